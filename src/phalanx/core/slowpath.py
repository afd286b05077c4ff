"""How a slow path ends: from what all honest members have seen, who is out and what stands. Pure functions.

The slow path at height ``j`` is Dolev-Strong broadcast over the messages of heights ``j`` and ``j + 1``, run by
``broadcast.py``. While messages arrive within ``delta``, all honest members come to the same :class:`Seen`, hence to
the same :class:`Resolution`. Honest members have all sent their message of height ``j``, have put everything they hold
into the exchange, and name at ``j + 1`` only a root that follows from what they put in. Whoever does otherwise is out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from phalanx.core.codec import encode
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.envelope import Examiner, Letter
from phalanx.core.messages import Alarm, Phase, Relay, Settlement, Signed, SlotOutcome, Timeout
from phalanx.core.transcript import Page, Transcript, Values, compute_values_root

SEALING = (Phase.SEAL, Phase.ABORT)
"""Phases that only certify a view that is known already: what they hold decides nothing."""
_AFTER = (Phase.SEAL, Phase.COMMIT)
_SIGNED_BYTES = 400  # of a message beside its body


# ---- What opens a slow path


def is_valid_alarm(run: bytes, examiner: Examiner, epoch: Transcript, alarm: Alarm) -> bool:
    """More than ``bound`` timeouts that miss one member, or all messages of the height and one that denies them."""
    view, height = epoch.view, alarm.height
    letters = [examiner.examine(x) for x in alarm.evidence if x.run == run and x.sender in view.roster]
    late = {x.message.sender: x for x in letters if x is not None and is_timeout(x, height, alarm.round)}
    if alarm.round > 0:
        return len(late) > view.bound
    if any(sum(misses(x, key) for x in late.values()) > view.bound for key in view.roster):
        return True
    here = {x.message.sender: x for x in letters if x is not None and is_agreed(x, height)}
    if any(key not in here for key in view.roster):
        return False
    if height > view.height and len({x.message.previous for x in here.values()}) != 1:
        return False  # in the first COMMIT of an attempt others may name what they like, and it is complete
    if epoch.heights.get(height) in SEALING:
        return False  # who denies in its COMMIT what was sealed takes part in it all the same, and goes later
    root = compute_values_root(view.roster, here)
    return any(x is not None and is_agreed(x, height + 1) and x.message.previous != root for x in letters)


def complete_alarm(epoch: Transcript, alarm: Alarm) -> Alarm:
    """An alarm about a letter that names another root, with a message of its height from everybody, where I know it."""
    phase = epoch.heights.get(alarm.height)
    letters = epoch.phases.get(phase, {}) if phase is not None else {}
    if alarm.round > 0 or len(alarm.evidence) != 1 or alarm.evidence[0].domain is not Domain.AGREED or not letters:
        return alarm
    mine = tuple(letters[key].message for key in epoch.view.roster)
    return Alarm(alarm.height, 0, (*mine, *alarm.evidence))


def get_successor(epoch: Transcript, height: int) -> bytes | None:
    """What the next height names if that does not depend on this one's messages: after SEAL and ABORT."""
    sealing = epoch.sealing if epoch.heights.get(height) in SEALING else None
    return sealing.previous if sealing is not None else None


def is_agreed(letter: Letter, height: int) -> bool:
    return letter.message.domain is Domain.AGREED and letter.message.height == height


def is_timeout(letter: Letter, height: int, round_: int) -> bool:
    body = letter.body
    return isinstance(body, Timeout) and letter.message.height == height and body.round == round_


def misses(letter: Letter, key: bytes) -> bool:
    """Whether somebody says that it misses another member: that it misses itself says nothing."""
    return isinstance(letter.body, Timeout) and key in letter.body.missing and letter.message.sender != key


# ---- What is exchanged in it


def compute_item_digest(letters: Iterable[Letter]) -> bytes:
    """The name of an item of the slow path."""
    return compute_digest("item", *(letter.digest for letter in letters))


def compute_settlement_digest(settlement: Settlement) -> bytes:
    return compute_digest("settlement", encode(settlement))


def weigh_messages(messages: Iterable[Signed]) -> int:
    """About as many bytes as these messages have, on the wire or in memory."""
    return sum(_SIGNED_BYTES + len(message.body) for message in messages)


def weigh_items(items: Iterable[Relay]) -> int:
    return sum(weigh_messages(relay.messages) + weigh_messages(relay.endorsements) for relay in items)


