"""Some honest members are made to work longer than others: nobody is missed for it.

An equivocator sends them to different phases of one height, of which one takes long and another does not. Or an accuser
shows its cases only to some, and the others have to ask for them. Those who are done sooner would miss the others, and
may be a quorum together with the attackers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_breaks import assert_unharmed, describe, get_bans

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.base import accuse, change_body, note_case
from phalanx.attacks.justice import Accuser
from phalanx.core import messages as m
from phalanx.core.effects import Delivery, Sign
from phalanx.core.envelope import open_body
from phalanx.core.messages import Message, Phase, Rule, Signed, Verdict
from phalanx.network.simulated import Links, World
from phalanx.simulation.swarm import Setup, Swarm

QUICK = Links(delta=1.0, low=0.05, high=0.1)


@dataclass(kw_only=True, eq=False)
class TwoTales(Accuser):
    """Once, in a phase, one attacker tells some honest members what it tells nobody else."""

    phase: Phase
    told: int
    """To so many honest members, the last ones of the roster."""
    start: int = 4

    def make_tales(self, insider: Insider, sign: Sign) -> tuple[Signed, Signed] | None:
        """For everybody, and for some. By default everybody but some is told what is no message at all."""
        return insider.seal_bytes(sign, b"nothing"), insider.seal(sign)

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if sign.phase is not self.phase or "tales" in insider.plot.notes:
            return sign
        tales = self.make_tales(insider, sign)
        if tales is None:
            return sign
        insider.plot.notes["tales"] = tales
        return tales[0]

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        tales = insider.plot.notes.get("tales")
        if tales is None or message != tales[0]:
            return ((to, message),)
        some = insider.honest[-self.told :]
        return ((tuple(key for key in to if key not in some), tales[0]), (some, tales[1]))


@dataclass(kw_only=True, eq=False)
class OtherWayRound(TwoTales):
    """Some are told what is no message, all others what is."""

    def make_tales(self, insider: Insider, sign: Sign) -> tuple[Signed, Signed] | None:
        return insider.seal(sign), insider.seal_bytes(sign, b"nothing")


@dataclass(kw_only=True, eq=False)
class LongVote(TwoTales):
    """Some have to vote, on as many gradients as an agenda holds."""

    phase: Phase = Phase.CONFIRM

    def make_tales(self, insider: Insider, sign: Sign) -> tuple[Signed, Signed] | None:
        cases: dict[tuple[bytes, int], m.Accusation] = {}
        for (_, key), heard in reversed(insider.heard.items()):
            body = open_body(heard) if heard.phase is Phase.COMMIT and heard.step >= insider.view.step - 3 else None
            if isinstance(body, m.Commit) and body.parts is not None:
                case = m.Accusation(Rule.GRADIENT, key, heard.step, heard.attempt, (), heard, None, (), ())
                cases.setdefault((key, heard.step), case)
        return insider.seal_bytes(sign, b"nothing"), insider.seal(self.bring(insider, sign, *cases.values()))


@dataclass(kw_only=True, eq=False)
class LongTransfer(TwoTales):
    """Some wait for a part that nobody opens."""

    phase: Phase = Phase.AGGREGATE

    def make_tales(self, insider: Insider, sign: Sign) -> tuple[Signed, Signed] | None:
        friend = next((key for key in (*insider.friends, insider.key) if key in insider.duties.contributors), None)
        if friend is None or not isinstance(sign.body, m.Aggregate):
            return None
        insider.plot.notes["hidden"] = friend, insider.index
        missing = (insider.view.roster.index(friend),)
        return insider.seal(sign), insider.seal(sign, m.Aggregate(None, missing, (), sign.body.trials))

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if is_hidden(insider, message):
            return ()
        return super().on_message(insider, to, message)


@dataclass(kw_only=True, eq=False)
class Hides(Attack):
    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return () if is_hidden(insider, message) else ((to, message),)


def is_hidden(insider: Insider, message: Message) -> bool:
    return isinstance(message, m.PartChunk) and (message.owner, message.part) == insider.plot.notes.get("hidden")


@dataclass(kw_only=True, eq=False)
class KeepsCases(Attack):
    """Shows some honest members no case, and votes as if there were nothing to them."""

    victims: int
    start: int = 4

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.MalformedBody):
            to = tuple(key for key in to if key not in insider.honest[: self.victims])
        return ((to, message),) if to else ()

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        cases = insider.plot.notes.get("tales", {})
        if not isinstance(sign.body, m.Vote):
            return sign
        ballots = [m.Ballot(x.case, Verdict.INNOCENT) if x.case in cases else x for x in sign.body.ballots]
        return change_body(sign, ballots=tuple(ballots))


@dataclass(kw_only=True, eq=False)
class ShowsLate(KeepsCases):
    """Accuses without end, and shows it to all but some when these have just asked for the last time."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.plot.notes
        if not isinstance(sign.body, m.Confirm) or "tales" in notes:
            return super().on_body(insider, sign)
        heard = [message for message in reversed(insider.heard.values()) if message.sender != insider.key]
        cases = [m.MalformedBody(message) for message in heard[: m.MAX_CASES]]
        notes["tales"] = {note_case(insider, case): case for case in cases}
        return accuse(sign, *notes["tales"])

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        notes, message = insider.plot.notes, delivery.message
        if not isinstance(message, m.PullProof) or message.case not in notes.get("tales", {}):
            return delivery
        if "shown" not in notes:
            notes["shown"] = True
            friends = tuple(key for key in insider.view.roster if key in insider.plot.keys and key != insider.key)
            for case in notes["tales"].values():
                insider.send_later(1.5, insider.honest[self.victims :], case)
                insider.send_later(0.0, friends, case)
        return None


