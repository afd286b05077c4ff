"""The command line is a contract: what goes to stdout, what to stderr, and the exit code."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import __version__
from phalanx.core.crypto import Identity


def phalanx(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([Path(sys.executable).parent / "phalanx", *arguments], capture_output=True, text=True)


def last_json(result: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


def test_version_is_the_packages() -> None:
    result = phalanx("--version")
    assert (result.returncode, result.stdout) == (0, f"{__version__}\n")


def test_keygen_writes_a_key_that_loads_and_prints_its_peer_id(tmp_path: Path) -> None:
    result = phalanx("keygen", str(tmp_path / "key"), "--json")
    assert result.returncode == 0
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert last_json(result) == {"file": str(tmp_path / "key"), "peer_id": Identity.load(tmp_path / "key").peer_id}


def test_keygen_refuses_to_overwrite_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"mine")
    result = phalanx("keygen", str(tmp_path / "key"))
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
    "--seeds 0:1 --steps 0",
    "--seeds 0:1 --jobs 0",
    "--seeds 0:1 --attack nonsense",
    "--seeds 0:1 --attack /no/such/file.py:mine",
    "--seeds 0:1 --trace /no/such/folder/trace",
)


@pytest.mark.parametrize(
    "arguments",
    [("keygen",), ("keygen", "/no/such/folder/key"), ("keygen", "/"), ("keygen", ""), ("nonsense",), ("demo", "--no")]
    + [("fuzz", *options.split()) for options in BAD_FUZZ],
)
def test_bad_input_exits_with_2_and_says_nothing_on_stdout(arguments: tuple[str, ...]) -> None:
    result = phalanx(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_demo_shows_that_clipping_holds_where_the_mean_fails() -> None:
    result = phalanx("demo", "--json")
    values = last_json(result)
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 1
    assert values["mean_error"] is None, "the mean should have overflowed: null, never NaN"
    assert values["clipped_error"] < 0.02 * 13.7, "within 2% of the starting distance"
    assert values["attacker_weight"] < 0.001


def test_a_full_disk_behind_stdout_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [Path(sys.executable).parent / "phalanx", "keygen", str(tmp_path / "key")]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


def test_fuzz_counts_what_happened(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    arguments = ("--seeds", "19:21", "--peers", "4", "--steps", "3", "--jobs", "2", "--trace", str(trace), "--json")
    result = phalanx("fuzz", *arguments)
    assert result.returncode == 0, result.stderr
    values = last_json(result)
    assert len(result.stdout.splitlines()) == 1
    keys = "seeds steps violations byzantine_banned byzantine_total honest_banned honest_eliminated seconds"
    assert set(keys.split()) <= set(values)
    assert (values["seeds"], values["steps"], values["violations"]) == (2, 6, 0)
    assert "2 of 2 seeds" in result.stderr
    assert " COMMIT " in trace.read_text()
