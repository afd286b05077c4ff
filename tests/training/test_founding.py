"""How a run between machines begins: what the manifest refuses, and what a peer is prepared with."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx import node
from phalanx.attacks import Attack, combine
from phalanx.attacks.gradients import Delayed, SignFlip
from phalanx.core.crypto import Identity
from phalanx.training import founding
from phalanx.training.manifest import read_network_manifest
from phalanx.training.member import Settings
from phalanx.training.solo import Solo

SMALL = f"{Path(__file__).parent / 'small.py'}:task"


def prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Attack | None, told: list[Settings] | None = None
) -> Solo:
    """What a founder that was started like this computes with."""

    def take_part(_0: object, _1: object, _2: object, solo: Solo, settings: Settings, _3: object) -> SimpleNamespace:
        if told is not None:
            told.append(settings)
        return SimpleNamespace(leave=None, run=lambda: solo)

    monkeypatch.setattr(node, "Member", take_part)
    identities = [Identity.generate() for _ in range(4)]
    identities[0].save(tmp_path / "key")
    founders = [identity.peer_id for identity in identities]
    settings = {"threads": torch.get_num_threads(), "gradient_time": 60.0}
    node.run_init(tmp_path / "run.toml", SMALL, founders, settings)
    solo = node.run_start(tmp_path / "run.toml", tmp_path / "key", tmp_path / "out", node.Door(), attack=attack)
    assert isinstance(solo, Solo)
    return solo


@pytest.mark.parametrize("attack", [Delayed(delay=2), combine(SignFlip(), Delayed(delay=2))])
def test_who_delays_has_the_parameters_of_so_many_steps_ago(
    attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = prepare(tmp_path, monkeypatch, attack)
    for step in range(4):
        solo.apply(step, torch.linspace(-1, 1, len(solo.start.parameters)))
    seed = bytes(32)
    past = solo.compute_gradient(2, seed)
    assert past is not None
    assert torch.equal(solo.compute_earlier(4, seed, 2), past)
    first = solo.compute_earlier(1, seed, 2)
    assert not torch.equal(first, past), "until there are any, the initial ones"


@pytest.mark.parametrize("attack", [None, SignFlip()])
def test_others_keep_no_parameters_of_the_past(
    attack: Attack | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = prepare(tmp_path, monkeypatch, attack)
    for step in range(4):
        solo.apply(step, torch.linspace(-1, 1, len(solo.start.parameters)))
    seed = bytes(32)
    initial = solo.compute_earlier(0, seed, 1)
    assert torch.equal(solo.compute_earlier(4, seed, 2), initial)


@pytest.mark.parametrize("method", ["btard-sgd", "btard-clipped-sgd", "restarted-btard-sgd"])
def test_the_methods_of_the_paper_are_there_between_machines_too(method: str, tmp_path: Path) -> None:
    founders = [Identity.generate().peer_id for _ in range(4)]
    settings = {"gradient_time": 60.0, "method": method, "clip": 0.25 if method == "btard-clipped-sgd" else None}
    manifest = node.run_init(tmp_path / "run.toml", SMALL, founders, settings)
    assert manifest.run.method == method
    assert (manifest.clipping.cap == 0.25) == (method == "btard-clipped-sgd")
    assert read_network_manifest(tmp_path / "run.toml") == manifest


@pytest.mark.parametrize(("seconds", "evaluates"), [(1.0, True), (61.0, False)])
def test_who_has_no_time_for_the_metric_says_so_and_computes_it_at_the_end(
    seconds: float,
    evaluates: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gradients wait for it: a peer that evaluates for longer than a gradient may take would be removed as silent."""
    settings: list[Settings] = []
    monkeypatch.setattr(founding, "time_evaluation", lambda solo: seconds)
    prepare(tmp_path, monkeypatch, None, settings)
    assert [x.evaluates for x in settings] == [evaluates]
    assert ("the metric takes 61.0 s here" in capsys.readouterr().err) is not evaluates
