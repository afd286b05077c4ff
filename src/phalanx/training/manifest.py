"""What fixes a run, as a TOML file: read by people, hashed by peers.

Two runs with the same manifest end in the same state. Sections are small structs; what is not in them is refused.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from phalanx.core.config import AutomaticTau, Config, Tolerance
from phalanx.core.crypto import compute_digest, parse_peer_id
from phalanx.core.errors import LocalError

VERSION = 1


class _Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TaskSection(_Section, frozen=True, kw_only=True):
    name: str
    """A built-in task, or FILE.py:NAME."""
    options: dict[str, str] = {}
    digest: str
    """Of the data and what else makes the task: a peer with another one does not start."""
    batch: int
    code: str | None = None
    """Of a task's file, in a run between machines."""


class RunSection(_Section, frozen=True, kw_only=True):
    peers: int
    byzantine: int
    validators: int
    steps: int
    seed: int
    wire: str = "float32"
    device: str = "cpu"
    threads: int
    """Of one peer's gradients: results depend on it in the last bits."""
    method: str = "none"


class ClippingSection(_Section, frozen=True, kw_only=True):
    tau: float | None = None
    """None: automatic."""
    multiple: float = 1.0
    start: float = 1.0
    floor: float = 1e-3
    ceiling: float = 1e3
    cap: float
    """The longest that a gradient may be; the lambda of btard-clipped-sgd."""


class SimulationSection(_Section, frozen=True, kw_only=True):
    defense: str
    attack: str
    start: int
    every: int
    delay: int | None = None
    attackers: list[int]
    evaluate_every: int
    checkpoint_every: int


class NetworkSection(_Section, frozen=True, kw_only=True):
    """What peers on different machines have to agree on beforehand."""

    founders: list[str]
    """Peer ids, in the order of the first roster."""
    delta: float
    gradient_time: float
    transfer_time: float
    quorum: Literal["majority", "partition-safe"] = "majority"
    lower: float | None = None
    upper: float | None = None
    platform: str
    probation: int = 12
    newcomer_probation: int = 0
    admissions: int = 1
    state: str
    conformance: str


class OriginSection(_Section, frozen=True, kw_only=True):
    """What a run goes on from, if it does not begin with initial parameters."""

    run: str
    """The name of the run before it."""
    steps: int
    """Of training before this run, in all runs before it: the schedule goes on from there."""


class Plan(_Section, frozen=True, kw_only=True):
    """What every run has."""

    version: int
    task: TaskSection
    run: RunSection
    clipping: ClippingSection
    optimizer: dict[str, Any]

    @property
    def seed(self) -> bytes:
        """Of all randomness in the run. Who attacks, and how often is measured, makes no difference to it."""
        text = format_manifest(self).partition("[simulation]")[0]
        return compute_digest("seed of a run", text.encode())

    def make_config(self, founders: tuple[bytes, ...], size: int, state: bytes) -> Config:
        """The protocol's numbers, for so many trained numbers and the digest of the state before step 0."""
        clip = self.clipping
        tau: float | AutomaticTau = (
            AutomaticTau(multiple=clip.multiple, start=clip.start, floor=clip.floor, ceiling=clip.ceiling)
            if clip.tau is None
            else clip.tau
        )
        return Config(
            founders=founders,
            byzantine=self.run.byzantine,
            validators=self.run.validators,
            size=size,
            steps=self.run.steps,
            wire=self.run.wire,
            tau=tau,
            cap=clip.cap,
            delta_max=2 * clip.cap,
            seed=self.seed,
            state=state,
            **self._get_network_settings(),
        )

    def _get_network_settings(self) -> dict[str, Any]:
        return {}


class Manifest(Plan, frozen=True, kw_only=True):
    """A run in one process."""

    simulation: SimulationSection


class NetworkManifest(Plan, frozen=True, kw_only=True):
    """A run between machines."""

    network: NetworkSection
    origin: OriginSection | None = None

    @property
    def steps_before(self) -> int:
        return self.origin.steps if self.origin is not None else 0

    @property
    def name(self) -> str:
        """What people call the run by: a hash of all that is in the manifest."""
        return compute_digest("name of a run", format_manifest(self).encode()).hex()[:32]

    @property
    def founders(self) -> tuple[bytes, ...]:
        return tuple(parse_peer_id(text) for text in self.network.founders)

    def _get_network_settings(self) -> dict[str, Any]:
        net = self.network
        same = ("delta", "gradient_time", "transfer_time", "probation", "newcomer_probation", "admissions")
        return {
            "tolerance": Tolerance(net.lower, net.upper) if net.lower is not None and net.upper is not None else None,
            "partition_safe": net.quorum == "partition-safe",
            **{name: getattr(net, name) for name in same},
        }


_P = TypeVar("_P", bound=Plan)


def format_manifest(manifest: Plan) -> str:
    values = msgspec.to_builtins(manifest)
    lines = ["# A run of Phalanx: with this file and the same software it can be repeated bit for bit."]
    lines.append(f"version = {values.pop('version')}")
    for section, fields in values.items():
        if fields is None:
            continue
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {_format(value)}" for name, value in fields.items() if value is not None]
    return "\n".join(lines) + "\n"


def _format(value: Any) -> str:
    """A value of TOML; its strings and lists are those of JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_format(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_format, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a run in one process, or :class:`LocalError` with what is wrong with it."""
    if not path.is_file():
        raise LocalError(f"{path}: there is no manifest; expected the folder of a run")
    return _parse(_read(path), str(path), Manifest, "simulation")


def read_network_manifest(path: Path) -> NetworkManifest:
    """The manifest of a run between machines."""
    if not path.is_file():
        raise LocalError(f"{path} does not exist; write a manifest with: phalanx init {path} --task ...")
    return parse_network_manifest(_read(path), str(path))


def parse_network_manifest(text: str, source: str) -> NetworkManifest:
    """The same from a text that came from ``source``."""
    manifest = _parse(text, source, NetworkManifest, "network")
    if len(manifest.founders) != manifest.run.peers:
        raise LocalError(
            f"{source}: {manifest.run.peers} peers and {len(manifest.founders)} founders; expected as many of both"
        )
    return manifest


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LocalError(f"{path}: not a TOML file: {error}") from None


def _parse(text: str, source: str, kind: type[_P], section: str) -> _P:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LocalError(f"{source}: not a TOML file: {error}") from None
    version = values.get("version")
    if version != VERSION:
        raise LocalError(
            f"{source}: a manifest of version {version!r}, and this is version {VERSION}: "
            "use the software that wrote it, or start a new run"
        )
    if section not in values:
        other = "phalanx start" if section == "simulation" else "phalanx simulate"
        raise LocalError(f"{source}: there is no section [{section}]; it may be a manifest for {other}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise LocalError(f"{source}: {error}") from None
