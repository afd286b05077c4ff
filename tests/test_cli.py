"""The command line is a contract: what goes to stdout, what to stderr, and the exit code."""

import contextlib
import io
import json
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from phalanx import __version__, cli, demo
from phalanx.core.crypto import Identity
from phalanx.simulation import scenario


def phalanx(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([Path(sys.executable).parent / "phalanx", *arguments], capture_output=True, text=True)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has PyTorch loaded already: for what ends before anything is run."""
    out, said = io.StringIO(), io.StringIO()
    code: object = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", ["phalanx", *arguments])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), said.getvalue())


def last_json(result: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


def test_version_is_the_packages() -> None:
    result = phalanx("--version")
    assert (result.returncode, result.stdout) == (0, f"{__version__}\n")


DEFAULTS = {
    "simulate": ("[default: 16]", "[default: the task's]", "[default: phalanx]"),
    "init": ("[default: this machine's]", "[default: by bandwidth]", "[default: 2.0]"),
    "start": ("[default: the manifest's]", "[default: /ip4/0.0.0.0/tcp/0]", "[default: named after file and key]"),
    "join": ("[default: named after the key]",),
    "swarm": ("[default: measured]", "[default: phalanx-swarm]"),
}


@pytest.mark.parametrize("command", DEFAULTS)
def test_help_shows_what_holds_where_nothing_is_given(command: str) -> None:
    result = call(command, "--help")
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    for default in DEFAULTS[command]:
        assert default in text
    assert "factory" not in text
    assert "\x1b" not in result.stdout


def test_the_list_of_commands_is_in_whole_sentences() -> None:
    listed = call("--help").stdout.partition("Commands:")[2].split("\n  ")
    assert len(listed) > 7
    assert all(line.rstrip().endswith(".") and "..." not in line for line in listed if line.strip())


def test_keygen_writes_a_key_that_loads_and_prints_its_peer_id(tmp_path: Path) -> None:
    result = phalanx("keygen", str(tmp_path / "key"), "--json")
    assert result.returncode == 0
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert last_json(result) == {"file": str(tmp_path / "key"), "peer_id": Identity.load(tmp_path / "key").peer_id}


def test_keygen_refuses_to_overwrite_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"mine")
    result = call("keygen", str(tmp_path / "key"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert "exists" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "key").read_bytes() == b"mine"


BAD_FUZZ = (
    "",
    "--seeds 3",
    "--seeds 5:5",
    "--seeds a:b",
    "--seeds 0:1 --peers 1",
    "--seeds 0:1 --peers 100000",
    "--seeds 0:1 --steps 0",
    "--seeds 0:1 --jobs 0",
    "--seeds 0:1 --attack nonsense",
    "--seeds 0:1 --attack /no/such/file.py:mine",
    "--seeds 0:1 --trace /no/such/folder/trace",
)
BAD_SIMULATE = {
    "--task nonsense": "task 'nonsense': not one of digits",
    "--task /no/such/file.py:mine": "there is no file",
    "--task cifar10": "needs the option data",
    "--task cifar10 --option data=/no/such/folder": "/no/such/folder",
    "--attack nonsense": "attack 'nonsense' is unknown",
    "--attack sign_flip": "attack 'sign_flip': byzantine is 0, so nobody attacks",
    "--every 3": "--start, --every: there is no attack",
    "--byzantine 1 --start 3": "--start, --every: there is no attack",
    "--peers 8 --byzantine 4 --attack sign_flip": "lower byzantine to 3, or take 10 members",
    "--defense nonsense": "defense 'nonsense' is unknown",
    "--steps 0": "steps: expected a whole number from 1",
    "--tau much": "tau: expected 'auto' or a positive number",
    "--optimizer name=nonsense": "optimizer: name = 'nonsense'",
    "--optimizer rate": "optimizer: expected NAME=VALUE",
    "--resume": "--resume needs --out",
    "--resume --out /no/such/folder": "there is no manifest",
    "--device nonsense": "nonsense",
}


@pytest.mark.parametrize(
    "arguments",
    [("keygen",), ("keygen", "/no/such/folder/key"), ("keygen", "/"), ("keygen", ""), ("nonsense",), ("demo", "--no")]
    + [("fuzz", *options.split()) for options in BAD_FUZZ],
)
def test_bad_input_exits_with_2_and_says_nothing_on_stdout(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("keygen", "a\0b"),
        ("init", "a\0b"),
        ("init", "run.toml", "--founder=a\0b"),
        ("init", "run.toml", "--task=a\0b.py:task"),
        ("init", "run.toml", "--option", "data=a\0b"),
        ("start", "a\0b", "--key", "key"),
        ("start", "run.toml", "--key", "a\0b"),
        ("start", "run.toml", "--key", "key", "--out", "a\0b"),
        ("join", "/ip4/1.2.3.4/tcp/1/p2p/x", "--key", "a\0b"),
        ("simulate", "--out", "a\0b"),
        ("simulate", "--out", "a\0b", "--resume"),
        ("demo", "--out", "a\0b"),
        ("swarm", "--out", "a\0b"),
        ("fuzz", "--seeds", "0:1", "--trace", "a\0b"),
    ],
)
def test_a_nul_is_one_line_and_exit_2(words: tuple[str, ...]) -> None:
    result = call(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "a NUL, which no path and no option can have; take it out" in result.stderr
    assert "a\\x00b" in result.stderr


def test_demo_shows_that_the_protocol_holds_where_the_mean_fails(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    result = phalanx("demo", "--json", "--out", str(tmp_path / "demo"))
    values = last_json(result)
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 1
    assert values["protected"]["byzantine_banned"] == 3
    assert values["protected"]["honest_banned"] == 0
    assert values["protected"]["final_metric"] > 0.9
    assert values["unprotected"]["final_metric"] < 0.2
    assert Path(values["report"]).parent == tmp_path / "demo-2", "what is there is never overwritten"
    assert Path(values["picture"]).read_bytes().startswith(b"\x89PNG")
    assert "<h1>" in Path(values["report"]).read_text()
    assert values["mean_error"] is None, "the mean should have overflowed: null, never NaN"
    assert values["clipped_error"] < 0.02 * 13.7, "within 2% of the starting distance"
    assert values["attacker_weight"] < 0.001


@pytest.mark.parametrize("options", BAD_SIMULATE)
def test_a_run_that_cannot_be_is_one_line_and_exit_2(options: str) -> None:
    result = call("simulate", *options.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert BAD_SIMULATE[options] in result.stderr
    assert len(result.stderr.splitlines()) == 1


SMALL = f"{Path(__file__).parent / 'training' / 'small.py'}:task"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("keys")
    files = [folder / f"{place}.key" for place in range(4)]
    for file in files:
        Identity.generate().save(file)
    return files


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory, keys: list[Path]) -> Path:
    file = tmp_path_factory.mktemp("manifest") / "run.toml"
    result = call("init", str(file), "--task", SMALL, *(f"--founder={key}" for key in keys))
    assert result.returncode == 0, result.stderr
    return file


BAD_INIT = {
    "--quorum foo": "quorum: 'foo' is not one of majority, partition-safe",
    "--bandwidth 0": "bandwidth: expected a positive number, got 0",
    "--bandwidth=-1": "bandwidth: expected a positive number, got -1",
    "--threads 0": "threads: expected a whole number from 1, got 0",
    "--threads 1000000000": "threads: expected at most 1024, got 1000000000",
    "--threads=-2": "threads: expected a whole number from 1, got -2",
    "--steps 0": "steps: expected a whole number from 1, got 0",
    "--gradient-time 0": "gradient_time: expected a positive number, got 0",
    "--gradient-time nan": "gradient_time: expected a positive number, got nan",
    "--transfer-time 0": "transfer_time: expected a positive number, got 0",
    "--admissions 0": "admissions: expected a whole number from 1, got 0",
    "--newcomer-probation=-1": "newcomer_probation: expected a whole number from 0, got -1",
    "--wire int4": "wire: 'int4' is not one of float32",
    "--lambda 0": "clip: expected a positive number, got 0",
    "--method btard-clipped-sgd": "method btard-clipped-sgd: expected a length to which gradients are scaled",
    "--method foo": "method 'foo' is unknown; expected one of btard-sgd",
}


@pytest.mark.parametrize("options", BAD_INIT)
def test_a_manifest_that_cannot_be_is_one_line_and_no_file(options: str, keys: list[Path], tmp_path: Path) -> None:
    founders = [f"--founder={key}" for key in keys]
    result = call("init", str(tmp_path / "run.toml"), "--task", SMALL, *founders, *options.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert BAD_INIT[options] in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_manifest_without_a_folder_is_bad_input(keys: list[Path], tmp_path: Path) -> None:
    founders = [f"--founder={key}" for key in keys]
    result = call("init", str(tmp_path / "nodir" / "run.toml"), "--task", SMALL, *founders)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"phalanx: {tmp_path / 'nodir'}: there is no such folder\n"


def test_a_manifest_in_a_folder_that_takes_none_is_bad_input(keys: list[Path]) -> None:
    founders = [f"--founder={key}" for key in keys]
    result = call("init", "/proc/run.toml", "--task", SMALL, *founders)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "/proc" in result.stderr


def test_a_founder_that_is_neither_id_nor_file_is_told_so(tmp_path: Path) -> None:
    result = call("init", str(tmp_path / "run.toml"), "--founder", "nofile.key")
    assert (result.returncode, result.stdout) == (2, "")
    assert "'nofile.key' is not the id of an Ed25519 peer" in result.stderr
    assert "there is no such file" in result.stderr


BAD_START = {
    "--threads 0": "threads: expected a whole number from 1, got 0",
    "--threads=-1": "threads: expected a whole number from 1, got -1",
    "--evaluate-every 0": "evaluate_every: expected a whole number from 1, got 0",
    "--checkpoint-every=-3": "checkpoint_every: expected a whole number from 1, got -3",
    "--attack sign_flip --every 0": "every: expected a whole number from 1, got 0",
    "--attack sign_flip --start=-1": "start: expected a whole number from 0, got -1",
    "--start 5": "there is no attack",
    "--every 2": "there is no attack",
    "--peer nonsense": "'nonsense' is not the address of a peer; expected /ip4/",
    "--threads 1000000000": "threads: expected at most 1024, got 1000000000",
}


@pytest.mark.parametrize("options", BAD_START)
def test_a_start_that_cannot_be_is_one_line_and_no_folder(
    options: str, manifest: Path, keys: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "peer"
    result = call("start", str(manifest), "--key", str(keys[0]), "--out", str(out), *options.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert BAD_START[options] in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not out.exists()


BAD_SWARM = {
    "--quorum foo": "quorum: 'foo' is not one of majority, partition-safe",
    "--task nosuch": "task 'nosuch': not one of digits",
    "--wire int4": "wire: 'int4' is not one of float32",
    "--every 0": "every: expected a whole number from 1, got 0",
    "--byzantine 4": "lower byzantine to 3",
    f"--peers {10**30}": "but a roster holds at most",
}


@pytest.mark.parametrize("options", BAD_SWARM)
def test_a_swarm_that_cannot_be_is_one_line_and_no_folder(options: str, tmp_path: Path) -> None:
    words = ["--task", SMALL, "--peers", "8", "--out", str(tmp_path / "swarm"), *options.split()]
    result = call("swarm", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert BAD_SWARM[options] in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("equal", "line"),
    [(True, "all honest states are equal"), (False, "honest states are NOT equal"), (None, "nobody finished")],
)
def test_the_end_of_a_swarm_is_a_line_of_rounded_numbers(equal: bool | None, line: str) -> None:
    result = SimpleNamespace(
        metric_name="accuracy", final_metric=31 / 90, steps=7, byzantine_banned=1, honest_banned=0, out="there"
    )
    found = SimpleNamespace(result=result, seconds_per_step=0.0673278, digests_equal=equal)
    assert cli._describe_swarm(found) == (  # type: ignore[arg-type]
        "accuracy 0.3444 after 7 steps, 0.07 s each; 1 attackers banned, honest peers banned: 0; "
        f"{line}; written to there"
    )


def test_an_interrupted_demo_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(settings: dict) -> None:
        assert (tmp_path / "demo").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_train_both", interrupt)
    assert CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "demo")]).exit_code == 130
    assert not (tmp_path / "demo").exists()


def test_ctrl_c_checkpoints_and_says_how_to_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--task", SMALL, "--peers", "4", "--steps", "4000", "--seed", "3", "--json"]
    command = [Path(sys.executable).parent / "phalanx", "simulate", *options, "--out", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not any((run / "checkpoints").glob("[0-9]*")) and process.poll() is None:
            if (run / "events.jsonl").exists() and (run / "events.jsonl").read_text().count("StepFinished") > 3:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    stopped = json.loads(out.splitlines()[-1])
    assert stopped["interrupted"] is True
    assert f"phalanx simulate --out {run} --resume" in said
    again = phalanx("simulate", "--out", str(run), "--resume", "--stop-at", str(stopped["steps"] + 3), "--json")
    assert again.returncode == 130, again.stderr
    assert last_json(again)["steps"] == stopped["steps"] + 3


def test_a_run_without_a_folder_that_was_stopped_kept_nothing() -> None:
    result = phalanx("simulate", "--task", SMALL, "--peers", "4", "--stop-at", "1")
    assert result.returncode == 130
    assert "nothing was kept; with --out" in result.stderr
    assert "can be resumed at" not in result.stderr
    assert "the run can be resumed" not in result.stderr


def test_a_full_disk_under_a_run_is_exit_1(tmp_path: Path) -> None:
    options = ["--task", SMALL, "--peers", "4", "--steps", "40", "--out", str(tmp_path / "run")]
    command = [Path(sys.executable).parent / "phalanx", "simulate", *options]
    limit = (60_000, 60_000)  # bytes that one file may have
    result = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "transcript.bin: could not be written: File too large" in result.stderr
    assert "what was written before is intact" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_full_disk_behind_stdout_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [Path(sys.executable).parent / "phalanx", "keygen", str(tmp_path / "key")]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


def test_fuzz_counts_what_happened(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    arguments = ("--seeds", "21:23", "--peers", "4", "--steps", "3", "--jobs", "2", "--trace", str(trace), "--json")
    result = phalanx("fuzz", *arguments)
    assert result.returncode == 0, result.stderr
    values = last_json(result)
    assert len(result.stdout.splitlines()) == 1
    keys = "seeds steps violations byzantine_banned byzantine_total honest_banned honest_eliminated seconds"
    assert set(keys.split()) <= set(values)
    assert (values["seeds"], values["steps"], values["violations"]) == (2, 6, 0)
    assert "2 of 2 seeds" in result.stderr
    assert " COMMIT " in trace.read_text()


def test_an_interrupted_fuzz_tells_of_the_seeds_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*words: object) -> Iterator[scenario.Result]:
        yield scenario.run_seed(19, 4, 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(scenario, "fuzz_seeds", interrupt)
    result = CliRunner().invoke(cli.app, ["fuzz", "--seeds", "19:40", "--json"])
    values = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 130
    assert (values["seeds"], values["steps"], values["interrupted"]) == (1, 3, True)