# ---- How it ends


@dataclass(slots=True)
class Seen:
    """What a slow path brought: letters of both heights, and who asks to be let in."""

    here: Page = field(default_factory=Page)
    next: Page = field(default_factory=Page)
    joins: dict[bytes, Letter] = field(default_factory=dict)
    """Requests of suspended members that are there and hold the state."""
    supports: dict[bytes, Values] = field(default_factory=dict)
    """What members put in for this height, by its root: whoever has named a root has put in what it follows from."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Who goes and on what the rest goes on."""

    banned: frozenset[bytes]
    removed: frozenset[bytes]
    coming: frozenset[bytes]
    """Suspended members that come in, where too few would be left without them."""
    patient: bool
    """Whether witnesses of earlier attempts were waited for long enough."""
    root: bytes
    """Of the height before."""
    values: Values | None
    """The letters of this height, if every member has one."""
    stands: bool
    """The step that was being closed stands on ``values``."""
    slots: tuple[SlotOutcome, ...]
    reasons: dict[bytes, str]
    """Why each goes that is removed."""

    @property
    def out(self) -> frozenset[bytes]:
        return self.banned | self.removed


Choose: TypeAlias = Callable[[frozenset[bytes], frozenset[bytes], bool], frozenset[bytes] | None]
"""Given who is banned, who is to be removed and whether the step stands: who comes in; None if too few are left."""


def resolve(
    height: int,
    roster: Sequence[bytes],
    bound: int,
    seen: Seen,
    choose: Choose,
    successor: bytes | None = None,
    patient: bool = False,
) -> Resolution | None:
    """The one conclusion from what was seen; None if it allows none, and the members wait."""
    here, beyond = seen.here, seen.next
    double = {key for key in roster if key in here.seconds}
    banned = double | {key for key in roster if key in beyond.seconds}
    missing = {key for key in roster if key not in here.letters}

    # The height before is settled: one root has an honest member behind it.
    roots = Counter(here.letters[key].message.previous for key in roster if key not in missing | double)
    backed = [root for root, count in roots.items() if count > bound]
    if len(backed) != 1:
        return None
    root = backed[0]
    stray = {key for key in roster if key not in missing | double and here.letters[key].message.previous != root}

    said = {key: beyond.letters[key] for key in roster if key in beyond.letters and key not in beyond.seconds}
    values: Values | None = None
    closing = False
    if missing:
        unsupported = set(said)  # nobody honest can have completed this height
    elif double:
        unsupported = set()
        # One of two values was named by enough to have been acted on, or none was.
        counts = Counter(letter.message.previous for key, letter in said.items() if key not in double)
        chosen = [name for name, count in counts.items() if count > bound]
        if len(chosen) == 1:
            values = seen.supports.get(chosen[0])
            closing = values is not None and _is_closing(said, chosen[0], bound)
    else:
        values = {key: here.letters[key] for key in roster}
        name = successor or compute_values_root(roster, values)
        denied = {key for key, letter in said.items() if letter.message.previous != name}
        unsupported = denied if successor is None else set()
        closing = _is_closing(said, name, bound)
    reasons = dict.fromkeys(sorted(unsupported - banned), "named what nobody could have seen")
    reasons |= dict.fromkeys(sorted(stray - banned), "follows another history")
    reasons |= dict.fromkeys(sorted(missing - banned), "silent")
    removed = frozenset(reasons)
    coming = choose(frozenset(banned), removed, closing)
    if coming is None:
        return None
    slots = tuple(
        SlotOutcome(place, key, _get_digest(page, key), key in page.seconds)
        for place, page in ((height, here), (height + 1, beyond))
        for key in sorted(roster)
        if place == height or key in page.letters
    )
    return Resolution(
        frozenset(banned),
        removed,
        coming,
        patient,
        root,
        values,
        closing,
        slots,
        reasons,
    )


def _get_digest(page: Page, key: bytes) -> bytes | None:
    return page.letters[key].digest if key in page.letters and key not in page.seconds else None


def _is_closing(said: Mapping[bytes, Letter], root: bytes, bound: int) -> bool:
    """Whether more than ``bound`` members took this height for the last of its step, and went on from ``root``."""
    on = [letter.message.phase for letter in said.values() if letter.message.previous == root]
    return sum(phase in _AFTER for phase in on) > bound
