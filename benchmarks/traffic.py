"""Bytes that the protocol adds to a plain butterfly all-reduce, by kind of message.

    python benchmarks/traffic.py [--json] [--small]

The butterfly moves ``2 (n-1)/n * d * 4`` bytes per peer and step. Overhead is every byte that the protocol sends beyond
its own share of that: agreed messages, requests, the frames and headers of chunks, and chunks sent more than once. (Its
own share is less than the butterfly's, for validators scatter nothing.)

* n = 16, 11.17 million float32 parameters: **run**. Simulated steps of the full size, every frame of the second one
  measured. It takes some ten GB of memory; ``--small`` runs a thousandth of it and computes the chunks, as for n = 64.
* n = 64, 100 million: **partly computed**. Two small sizes are run, which shows that nothing but chunks depends on the
  size; the chunks of 100 million are made and encoded by the real code, one part of each size, and multiplied. The same
  computation is held against the bytes measured in a run, and must give them exactly.
* tolerant checks, n = 16, small: **run**. A validator whose platform rounds otherwise fetches the bytes of its target.

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if every target is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.core import messages as m
from phalanx.core.codec import encode_frame
from phalanx.core.config import Config, Tolerance
from phalanx.core.events import AttemptStarted, Banned, Removed, StepFinished
from phalanx.core.handlers import send_aggregate
from phalanx.core.life import run_peer
from phalanx.core.membership import compute_duties
from phalanx.core.merkle import compute_paths
from phalanx.core.messages import Message
from phalanx.core.partition import compute_part_sizes
from phalanx.network.ideal import IdentityExaminer, make_signers
from phalanx.network.simulated import USUAL, Links, World
from phalanx.network.traffic import name_kind
from phalanx.simulation.machine import Bowl, compute_state_digest, make_start

WIDTH = 4
"""Bytes of a number."""
TARGETS = {"overhead_16": 0.002, "overhead_64": 0.001}


@dataclass(frozen=True)
class Case:
    peers: int
    byzantine: int
    size: int
    step: int = 1
    """The one that is measured."""
    rounding: float = 0.0


FULL = Case(16, 7, 11_170_000)
SMALL = Case(16, 7, 11_170)
HUGE = Case(64, 31, 100_000_000)
MODELS = (Case(64, 31, 6_400), Case(64, 31, 25_600))
TOLERANT = Case(16, 7, 11_170, rounding=1e-6)


class Meter:
    """Frames by step and kind, with the numbers in them apart: once for each receiver."""

    def __init__(self) -> None:
        self.frames: dict[int | None, Counter[str]] = {}
        self.numbers: dict[int | None, Counter[str]] = {}
        self._last: tuple[Message, int] | None = None

    def route(self, now: float, sender: bytes, to: bytes, message: Message) -> float:
        if self._last is None or self._last[0] is not message:
            self._last = message, len(encode_frame(message))
        step, kind = getattr(message, "step", None), name_kind(message)
        self.frames.setdefault(step, Counter())[kind] += self._last[1]
        if isinstance(message, m.PartChunk | m.AggregateChunk | m.StateChunk):
            self.numbers.setdefault(step, Counter())[kind] += len(message.data)
        return USUAL


@dataclass(frozen=True)
class Traffic:
    """Of all peers together, in one step in which one member validates."""

    frames: Counter[str]
    numbers: Counter[str]
    validator: int

    @property
    def rest(self) -> Counter[str]:
        """What is not numbers."""
        return Counter({kind: size - self.numbers[kind] for kind, size in self.frames.items()})


def run_case(case: Case) -> Traffic:
    """Run a swarm of honest peers until what belongs to ``case.step`` has been sent."""
    signers, verify = make_signers(case.peers, 1, ideal=True)
    config = Config(
        founders=tuple(signer.key for signer in signers),
        byzantine=case.byzantine,
        size=case.size,
        steps=1_000_000,
        tau=1e3,
        cap=1e6,
        tolerance=Tolerance(1e-4, 1e-2) if case.rounding else None,
        state=compute_state_digest(make_start(case.size)),
    ).check()
    last = case.step + 2 * (case.rounding > 0)  # what is fetched to check a step travels in the next but one
    finished: set[bytes] = set()
    validators: set[bytes] = set()

    def hear(key: bytes, event: Any) -> None:
        assert not isinstance(event, Banned | Removed), event
        if isinstance(event, AttemptStarted) and event.view.step == case.step:
            validators.update(compute_duties(config, event.view).validators)
        elif isinstance(event, StepFinished) and event.step == last:
            finished.add(key)

    meter = Meter()
    links = Links(low=0.05, high=0.5, route=meter.route)
    world = World(config.run, 1, links, count=True, trace=False, on_note=hear, keep_notes=False)
    examiner = IdentityExaminer(verify)
    for signer in signers:

        def start(disk, key=signer.key):  # type: ignore[no-untyped-def]
            return run_peer(config, key, examiner, disk.view)

        world.add(signer.key, signer, Bowl(case.size, 0.5, case.rounding, signer.key), start)
    world.run(stop=lambda: len(finished) == case.peers)
    total = world.traffic.total
    assert total.payload + total.rest == sum(sum(kinds.values()) for kinds in meter.frames.values())
    (validator,) = validators
    frames = meter.frames[case.step] + meter.frames.get(
        None, Counter()
    )  # what names no step counts as if all were ours
    return Traffic(frames, meter.numbers[case.step], config.founders.index(validator))


def compute_chunks(case: Case, validator: int) -> Traffic:
    """What scatter and gather send, from real messages of the real lengths. What keys and digests say adds no byte."""
    _, paths = compute_paths([bytes(32)] * case.peers)
    frames: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    lengths: dict[tuple[int, int], tuple[int, int]] = {}
    for part, size in enumerate(compute_part_sizes(case.size, case.peers)):
        shape, path, data = (size, len(paths[part])), paths[part], bytes(WIDTH * size)
        if shape not in lengths:
            lengths[shape] = measure_part(case.step, part, path, data), measure_aggregate(case.step, part, data)
        senders = case.peers - 1 - (part != validator)  # nobody sends to itself, and the validator has nothing to send
        frames["partchunk"] += senders * lengths[shape][0]
        numbers["partchunk"] += senders * len(data)
        frames["aggregatechunk"] += (case.peers - 1) * lengths[shape][1]
        numbers["aggregatechunk"] += (case.peers - 1) * len(data)
    return Traffic(frames, numbers, validator)


def measure_part(step: int, part: int, path: m.Path, data: bytes) -> int:
    size = len(data)
    pieces = ((at, data[at : at + m.MAX_CHUNK]) for at in range(0, size, m.MAX_CHUNK))
    return sum(len(encode_frame(m.PartChunk(step, 0, bytes(32), part, path, size, at, piece))) for at, piece in pieces)


def measure_aggregate(step: int, part: int, data: bytes) -> int:
    return sum(len(encode_frame(effect.message)) for effect in send_aggregate((bytes(32),), step, 0, part, data))


def compute_butterfly(case: Case) -> int:
    """Bytes of all peers together."""
    return 2 * (case.peers - 1) * case.size * WIDTH


def compute_overhead(case: Case, traffic: Traffic) -> dict[str, int]:
    """Bytes beyond the numbers that have to travel, by kind; none of them is lost or counted twice."""
    needed = compute_chunks(case, traffic.validator).numbers
    extra = {kind: traffic.frames[kind] - needed[kind] for kind in traffic.frames}
    assert all(size >= 0 for size in extra.values())
    return dict(sorted(extra.items(), key=lambda item: -item[1]))


def select_agreed(frames: Counter[str]) -> dict[str, int]:
    """Agreed messages alone. Requests, and answers to them, depend on what a delay happens to be."""
    return {kind: size for kind, size in frames.items() if kind in m.Phase.__members__}


def extend(model: Case, traffic: Traffic, case: Case) -> Traffic:
    """The traffic of ``case`` from that of a smaller one with as many peers: the same, but for the chunks.

    If the chunks of the smaller one are not what they are computed to be, this would be a guess, and is refused.
    """
    computed, chunks = (compute_chunks(x, traffic.validator) for x in (model, case))
    if any(traffic.frames[kind] != size for kind, size in computed.frames.items()):
        raise ValueError(f"chunks took {traffic.frames}, where {computed.frames} were computed")
    return Traffic(traffic.frames - computed.frames + chunks.frames, chunks.numbers, traffic.validator)


def run(small: bool = False) -> dict[str, Any]:
    full = extend(SMALL, run_case(SMALL), FULL) if small else run_case(FULL)
    models = [run_case(case) for case in MODELS]
    same = select_agreed(models[0].frames) == select_agreed(models[1].frames)
    huge = extend(MODELS[0], models[0], HUGE)
    tolerant, exact = run_case(TOLERANT), run_case(SMALL)
    fetched = tolerant.numbers.total() - compute_chunks(TOLERANT, tolerant.validator).numbers.total()
    results: dict[str, Any] = {"run_16": "small, extended" if small else "full size"}
    for name, case, traffic in (("16", FULL, full), ("64", HUGE, huge)):
        extra, plain = compute_overhead(case, traffic), compute_butterfly(case)
        results |= {
            f"overhead_{name}": sum(extra.values()) / plain,
            f"total_over_butterfly_{name}": traffic.frames.total() / plain,
            f"butterfly_bytes_per_peer_{name}": plain // case.peers,
            f"overhead_bytes_per_peer_{name}": {kind: size / case.peers for kind, size in extra.items()},
        }
    return results | {
        "agreed_independent_of_size_64": same,
        "chunks_as_computed_16": full.frames["partchunk"] + full.frames["aggregatechunk"]
        == compute_chunks(FULL, full.validator).frames.total(),
        "tolerant_fetch_over_butterfly_16": fetched / compute_butterfly(TOLERANT),
        "tolerant_fetch_in_gradients_16": fetched / (WIDTH * TOLERANT.size),
        "exact_fetch_over_butterfly_16": exact.numbers.total() / compute_chunks(SMALL, exact.validator).numbers.total()
        - 1,
    }


def print_table(results: dict[str, Any]) -> None:
    for name, case in (("16", FULL), ("64", HUGE)):
        plain = results[f"butterfly_bytes_per_peer_{name}"]
        how = results["run_16"] if name == "16" else "agreed messages run, chunks computed"
        print(f"n = {name}, {case.size / 1e6:g} million float32 ({how}); per peer and step:")
        print(f"  {'plain butterfly':<18}{plain:>14,} bytes")
        for kind, size in results[f"overhead_bytes_per_peer_{name}"].items():
            print(f"  {kind:<18}{size:>14,.0f} bytes  {size / plain:.5%}")
        share, limit = results[f"overhead_{name}"], TARGETS[f"overhead_{name}"]
        print(f"  overhead {share:.4%}, target < {limit:.1%}   {'met' if share < limit else 'MISSED'}")
        print(f"  everything that is sent, over the butterfly: {results[f'total_over_butterfly_{name}']:.5f}")
    print(f"agreed messages the same at two sizes: {results['agreed_independent_of_size_64']}")
    print(
        f"tolerant: validators fetch {results['tolerant_fetch_in_gradients_16']:.2f} gradients a step at n = 16, "
        f"{results['tolerant_fetch_over_butterfly_16']:.2%} of the butterfly; exact: nothing"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--small", action="store_true", help="compute the chunks of n = 16 too, as for n = 64")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = run(options.small)
    if options.json:
        print(json.dumps(results | {"targets": TARGETS}))
    else:
        print_table(results)
    fine = results["agreed_independent_of_size_64"] and results["chunks_as_computed_16"]
    return 0 if fine and all(results[key] < limit for key, limit in TARGETS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
