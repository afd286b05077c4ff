"""A new run from a certified state of an old one: what it has from there, what is refused, and that files are equal."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from phalanx import node
from phalanx.attacks import load_attack
from phalanx.cli import main
from phalanx.core.crypto import Identity, verify_signature
from phalanx.core.errors import LocalError
from phalanx.core.membership import decode_view
from phalanx.events import Banned, read_events
from phalanx.training.checkpoints import read_checkpoint
from phalanx.training.continuing import find_state_file, read_state
from phalanx.training.founding import find_optimizer, make_network_manifest, prepare
from phalanx.training.gradients import Gradients
from phalanx.training.machine import Workshop
from phalanx.training.manifest import NetworkManifest, format_manifest, parse_network_manifest, read_network_manifest
from phalanx.training.optimizers import Continued, Optimizer, State, compute_state_digest, make_optimizer
from phalanx.training.recorder import EVENTS, Recorder
from phalanx.training.solo import Solo
from phalanx.training.swarm import SwarmRun
from phalanx.training.tasks import load_task

SMALL = f"{Path(__file__).parent / 'small.py'}:task"
STEPS = 9
ADAM = {"name": "adamw", "rate": 0.05, "schedule": "cosine", "warmup": 3}


def make_old_run(folder: Path, peers: int = 4, attackers: int = 0, stop: int = 6, **settings: Any) -> list[Identity]:
    """The folder of a peer of a run that was stopped before step ``stop``; checkpoints of every other step."""
    identities = [Identity(bytes([number]) * 32) for number in range(1, peers + 1)]
    common = {"steps": STEPS, "threads": torch.get_num_threads(), "gradient_time": 60.0, "byzantine": attackers}
    manifest = make_network_manifest(SMALL, [identity.peer_id for identity in identities], **common | settings)
    folder.mkdir()
    node.write_manifest(folder / node.MANIFEST, manifest)
    continue_old_run(folder, manifest, identities, attackers, stop)
    return identities


def continue_old_run(
    folder: Path,
    manifest: NetworkManifest,
    identities: list[Identity],
    attackers: int = 0,
    stop: int = STEPS,
    start: State | None = None,
) -> None:
    gradients = Gradients(load_task(SMALL, {}), manifest.run.seed)
    workshop = Workshop(gradients, find_optimizer(manifest, gradients))
    if start is not None:
        workshop.start, workshop.start_digest = start, workshop.add(start)
    config = manifest.make_config(manifest.founders, gradients.size, workshop.start_digest)
    assert workshop.start_digest.hex() == manifest.network.state
    recorder = Recorder(
        gradients,
        steps=manifest.run.steps,
        evaluate_every=100,
        checkpoint_every=2,
        out=folder,
        stop=lambda step: step >= stop,
    )
    attacking = {identity.key: load_attack("sign_flip") for identity in identities[:attackers]}
    try:
        SwarmRun(config, list(identities), verify_signature, attacking, workshop, recorder).run()
    finally:
        recorder.close()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Identity]]:
    folder = tmp_path_factory.mktemp("old") / "run"
    return folder, make_old_run(folder, optimizer=ADAM)


def name(identities: list[Identity]) -> list[str]:
    return [identity.peer_id for identity in identities]


def refuse(tmp_path: Path, folder: Path, *arguments: Any, target: str = "refused.toml", **settings: Any) -> str:
    """What is said instead of writing anything."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(LocalError) as error:
        node.run_continue(tmp_path / target, folder, *arguments, **settings)
    assert sorted(tmp_path.iterdir()) == before
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- What goes on


def test_state_task_and_schedule_go_on_from_the_last_certified_checkpoint(
    tmp_path: Path, old: tuple[Path, list[Identity]]
) -> None:
    folder, identities = old
    fresh, state = node.run_continue(tmp_path / "new.toml", folder)
    before = read_network_manifest(folder / node.MANIFEST)
    held = read_checkpoint(folder / "checkpoints" / "000006").states[6]
    assert fresh == read_network_manifest(tmp_path / "new.toml")
    assert fresh.network.state == compute_state_digest(held).hex()
    assert fresh.origin is not None
    assert (fresh.origin.run, fresh.origin.steps, fresh.run.steps) == (before.name, 6, STEPS - 6)
    assert (fresh.task, fresh.optimizer, fresh.run.seed) == (before.task, before.optimizer, before.run.seed)
    assert fresh.network.founders == name(identities)
    assert fresh.name != before.name
    assert state == find_state_file(tmp_path / "new.toml")
    prepared = prepare(fresh, load_task(SMALL, {}), print, start=read_state(state, fresh.network.state))
    assert torch.equal(prepared.solo.start.parameters, held.parameters)
    assert all(map(torch.equal, prepared.solo.start.slots, held.slots))
    assert prepared.config.state == compute_state_digest(held)


