"""What bears one name is one thing: a step and attempt name one view, a vote counts where and when it was cast.

So no proof joins two views, and a slow path one height below loses nothing of what was voted for above it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events, get_notes, get_peer, is_out
from test_roots import EVEN, OTHER, Hushed, leave
from test_seals import assert_others_go_on, crash_when
from test_strangers import make_swarm

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.base import change_body
from phalanx.attacks.justice import Accuser
from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import Delivery, Sign
from phalanx.core.envelope import open_body, seal
from phalanx.core.events import AttemptStarted
from phalanx.core.messages import Message, Phase, Signed
from phalanx.network.simulated import Links
from phalanx.simulation.swarm import Swarm

# ---- Two views after one attempt

STEP = 2
"""The step whose first attempt is ended."""


@dataclass(kw_only=True, eq=False)
class AbortForOne(Hushed):
    """Ends an attempt; its ABORT goes to one alone, and an alarm calls all others to the COMMITs below it."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes, one = insider.notes, insider.plot.notes["one"]
        if isinstance(sign.body, m.Commit) and sign.step == STEP and "commit" not in notes:
            notes.update({"commit": sign.height, "roster": insider.view.roster})
            return change_body(sign, view=OTHER)
        if not isinstance(sign.body, m.Abort) or notes.get("commit") != sign.height - 1:
            return sign
        notes["hushed"] = True
        below, astray = notes["commit"], insider.seal(sign, previous=OTHER)
        commits = (insider.heard[below, key] for key in notes["roster"])
        rest = [key for key in insider.others if key != one]
        insider.send_later(0.0, (one,), insider.seal(sign))
        insider.send_later(0.3, rest, m.Alarm(below, 0, (*commits, astray)))
        for delay in (0.6, 1.1):
            insider.send_later(delay, rest, m.Gossip(below, 0, (m.Relay((astray,), ()),), ()))
        return insider.seal(sign)


@dataclass(kw_only=True, eq=False)
class JoinAttempts(Accuser):
    """Joins the COMMIT of an attempt that one member alone began with its REVEAL of the attempt that all began."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        one, notes = insider.plot.notes["one"], insider.notes
        if not isinstance(sign.body, m.Confirm) or sign.step != STEP or "joined" in notes:
            return sign
        said = [message for (_, key), message in sorted(insider.heard.items()) if key == one and message.step == STEP]
        commits = [message for message in said if message.phase is Phase.COMMIT and message.attempt]
        notes["joined"] = len(commits)
        return self.bring(insider, sign, *join(commits[0], insider.find(Phase.REVEAL, one)))


def join(commit: Signed, reveal: Signed | None) -> list[m.WrongReveal]:
    """What is signed in one attempt, as its name says, can be shown together."""
    fits = reveal is not None and (commit.step, commit.attempt) == (reveal.step, reveal.attempt)
    return [m.WrongReveal(commit, reveal)] if fits else []


def go_out_between(swarm: Swarm, others: Iterable[bytes]) -> bytes:
    """One begins an attempt alone, is out as soon as all have its COMMIT, and back when they are in another one."""
    one, others = swarm.plot.notes["one"], [*others]
    notes = get_notes(swarm, len(swarm.keys) - 1)

    def has_it(key: bytes) -> bool:
        page = get_peer(swarm, key).pages.get(notes["commit"] + 2)
        return page is not None and one in page.letters

    assert swarm.run(400.0, lambda: "hushed" in notes and all(has_it(key) for key in others))
    swarm.crash(one)
    assert swarm.run(400.0, lambda: any(get_peer(swarm, key).view.attempt for key in others))
    swarm.restart(one)
    return one


def assert_names_are_unique(swarm: Swarm) -> None:
    """One was in a view that no other was in, and no two views have the same step and attempt."""
    views = {event.view.digest: event.view for event in get_events(swarm, AttemptStarted)}.values()
    assert sum(view.step == STEP for view in views) == 3, describe(swarm)
    assert len({(view.step, view.attempt) for view in views}) == len(views), describe(swarm)


def test_a_commit_of_one_view_and_a_reveal_of_another_ban_nobody_honest() -> None:
    swarm = make_swarm({6: JoinAttempts(), 7: AbortForOne()}, founders=8, steps=5, links=EVEN)
    swarm.plot.notes["one"] = swarm.keys[0]
    go_out_between(swarm, swarm.keys[1:7])
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 6)["joined"] == 2
    assert_unharmed(swarm)
    assert_names_are_unique(swarm)


@dataclass(kw_only=True, eq=False)
class ReturnAndJoin(AbortForOne, Accuser):
    """Ends an attempt so; then it asks around for what one member said, comes back as a member, and accuses it."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if "reveal" not in notes or not isinstance(sign.body, m.Confirm) or insider.index is None or "joined" in notes:
            return sign if "back" in notes else super().on_body(insider, sign)
        notes["joined"] = sign.step
        return self.bring(insider, sign, *join(notes["begun"], notes["reveal"]))

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        notes, said = insider.notes, delivery.message
        letters = said.messages if isinstance(said, m.Certificate) else (said,) if isinstance(said, Signed) else ()
        for letter in letters:
            mine = letter.sender == insider.plot.notes["one"] and letter.step == STEP and letter.attempt
            if mine and letter.domain is Domain.AGREED and letter.phase is Phase.COMMIT:
                notes.setdefault("begun", letter)
            if mine and letter.domain is Domain.AGREED and letter.phase is Phase.REVEAL:
                notes.setdefault("reveal", letter)
        return super().on_delivery(insider, delivery)

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return ((to, message),) if "back" in insider.notes else super().on_message(insider, to, message)


