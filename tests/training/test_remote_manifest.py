"""A manifest that came from a stranger: what it may not name, which numbers it may hold, and how its text is shown."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx import cli, node
from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError
from phalanx.core.messages import MAX_MANIFEST
from phalanx.training.files import read_file
from phalanx.training.manifest import NetworkManifest, format_manifest, parse_network_manifest
from phalanx.training.tasks import load_task

FOUNDERS = [Identity.generate().peer_id for _ in range(4)]
ESCAPE = "\x1b[2J\x1b]0;owned\x07"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that is all right."""
    settings = {"threads": 1, "gradient_time": 60.0, "steps": 10, "byzantine": 1}
    return format_manifest(node.run_init(tmp_path_factory.mktemp("run") / "run.toml", "digits", FOUNDERS, settings))


def change(text: str, line: str) -> str:
    """The manifest with one line changed, or added to its section: ``network.delta = 3``."""
    section, _, line = line.partition(".")
    name = line.partition(" =")[0]
    lines, inside, done = [], False, False
    for old in text.splitlines():
        if old.startswith("["):
            inside = old == f"[{section}]"
            if inside:
                lines += [old, line]
                done = True
                continue
        if inside and old.partition(" =")[0] == name:
            continue
        lines.append(old)
    assert done
    return "\n".join(lines) + "\n"


def test_a_manifest_that_is_all_right_is_read(manifest: str) -> None:
    assert format_manifest(parse_network_manifest(manifest, "here")) == manifest


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run.steps = 10000000000000000000000000", "steps"),
        ("run.steps = 0", "steps"),
        ("run.steps = -1", "steps"),
        ("run.threads = 100000000", "threads"),
        ("run.threads = 0", "threads"),
        ("run.seed = 100000000000000000000000000000", "seed"),
        ("run.seed = -1", "seed"),
        ("run.byzantine = -1", "byzantine"),
        ("run.validators = 1000000", "validators"),
        ("run.outages = -3", "outages"),
        ("run.peers = 100000", "peers"),
        ('run.wire = "float7"', "wire"),
        ('run.method = "theft"', "method"),
        ('run.device = "meta"', "device"),
        ("task.batch = 0", "batch"),
        ("task.batch = 1000000000", "batch"),
        ("clipping.cap = 0.0", "cap"),
        ("clipping.cap = nan", "cap"),
        ("clipping.cap = inf", "cap"),
        ("clipping.cap = 1e300", "cap"),
        ("clipping.tau = -1.0", "tau"),
        ("clipping.tau = 1e-300", "tau"),
        ("clipping.start = nan", "start"),
        ("clipping.floor = 0.0", "floor"),
        ("clipping.ceiling = inf", "ceiling"),
        ("clipping.multiple = -2.0", "multiple"),
        ("network.delta = 1e-300", "delta"),
        ("network.delta = 0.0", "delta"),
        ("network.delta = -1.0", "delta"),
        ("network.delta = inf", "delta"),
        ("network.delta = 1e300", "delta"),
        ("network.gradient_time = 1e300", "gradient_time"),
        ("network.gradient_time = nan", "gradient_time"),
        ("network.transfer_time = -1.0", "transfer_time"),
        ("network.probation = -12", "probation"),
        ("network.probation = 100000000000000000", "probation"),
        ("network.newcomer_probation = -1", "newcomer_probation"),
        ("network.newcomer_probation = 100000000000000000", "newcomer_probation"),
        ("network.admissions = 0", "admissions"),
        ("network.admissions = 1000000", "admissions"),
        ("network.lower = 1e-4", "lower and upper"),
        ("network.upper = 1e-2", "lower and upper"),
        ('network.quorum = "none"', "quorum"),
        ('network.state = "00"', "state"),
        ('network.conformance = "zz"', "conformance"),
        ('task.digest = ""', "digest"),
        ("optimizer.rate = nan", "rate"),
        ("optimizer.rate = 1979-05-27T07:32:00Z", "rate"),
        ("optimizer.rate = [1, 2]", "rate"),
        ("optimizer.rate = { a = { b = 1 } }", "rate"),
        ("optimizer.rate = 100000000000000000000000000000000000000000", "rate"),
        ('task.options = { "data" = "/dev/zero" }', "data"),
        ('task.options = { "data" = "" }', "data"),
        ('task.name = "/etc/\\u0000passwd.py:x"', "NUL"),
        ('task.name = "digits\\u001b[2J"', "printable"),
        ('task.name = "dig\\nits"', "printable"),
        ('task.name = "digits\\u202e"', "printable"),
        ('task.options = { "a\\u001b" = "b" }', "printable"),
        ('network.platform = "\\u001b]0;owned\\u0007"', "printable"),
        ('optimizer.name = "sgd\\u0000"', "NUL"),
        ('task.name = "nonsense"', "nonsense"),
    ],
)
def test_a_manifest_out_of_all_reason_is_refused_with_the_number_to_change(
    manifest: str, line: str, words: str
) -> None:
    with pytest.raises(LocalError, match=words) as caught:
        parse_network_manifest(change(manifest, line), "stranger")
    assert str(caught.value).isprintable()


