"""What past steps leave can lie in files: the run is the same, the files end with whoever holds them."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import SafetensorError, safe_open
from small import task
from torch import Tensor

import phalanx.simulation.swarm as swarm
from phalanx.core.config import KEPT_STEPS, Config
from phalanx.core.effects import Broadcast
from phalanx.core.envelope import Examiner
from phalanx.core.errors import WriteFailed
from phalanx.core.handlers import HANDLERS, _on_pull_part
from phalanx.core.life import make_peer
from phalanx.core.membership import make_genesis
from phalanx.core.merkle import compute_paths, hash_part, verify_path
from phalanx.core.messages import MAX_CHUNK, AggregateChunk, PartChunk, PullPart
from phalanx.core.partition import BLOCK, compute_part_sizes, split_parts
from phalanx.core.peer import Own, Peer
from phalanx.core.wire import WIRE_TYPES, encode_tensor
from phalanx.network.ideal import make_signers
from phalanx.simulation.scenario import draw_scenario, run_scenario
from phalanx.training.checkpoints import save_tensors
from phalanx.training.gradients import Gradients
from phalanx.training.optimizers import encode_state, make_optimizer
from phalanx.training.shelf import Shelf
from phalanx.training.solo import Solo

SIGNERS, VERIFY = make_signers(4, 1, ideal=True)
CONFIG = Config(
    founders=tuple(signer.key for signer in SIGNERS),
    byzantine=1,
    size=4 * (MAX_CHUNK // 4 + 2 * BLOCK),  # parts of four peers take two chunks
    steps=10,
    state=bytes(32),
).check()

SEEDS = (1, 3, 4)
"""Scenarios with attackers, joiners, a tolerance, and several types of numbers."""


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    found = Shelf(tmp_path / "shelf")
    yield found
    found.close()


# ---- Files


@pytest.mark.parametrize("size", [1, 4096, 100_003])
def test_bytes_are_the_same_on_the_shelf(shelf: Shelf, size: int) -> None:
    data = bytes(i * 7 % 256 for i in range(size))
    held = shelf.put(bytearray(data))
    shelf.rest()
    assert bytes(held) == data
    assert bytes(held[5:77]) == data[5:77]
    assert hash_part(held) == hash_part(data)


def test_nothing_needs_no_file(shelf: Shelf) -> None:
    assert shelf.put(b"") == b""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_the_same_on_the_shelf(shelf: Shelf, dtype: torch.dtype) -> None:
    vector = torch.randn(70_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    held = shelf.put_tensor(vector)
    shelf.rest()
    assert held.dtype is dtype
    assert torch.equal(held, vector)


def test_files_end_with_whoever_holds_them(shelf: Shelf, tmp_path: Path) -> None:
    held: Any = [shelf.put(bytes(5000)), shelf.put_tensor(torch.zeros(1000)), memoryview(shelf.put(bytes(300)))[7:9]]
    assert list((tmp_path / "shelf").iterdir()) == []  # they have no names: whatever ends this process ends them too
    assert shelf.held == 9300
    held.pop(0)
    gc.collect()
    assert shelf.held == 4300
    held.clear()
    gc.collect()
    assert shelf.held == 0


def test_what_somebody_left_is_removed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "1.bin").write_bytes(b"old")
    Shelf(tmp_path / "shelf").close()
    assert list((tmp_path / "shelf").iterdir()) == []


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_is_a_clear_error(shelf: Shelf, tmp_path: Path) -> None:
    with files_of_at_most(1 << 20), pytest.raises(WriteFailed, match=r"shelf/1\.bin: what past steps left could not"):
        shelf.put(bytes(1 << 21))
    assert list((tmp_path / "shelf").iterdir()) == []
    assert bytes(shelf.put(b"later")) == b"later"


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WriteFailed, match="Not a directory"):
        Shelf(tmp_path / "file" / "shelf")


# ---- A peer


@pytest.mark.parametrize("seed", SEEDS)
def test_a_swarm_with_shelves_does_the_same(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Attacks, openings, slow paths and joiners among them: every message is the same."""
    plain = run_scenario(draw_scenario(seed), checkers=False).trace_digest

    def make_shelved(*arguments: Any) -> Peer:
        peer = make_peer(*arguments)
        peer.store = shelf.put
        return peer

    monkeypatch.setattr(swarm, "make_peer", make_shelved)
    assert run_scenario(draw_scenario(seed), checkers=False).trace_digest == plain


def test_a_shelved_part_is_served_until_it_is_forgotten(shelf: Shelf) -> None:
    view = make_genesis(CONFIG)
    peer = Peer(CONFIG, SIGNERS[0].key, Examiner(VERIFY), view, lambda *_: view, HANDLERS)
    peer.store = shelf.put
    parts = split_parts(torch.linspace(-1, 1, CONFIG.size), 4)
    own = peer.own[0] = Own(b"seed", {0: [peer.put_away_vector(part) for part in parts]})
    own.parts[0] = WIRE_TYPES["float32"].encode_parts(own.tensors[0])
    own.roots[0], own.paths[0] = compute_paths([hash_part(part) for part in own.parts[0]])
    pull, asker, root = PullPart(0, 0, SIGNERS[0].key, 2, 0), SIGNERS[1].key, own.roots[0]
    for step in (1, KEPT_STEPS):
        peer.enter(msgspec.structs.replace(view, step=step, height=10 * step))
        shelf.rest()
        sent = [effect.message for effect in _on_pull_part(peer, asker, pull) if isinstance(effect, Broadcast)]
        data = b"".join(chunk.data for chunk in sent if isinstance(chunk, PartChunk))
        assert len(sent) == 2
        assert data == encode_tensor(parts[2])
        assert verify_path(root, 4, 2, hash_part(data), own.paths[0][2])
    del own, sent
    peer.enter(msgspec.structs.replace(view, step=KEPT_STEPS + 1, height=100))
    gc.collect()
    assert list(_on_pull_part(peer, asker, pull)) == []
    assert shelf.held == 0