def test_who_is_removed_and_comes_back_cannot_join_what_it_collected() -> None:
    swarm = make_swarm({5: ReturnAndJoin()}, founders=6, byzantine=1, steps=24, links=EVEN)
    swarm.plot.notes["one"] = swarm.keys[0]
    insider, others = swarm.insiders[swarm.keys[5]], swarm.keys[1:5]
    one = go_out_between(swarm, others)
    for place in range(60):
        for height in (2, 5):
            pull = m.PullMessages(insider.notes["commit"] + height, (one,))
            insider.send_later(0.05 * place, others, pull)
    insider.notes["back"] = True
    swarm.run(400.0, swarm.is_over)
    assert insider.notes["joined"]
    assert insider.notes["reveal"].height > insider.notes["begun"].height + 2, "of two views"
    assert_unharmed(swarm)
    assert_names_are_unique(swarm)


# ---- A leaver, and an alarm that comes late


@dataclass(kw_only=True, eq=False)
class LateSeal(Hushed):
    """Its SEAL comes too late for one victim, who complains; with its own word that is an alarm, whenever it likes."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if isinstance(sign.body, m.Seal) and "hushed" not in notes:
            notes.update({"hushed": True, "seal": sign})
            insider.plot.notes["members"] = insider.honest
            late, victim = insider.seal(sign), insider.plot.notes["victim"]
            insider.send_later(3.94, (key for key in insider.honest if key != victim), late)
            return late
        if isinstance(sign.body, m.Commit) and "seal" in notes and notes["seal"].height == sign.height - 1:
            return self.commit(insider, sign)
        return sign

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        said, notes = delivery.message, insider.notes
        timeout = isinstance(said, Signed) and said.domain is Domain.TIMEOUT
        if timeout and said.sender == insider.plot.notes["victim"] and "seal" in notes and "complaint" not in notes:
            notes["complaint"] = said
            self.on_complaint(insider)
        return delivery

    def on_complaint(self, insider: Insider) -> None:
        """What it does when the victim has complained."""

    def commit(self, insider: Insider, sign: Sign) -> Signed | None:
        """What it says in the view that is sealed; None: nothing."""
        return None

    def raise_alarm(self, insider: Insider, delay: float, to: Iterable[bytes]) -> None:
        """Call these to the SEAL, for want of the plot's."""
        place, plot, theirs = insider.notes["seal"], insider.plot, insider.notes["complaint"]
        at = (insider.config.run, place.height, place.step, place.attempt, place.phase, bytes(32))
        timeout = m.Timeout(tuple(sorted(plot.keys)), 0, None)
        mine = (seal(plot.signers[key], *at, timeout) for key in sorted(plot.keys))
        insider.send_later(delay, to, m.Alarm(place.height, 0, (theirs, *mine)))


@dataclass(kw_only=True, eq=False)
class CommitForLeaver(LateSeal):
    """Its COMMIT goes to the leaver alone; the alarm for want of its SEAL comes ``wait`` later."""

    wait: float

    def commit(self, insider: Insider, sign: Sign) -> Signed | None:
        commit = insider.seal(sign)
        insider.send_later(5.0, (insider.plot.notes["leaver"],), commit)
        return commit

    def on_complaint(self, insider: Insider) -> None:
        self.raise_alarm(insider, self.wait, insider.plot.notes["members"])


def test_an_alarm_that_comes_when_the_leaver_is_gone_halts_nobody() -> None:
    """Those who stay wait long for the attacker's gradient."""
    attack = CommitForLeaver(wait=25.0)
    swarm = make_swarm({5: attack}, founders=6, byzantine=1, steps=8, gradient_time=60.0, links=EVEN)
    swarm.plot.notes["leaver"], swarm.plot.notes["victim"] = leave(swarm, 0), swarm.keys[1]
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 5)["complaint"]
    assert_others_go_on(swarm, swarm.keys[:1])


