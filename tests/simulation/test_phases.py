"""An equivocator sends honest members to different phases of one height, of which one takes long and another does not.

Those in the short one soon miss those in the long one, and may be a quorum together with the attackers. Nobody may be
removed for it but who signed two messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from test_breaks import assert_unharmed, describe, get_bans

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.justice import Accuser
from phalanx.core import messages as m
from phalanx.core.effects import Sign
from phalanx.core.envelope import open_body
from phalanx.core.messages import Message, Phase, Rule, Signed
from phalanx.network.simulated import Links, World
from phalanx.simulation.swarm import Setup, Swarm


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


def play(first: Attack, others: Attack, n: int, b: int, compute_time: float, settings: Mapping[str, Any]) -> Swarm:
    attackers = {n - b: first} | dict.fromkeys(range(n - b + 1, n), others)
    usual = {"byzantine": b, "steps": 9, "size": 64, "tau": 1.0, "cap": 100.0}
    setup = Setup(founders=n, settings=usual | settings, attackers=attackers, compute_time=compute_time)
    swarm = Swarm(setup, 1, Links(delta=1.0, low=0.05, high=0.1), keep_events=True)
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
    ("n", "b", "told", "settings"), [(6, 2, 2, {}), (7, 2, 3, {"outages": 1}), (7, 2, 2, {"partition_safe": True})]
)
def test_nobody_is_missed_where_only_some_have_to_vote(n: int, b: int, told: int, settings: dict[str, Any]) -> None:
    play(LongVote(told=told), Attack(), n, b, 0.8, settings)


@pytest.mark.parametrize(("n", "b", "told"), [(4, 1, 1), (10, 4, 4)])
def test_nobody_is_missed_where_only_some_wait_for_parts(n: int, b: int, told: int) -> None:
    play(LongTransfer(told=told), Hides(), n, b, 0.0, {"transfer_time": 10.0})
