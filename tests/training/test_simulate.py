"""Whole runs in one process: what they end in, what they leave behind, and what stops them."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import task
from torch import nn

import phalanx
from phalanx import events
from phalanx.attacks import PAPER
from phalanx.core.envelope import Examiner
from phalanx.core.errors import LocalError, WriteFailed
from phalanx.core.membership import decode_view
from phalanx.core.messages import Phase
from phalanx.events import Event, read_events
from phalanx.network.ideal import make_signers
from phalanx.training import checkpoints
from phalanx.training.checkpoints import check_certificate, find_latest, read_certificate, read_checkpoint
from phalanx.training.gradients import Gradients
from phalanx.training.manifest import read_manifest
from phalanx.training.optimizers import compute_state_digest
from phalanx.training.recorder import Recorder, read_transcript
from phalanx.training.simulate import DEFENSES, Result, resume, simulate

TASK = f"{Path(__file__).with_name('small.py')}:task"
ATTACKED: dict[str, Any] = {"peers": 7, "byzantine": 2, "attack": "sign_flip", "start": 3, "steps": 30}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def is_same(one: Result, other: Result) -> bool:
    return (one.state_digest, one.final_metric, one.steps_to_ban) == (
        other.state_digest,
        other.final_metric,
        other.steps_to_ban,
    )


# ---- How runs end


def test_honest_peers_train() -> None:
    result = simulate(task, peers=4, steps=20)
    assert result.final_metric is not None
    assert result.final_metric > 0.9
    assert (result.steps, result.honest_banned, result.honest_removed) == (20, 0, 0)
    assert not result.interrupted


@pytest.mark.parametrize("attack", [*PAPER, "delayed_7", "ipm_0.3"])
def test_who_keeps_attacking_is_banned_and_training_goes_on(attack: str) -> None:
    settings = {**ATTACKED, "attack": attack, "steps": 60, "seed": 1}
    result = simulate(task, **settings)
    assert result.honest_banned == result.honest_removed == 0
    if attack != "none":
        assert result.byzantine_banned == 2
        assert result.byzantine_active == 0
        assert all(steps >= 1 for steps in result.steps_to_ban)
    assert result.final_metric is not None
    assert result.final_metric > 0.9


def test_an_attack_waits_for_its_start_and_acts_every_kth_step() -> None:
    result = simulate(task, **{**ATTACKED, "start": 4, "every": 3, "steps": 60})
    bans = [event for event in result.events if isinstance(event, events.Banned)]
    assert bans
    assert all(ban.offence_step >= 4 and (ban.offence_step - 4) % 3 == 0 for ban in bans)


@pytest.mark.parametrize("defense", DEFENSES)
def test_every_defense_runs(defense: str) -> None:
    result = simulate(task, **{**ATTACKED, "defense": defense, "steps": 12})
    assert result.steps == 12
    assert result.honest_banned == 0
    if defense != "phalanx":
        assert result.byzantine_active == 2


def test_the_mean_is_ruined() -> None:
    protected, mean = (simulate(task, **{**ATTACKED, "defense": name, "steps": 60}) for name in ("phalanx", "mean"))
    assert protected.final_metric is not None
    assert mean.final_metric is not None
    assert protected.final_metric > 0.9
    assert mean.final_metric < 0.6


def test_same_manifest_and_seed_same_state() -> None:
    one, two, other = (simulate(task, **ATTACKED, seed=seed) for seed in (5, 5, 6))
    assert one.state_digest == two.state_digest
    assert [str(event) for event in one.events] == [str(event) for event in two.events]
    assert one.state_digest != other.state_digest


def test_json_has_the_promised_keys() -> None:
    result = simulate(task, peers=4, steps=3).to_json()
    promised = {
        "final_metric",
        "metric_name",
        "steps",
        "honest_banned",
        "honest_removed",
        "byzantine_banned",
        "byzantine_active",
        "steps_to_ban",
        "bytes_per_peer_step",
        "allreduce_bytes_per_peer_step",
        "state_digest",
    }
    assert promised <= result.keys()
    json.dumps(result, allow_nan=False)
    assert len(result["state_digest"]) == 64
    assert result["allreduce_bytes_per_peer_step"] == 2 * 3 / 4 * 33 * 4


@pytest.mark.parametrize("method", ["btard-sgd", "btard-clipped-sgd", "restarted-btard-sgd"])
def test_the_papers_methods(method: str) -> None:
    clip = 1.0 if method == "btard-clipped-sgd" else None
    result = simulate(task, peers=4, steps=21, method=method, clip=clip)
    assert result.final_metric is not None
    assert result.final_metric > 0.8


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_other_optimizers(name: str) -> None:
    result = simulate(task, peers=4, steps=20, optimizer={"name": name, "rate": 0.1})
    assert result.final_metric is not None
    assert result.final_metric > 0.8


@pytest.mark.parametrize(("wire", "width"), [("bfloat16", 2), ("float16", 2), ("int8", 1 + 1 / 32)])
def test_short_wire_types(wire: str, width: float) -> None:
    result = simulate(task, **{**ATTACKED, "wire": wire, "steps": 40})
    assert (result.honest_banned, result.byzantine_banned) == (0, 2)
    assert result.allreduce_bytes_per_peer_step == pytest.approx(2 * 6 / 7 * 33 * width)


# ---- Resuming


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 8, 13, 20, 29])
@pytest.mark.parametrize("attack", ["sign_flip", "delayed_4"])
def test_a_run_that_was_stopped_ends_like_one_that_was_not(tmp_path: Path, attack: str, at: int) -> None:
    settings = {**ATTACKED, "attack": attack}
    whole = simulate(task, **settings)
    first = simulate(task, **settings, out=tmp_path / "run", stop=lambda step: step >= at)
    assert first.interrupted
    assert first.steps == at
    second = resume(tmp_path / "run", task=task)
    assert is_same(second, whole)
    assert second.steps == 30


def test_stopping_again_and_again(tmp_path: Path) -> None:
    whole = simulate(task, **ATTACKED)
    result = simulate(task, **ATTACKED, out=tmp_path / "run", stop=lambda step: step >= 2)
    at = 2
    while result.interrupted:
        at += 3
        result = resume(tmp_path / "run", task=task, stop=lambda step, at=at: step >= at)  # type: ignore[misc]
    assert is_same(result, whole)


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    whole = simulate(task, **ATTACKED)

    def die(event: events.Event) -> None:
        if isinstance(event, events.StepFinished) and event.step == 19:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        simulate(task, **ATTACKED, out=tmp_path / "run", checkpoint_every=8, on_event=die)
    with open(tmp_path / "run" / "events.jsonl", "ab") as log:
        log.write(b'{"type":"StepFin')
    with open(tmp_path / "run" / "transcript.bin", "ab") as transcript:
        transcript.write((tmp_path / "run" / "transcript.bin").read_bytes()[:300])
    result = resume(tmp_path / "run", task=task)
    assert is_same(result, whole)
    assert [event.step for event in result.events if isinstance(event, events.Resumed)] == [16]
    steps = [decode_view(epoch.view).step for epoch in read_transcript(tmp_path / "run" / "transcript.bin")]  # type: ignore[union-attr]
    assert set(range(30)) <= set(steps)


def test_a_run_that_was_killed_after_its_last_checkpoint_is_finished(tmp_path: Path) -> None:
    def die(event: events.Event) -> None:
        if isinstance(event, events.CheckpointWritten) and event.step == 12:
            raise RuntimeError("killed")

    settings = {**ATTACKED, "steps": 12}
    with pytest.raises(RuntimeError, match="killed"):
        simulate(task, **settings, out=tmp_path / "run", on_event=die)
    result = resume(tmp_path / "run", task=task)
    assert not result.interrupted
    assert is_same(result, simulate(task, **settings))


@pytest.mark.parametrize("defense", ["mean", "krum"])
def test_a_server_resumes_too(tmp_path: Path, defense: str) -> None:
    settings = {**ATTACKED, "defense": defense, "attack": "alie"}
    whole = simulate(task, **settings)
    simulate(task, **settings, out=tmp_path / "run", stop=lambda step: step >= 11)
    assert is_same(resume(tmp_path / "run", task=task), whole)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    whole = simulate(task, **ATTACKED, out=tmp_path / "run")
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    again = resume(tmp_path / "run", task=task)
    assert is_same(again, whole)
    assert again.log_head == whole.log_head
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


def test_a_finished_run_without_its_last_checkpoint_goes_on_from_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = simulate(task, **ATTACKED, out=run, checkpoint_every=8)
    shutil.rmtree(run / "checkpoints" / "000030")
    again = resume(run, task=task)
    assert is_same(again, whole)
    assert [event.step for event in again.events if isinstance(event, events.Resumed)] == [24]


def test_a_run_that_should_have_stopped_before_does_no_more(tmp_path: Path) -> None:
    first = simulate(task, **ATTACKED, out=tmp_path / "run", stop=lambda step: step >= 5)
    again = resume(tmp_path / "run", task=task, stop=lambda step: step >= 5)
    assert (again.steps, again.interrupted, again.state_digest) == (5, True, first.state_digest)
    assert torch.equal(again.model["weight"], first.model["weight"])


def test_an_attack_right_before_a_stop_is_still_found(tmp_path: Path) -> None:
    """Checks of the step before the stop are made after it: nobody cheats for free when it knows of a stop."""
    settings = {**ATTACKED, "byzantine": 1, "steps": 12}
    for at in range(4, 11):
        run = tmp_path / str(at)
        first = simulate(task, **settings, out=run, stop=lambda step, at=at: step >= at)  # type: ignore[misc]
        second = resume(run, task=task)
        whole = simulate(task, **settings)
        assert is_same(second, whole), at
        assert first.byzantine_banned <= second.byzantine_banned


# ---- What a run leaves behind


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    run, told = tmp_path / "run", list[Event]()
    result = simulate(TASK, **ATTACKED, out=run, on_event=told.append)
    assert read_events(run / "events.jsonl") == result.events == told
    manifest = read_manifest(run / "manifest.toml")
    assert manifest.run.peers == 7
    epochs = read_transcript(run / "transcript.bin")
    confirmed = [epoch for epoch in epochs if any(said.phase is Phase.CONFIRM for said in epoch.said)]
    assert len(confirmed) >= 30
    folder = find_latest(run)
    assert folder is not None
    model = nn.Linear(10, 3)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    right = (model(task.test.tensors[0]).argmax(-1) == task.test.tensors[1]).float().mean()
    assert float(right) == pytest.approx(result.final_metric)


def test_events_that_are_in_the_folder_are_not_in_memory_too(tmp_path: Path) -> None:
    recorder = Recorder(Gradients(task), steps=1, evaluate_every=1, checkpoint_every=1, out=tmp_path)
    tracemalloc.start()
    for step in range(1000):
        recorder.add(events.Evaluated(step, 0.5))
        if step == 100:
            before, _ = tracemalloc.get_traced_memory()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    recorder.close()
    assert after - before < 20_000  # an event takes some hundred bytes
    assert recorder.events == [events.Evaluated(step, 0.5) for step in range(1000)]


def test_a_checkpoint_is_certified_by_the_members(tmp_path: Path) -> None:
    run = tmp_path / "run"
    simulate(task, **ATTACKED, out=run, checkpoint_every=5)
    manifest = read_manifest(run / "manifest.toml")
    signers, verify = make_signers(7, 0, ideal=False)
    gradients = Gradients(task, 0)
    started = read_events(run / "events.jsonl")[0]
    assert isinstance(started, events.RunStarted)
    for folder in sorted((run / "checkpoints").iterdir()):
        state = compute_state_digest(read_checkpoint(folder).states[int(folder.name)])
        config = _find_config(manifest, tuple(signer.key for signer in signers), gradients, started.run)
        certificate = read_certificate(folder)
        assert check_certificate(config, Examiner(verify), certificate) == state
        foreign = type(config)(**{**_fields(config), "steps": 31})
        assert check_certificate(foreign, Examiner(verify), certificate) is None


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def _find_config(manifest: Any, keys: tuple[bytes, ...], gradients: Gradients, run: str) -> Any:
    from phalanx.training.machine import Workshop
    from phalanx.training.optimizers import make_optimizer

    workshop = Workshop(gradients, make_optimizer(manifest.optimizer, manifest.run.steps, gradients.sizes))
    config = manifest.make_config(keys, gradients.size, workshop.start_digest)
    assert config.run.hex() == run
    return config


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    simulate(task, peers=4, steps=2, out=tmp_path / "run")
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    with pytest.raises(LocalError, match="there is a run already; resume it, or choose another folder"):
        simulate(task, peers=4, steps=2, out=tmp_path / "run")
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


# ---- What is refused

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"attack": "sign_flop"}, "attack 'sign_flop' is unknown; did you mean sign_flip"),
    ({"attack": "ipm_x"}, "'x' is not a number that ipm takes"),
    ({"defense": "prayer"}, "defense 'prayer' is unknown; expected one of phalanx, mean"),
    ({"byzantine": 3}, "7 members with byzantine=3 leave room for validators"),
    ({"byzantine": 8}, "byzantine: expected 0 to 7"),
    ({"steps": 0}, "steps: expected a whole number from 1, got 0"),
    ({"every": 0}, "every: expected a whole number from 1, got 0"),
    ({"delay": 5, "attack": "alie"}, "delay: only the attack 'delayed' lags behind"),
    ({"delay": 0, "attack": "delayed"}, "delay: expected a whole number from 1"),
    ({"tau": "much"}, "tau: expected 'auto' or a positive number, got 'much'"),
    ({"tau": -1.0}, "tau: expected a positive number"),
    ({"method": "sgd"}, "method 'sgd' is unknown; expected one of btard-sgd"),
    ({"method": "btard-clipped-sgd"}, "expected a length to which gradients are scaled"),
    ({"clip": 0.0}, "clip: expected a positive number, got 0"),
    ({"optimizer": {"name": "adam"}}, "optimizer: name = 'adam'"),
    ({"wire": "int4"}, "wire: 'int4' is not one of"),
    ({"byzantine": 0}, "attack 'sign_flip': byzantine is 0, so nobody attacks"),
    ({"start": 30}, "start: the attack begins in step 30, and the last step is 29"),
    ({"attack": "sign_flip@40", "start": None}, "start: the attack begins in step 40"),
    ({"seed": "a"}, "seed: expected a whole number, got 'a'"),
    ({"peers": 40, "byzantine": 2}, "33 parameters cannot be cut into 40 parts"),
]


@pytest.mark.parametrize(("change", "line"), WRONG, ids=[line[:30] for _, line in WRONG])
def test_wrong_settings(change: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(LocalError) as caught:
        simulate(task, **{**ATTACKED, **change}, out=tmp_path / "run")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_manifest_of_another_version(tmp_path: Path) -> None:
    run = tmp_path / "run"
    simulate(task, peers=4, steps=2, out=run)
    text = (run / "manifest.toml").read_text()
    (run / "manifest.toml").write_text(text.replace("version = 1", "version = 2"))
    with pytest.raises(LocalError, match="a manifest of version 2, and this is version 1"):
        resume(run, task=task)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("peers = 4", "peers = 'four'"), "Expected `int`, got `str`"),
        (("peers = 4", "peers = 4\nspeed = 3"), "unknown field `speed`"),
        (("[run]", "[run"), "not a TOML file"),
    ],
)
def test_a_manifest_that_was_spoilt(tmp_path: Path, change: tuple[str, str], line: str) -> None:
    run = tmp_path / "run"
    simulate(task, peers=4, steps=2, out=run)
    text = (run / "manifest.toml").read_text()
    assert change[0] in text
    (run / "manifest.toml").write_text(text.replace(*change))
    with pytest.raises(LocalError, match=line):
        resume(run, task=task)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("peers = 7", "peers = 8"), "run"),
        (("seed = 0", "seed = 1"), "run"),
        (("rate = 0.2", "rate = 0.3"), "run"),
        (('attack = "sign_flip"', 'attack = "alie"'), "attack"),
        (('defense = "phalanx"', 'defense = "mean"'), "defense"),
        (("start = 3", "start = 4"), "start"),
    ],
)
def test_a_manifest_that_was_changed(tmp_path: Path, change: tuple[str, str], name: str) -> None:
    run = tmp_path / "run"
    simulate(task, **ATTACKED, out=run, stop=lambda step: step >= 2)
    text = (run / "manifest.toml").read_text()
    assert change[0] in text
    (run / "manifest.toml").write_text(text.replace(*change))
    with pytest.raises(LocalError, match=rf"the manifest was changed since the run was started \({name} is another\)"):
        resume(run, task=task)


def test_other_data_is_noticed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    simulate(task, peers=4, steps=4, out=run, stop=lambda step: step >= 2)
    other = dataclasses.replace(task, train=task.test)
    with pytest.raises(LocalError, match=r"its data is not what .* was started with"):
        resume(run, task=other)


def test_no_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="there is no manifest; expected the folder of a run"):
        resume(tmp_path, task=task)


@pytest.mark.parametrize("file", ["memory.bin", "state.safetensors"])
def test_a_spoilt_checkpoint(tmp_path: Path, file: str) -> None:
    run = tmp_path / "run"
    simulate(task, peers=4, steps=4, out=run, stop=lambda step: step >= 2)
    folder = find_latest(run)
    assert folder is not None
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(LocalError, match="not a whole checkpoint"):
        resume(run, task=task)
    for at in range(len(data) // 2, len(data), max(1, len(data) // 20)):  # one bit, anywhere: never another run
        (folder / file).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(LocalError, match=r"not a whole checkpoint|not what was written there"):
            resume(run, task=task)


def test_a_full_disk_at_checkpoint_time_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, written = tmp_path / "run", 0
    save = checkpoints.save_tensors

    def fill_up(*arguments: Any, **options: Any) -> None:
        nonlocal written
        written += 1
        if written > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments, **options)

    monkeypatch.setattr(checkpoints, "save_tensors", fill_up)
    with pytest.raises(WriteFailed, match="the checkpoint could not be written: No space left on device"):
        simulate(task, **ATTACKED, out=run, checkpoint_every=5)
    monkeypatch.undo()
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["000005", "000010"]
    assert is_same(resume(run, task=task), simulate(task, **ATTACKED))


def test_the_python_interface() -> None:
    result = phalanx.simulate(task, peers=4, steps=5)
    model = nn.Linear(10, 3)
    model.load_state_dict(result.model)
    assert isinstance(result, phalanx.Result)


def test_a_task_that_cannot_be_repeated_is_refused() -> None:
    """Validators would find honest peers guilty."""
    draws = iter(range(1000))
    restless = dataclasses.replace(task, augment=lambda batch, generator: (batch[0] + next(draws), batch[1]))
    with pytest.raises(LocalError, match="is another one the second time"):
        simulate(restless, peers=4, steps=2)