def test_a_leaver_stays_while_one_of_the_others_may_be_out() -> None:
    """One of them goes out for good as soon as the leaver is gone."""
    attack = CommitForLeaver(wait=5.6)
    swarm = make_swarm({6: attack}, founders=7, byzantine=1, steps=8, links=EVEN)
    leaver = swarm.plot.notes["leaver"] = leave(swarm, 0)
    swarm.plot.notes["victim"] = swarm.keys[1]
    assert swarm.run(400.0, lambda: not swarm.is_up(leaver))
    swarm.crash(swarm.keys[5], 0.0)
    swarm.run(swarm.world.now + 100.0, lambda: {*swarm.keys[1:5]} <= swarm.finished)
    assert get_notes(swarm, 6)["complaint"]
    assert {*swarm.keys[1:5]} <= swarm.finished, describe(swarm)
    assert not get_bans(swarm), describe(swarm)


# ---- Votes of the next attempt


@dataclass(kw_only=True, eq=False)
class AlarmAfterSilence(Hushed):
    """Silent with one kind of message; ``delay`` after all hear of that an alarm calls them to the height below."""

    silent: type
    delay: float
    alarm: bool = True

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if not isinstance(sign.body, self.silent) or "hushed" in notes:
            return sign
        notes.update({"hushed": True, "kept": sign, "roster": insider.view.roster})
        return None

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        notes, said = insider.notes, delivery.message
        slow = isinstance(said, m.Alarm) and "kept" in notes and said.height == notes["kept"].height
        if self.alarm and slow and "shown" not in notes:
            notes["shown"] = True
            below, astray = said.height - 1, insider.seal(notes["kept"], previous=OTHER)
            to = [key for key in notes["roster"] if key != insider.key]
            heard = (insider.heard[below, key] for key in notes["roster"])
            insider.send_later(self.delay, to, m.Alarm(below, 0, (*heard, astray)))
            for more in (0.3, 0.8):
                insider.send_later(self.delay + more, to, m.Gossip(below, 0, (m.Relay((astray,), ()),), ()))
        return delivery


@pytest.mark.parametrize(("low", "high", "delay"), [(0.0499, 0.0501, 3.975), (0.05, 0.1, 3.96), (0.3, 0.5, 3.8)])
def test_votes_of_the_next_attempt_settle_what_they_are_for(low: float, high: float, delay: float) -> None:
    """The last height of one attempt opens while all vote at the first height of the next."""
    attack = AlarmAfterSilence(silent=m.Commit, delay=delay, start=2)
    links = Links(delta=1.0, low=low, high=high)
    swarm = make_swarm({4: attack}, founders=5, byzantine=1, steps=5, links=links)
    swarm.run(200.0, swarm.is_over)
    assert get_notes(swarm, 4)["shown"]
    assert_unharmed(swarm)


@dataclass(kw_only=True, eq=False)
class AlarmAtSeal(LateSeal):
    """Silent at COMMIT after a SEAL; ``delay`` after all hear of that an alarm calls all but one back to the SEAL."""

    delay: float
    second: bool = False
    """Whether a second SEAL goes with it."""

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        notes, plot, said = insider.notes, insider.plot.notes, delivery.message
        slow = isinstance(said, m.Alarm) and "seal" in notes and said.height == notes["seal"].height + 1
        if slow and "shown" not in plot:
            plot["shown"] = True
            to = [key for key in plot["members"] if key != plot.get("spared")]
            self.raise_alarm(insider, self.delay, to)
            other = insider.seal(notes["seal"], m.Seal(OTHER))
            for more in (0.3, 0.8) if self.second else ():
                gossip = m.Gossip(other.height, 0, (m.Relay((other,), ()),), ())
                insider.send_later(self.delay + more, to, gossip)
        return super().on_delivery(insider, delivery)


def test_votes_in_the_new_roster_settle_what_they_are_for_though_the_seal_opens_again() -> None:
    swarm = make_swarm({5: AlarmAtSeal(delay=3.975)}, founders=6, byzantine=1, steps=8, links=EVEN)
    leaver, swarm.plot.notes["victim"] = leave(swarm, 0), swarm.keys[1]
    swarm.run(200.0, swarm.is_over)
    assert swarm.plot.notes["shown"]
    assert_others_go_on(swarm, [leaver])