def play(
    first: Attack,
    others: Attack,
    n: int,
    b: int,
    compute_time: float,
    settings: Mapping[str, Any],
    links: Links = QUICK,
) -> Swarm:
    attackers = {n - b: first} | dict.fromkeys(range(n - b + 1, n), others)
    usual: dict[str, Any] = {"byzantine": b, "steps": 9, "size": 64, "tau": 1.0, "cap": 100.0}
    setup = Setup(founders=n, settings=usual | settings, attackers=attackers, compute_time=compute_time)
    swarm = Swarm(setup, 1, replace(links), keep_events=True)
    swarm.run(1500.0, swarm.is_over)
    assert swarm.is_over(), describe(swarm)
    assert "tales" in swarm.plot.notes
    assert_unharmed(swarm)
    assert set(get_bans(swarm)) == {swarm.keys[n - b]}, describe(swarm)
    return swarm


@pytest.mark.parametrize("start", [4, 5, 6])  # by chance one that has no gradient to make is soon done, and says so
@pytest.mark.parametrize("tales", [TwoTales, OtherWayRound])
@pytest.mark.parametrize("phase", [Phase.COMMIT, Phase.AGGREGATE, Phase.REVEAL, Phase.REPORT, Phase.CONFIRM])
def test_nobody_is_missed_where_only_some_have_to_work(
    phase: Phase, tales: type[TwoTales], start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is told what is no message ends the attempt. The others go on, if need be to the next step's gradient."""
    monkeypatch.setattr(World, "_perform_foresee", lambda *_: None)  # nobody has begun on that before
    settings = {"gradient_time": 20.0, "transfer_time": 20.0}
    play(tales(phase=phase, told=2, start=start), Attack(), 6, 2, 18.0, settings)


@pytest.mark.parametrize(
    ("n", "b", "told", "settings"), [(6, 2, 2, {}), (8, 2, 3, {}), (7, 2, 2, {"partition_safe": True})]
)
def test_nobody_is_missed_where_only_some_have_to_vote(n: int, b: int, told: int, settings: dict[str, Any]) -> None:
    play(LongVote(told=told), Attack(), n, b, 0.8, settings)


@pytest.mark.parametrize(("n", "b", "told"), [(4, 1, 1), (10, 4, 4)])
def test_nobody_is_missed_where_only_some_wait_for_parts(n: int, b: int, told: int) -> None:
    play(LongTransfer(told=told), Hides(), n, b, 0.0, {"transfer_time": 10.0})


@pytest.mark.parametrize(("n", "b"), [(7, 2), (10, 4)])
def test_nobody_is_missed_who_has_to_ask_for_many_cases(n: int, b: int) -> None:
    links = Links(delta=1.0, low=0.15, high=0.2)
    play(ShowsLate(victims=b), KeepsCases(victims=b), n, b, 0.0, {}, links)