def test_lower_and_upper_belong_together(manifest: str) -> None:
    text = change(change(manifest, "network.lower = 1e-4"), "network.upper = 1e-2")
    assert parse_network_manifest(text, "here").network.upper == 1e-2
    with pytest.raises(LocalError, match="tolerance"):
        parse_network_manifest(change(text, "network.upper = 1e-5"), "stranger")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version = 1",
        "x = " + "[" * 20_000,
        "x = " + "{ a = " * 10_000,
        "[" + ".".join(["a"] * 10_000) + "]",
        "version = " + "9" * 10_000,
        "\0\0\0",
        f"{ESCAPE} = 1",
        f'version = "{ESCAPE}"',
        "version = 1\n[network]\n" + "a" * 1000 + " = 1",
        "#" * (MAX_MANIFEST + 1),
        "version = 1\ntask = 1\nrun = 2\nclipping = 3\noptimizer = 4\nnetwork = 5",
    ],
    ids=range(12),
)
def test_what_is_no_manifest_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(LocalError) as caught:
        parse_network_manifest(text, "stranger")
    assert len(str(caught.value)) < 1000


def test_no_manifest_says_which_files_to_read(tmp_path: Path) -> None:
    """Not even that which ``init`` writes: each machine has its own."""
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 100)
    options = {"data": str(tmp_path / "a.txt"), "context": "16", "width": "8", "layers": "1", "heads": "1"}
    settings = {"threads": 1, "gradient_time": 60.0, "steps": 10, "options": options}
    made = node.run_init(tmp_path / "run.toml", "text", FOUNDERS, settings)
    assert "data" not in made.task.options
    assert made.task.options["context"] == "16"
    assert str(tmp_path) not in format_manifest(made)


# ---- Joining with the manifest of a stranger


def join(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, then: Callable[..., Any] | None = None
) -> int | str | None:
    """Join as from the command line somebody who answers with this manifest; the exit code."""

    def fetch(*arguments: Any) -> tuple[NetworkManifest, str]:
        manifest = parse_network_manifest(text, arguments[0])
        return manifest, manifest.task.name

    def take_part(*arguments: Any) -> Any:
        raise LocalError(f"taking part with {dict(arguments[-1])}")

    monkeypatch.setattr(node, "_fetch", fetch)
    if then is not None:
        monkeypatch.setattr(node, "prepare", then)
    Identity.generate().save(tmp_path / "peer.key")
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{FOUNDERS[0]}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["phalanx", "join", address, "--key", "peer.key", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


TEXT_TASK = 'task.options = { "context" = "16", "width" = "8", "layers" = "1", "heads" = "1" }'


def make_text_manifest(manifest: str) -> str:
    return change(change(manifest, 'task.name = "text"'), TEXT_TASK)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/stdin", "pipe", "/proc/self/mem", "nothing", "."])
def test_only_regular_files_are_read(
    path: str, manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = join(make_text_manifest(manifest), tmp_path, monkeypatch, "--option", f"data={path}")
    assert code == 2
    assert "data: " in capfd.readouterr().err


def test_data_of_ones_own_are_named_on_the_command_line(
    manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_bytes(bytes(range(256)) * 10)
    text = make_text_manifest(manifest)
    assert join(text, tmp_path, monkeypatch) == 2
    assert "--option data=" in capfd.readouterr().err
    (tmp_path / "peer.key").unlink()
    assert join(text, tmp_path, monkeypatch, "--option", "data=mine.txt") == 2
    assert "the data here is not the run's" in capfd.readouterr().err
    (tmp_path / "peer.key").unlink()
    assert join(text, tmp_path, monkeypatch, "--option", "width=9") == 2
    assert "the manifest" in capfd.readouterr().err


@pytest.mark.parametrize("sizes", [("65536", "65536"), ("16384", "4096")])
def test_a_model_that_does_not_fit_into_this_machine_is_refused_before_it_is_made(
    sizes: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 5000)
    options = {"data": str(tmp_path / "a.txt"), "context": "16", "heads": "1", "width": sizes[0], "layers": sizes[1]}
    with pytest.raises(LocalError, match="memory"):
        load_task("text", options)


# ---- Files


def test_a_file_is_read_to_its_bound_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    assert read_file(path, 100, "data:") == bytes(100)
    with pytest.raises(LocalError, match="more than 99 bytes"):
        read_file(path, 99, "data:")
    with pytest.raises(LocalError, match="no name of a file"):
        read_file(Path("a\0b"), 99, "data:")


def test_a_sparse_file_that_would_fill_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    with open(path, "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(LocalError, match="bytes"):
        load_task("text", {"data": str(path)})


# ---- What is printed


def test_the_text_of_others_is_printed_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for text in (f"version = 1\n[{ESCAPE!r}]", f'version = "{ESCAPE}"', "version = 1\n[network]\n'\\u001b[2J' = 1"):
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "peer.key").unlink()
        assert join(text, tmp_path, monkeypatch) == 2
        printed = capfd.readouterr().err
        assert printed.replace("\n", "").isprintable(), ascii(printed)


def test_what_is_said_is_one_line_of_printable_text(capfd: pytest.CaptureFixture[str]) -> None:
    node._say(f"a peer says {ESCAPE}\nphalanx: all is well")
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert printed[:-1].isprintable()


def test_an_error_of_the_system_is_printed_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(2, "No such file", f"/tmp/{ESCAPE}")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    assert capfd.readouterr().err[:-1].isprintable()