def test_what_comes_in_chunks_goes_to_the_shelf(shelf: Shelf) -> None:
    view = make_genesis(CONFIG)
    peer = Peer(CONFIG, SIGNERS[0].key, Examiner(VERIFY), view, lambda *_: view, HANDLERS)
    peer.store = shelf.put
    size = 4 * compute_part_sizes(CONFIG.size, 4)[1]
    data = bytes(range(256)) * (size // 256)
    peer.asked.add(("part", 0, 0, SIGNERS[1].key, 1, SIGNERS[1].key))
    for at in range(0, size, MAX_CHUNK):
        chunk = data[at : at + MAX_CHUNK]
        peer.store_aggregate(SIGNERS[1].key, AggregateChunk(0, 0, 1, size, at, chunk))
        peer.store_part(SIGNERS[1].key, PartChunk(0, 0, SIGNERS[1].key, 1, (), size, at, chunk))
    assert shelf.held == 2 * size
    assert peer.aggregates[0, 0, 1] == data
    assert peer.parts[0, 0, SIGNERS[1].key, 1][0] == data


# ---- States


def make_solo(shelf: Shelf | None) -> Solo:
    gradients = Gradients(task)
    solo = Solo(gradients, make_optimizer({"name": "sgd", "rate": 0.1, "momentum": 0.9}, 10))
    if shelf is not None:
        solo.use_shelf(shelf)
    return solo


def test_states_are_the_same_on_the_shelf(shelf: Shelf) -> None:
    plain, shelved = make_solo(None), make_solo(shelf)
    for step in range(6):
        for aside in (0.5, 1.0):  # the first comes to nothing
            for solo in (plain, shelved):
                gradient = solo.compute_gradient(step, bytes([step]) * 32)
                assert gradient is not None
                solo.apply(step, aside * gradient)
                if aside == 0.5:
                    solo.undo(step)
        assert plain.states.keys() == shelved.states.keys()
        for at in plain.states:
            assert plain.hash_state(at) == shelved.hash_state(at)
            assert shelved.has_state(at, plain.hash_state(at))
            data = shelved.read_state(at)
            assert data is not None
            assert data[0 : len(data)] == encode_state(plain.states[at])
        again = shelved.compute_gradient(max(0, step - 2), bytes([9]) * 32)
        expected = plain.compute_gradient(max(0, step - 2), bytes([9]) * 32)
        assert again is not None
        assert expected is not None
        assert torch.equal(again, expected)


def test_states_that_are_forgotten_are_gone(shelf: Shelf) -> None:
    solo, sizes = make_solo(shelf), []
    for step in range(9):
        solo.apply(step, torch.ones(len(solo.start.parameters)))
        gc.collect()
        sizes.append(shelf.held)
    assert sizes[-1] == sizes[-2] == sizes[-3]


def test_a_state_is_read_in_pieces() -> None:
    solo = make_solo(None)
    solo.apply(0, torch.ones(len(solo.start.parameters)))
    data, whole = solo.read_state(1), encode_state(solo.states[1])
    assert data is not None
    assert len(data) == len(whole)
    for width in (1, 7, 100, 1000):
        assert b"".join(data[at : at + width] for at in range(0, len(data), width)) == whole
    assert data[len(data) :] == b""


def test_a_state_that_came_in_pieces_is_adopted(shelf: Shelf) -> None:
    giver, taker = make_solo(None), make_solo(shelf)
    giver.apply(0, torch.ones(len(giver.start.parameters)))
    data = giver.read_state(1)
    assert data is not None
    assert not taker.adopt_state(1, bytes(32), bytearray(data[0 : len(data)]))
    assert taker.adopt_state(1, giver.hash_state(1), bytearray(data[0 : len(data)]))
    ones = torch.ones(len(giver.start.parameters))
    for solo in (taker, giver):
        solo.apply(1, ones)
    assert taker.hash_state(2) == giver.hash_state(2)


# ---- Checkpoints


def test_files_of_tensors_are_what_the_library_reads(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "b.weight": torch.randn(3, 5),
        "a": torch.arange(7),
        "half": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True, False, True]),
        "number": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(3, 5).t(),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    save_tensors(tensors, tmp_path / "x.safetensors", {"step": "3"})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"step": "3"}
        assert set(file.keys()) == set(tensors)
        for name, value in tensors.items():
            assert torch.equal(file.get_tensor(name), value)
            assert file.get_tensor(name).dtype == value.dtype


def test_a_tensor_that_the_format_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError, match=r"x is torch\.complex128"):
        save_tensors({"x": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "x.safetensors")
