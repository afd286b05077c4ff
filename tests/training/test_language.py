"""Language tasks: causal models look only back, splits are fixed, masks come from the generator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from phalanx.core.errors import LocalError
from phalanx.core.randomness import derive_seed
from phalanx.training.gradients import Gradients
from phalanx.training.tasks import load_task
from phalanx.training.tasks.pysource import load_source
from phalanx.training.tasks.text import hide_bytes
from phalanx.training.tasks.transformer import Transformer, complement_bytes, cut_windows, pick_windows

SEED = bytes(32)
TEXT = b"The quick brown fox jumps over the lazy dog. " * 100
SMALL = {"context": "16", "width": "8", "layers": "1", "heads": "2"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.txt").write_bytes(TEXT.upper())
    (tmp_path / "c.md").write_bytes(b"not this")
    return tmp_path


# ---- Windows and the transformer


@settings(deadline=None, derandomize=True)
@given(st.binary(min_size=6, max_size=200), st.integers(1, 5))
def test_windows_share_one_byte_and_lose_less_than_one_window(text: bytes, context: int) -> None:
    windows = cut_windows(text, context, "text")
    assert windows.shape[1] == context + 1
    joined = bytes(windows[0, :1].tolist()) + b"".join(bytes(row[1:].tolist()) for row in windows)
    assert text.startswith(joined)
    assert len(text) - len(joined) < context
    assert torch.equal(windows[1:, 0], windows[:-1, -1])


@given(st.integers(1, 300))
@settings(deadline=None, derandomize=True)
def test_picked_windows_are_different_and_in_order(count: int) -> None:
    picked = pick_windows(torch.arange(count)).tolist()
    assert len(picked) == min(count, 64)
    assert picked == sorted(set(picked))


def test_the_transformer_looks_only_back() -> None:
    model = Transformer(context=12, width=16, layers=2, heads=2).eval()
    tokens = torch.randint(256, (2, 12), generator=Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert bool((before[:, 7:] != after[:, 7:]).any(-1).all())


def test_the_poison_is_the_complement() -> None:
    rows = torch.arange(256, dtype=torch.uint8).view(2, 128)
    assert complement_bytes((rows,))[0].flatten().tolist() == list(range(255, -1, -1))


# ---- The Python library


def test_the_library_is_read_and_can_be_learnt() -> None:
    task = load_task("pysource")
    assert (task.metric_name, task.higher_is_better, task.batch) == ("loss", False, 32)
    assert task.train.tensors[0].shape[1] == 129
    assert len(task.test) == 64
    assert task.digest == load_task("pysource").digest
    gradients = Gradients(task)
    assert gradients.size == 141_056
    parameters = gradients.start.clone()
    assert gradients.evaluate(parameters) == pytest.approx(5.55, abs=0.1)
    first = gradients.compute(parameters, SEED)
    assert torch.equal(gradients.compute(parameters, SEED), first)
    assert not torch.equal(gradients.compute(parameters, SEED, poisoned=True), first)
    for step in range(20):
        parameters -= 0.01 * gradients.compute(parameters, derive_seed(SEED, "test", bytes([step]))).sign()
    assert gradients.evaluate(parameters) < 4


def test_files_are_split_by_their_names(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"module_{number}.py").write_bytes(bytes([number]) * 1280)
    (tmp_path / "folder.py").mkdir()
    train, test = load_source(tmp_path)
    kept, held = set(train.tensors[0].flatten().tolist()), set(test.tensors[0].flatten().tolist())
    assert not kept & held
    assert 1 <= len(held) <= 15
    (tmp_path / "module_0.py").write_bytes(b"x" * 1280)
    other = load_source(tmp_path)
    assert (other[0].digest, other[1].digest) != (train.digest, test.digest)


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="expected the sources of the Python standard library") as caught:
        load_source(tmp_path)
    assert str(tmp_path) in str(caught.value)


# ---- Text of one's own


def test_text_from_a_file_or_a_folder(folder: Path) -> None:
    one = load_task("text", {"data": str(folder / "a.txt"), **SMALL})
    both = load_task("text", {"data": str(folder), **SMALL})
    assert len(both.train) == 2 * len(one.train) == 2 * (4049 // 16)
    assert one.digest != both.digest
    assert bytes(one.train.tensors[0][0].tolist()) == TEXT[:17]
    assert bytes(one.test.tensors[0][0].tolist()) == TEXT[4050:4067]


@pytest.mark.parametrize("model", ["bytes", "albert"])
def test_gradients_of_text_can_be_repeated(folder: Path, model: str) -> None:
    task = load_task("text", {"data": str(folder), "model": model, **SMALL})
    gradients = Gradients(task)
    first = gradients.compute(gradients.start, SEED)
    gradients.require_repeatable()
    assert torch.equal(Gradients(task).compute(gradients.start, SEED), first)
    assert not torch.equal(gradients.compute(gradients.start, bytes(range(32))), first)
    assert not torch.equal(gradients.compute(gradients.start, SEED, poisoned=True), first)
    assert gradients.evaluate(gradients.start) == pytest.approx(5.55, abs=0.3)
    assert gradients.evaluate(gradients.start - 0.1 * first) < gradients.evaluate(gradients.start)
    fresh = task.model()
    fresh.load_state_dict(gradients.make_state_dict(gradients.start), strict=True)
    assert task.metric(fresh.eval(), task.test) == gradients.evaluate(gradients.start)


def test_masks_hide_what_they_should() -> None:
    rows = torch.full((100, 1000), 65, dtype=torch.uint8)
    shown, wanted = hide_bytes((rows,), Generator().manual_seed(0))
    guessed = wanted != -100
    assert set(wanted[guessed].tolist()) == {65}
    assert float(guessed.float().mean()) == pytest.approx(0.15, abs=0.005)
    assert float((shown == 256).float().mean()) == pytest.approx(0.12, abs=0.005)
    assert float((shown[guessed] == 65).float().mean()) == pytest.approx(0.1, abs=0.01)
    assert torch.equal(shown[~guessed], rows[~guessed].long())
    again = hide_bytes((rows,), Generator().manual_seed(0))
    assert torch.equal(again[0], shown)
    assert torch.equal(again[1], wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt"}, "model 'gpt' is unknown; expected bytes or albert"),
        ({"width": "wide"}, "width: expected a whole number from 1 to 65536, got 'wide'"),
        ({"layers": "0"}, "layers: expected a whole number"),
        ({"heads": "-1"}, "heads: expected a whole number"),
        ({"context": "1000000"}, "context: expected a whole number"),
        ({"width": "9", "heads": "2"}, "width 9 cannot be divided among 2 heads"),
        ({"context": "4050"}, "the first nine tenths of .*a.txt: 4050 bytes are too few; at least 4051 are needed"),
        ({"context": "1000"}, "the last tenth of .*a.txt: 450 bytes are too few; at least 1001 are needed"),
        ({"colour": "red"}, "has no option 'colour'; it has data, model, context, width, layers, heads"),
    ],
)
def test_wrong_options_are_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        load_task("text", {"data": str(folder), **options})


def test_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"expected \*.txt files in the folder"):
        load_task("text", {"data": str(tmp_path)})
    with pytest.raises(LocalError, match=r"cannot read .*nowhere\.txt: No such file"):
        load_task("text", {"data": str(tmp_path / "nowhere.txt")})


def test_without_transformers_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LocalError, match=r"\.\[albert\]"):
        load_task("text", {"data": str(folder), "model": "albert"})