def test_two_members_write_the_same_bytes(tmp_path: Path, old: tuple[Path, list[Identity]]) -> None:
    folder, identities = old
    shutil.copytree(folder, tmp_path / "other")
    written = []
    for place, source in enumerate((folder, tmp_path / "other")):
        path = tmp_path / str(place) / "new.toml"
        path.parent.mkdir()
        _, state = node.run_continue(path, source, name(identities[:3]), {"delta": 3.0})
        written.append((path.read_bytes(), state.read_bytes()))
    assert written[0] == written[1]


def test_a_run_that_went_on_can_be_continued_again(tmp_path: Path) -> None:
    """And each takes the steps that the one before had left, all of them those of the first schedule."""
    identities = make_old_run(tmp_path / "run0", optimizer=ADAM, stop=4)
    fresh, state = node.run_continue(tmp_path / "run1.toml", tmp_path / "run0")
    (tmp_path / "run1").mkdir()
    node.write_manifest(tmp_path / "run1" / node.MANIFEST, fresh)
    start = read_state(state, fresh.network.state)
    continue_old_run(tmp_path / "run1", fresh, identities, stop=2, start=start)
    last, _ = node.run_continue(tmp_path / "run2.toml", tmp_path / "run1", name(identities[1:]))
    assert last.origin is not None
    assert (last.origin.run, last.origin.steps, last.run.steps) == (fresh.name, 6, STEPS - 6)
    assert (last.run.peers, last.network.platform) == (3, fresh.network.platform)


def test_at_takes_an_earlier_checkpoint(tmp_path: Path, old: tuple[Path, list[Identity]]) -> None:
    fresh, _ = node.run_continue(tmp_path / "new.toml", old[0], at=2)
    assert fresh.run.steps == STEPS - 2
    assert "it has 2, 4, 6" in refuse(tmp_path, old[0], at=3)


def test_a_checkpoint_that_was_altered_is_passed_over(
    tmp_path: Path, old: tuple[Path, list[Identity]], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(old[0], tmp_path / "run")
    for damaged, file in (("000006", "state.safetensors"), ("000004", "certificate.bin")):
        path = tmp_path / "run" / "checkpoints" / damaged / file
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    fresh, _ = node.run_continue(tmp_path / "new.toml", tmp_path / "run")
    assert fresh.run.steps == STEPS - 2
    said = capsys.readouterr().err
    assert said.count("passed over") == 2


def test_tau_goes_on_from_where_it_stood(tmp_path: Path, old: tuple[Path, list[Identity]]) -> None:
    folder, identities = old
    memory = read_checkpoint(folder / "checkpoints" / "000006").memory
    assert memory is not None
    view = decode_view(memory.view)
    assert view is not None
    same, _ = node.run_continue(tmp_path / "same.toml", folder)
    assert same.clipping.start == pytest.approx(view.tau)
    half, _ = node.run_continue(tmp_path / "half.toml", folder, name(identities[:2]))
    assert half.clipping.start == pytest.approx(view.tau * 2**0.5), "parts are twice as long"


# ---- Founders


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Identity], int]:
    """The first of six cheated and was banned, and in which step."""
    folder = tmp_path_factory.mktemp("attacked") / "run"
    identities = make_old_run(folder, peers=6, attackers=1, steps=60, stop=40)
    (banned,) = [event for event in read_events(folder / EVENTS) if isinstance(event, Banned)]
    assert banned.key == identities[0].key.hex()
    return folder, identities, banned.step


