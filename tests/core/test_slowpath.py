"""How a slow path opens and ends, as pure functions: every case of :func:`resolve`, and what makes an alarm valid."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.envelope import Letter, seal
from phalanx.core.membership import Changes, Suspension, View, compute_duties, find_replacements, make_genesis
from phalanx.core.messages import Phase, Signed
from phalanx.core.slowpath import Choose, Resolution, Seen, is_valid_alarm, resolve
from phalanx.core.transcript import Page, Transcript, compute_values_root
from phalanx.network.ideal import IdentityExaminer, make_signers

SIGNERS, VERIFY = make_signers(8, 1, True)
SIGNERS.sort(key=lambda signer: signer.key)
EXAMINER = IdentityExaminer(VERIFY)
STRANGER = SIGNERS.pop()
KEYS = tuple(signer.key for signer in SIGNERS)
BOUND, MOST, HEIGHT = 2, 3, 10
CONFIG = Config(founders=KEYS, byzantine=BOUND, size=64, steps=9)
RUN = make_genesis(CONFIG).previous
BEFORE, OTHER = b"r" * 32, b"o" * 32


def say(
    who: int, height: int = HEIGHT, previous: bytes = BEFORE, value: int = 0, phase: Phase = Phase.REVEAL
) -> Letter:
    body: m.Body = m.Reveal(bytes([value]) * 32, bytes(32))
    if phase in (Phase.SEAL, Phase.ABORT, Phase.COMMIT):
        body = {
            Phase.SEAL: m.Seal(bytes([value]) * 32),
            Phase.ABORT: m.Abort((), bytes([value]) * 32),
            Phase.COMMIT: m.Commit(None, bytes(32), bytes([value]) * 32),
        }[phase]
    return open_letter(seal(SIGNERS[who], RUN, height, 1, 0, phase, previous, body))


def open_letter(message: Signed) -> Letter:
    letter = EXAMINER.examine(message)
    assert letter is not None
    return letter


def miss(who: int, *missing: int, height: int = HEIGHT, round_: int = 0) -> Letter:
    keys = tuple(sorted(KEYS[number] for number in missing))
    return open_letter(seal(SIGNERS[who], RUN, height, 1, 0, Phase.REVEAL, BEFORE, m.Timeout(keys, round_, None)))


def see(here: list[Letter], beyond: list[Letter] = ()) -> Seen:  # type: ignore[assignment]
    seen = Seen()
    for letter in here:
        seen.here.add(letter)
    for letter in beyond:
        seen.next.add(letter)
    if all(key in seen.here.letters for key in KEYS):
        seen.supports[root_of(seen.here)] = dict(seen.here.letters)
    return seen


def root_of(page: Page) -> bytes:
    return compute_values_root(KEYS, page.letters)


ALL = range(7)


def everybody(**fields: Any) -> list[Letter]:
    return [say(who, **fields) for who in ALL]


def allow(most: int) -> Choose:
    """So many may go."""
    return lambda banned, removed, _: frozenset() if len(removed) <= most else None


def settle(seen: Seen, successor: bytes | None = None, most: int = MOST) -> Resolution | None:
    return resolve(HEIGHT, KEYS, BOUND, seen, allow(most), successor)


def settled(seen: Seen, **options: Any) -> Resolution:
    found = settle(seen, **options)
    assert found is not None
    return found


def who(keys: frozenset[bytes]) -> set[int]:
    return {KEYS.index(key) for key in keys}


# ---- Resolving


def test_all_here_and_nobody_ahead() -> None:
    found = settled(see(everybody()))
    assert not found.out
    assert not found.coming
    assert found.root == BEFORE
    assert found.values is not None
    assert set(found.values) == set(KEYS)
    assert not found.stands
    assert [slot.owner for slot in found.slots] == sorted(KEYS)
    assert all(slot.value is not None and not slot.double for slot in found.slots)


def test_missing_is_removed_not_banned() -> None:
    found = settled(see(everybody()[:5]))
    assert (who(found.removed), who(found.banned)) == ({5, 6}, set())
    assert found.reasons == {KEYS[5]: "silent", KEYS[6]: "silent"}
    assert found.values is None
    assert [slot.value is None for slot in found.slots] == [key in KEYS[5:] for key in sorted(KEYS)]


@pytest.mark.parametrize("phase", [Phase.REVEAL, Phase.SEAL])
def test_double_here_is_banned(phase: Phase) -> None:
    found = settled(see([*everybody(), say(6, value=1, phase=phase)]))
    assert (who(found.banned), who(found.removed)) == ({6}, set())
    assert found.values is None, "nobody has named one of the two"
    (slot,) = [slot for slot in found.slots if slot.owner == KEYS[6]]
    assert slot.double
    assert slot.value is None


def test_double_ahead_is_banned_and_this_height_stands() -> None:
    here = everybody()
    root = root_of(see(here).here)
    ahead = [say(6, HEIGHT + 1, root), say(6, HEIGHT + 1, root, value=1)]
    found = settled(see(here, ahead))
    assert who(found.banned) == {6}
    assert found.values is not None


def test_two_values_of_which_one_was_acted_on() -> None:
    """More than ``bound`` named a root: what it follows from is what stands, whichever of the two came first here."""
    first, second = everybody(), say(6, value=1)
    other = [*first[:6], second]
    named = root_of(see(other).here)
    seen = see([*first, second], [say(number, HEIGHT + 1, named) for number in range(3)])
    seen.supports[named] = {letter.message.sender: letter for letter in other}
    found = settled(seen)
    assert who(found.banned) == {6}
    assert found.values is not None
    assert found.values[KEYS[6]].digest == second.digest
    few = see([*first, second], [say(number, HEIGHT + 1, named) for number in range(2)])
    few.supports[named] = seen.supports[named]
    assert settled(few).values is None


def test_stray_names_another_root_before() -> None:
    here = [*everybody()[:5], say(5, previous=OTHER), say(6, previous=OTHER)]
    found = settled(see(here))
    assert (who(found.removed), who(found.banned)) == ({5, 6}, set())
    assert found.root == BEFORE
    assert set(found.reasons.values()) == {"follows another history"}


def test_unsupported_names_a_root_ahead_that_nothing_gives() -> None:
    here = everybody()
    root = root_of(see(here).here)
    found = settled(see(here, [say(0, HEIGHT + 1, root), say(5, HEIGHT + 1, OTHER)]))
    assert who(found.removed) == {5}
    assert set(found.reasons.values()) == {"named what nobody could have seen"}


def test_nobody_can_be_ahead_of_what_is_missing() -> None:
    found = settled(see(everybody()[:6], [say(5, HEIGHT + 1, OTHER)]))
    assert who(found.removed) == {5, 6}


def test_after_seal_nobody_goes_for_what_its_commit_names() -> None:
    """It takes part in COMMIT all the same, and goes for it there."""
    here = everybody(phase=Phase.SEAL)
    ahead = [say(0, HEIGHT + 1, OTHER, phase=Phase.COMMIT), say(1, HEIGHT + 1, BEFORE, phase=Phase.COMMIT)]
    assert who(settled(see(here, ahead), successor=OTHER).removed) == set()


@pytest.mark.parametrize(
    ("phases", "stands"),
    [
        ([Phase.SEAL] * 3, True),
        ([Phase.COMMIT] * 3, True),
        ([Phase.SEAL, Phase.COMMIT, Phase.SEAL], True),
        ([Phase.SEAL] * 2, False),
        ([Phase.SEAL] * 2 + [Phase.ABORT] * 4, False),
        ([Phase.REVEAL] * 5, False),
        ([], False),
    ],
)
def test_stands_if_more_than_the_bound_went_on_from_it(phases: list[Phase], stands: bool) -> None:
    here = everybody()
    root = root_of(see(here).here)
    ahead = [say(number, HEIGHT + 1, root, phase=phase) for number, phase in enumerate(phases)]
    assert settled(see(here, ahead)).stands == stands


def test_step_does_not_stand_on_what_is_missing() -> None:
    ahead = [say(number, HEIGHT + 1, OTHER, phase=Phase.SEAL) for number in range(3)]
    assert not settled(see(everybody()[:6], ahead), most=7).stands


def test_none_if_two_roots_have_an_honest_member_behind_them() -> None:
    """While ``delta`` holds this cannot be: the height before was settled for all, or had a slow path first."""
    here = [say(number, previous=BEFORE if number < 4 else OTHER) for number in ALL]
    assert settle(see(here)) is None


def test_none_if_too_few_would_be_left() -> None:
    """Then the members wait: whoever is cut off would otherwise remove the rest."""
    assert who(settled(see(everybody()[: 7 - MOST])).removed) == set(range(7 - MOST, 7))
    assert settle(see(everybody()[: 6 - MOST])) is None
    here = everybody()
    assert settle(see(here, [say(number, HEIGHT + 1, OTHER) for number in range(MOST + 1)])) is None


def test_whoever_decides_who_comes_knows_who_goes_and_whether_the_step_stands() -> None:
    asked: list[tuple[frozenset[bytes], frozenset[bytes], bool]] = []

    def choose(banned: frozenset[bytes], removed: frozenset[bytes], stands: bool) -> frozenset[bytes] | None:
        asked.append((banned, removed, stands))
        return frozenset({STRANGER.key})

    def conclude(seen: Seen) -> Resolution:
        found = resolve(HEIGHT, KEYS, BOUND, seen, choose)
        assert found is not None
        return found

    here = everybody()
    root = root_of(see(here).here)
    assert conclude(see([*here[:5], say(4, value=1)])).coming == {STRANGER.key}
    conclude(see(here, [say(number, HEIGHT + 1, root, phase=Phase.SEAL) for number in range(3)]))
    conclude(see(here))
    assert asked == [
        (frozenset(KEYS[4:5]), frozenset(KEYS[5:]), False),
        (frozenset(), frozenset(), True),
        (frozenset(), frozenset(), False),
    ]


# ---- The floor decides who may go


def choose_by(view: View, *present: bytes, round_: int = 0) -> Choose:
    """As members choose."""
    return lambda banned, removed, stands: find_replacements(
        CONFIG, view, Changes(banned, removed), present, stands, round_
    )


def test_silence_is_let_go_as_far_as_the_floor() -> None:
    """Seven members, of whom six must stay."""
    view = make_genesis(CONFIG)
    one = resolve(HEIGHT, KEYS, BOUND, see(everybody()[:6]), choose_by(view))
    assert one is not None
    assert who(one.removed) == {6}
    assert resolve(HEIGHT, KEYS, BOUND, see(everybody()[:5]), choose_by(view)) is None
    both = see([*everybody()[:6], say(5, value=1)])
    found = resolve(HEIGHT, KEYS, BOUND, both, choose_by(view))
    assert found is not None, "a ban lowers the floor by two: another one may go"
    assert (who(found.banned), who(found.removed)) == ({5}, {6})


def test_who_waits_at_the_door_comes_in_where_too_few_would_be_left() -> None:
    view = msgspec.structs.replace(make_genesis(CONFIG), suspended=(Suspension(STRANGER.key, 0, 40),), step=3)
    seen = see(everybody()[:5])
    assert resolve(HEIGHT, KEYS, BOUND, seen, choose_by(view)) is None
    found = resolve(HEIGHT, KEYS, BOUND, seen, choose_by(view, STRANGER.key))
    assert found is not None
    assert (who(found.removed), found.coming) == ({5, 6}, {STRANGER.key})
    enough = resolve(HEIGHT, KEYS, BOUND, see(everybody()[:6]), choose_by(view, STRANGER.key))
    assert enough is not None
    assert not enough.coming, "nobody comes out of turn"
    assert resolve(HEIGHT, KEYS, BOUND, see(everybody()[:4]), choose_by(view, STRANGER.key)) is None


def test_none_if_no_root_has() -> None:
    assert settle(see(everybody()[:2])) is None
    assert settle(see([])) is None
    roots = [say(number, previous=bytes([number // 2]) * 32) for number in ALL]
    assert settle(see(roots)) is None


@given(st.permutations(range(9)), st.integers(0, 6))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_order_of_arrival_changes_nothing(order: list[int], double: int) -> None:
    """Two members that saw the same in another order come to the same outcome: which value came first is no part."""
    letters = [*everybody(), say(double, value=1), say((double + 1) % 7, HEIGHT + 1, OTHER)]
    usual, mixed = Seen(), Seen()
    for seen, places in ((usual, range(9)), (mixed, order)):
        for place in places:
            letter = letters[place]
            (seen.next if letter.message.height > HEIGHT else seen.here).add(letter)
    first, second = settled(usual), settled(mixed)
    assert (first.banned, first.removed, first.root, first.stands, first.slots, first.reasons) == (
        second.banned,
        second.removed,
        second.root,
        second.stands,
        second.slots,
        second.reasons,
    )


@given(st.sets(st.integers(0, 6), max_size=BOUND), st.data())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_honest_members_are_never_out(liars: set[int], data: st.DataObject) -> None:
    """Whatever up to ``bound`` others say or do not say: who has sent one right message of each height stays."""
    here = [say(number) for number in ALL if number not in liars]
    ahead: list[Letter] = []
    for liar in sorted(liars):
        values = data.draw(st.lists(st.tuples(st.sampled_from([BEFORE, OTHER]), st.integers(0, 2)), max_size=2))
        here += [say(liar, previous=previous, value=value) for previous, value in values]
        ahead += [say(liar, HEIGHT + 1, OTHER, phase=data.draw(st.sampled_from([Phase.SEAL, Phase.REVEAL])))]
    found = settled(see(here, ahead))
    assert who(found.out) <= liars
    assert found.root == BEFORE


# ---- Alarms


@pytest.fixture
def epoch() -> Transcript:
    view = make_genesis(CONFIG)
    transcript = Transcript(view, compute_duties(CONFIG, view))
    transcript.heights[HEIGHT] = Phase.REVEAL
    return transcript


def is_valid(epoch: Transcript, *letters: Letter | Signed, round_: int = 0, height: int = HEIGHT) -> bool:
    messages = tuple(x.message if isinstance(x, Letter) else x for x in letters)
    return is_valid_alarm(RUN, EXAMINER, epoch, m.Alarm(height, round_, messages))


def test_alarm_needs_more_timeouts_than_the_bound_that_miss_one_member(epoch: Transcript) -> None:
    assert is_valid(epoch, miss(0, 6), miss(1, 6), miss(2, 6))
    assert is_valid(epoch, miss(0, 5, 6), miss(1, 4, 6), miss(2, 3, 6))
    assert not is_valid(epoch, miss(0, 6), miss(1, 6))
    assert not is_valid(epoch, miss(0, 6), miss(1, 6), miss(2, 5)), "of different members: no honest one is late"
    assert not is_valid(epoch)


def test_alarm_counts_every_member_once_and_strangers_never(epoch: Transcript) -> None:
    assert not is_valid(epoch, miss(0, 6), miss(1, 6), miss(1, 5, 6), miss(1, 4, 6))
    body = m.Timeout((KEYS[6],), 0, None)
    stranger = seal(STRANGER, RUN, HEIGHT, 1, 0, Phase.REVEAL, BEFORE, body)
    assert not is_valid(epoch, miss(0, 6), miss(1, 6), stranger)
    forged = msgspec.structs.replace(stranger, sender=KEYS[2])
    assert not is_valid(epoch, miss(0, 6), miss(1, 6), forged)
    elsewhere = seal(SIGNERS[2], b"x" * 32, HEIGHT, 1, 0, Phase.REVEAL, BEFORE, body)
    assert not is_valid(epoch, miss(0, 6), miss(1, 6), elsewhere), "of another run"


def test_alarm_is_about_its_height_and_round(epoch: Transcript) -> None:
    assert not is_valid(epoch, miss(0, 6), miss(1, 6), miss(2, 6, height=HEIGHT + 1))
    assert not is_valid(epoch, miss(0, 6), miss(1, 6), miss(2, 6), height=HEIGHT + 1)
    later = [miss(number, round_=1) for number in range(3)]
    assert is_valid(epoch, *later, round_=1)
    assert not is_valid(epoch, *later[:2], round_=1)
    assert not is_valid(epoch, *later, round_=2)
    assert not is_valid(epoch, *later)


def test_alarm_of_two_roots_needs_all_messages_and_one_that_denies_them(epoch: Transcript) -> None:
    here = everybody()
    root = root_of(see(here).here)
    wrong, right = say(3, HEIGHT + 1, OTHER), say(3, HEIGHT + 1, root)
    assert is_valid(epoch, *here, wrong)
    assert not is_valid(epoch, *here, right)
    assert not is_valid(epoch, *here)
    assert not is_valid(epoch, *here[1:], wrong)
    assert not is_valid(epoch, *here, say(3, HEIGHT + 2, OTHER))
    assert not is_valid(epoch, *here[1:], say(0, previous=OTHER), wrong), "those of this height must name one root"


def test_no_alarm_of_two_roots_after_seal(epoch: Transcript) -> None:
    """There a COMMIT that names something else is its sender's own affair."""
    epoch.heights[HEIGHT] = Phase.SEAL
    epoch.sealing = msgspec.structs.replace(epoch.view, previous=OTHER)
    here = everybody(phase=Phase.SEAL)
    assert not is_valid(epoch, *here, say(3, HEIGHT + 1, OTHER, phase=Phase.COMMIT))
    assert not is_valid(epoch, *here, say(3, HEIGHT + 1, root_of(see(here).here), phase=Phase.COMMIT))


def test_alarm_goes_by_what_a_height_is_not_by_what_a_sender_calls_it(epoch: Transcript) -> None:
    here = [*everybody()[:-1], say(6, phase=Phase.SEAL)]
    assert is_valid(epoch, *here, say(3, HEIGHT + 1, OTHER))


def test_alarm_after_the_first_commit_of_an_attempt_whatever_root_that_names(epoch: Transcript) -> None:
    """There a wrong root is the sender's own affair, and the height is complete all the same."""
    here = [*everybody()[:-1], say(6, previous=OTHER)]
    assert not is_valid(epoch, *here, say(3, HEIGHT + 1, OTHER))
    first = Transcript(msgspec.structs.replace(epoch.view, height=HEIGHT), epoch.duties)
    first.heights[HEIGHT] = Phase.COMMIT
    assert is_valid(first, *here, say(3, HEIGHT + 1, OTHER))
