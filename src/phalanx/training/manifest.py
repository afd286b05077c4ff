"""What fixes a run, as a TOML file: read by people, hashed by peers.

Two runs with the same manifest end in the same state. Sections are small structs; what is not in them is refused.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from phalanx.core.config import AutomaticTau, Config, Tolerance
from phalanx.core.crypto import compute_digest, parse_peer_id
from phalanx.core.errors import LocalError
from phalanx.core.messages import MAX_MANIFEST, MAX_MEMBERS
from phalanx.core.wire import WIRE_TYPES
from phalanx.training.files import read_file
from phalanx.training.optimizers import METHODS

VERSION = 1
LOCAL_OPTIONS = ("data",)
"""Options of a task that are each machine's own business: what they name is read from this machine's disk."""

_LONGEST_TEXT = 1024
_WHOLE = {
    "task.batch": (1, 1 << 16),
    "run.peers": (1, MAX_MEMBERS),
    "run.byzantine": (0, MAX_MEMBERS),
    "run.validators": (1, MAX_MEMBERS),
    "run.steps": (1, 10**9),
    "run.seed": (0, (1 << 63) - 1),
    "run.threads": (1, 1024),
    "network.probation": (1, 10**6),
    "network.newcomer_probation": (0, 10**6),
    "network.admissions": (1, MAX_MEMBERS),
}
_SCALE = (1e-20, 1e20)
_NUMBERS = {
    "clipping.tau": _SCALE,
    "clipping.multiple": (1e-9, 1e9),
    "clipping.start": _SCALE,
    "clipping.floor": _SCALE,
    "clipping.ceiling": _SCALE,
    "clipping.cap": _SCALE,
    "network.delta": (1e-3, 1e6),
    "network.gradient_time": (0.0, 1e7),
    "network.transfer_time": (0.0, 1e7),
    "network.lower": (1e-20, 1e3),
    "network.upper": (1e-20, 1e3),
}
"""The numbers of a manifest, and what each may be. Whoever joins has them from a stranger."""
_DIGESTS = ("task.digest", "task.code", "network.state", "network.conformance")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")

# What a file may hold: a number beyond these is a slip, and would only fail later, somewhere else.
MAX_THREADS = 1024
Positive: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 31)]
Threads: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_THREADS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]


class _Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TaskSection(_Section, frozen=True, kw_only=True):
    name: str
    """A built-in task, or FILE.py:NAME."""
    options: dict[str, str] = {}
    digest: str
    """Of the data and what else makes the task: a peer with another one does not start."""
    batch: Positive
    code: str | None = None
    """Of a task's file, in a run between machines."""


class RunSection(_Section, frozen=True, kw_only=True):
    peers: Positive
    byzantine: Count
    validators: Count
    steps: Positive
    seed: int
    wire: str = "float32"
    device: str = "cpu"
    threads: Threads
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
    start: Count
    every: Positive
    delay: Positive | None = None
    lower: float | None = None
    upper: float | None = None
    attackers: list[Count]
    evaluate_every: Positive
    checkpoint_every: Positive


class NetworkSection(_Section, frozen=True, kw_only=True):
    """What peers on different machines have to agree on beforehand."""

    founders: list[str]
    """Peer ids, in the order of the first roster."""
    delta: Seconds
    gradient_time: Seconds
    transfer_time: Seconds
    quorum: Literal["majority", "partition-safe"] = "majority"
    lower: float | None = None
    upper: float | None = None
    platform: str
    probation: Count = 12
    newcomer_probation: Count = 0
    admissions: Count = 1
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

    def _get_network_settings(self) -> dict[str, Any]:
        return {"tolerance": _make_tolerance(self.simulation)}


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
            "tolerance": _make_tolerance(net),
            "partition_safe": net.quorum == "partition-safe",
            **{name: getattr(net, name) for name in same},
        }


def _make_tolerance(section: SimulationSection | NetworkSection) -> Tolerance | None:
    lower, upper = section.lower, section.upper
    return Tolerance(lower, upper) if lower is not None and upper is not None else None


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
    if not path.exists():
        raise LocalError(f"{path}: there is no manifest; expected the folder of a run")
    return _parse(_read(path), str(path), Manifest, "simulation")


def read_network_manifest(path: Path) -> NetworkManifest:
    """The manifest of a run between machines."""
    if not path.exists():
        raise LocalError(f"{path} does not exist; write a manifest with: phalanx init {path} --task ...")
    return parse_network_manifest(_read(path), str(path))


def parse_network_manifest(text: str, source: str) -> NetworkManifest:
    """The same from a text that came from ``source``, who may be anybody."""
    if len(text) > MAX_MANIFEST:
        raise LocalError(f"{source}: a manifest of {len(text)} characters; expected at most {MAX_MANIFEST}")
    manifest = _parse(text, source, NetworkManifest, "network")
    _check_values(manifest, source)
    if len(manifest.founders) != manifest.run.peers:
        raise LocalError(
            f"{source}: {manifest.run.peers} peers and {len(manifest.founders)} founders; expected as many of both"
        )
    return manifest