def test_banned_keys_are_no_founders_and_attackers_fewer(
    tmp_path: Path, attacked: tuple[Path, list[Identity], int]
) -> None:
    folder, identities, _ = attacked
    fresh, _ = node.run_continue(tmp_path / "new.toml", folder)
    assert sorted(fresh.network.founders) == sorted(name(identities[1:]))
    assert fresh.run.byzantine == 0, "the one that there was is banned"
    stranger = Identity.generate()
    mixed, _ = node.run_continue(tmp_path / "mixed.toml", folder, [*name(identities[1:]), stranger.peer_id])
    assert mixed.run.byzantine == 1, "nobody knows a stranger"
    assert "banned in the old run" in refuse(tmp_path, folder, name(identities))


def test_a_ban_after_the_checkpoint_counts(tmp_path: Path, attacked: tuple[Path, list[Identity], int]) -> None:
    folder, identities, banned = attacked
    assert banned > 2, "there is a checkpoint before it"
    fresh, _ = node.run_continue(tmp_path / "new.toml", folder, at=2)
    assert identities[0].peer_id not in fresh.network.founders
    assert fresh.run.byzantine == 0


# ---- What is refused


def test_what_cannot_be_continued_is_said_in_one_line(tmp_path: Path, old: tuple[Path, list[Identity]]) -> None:
    folder, identities = old
    assert "expected the folder of a peer" in refuse(tmp_path, tmp_path / "nowhere")
    assert "not of 'digits'" in refuse(tmp_path, folder, task="digits")
    assert "take 2 members" in refuse(tmp_path, folder, name(identities[:1]))
    assert "expected" in refuse(tmp_path, folder, ["nonsense"])
    assert "byzantine" in refuse(tmp_path, folder, changes={"byzantine": -1})
    shutil.copytree(folder, tmp_path / "empty", ignore=shutil.ignore_patterns("0*"))
    assert "there is no checkpoint" in refuse(tmp_path, tmp_path / "empty")
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("certificate.bin"))
    assert "none of its checkpoints is certified" in refuse(tmp_path, tmp_path / "bare")
    shutil.copytree(folder, tmp_path / "foreign")
    manifest = read_network_manifest(folder / node.MANIFEST)
    foreign = replace(manifest, run=replace(manifest.run, steps=STEPS + 1))
    node.write_manifest(tmp_path / "foreign" / node.MANIFEST, foreign)
    assert "of another run" in refuse(tmp_path, tmp_path / "foreign", at=6)


def test_a_run_at_its_end_is_not_continued(tmp_path: Path) -> None:
    make_old_run(tmp_path / "run", stop=100)
    assert "at its end" in refuse(tmp_path, tmp_path / "run")


def test_nothing_is_overwritten(tmp_path: Path, old: tuple[Path, list[Identity]]) -> None:
    place = find_state_file(tmp_path / "new.toml")
    place.write_bytes(b"somebody's")
    assert "not overwritten" in refuse(tmp_path, old[0], target="new.toml")
    assert place.read_bytes() == b"somebody's"
    place.unlink()
    node.run_continue(tmp_path / "new.toml", old[0])
    assert "not overwritten" in refuse(tmp_path, old[0], target="new.toml")
    (tmp_path / "new.toml").unlink()  # as if the command had been killed between the two
    node.run_continue(tmp_path / "new.toml", old[0])


