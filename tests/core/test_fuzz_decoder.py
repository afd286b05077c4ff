"""A share of the decoder's fuzzing, and a check that the fuzzer notices what it looks for."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fuzz_decoder
import pytest
from fuzz_decoder import Decoders, Failure, fuzz

from phalanx.core import codec
from phalanx.core.errors import Malformed
from phalanx.core.messages import PullManifest

SCRIPT = Path(__file__).with_name("fuzz_decoder.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False, timeout=300
    )


def test_twenty_thousand_damaged_messages_do_no_harm() -> None:
    result = run("--messages", "20000", "--seed", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "20000 inputs" in result.stdout


def test_one_seed_gives_one_sequence_of_inputs() -> None:
    first, second = ([fuzz_decoder.make_input(random.Random(f"5 {i}")) for i in range(200)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 190


def test_damage_reaches_behind_the_first_check() -> None:
    counts = fuzz(seed=3, first=0, messages=2000)
    assert counts["messages"] > 50
    assert counts["bodies"] > 20


def assert_noticed(decoders: Decoders, capsys: pytest.CaptureFixture[str], complaint: str) -> None:
    with pytest.raises(Failure, match=complaint):
        fuzz(seed=4, first=100, messages=1000, decoders=decoders)
    output = capsys.readouterr().out
    assert "bytes: " in output
    assert re.search(r"replay: python tests/core/fuzz_decoder.py --seed 4 --first \d+ --messages 1\n", output)


def test_another_error_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    def crash(data: bytes) -> Any:
        return codec.decode_body(data) if data[3:4] != b"\x00" else data[len(data)]

    assert_noticed(Decoders(body=crash), capsys, "IndexError instead of Malformed")


def test_an_error_derived_from_malformed_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    class Special(Malformed):
        pass

    def derive(data: bytes) -> Any:
        raise Special

    assert_noticed(Decoders(message=derive), capsys, "a subclass of Malformed")


def test_a_second_encoding_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert_noticed(Decoders(message=lambda data: PullManifest()), capsys, "encodes to other bytes")


def test_a_slow_input_is_noticed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "process_time", lambda: 2.0 * next(clock))
    assert_noticed(Decoders(), capsys, "took 2.0 s")


def test_frames_cut_in_other_places_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    class Careless(codec.FrameReader):
        def feed(self, data: bytes) -> Any:
            return list(super().feed(data))[:1]

    assert_noticed(Decoders(reader=Careless), capsys, "other frames")


def test_a_stream_that_goes_on_behind_a_bad_length_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    class Forgetful(codec.FrameReader):
        def feed(self, data: bytes) -> Any:
            self._complaint = None
            return super().feed(data)

    assert_noticed(Decoders(reader=Forgetful), capsys, "went on behind")


def test_growing_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter((100.0, 131.0))
    monkeypatch.setattr(fuzz_decoder, "resident_megabytes", lambda: next(sizes))
    monkeypatch.setattr(fuzz_decoder, "WARM_UP", 10)
    with pytest.raises(Failure, match=r"grew by 31\.0 MB"):
        fuzz(seed=0, first=0, messages=20)


def test_a_failure_ends_the_script_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz_decoder.py", "--messages", "5"])
    monkeypatch.setattr(fuzz_decoder, "MAX_SECONDS", -1.0)
    assert fuzz_decoder.main() == 1
    assert "FAILED: took" in capsys.readouterr().out


def test_a_replay_runs_one_input() -> None:
    result = run("--seed", "1", "--first", "777", "--messages", "1")
    assert result.returncode == 0
    assert "seed 1, inputs 777 to 777" in result.stdout
