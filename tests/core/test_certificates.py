"""Who may say that a view follows another: a quorum of the right roster, and of no other."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.core import messages as m
from phalanx.core.certificates import find_certificate
from phalanx.core.config import Config
from phalanx.core.crypto import Identity
from phalanx.core.envelope import Examiner, seal
from phalanx.core.membership import Committed, View, compute_roster_digest, make_genesis
from phalanx.core.messages import Phase, Signed

IDENTITIES = [Identity(bytes([number + 1]) * 32) for number in range(5)]
KEYS = tuple(identity.key for identity in IDENTITIES)
CONFIG = Config(founders=KEYS[:3], byzantine=0, size=64, steps=10).check()
BEFORE = make_genesis(CONFIG)
"""Three members; then a fourth joined, and the link that says so is kept back."""
LATER = msgspec.structs.replace(BEFORE, step=4, attempt=1, height=24, roster=KEYS[:3])


def vote(number: int, view: View, roster: tuple[bytes, ...]) -> Signed:
    body = m.Outcome(0, True, bytes(32), False, view.digest)
    return seal(IDENTITIES[number], CONFIG.run, 22, 4, 0, Phase.COMMIT, compute_roster_digest(roster), body)


def say(number: int, phase: Phase, body: m.Seal | m.Abort | m.Commit, height: int = 24) -> Signed:
    return seal(IDENTITIES[number], CONFIG.run, height, 4, 0, phase, bytes(32), body)


def find(messages: list[Signed], view: View = LATER, before: View = BEFORE) -> tuple[Signed, ...] | None:
    return find_certificate(CONFIG, Examiner(), before, view, messages)


def test_a_quorum_of_votes_certifies() -> None:
    assert find([vote(number, LATER, KEYS[:3]) for number in (0, 2)]) is not None
    assert find([vote(0, LATER, KEYS[:3])]) is None


@pytest.mark.parametrize("roster", [KEYS[:4], KEYS[:2], KEYS[1:4], tuple(reversed(KEYS[:3]))])
def test_votes_of_another_roster_count_nothing(roster: tuple[bytes, ...]) -> None:
    """Two of three are a quorum; two of four are none, though both are among the three."""
    assert find([vote(number, LATER, roster) for number in (0, 1, 2)]) is None


def test_commits_come_from_the_view_s_own_roster() -> None:
    def commits(view: View) -> list[Signed]:
        return [say(number, Phase.COMMIT, m.Commit(bytes(32), bytes(32), view.digest)) for number in range(3)]

    assert find(commits(LATER)) is not None
    assert find(commits(LATER)[:2]) is None
    grown = msgspec.structs.replace(LATER, roster=KEYS[:4])
    assert find(commits(grown), grown) is None, "the fourth has not said so"


@pytest.mark.parametrize("phase", [Phase.SEAL, Phase.ABORT])
def test_who_sealed_an_attempt_is_on_record(phase: Phase) -> None:
    def sealed(view: View) -> list[Signed]:
        body = m.Seal(view.digest) if phase is Phase.SEAL else m.Abort((), view.digest)
        return [say(number, phase, body) for number in range(3)]

    by_three = msgspec.structs.replace(LATER, attempts=(Committed(4, 0, KEYS[:3], KEYS[:2], ()),))
    by_four = msgspec.structs.replace(LATER, attempts=(Committed(4, 0, KEYS[:4], KEYS[:3], ()),))
    assert find(sealed(by_three), by_three) is not None
    assert find(sealed(by_four), by_four) is None
    assert find(sealed(LATER)) is not None, "an attempt that nobody has committed to is not on record"


# ---- Views that are left out


def commit(number: int, view: View, height: int | None = None) -> Signed:
    body = m.Commit(None, bytes(32), view.digest)
    return say(number, Phase.COMMIT, body, view.height if height is None else height)


GROWN = msgspec.structs.replace(BEFORE, step=6, attempt=1, height=40, roster=(*KEYS[1:3], *KEYS[3:]))
"""One of the three has gone since, and two came: two of the three are a quorum of theirs."""


def test_a_complete_commit_certifies_a_later_roster_if_a_quorum_of_the_earlier_one_is_in_it() -> None:
    assert find([commit(number, GROWN) for number in (1, 2, 3, 4)], GROWN) is not None


@pytest.mark.parametrize("numbers", [(1, 2, 3), (1, 3, 4), (3, 4)])
def test_a_commit_that_is_not_complete_certifies_no_later_roster(numbers: tuple[int, ...]) -> None:
    assert find([commit(number, GROWN) for number in numbers], GROWN) is None


def test_keys_that_nobody_knew_certify_no_roster_of_their_own() -> None:
    forged = msgspec.structs.replace(GROWN, roster=(KEYS[2], *KEYS[3:]))
    assert find([commit(number, forged) for number in (2, 3, 4)], forged) is None, "one of three is no quorum"


def test_commits_at_another_height_certify_nothing() -> None:
    assert find([commit(number, GROWN, height=41) for number in (1, 2, 3, 4)], GROWN) is None