@pytest.mark.parametrize(
    ("harm", "words"), [("missing", "does not exist"), ("altered", "digest is another"), ("garbage", "not a file")]
)
def test_start_refuses_a_state_that_is_not_the_runs(
    harm: str, words: str, tmp_path: Path, old: tuple[Path, list[Identity]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, identities = old
    identities[0].save(tmp_path / "key")
    _, state = node.run_continue(tmp_path / "new.toml", folder)
    data = bytearray(state.read_bytes())
    if harm == "missing":
        state.unlink()
    else:
        data[-1 if harm == "altered" else 3] ^= 0x40
        state.write_bytes(data)

    def start() -> object:
        return node.run_start(tmp_path / "new.toml", tmp_path / "key", tmp_path / "out", node.Door())

    with pytest.raises(LocalError, match=words):
        start()
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(node, "Member", lambda *_: SimpleNamespace(leave=None, run=lambda: "started"))
    (tmp_path / "out" / "checkpoints" / "000002").mkdir(parents=True)  # who has a checkpoint needs no other state
    assert start() == "started"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--steps 5", "--steps: a run that goes on has it from the old one"),
        ("--optimizer rate=1", "--optimizer: a run that goes on has it"),
        ("--task digits", "not of 'digits'"),
        ("--delta 0", "delta: expected a positive number"),
        ("--at 77", "it has 2, 4, 6"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_2(
    words: str,
    said: str,
    tmp_path: Path,
    old: tuple[Path, list[Identity]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["phalanx", "init", str(tmp_path / "new.toml"), "--continue", str(old[0]), *words.split()]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err
    assert not list(tmp_path.iterdir())


def test_the_command_says_where_it_goes_on_and_what_to_give_to_others(
    tmp_path: Path,
    old: tuple[Path, list[Identity]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["phalanx", "init", str(tmp_path / "new.toml"), "--continue", str(old[0])])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert not end.value.code
    assert "after 6 steps of training, 3 are left" in out
    assert "give both to every founder" in out
    assert "2 may be away" in err


# ---- Those who join, and the schedule


def test_one_that_joins_has_no_state_and_computes_the_same(tmp_path: Path, old: tuple[Path, list[Identity]]) -> None:
    fresh, state = node.run_continue(tmp_path / "new.toml", old[0])
    manifest = parse_network_manifest(format_manifest(fresh), "a member")
    prepared = prepare(manifest, load_task(SMALL, {}), print)
    assert prepared.config.run == manifest.make_config(manifest.founders, 33, bytes.fromhex(fresh.network.state)).run
    assert not prepared.solo.has_state(0, prepared.config.state)
    founder = prepare(manifest, load_task(SMALL, {}), print, start=read_state(state, fresh.network.state)).solo
    served = founder.read_state(0)
    assert served is not None
    assert prepared.solo.adopt_state(0, prepared.config.state, served[0 : len(served)])
    for solo in (prepared.solo, founder):
        solo.apply(0, torch.linspace(-1, 1, 33))
    assert prepared.solo.hash_state(1) == founder.hash_state(1)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd", "rate": 0.1, "momentum": 0.9, "schedule": "cosine", "warmup": 5, "floor": 0.1},
        {**ADAM, "weight_decay": 0.01},
        {"name": "lamb", "rate": 0.01, "schedule": "cosine"},
        {"name": "restarted", "rate": 0.1, "first_stage": 3},
    ],
    ids=lambda settings: settings["name"],
)
def test_a_schedule_in_two_runs_is_the_schedule_in_one(settings: dict[str, Any]) -> None:
    whole = make_optimizer(settings, 20, (8, 8))
    rest = Continued(rate=whole.rate, inner=whole, before=8)
    gradients = [torch.randn(16, generator=torch.Generator().manual_seed(step)) for step in range(20)]
    one = two = whole.init(torch.ones(16))
    for step, gradient in enumerate(gradients):
        one = whole.update(one, gradient, step)
        two = whole.update(two, gradient, step) if step < 8 else rest.update(two, gradient, step - 8)
        assert compute_state_digest(one) == compute_state_digest(two)


def test_whatever_takes_a_step_is_passed_on_with_the_steps_before() -> None:
    """``update`` calls ``_move``. A method left out would take a long schedule for one that has just begun."""
    taking = {
        method
        for kind in (Optimizer, *Optimizer.__subclasses__())
        for method, function in inspect.getmembers(kind, inspect.isfunction)
        if "step" in inspect.signature(function).parameters and not (method.startswith("_") and method != "_move")
    }
    assert taking - {"update", "get_stage"} <= vars(Continued).keys()


def test_a_manifest_without_an_origin_reads_as_before(tmp_path: Path) -> None:
    identities = [Identity.generate().peer_id for _ in range(2)]
    manifest = node.run_init(tmp_path / "run.toml", SMALL, identities, {"gradient_time": 60.0})
    assert manifest.origin is None
    assert "origin" not in (tmp_path / "run.toml").read_text()
    solo = Solo(Gradients(load_task(SMALL, {}), 0), make_optimizer(manifest.optimizer, manifest.run.steps))
    assert solo.start_digest.hex() == manifest.network.state