def _check_values(manifest: NetworkManifest, source: str) -> None:
    """Every value on its own; how they fit together is for :meth:`Config.check`, once the model is known."""
    values = msgspec.to_builtins(manifest)

    def require(condition: bool, complaint: str) -> None:
        if not condition:
            raise LocalError(f"{source}: {complaint}")

    for name, text in _list_texts(values):
        short = text[:80] + "..." * (len(text) > 80)
        require(text.isprintable(), f"{name}: expected printable text, got {short!r}")
        require(len(text) <= _LONGEST_TEXT, f"{name}: {len(text)} characters; expected at most {_LONGEST_TEXT}")
    for place, (low, high) in (*_WHOLE.items(), *_NUMBERS.items()):
        section, _, name = place.partition(".")
        value = values[section][name]
        kind = "a whole number" if place in _WHOLE else "a number"
        require(value is None or low <= value <= high, f"{name}: expected {kind} from {low:g} to {high:g}, got {value}")
    for place in _DIGESTS:
        section, _, name = place.partition(".")
        value = values[section][name]
        require(value is None or bool(re.fullmatch("[0-9a-f]{64}", value)), f"{name}: expected 64 hexadecimal digits")
    for name, value in manifest.optimizer.items():
        simple = isinstance(value, str | bool | int | float)
        small = not isinstance(value, int | float) or (math.isfinite(value) and abs(value) <= 1e20)
        require(simple and small, f"optimizer: {name}: expected a word or a number of reasonable size")
    run, net, task = manifest.run, manifest.network, manifest.task
    require(run.wire in WIRE_TYPES, f"wire: {run.wire!r} is not one of {', '.join(WIRE_TYPES)}")
    require(run.method in ("none", *METHODS), f"method: {run.method!r} is not one of none, {', '.join(METHODS)}")
    require(bool(_DEVICE.fullmatch(run.device)), f"device: {run.device!r} is neither cpu nor cuda")
    require((net.lower is None) == (net.upper is None), "lower and upper: expected both, or neither")
    if net.lower is not None and net.upper is not None:
        require(net.lower < net.upper, "tolerance: expected lower < upper")
    for name in LOCAL_OPTIONS:
        require(
            name not in task.options,
            f"options: a manifest does not say which files of this machine are read, and this one names {name!r}: "
            f"leave it out, and give your own with --option {name}=PATH",
        )
    # Imported here: tasks know nothing of manifests, and need not be loaded for reading one.
    from phalanx.training.tasks import TASKS

    require(":" in task.name or task.name in TASKS, f"task {task.name!r}: not one of {', '.join(TASKS)}")
    require((":" in task.name) == (task.code is not None), "code: expected for a task from a file, and for no other")


def _list_texts(values: Any, name: str = "the manifest") -> Iterator[tuple[str, str]]:
    """All text in a manifest, names of settings included, and where it is."""
    if isinstance(values, str):
        yield name, values
    elif isinstance(values, dict):
        for key, value in values.items():
            yield "the manifest", key
            yield from _list_texts(value, key)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _list_texts(value, name)


def _read(path: Path) -> str:
    try:
        return read_file(path, MAX_MANIFEST, "manifest:").decode("utf-8")
    except UnicodeDecodeError as error:
        raise LocalError(f"{path}: not a TOML file: {error}") from None
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror or error}; expected a manifest, a TOML file") from None


def _require_flat(values: dict[str, Any], source: str) -> None:
    """A section holds plain values, lists of them, and a task's options; and no text has a NUL, which no path takes."""
    for section, fields in values.items():
        for name, value in (fields if isinstance(fields, dict) else {}).items():
            options = value if (section, name) == ("task", "options") and isinstance(value, dict) else None
            parts = list(options.values()) if options is not None else value
            for part in parts if isinstance(parts, list) else [parts]:
                if isinstance(part, dict | list):
                    raise LocalError(f"{source}: [{section}] {name} holds more than one value; expected a flat one")
                if isinstance(part, str) and "\0" in part:
                    raise LocalError(f"{source}: [{section}] {name} has a NUL in its text; take it out")


def _parse(text: str, source: str, kind: type[_P], section: str) -> _P:
    try:
        values = tomllib.loads(text)
        _require_flat(values, source)
    except tomllib.TOMLDecodeError as error:
        raise LocalError(f"{source}: not a TOML file: {str(error)[:200]}") from None
    except RecursionError:
        raise LocalError(f"{source}: not a manifest: nested too deeply; expected sections of flat values") from None
    except ValueError as error:  # a number of too many digits, for one
        raise LocalError(f"{source}: not a TOML file: {str(error)[:200]}") from None
    version = values.get("version")
    if version is None:
        raise LocalError(f"{source}: not a manifest: expected a version in its first lines, as phalanx init writes it")
    if version != VERSION:
        raise LocalError(
            f"{source}: a manifest of version {repr(version)[:40]}, and this is version {VERSION}: "
            "use the software that wrote it, or start a new run"
        )
    if section not in values:
        other = "phalanx start" if section == "simulation" else "phalanx simulate"
        raise LocalError(f"{source}: there is no section [{section}]; it may be a manifest for {other}")
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise LocalError(f"{source}: {str(error)[:200]}") from None