def test_two_that_miss_themselves_call_nobody_back_to_a_seal() -> None:
    """Two leave; who settled alone what the smaller roster voted for, and crashed, was once left behind by that."""
    attack = AlarmAtSeal(delay=5.975, second=True)
    swarm = make_swarm({8: attack, 9: attack}, founders=10, steps=8, links=EVEN)
    leavers = [leave(swarm, 0), leave(swarm, 1)]
    swarm.plot.notes["spared"] = swarm.keys[2]
    swarm.plot.notes["victim"] = swarm.keys[3]
    swarm.run(200.0, swarm.is_over)
    assert swarm.plot.notes["shown"]
    assert_others_go_on(swarm, leavers)


# ---- Votes of this height and of the next


@dataclass(kw_only=True, eq=False)
class AlarmAndVote(AlarmAfterSilence):
    """At the height below it casts a final vote for what the others vote for first, and shows one member alone."""

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        notes, said = insider.notes, delivery.message
        vote = isinstance(said, Signed) and said.domain is Domain.OUTCOME and "kept" in notes and "voted" not in notes
        if vote and said.height == notes["kept"].height - 1:
            body = open_body(said)
            assert isinstance(body, m.Outcome)
            notes["voted"] = True
            mine = insider.seal_again(said, msgspec.structs.replace(body, final=True))
            insider.send_later(0.0, (insider.plot.notes["one"],), mine)
        return super().on_delivery(insider, delivery)


def test_votes_at_a_height_come_after_those_of_the_next() -> None:
    """Two crash in the slow path below, the second when it has settled it alone."""
    attack = AlarmAndVote(silent=m.Reveal, delay=5.93, start=1)
    quiet = AlarmAndVote(silent=m.Reveal, delay=5.93, start=1, alarm=False)
    links = Links(delta=1.0, low=0.04, high=0.06)
    swarm = make_swarm({6: quiet, 7: attack}, founders=8, steps=6, seed=3, links=links)
    one, other = swarm.keys[0], swarm.keys[3]
    swarm.plot.notes["one"] = one
    crash_when(swarm, other, lambda: has_voted_below(swarm, other))
    crash_when(swarm, one, lambda: get_peer(swarm, one).view.attempt > 0, lost=1.0)
    swarm.run(200.0, swarm.is_over)
    assert get_notes(swarm, 7)["voted"]
    assert_unharmed(swarm)


def has_voted_below(swarm: Swarm, key: bytes) -> bool:
    """Whether it has cast its first vote at the height that the attacker has opened."""
    kept = get_notes(swarm, 7).get("kept")
    return kept is not None and (kept.height - 1, 0, False) in swarm.world.get_disk(key).votes


# ---- A third letter


@dataclass(kw_only=True, eq=False)
class TwoAstray(Attack):
    """Late at REVEAL, so that this is settled; then two REPORTs with other roots for some, a right one for the rest."""

    delay: float
    silent: bool
    """Whether nobody hears it afterwards."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if isinstance(sign.body, m.Reveal) and "reveal" not in notes:
            notes["reveal"] = insider.seal(sign)
            return notes["reveal"]
        if isinstance(sign.body, m.Report) and "report" not in notes:
            notes["report"] = sign
            return insider.seal(sign)
        return sign

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        notes, said, victims = insider.notes, delivery.message, insider.plot.notes["victims"]
        slow = isinstance(said, m.Alarm) and "report" in notes and said.height == notes["reveal"].height
        if slow and "shown" not in notes:
            notes["shown"] = insider.now
            gossip = m.Gossip(said.height, 0, (m.Relay((notes["reveal"],), ()),), ())
            insider.send_later(0.1, insider.others, gossip)
            for root in (OTHER, bytes([8]) * 32):
                insider.send_later(self.delay, victims, insider.seal(notes["report"], previous=root))
            rest = (key for key in insider.others if key not in victims)
            insider.send_later(self.delay, rest, insider.seal(notes["report"]))
        return delivery

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        notes = insider.notes
        back = not self.silent and insider.now > notes.get("shown", insider.now) + self.delay + 0.6
        return ((to, message),) if "reveal" not in notes or back else ()


@pytest.mark.parametrize(("founders", "byzantine", "silent"), [(5, 1, True), (7, 2, False)])
def test_a_third_letter_that_names_my_root_is_taken(founders: int, byzantine: int, silent: bool) -> None:
    attack = TwoAstray(delay=2.4 + 2 * byzantine, silent=silent, start=1)
    swarm = make_swarm({founders - 1: attack}, founders=founders, byzantine=byzantine, steps=5, links=EVEN)
    swarm.plot.notes["victims"] = swarm.keys[:byzantine]
    swarm.run(200.0, swarm.is_over)
    assert get_notes(swarm, founders - 1)["shown"]
    assert_unharmed(swarm)
    assert is_out(swarm, founders - 1), describe(swarm)
