"""Attacks that once worked: each is played as it was found, and has to fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.attacks import Attack, Insider
from phalanx.attacks.aggregation import FalseReport
from phalanx.attacks.base import Mail, change_body, combine
from phalanx.attacks.gradients import WrongGradient
from phalanx.attacks.justice import ShieldingVotes
from phalanx.attacks.membership import Leave
from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import Broadcast, Delivery, Effect, Sign, Story
from phalanx.core.envelope import open_body, seal
from phalanx.core.events import Banned, Removed
from phalanx.core.membership import encode_view
from phalanx.core.messages import Message, Phase, Rule, Signed
from phalanx.core.peer import Peer
from phalanx.network.ideal import make_signers
from phalanx.network.simulated import USUAL, Links
from phalanx.simulation.checkers import ALL, Checker, Checkers, Evidence
from phalanx.simulation.swarm import Setup, Swarm


def play(
    setup: Setup,
    seed: int = 1,
    links: Links | None = None,
    join_at: float = 2.0,
    until: float = 150.0,
    kinds: Iterable[type[Checker]] = ALL,
) -> Swarm:
    """Run to the end: honest peers have finished together, none was banned or removed, and no invariant is broken."""
    swarm = Swarm(setup, seed, links, keep_events=True)
    checkers = Checkers(swarm, kinds)
    for index in range(setup.founders, setup.founders + setup.joiners):
        swarm.world.at(join_at, lambda index=index: swarm.start(index))  # type: ignore[misc]
    swarm.run(until, lambda: swarm.is_over() or bool(checkers.violations))
    if not checkers.violations:
        checkers.finish()
    assert not checkers.violations, "\n".join(map(str, checkers.violations))
    assert set(swarm.honest) == swarm.finished - swarm.byzantine
    assert not (set(get_bans(swarm)) | get_removed(swarm)) & set(swarm.honest)
    views = [get_peer(swarm, key).view for key in swarm.honest]
    assert len({(view.state, view.roster, view.banned) for view in views}) == 1
    return swarm


def get_peer(swarm: Swarm, key: bytes) -> Peer:
    peer = swarm.get_peer(key)
    assert peer is not None
    return peer


def get_events(swarm: Swarm, kind: type) -> list[Any]:
    return [event for key in swarm.honest for _, event in swarm.events[key] if isinstance(event, kind)]


def get_bans(swarm: Swarm) -> dict[bytes, Rule]:
    return {event.key: event.rule for event in get_events(swarm, Banned)}


def get_removed(swarm: Swarm) -> set[bytes]:
    return {event.key for event in get_events(swarm, Removed)}


class Introspective(Attack):
    """Knows what the honest peer that it runs has worked out."""

    def wrap(self, story: Story, insider: Insider) -> Story:
        insider.notes["story"] = story
        return super().wrap(story, insider)

    def get_peer(self, insider: Insider) -> Peer:
        peer: Peer = insider.notes["story"].gi_frame.f_locals["peer"]
        return peer


def get_seals(insider: Insider, height: int) -> tuple[Signed, ...]:
    return tuple(x for (at, _), x in insider.heard.items() if at == height and x.phase is Phase.SEAL)


# ---- Two commits of a probationer


@dataclass(kw_only=True, eq=False)
class TwoTrials(Attack):
    """On probation, sends a minority another commit than the others: who checks that one finds it wrong."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, Signed) and message.domain is Domain.TRIAL and message.sender == insider.key:
            insider.notes["sent"] = True
            few = to[: (len(to) - 1) // 2]
            return ((to[len(few) :], message), (few, insider.seal_again(message, m.Trial(bytes(32)))))
        return ((to, message),)


def test_two_commits_of_a_probationer_do_not_turn_its_checkers_into_false_accusers() -> None:
    setup = Setup(
        founders=5,
        joiners=1,
        settings={"steps": 7, "byzantine": 1, "probation": 6, "probation_checks": 4},
        attackers={5: TwoTrials()},
    )
    swarm = play(setup, seed=3)
    assert swarm.insiders[swarm.keys[5]].notes["sent"]


# ---- COMMIT kept from one member


@dataclass(kw_only=True, eq=False)
class LateForOne(Attack):
    """Keeps its COMMIT, its AGGREGATE and its parts from one member, which has to ask the others."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, Signed):
            kept = message.sender == insider.key and message.phase in (Phase.COMMIT, Phase.AGGREGATE)
            kept = kept and message.domain is Domain.AGREED
        else:
            kept = isinstance(message, m.Certificate) or (
                isinstance(message, m.PartChunk) and message.owner == insider.key
            )
        return ((tuple(key for key in to if not kept or key != insider.honest[0]), message),)


def test_a_commit_kept_from_one_member_does_not_remove_it_while_gradients_may_take_long() -> None:
    settings = {"steps": 3, "byzantine": 1, "gradient_time": 60.0, "transfer_time": 10.0}
    setup = Setup(founders=4, settings=settings, attackers={3: LateForOne(start=1, stop=2)}, compute_time=1.0)
    play(setup, links=Links(delta=0.9, low=0.6, high=0.9))


# ---- A certificate that is not whole


@dataclass(kw_only=True, eq=False)
class EarlyChain(Introspective):
    """Sends its SEAL to nobody, and shows some members those of the others as if they certified the view."""

    victims: int = 2

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Seal):
            insider.notes["height"] = sign.height
            return None
        return sign

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        height, peer = insider.notes.get("height"), self.get_peer(insider)
        if height is not None and "shown" not in insider.notes and peer.transcript.sealing is not None:
            seals = tuple(x for x in get_seals(insider, height) if x.sender != insider.key)
            if len(seals) >= len(insider.view.roster) - insider.view.bound:
                insider.notes["shown"] = True
                chain = m.Chain((m.Link(encode_view(peer.transcript.sealing), seals),))
                insider.send_later(0.0, insider.honest[: self.victims], chain)
        return delivery


def test_nobody_goes_on_from_a_view_whose_seal_is_not_complete() -> None:
    attackers = {7: Leave(start=1, stop=2), 6: EarlyChain(start=1, victims=1)}
    swarm = play(Setup(founders=8, settings={"steps": 3, "byzantine": 2}, attackers=attackers))
    assert swarm.insiders[swarm.keys[6]].notes["shown"]
    assert get_removed(swarm) == swarm.byzantine


# ---- All honest members accuse


@dataclass(kw_only=True, eq=False)
class Shield(ShieldingVotes):
    """Accuses nobody, and finds its friends innocent."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Confirm):
            return change_body(sign, accusations=())
        return super().on_body(insider, sign)


def test_accusers_who_are_all_the_honest_members_convict() -> None:
    """A probationer cheats and a member shields it: were the accusers without a vote, that member alone would judge."""
    setup = Setup(
        founders=4,
        joiners=1,
        settings={"steps": 7, "byzantine": 1, "probation": 5, "probation_checks": 16},
        attackers={3: Shield(), 4: WrongGradient()},
    )
    # The checker of evidence counts no votes of accusers.
    swarm = play(setup, kinds=[kind for kind in ALL if kind is not Evidence])
    assert get_bans(swarm) == {swarm.keys[4]: Rule.GRADIENT}


# ---- Gossip that nobody asked for


@dataclass(kw_only=True, eq=False)
class Chatter(Attack):
    """Sends gossip of very many rounds of a slow path that nobody has opened."""

    rounds: int = 300
    repeats: int = 4

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        view = insider.view
        place = (insider.config.run, view.height + 2, view.step, view.attempt, Phase.COMMIT, bytes(32))
        item = m.Relay((seal(insider.signer, *place, m.Timeout((), 1, None)),), ())
        for number in range(self.rounds * self.repeats):
            yield Broadcast(insider.others, m.Gossip(view.height + 2, number // self.repeats, (item,), ()))


def test_unasked_gossip_is_kept_within_bounds() -> None:
    attack = Chatter()
    swarm = Swarm(Setup(founders=4, settings={"steps": 3, "byzantine": 1}, attackers={3: attack}), 1)
    swarm.run(1.0)
    for key in swarm.honest:
        gossip = get_peer(swarm, key).gossip
        kept = sum(len(queues.get(swarm.keys[3], ())) for queues in gossip.values())
        assert 0 < kept <= attack.rounds * attack.repeats // 10


# ---- Slow parts


def test_one_lie_about_sums_bans_no_aggregator_when_parts_travel_as_long_as_they_may() -> None:
    """The evidence against the lie takes ``transfer_time``; who does not wait for it believes the lie."""

    def route(now: float, sender: bytes, receiver: bytes, message: Message) -> Any:
        return 8.0 if isinstance(message, m.PartChunk | m.AggregateChunk) else USUAL

    settings = {"steps": 3, "byzantine": 1, "transfer_time": 10.0}
    setup = Setup(founders=4, settings=settings, attackers={3: FalseReport(start=1, stop=2)})
    swarm = play(setup, links=Links(delta=0.9, route=route))
    assert get_bans(swarm) == {swarm.keys[3]: Rule.REPORT}


# ---- Requests that use up the answers


@dataclass(kw_only=True, eq=False)
class LateOpenings(Attack):
    """Calls the parts of its friends missing, which open them late: until then all ask all for them again and again."""

    late: float = 6.3

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Aggregate) and sign.phase is Phase.AGGREGATE:
            insider.notes["asked"] = True
            friends = set(insider.friends) & set(insider.duties.contributors)
            missing = tuple(place for place, key in enumerate(insider.view.roster) if key in friends)
            return change_body(sign, result=None, missing=missing)
        return sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        plot, roster = insider.plot.keys, insider.view.roster
        if not isinstance(message, m.PartChunk) or message.owner not in plot or roster[message.part] not in plot:
            return ((to, message),)
        place = ("opened", message.part)
        if message.owner == insider.key and "asked" in insider.notes and place not in insider.notes:
            insider.notes[place] = True
            insider.send_later(self.late, insider.others, message)
        return ()


def test_parts_that_are_opened_late_do_not_use_up_the_answers_of_honest_members() -> None:
    n, b = 24, 7
    late = LateOpenings(start=1, stop=2)
    attackers: dict[int, Attack] = {n - 1 - i: late for i in range(b)}
    attackers[n - 1] = combine(late, FalseReport(start=1, stop=2))
    settings = {"steps": 2, "byzantine": b, "transfer_time": 2.0}
    swarm = play(Setup(founders=n, settings=settings, attackers=attackers))
    assert get_bans(swarm) == {swarm.keys[n - 1]: Rule.REPORT}


# ---- The chain of rosters


@dataclass(kw_only=True, eq=False)
class WipeLinks(Introspective):
    """Shows everybody a good certificate with a worthless message of height 0 in front of it."""

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        transcript = self.get_peer(insider).transcript
        view = transcript.sealing
        if view is not None and ("shown", view.height) not in insider.notes:
            seals = get_seals(insider, view.height - 1)
            if len(seals) == len(transcript.view.roster):
                insider.notes["shown", view.height] = True
                junk = msgspec.structs.replace(seals[0], height=0)
                chain = m.Chain((m.Link(encode_view(view), (junk, *seals)),))
                for delay in (0.05, 0.2, 0.5, 0.8):
                    insider.send_later(delay, insider.honest, chain)
        return delivery


def test_a_worthless_message_in_a_certificate_does_not_wipe_the_chain_of_rosters() -> None:
    attackers = {7: Leave(start=1), 6: combine(WipeLinks(), Leave(start=2))}
    swarm = play(Setup(founders=8, settings={"steps": 4, "byzantine": 2}, attackers=attackers))
    for key in swarm.honest:
        rosters = [view.roster for view, _ in get_peer(swarm, key).links]
        assert set(swarm.keys) - set(rosters[0]) == {swarm.keys[7]}, "the first that left is in the chain"
        assert any(swarm.keys[6] not in roster for roster in rosters[1:]), "and so is the second"


# ---- Sets of letters in a slow path


STEP = 1


@dataclass(kw_only=True, eq=False)
class Accomplice(Attack):
    """Votes in a slow path with whoever votes, some for one outcome, others for another; sends its share of a flood."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.Certificate | m.Chain | m.Alarm):
            return ()
        if isinstance(message, Signed) and message.sender == insider.key and message.domain is Domain.OUTCOME:
            return ()
        return ((to, message),)

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message, few, flood = delivery.message, insider.honest[-2:], insider.plot.notes.get("flood")
        if flood is not None and "flooded" not in insider.notes:
            insider.notes["flooded"] = True
            for gossip in flood[sorted(insider.plot.keys).index(insider.key) :: len(insider.plot.keys)]:
                insider.send_later(0.0, few, gossip)
        if isinstance(message, Signed) and message.domain is Domain.OUTCOME and message.sender in insider.honest:
            body = open_body(message)
            assert isinstance(body, m.Outcome)
            group = few if message.sender in few else insider.honest[:-2]
            place = ("vote", message.height, body.round, body.final, group)
            if place not in insider.notes:
                insider.notes[place] = True
                insider.send_later(0.0, group, insider.seal_again(message, body))
        return delivery


@dataclass(kw_only=True, eq=False)
class Flood(Accomplice):
    """Signs many CONFIRMs; two members get so many sets of letters with them that the true one finds no place."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        mine = (insider.key, Domain.AGREED, Phase.CONFIRM, STEP)
        if isinstance(message, Signed) and (message.sender, message.domain, message.phase, message.step) == mine:
            insider.notes["first"], few = message, insider.honest[-2:]
            second = self.say(insider, message, b"2" * 32)
            return ((tuple(key for key in to if key not in few), message), (few, second))
        return super().on_message(insider, to, message)

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        first = insider.notes.get("first")
        if first is not None and "flood" not in insider.plot.notes:
            letters = [x for key in insider.view.roster if (x := insider.heard.get((first.height, key))) is not None]
            if len(letters) == len(insider.view.roster):
                insider.plot.notes["flood"] = [
                    self.gather(insider, letters, self.say(insider, first, number.to_bytes(32, "big")))
                    for number in range(4 * len(letters) + 4)
                ]
        return super().on_delivery(insider, delivery)

    def gather(self, insider: Insider, letters: list[Signed], junk: Signed) -> m.Gossip:
        items = tuple(m.Relay((junk if x.sender == insider.key else x,), ()) for x in letters)
        return m.Gossip(junk.height, 0, items, ())

    def say(self, insider: Insider, message: Signed, state: bytes) -> Signed:
        body = open_body(message)
        assert isinstance(body, m.Confirm)
        return insider.seal_again(message, msgspec.structs.replace(body, state=state))


def test_a_flood_of_sets_of_letters_does_not_settle_two_outcomes() -> None:
    n, b = 8, 3
    plot = {signer.key for signer in make_signers(n, 1, True)[0][n - b :]}

    def route(now: float, sender: bytes, receiver: bytes, message: Message) -> Any:
        return 0.001 if sender in plot or receiver in plot else USUAL

    attackers = {5: Accomplice(start=STEP), 6: Accomplice(start=STEP), 7: Flood(start=STEP)}
    setup = Setup(founders=n, settings={"steps": 3, "byzantine": b}, attackers=attackers)
    swarm = play(setup, links=Links(delta=0.9, low=0.6, high=0.62, route=route))
    assert swarm.byzantine == plot
    assert all(insider.notes["flooded"] for insider in swarm.insiders.values())
    assert get_bans(swarm) == {swarm.keys[7]: Rule.EQUIVOCATION}


def test_a_banned_peer_gets_nothing_from_honest_ones() -> None:
    """It went on following, and had every member send it every aggregate: many times what an honest step costs."""
    sent: list[tuple[bytes, Message]] = []

    def route(now: float, sender: bytes, to: bytes, message: Message) -> float:
        peer = swarm.get_peer(sender)
        if to in swarm.byzantine and peer is not None and to in peer.view.banned and sender not in swarm.byzantine:
            sent.append((sender, message))
        return USUAL

    setup = Setup(founders=7, settings={"byzantine": 2, "steps": 12}, attackers={0: WrongGradient()})
    swarm = Swarm(setup, 1, Links(route=route), keep_events=True)
    swarm.run(300.0, swarm.is_over)
    bans = get_bans(swarm)
    assert set(bans) == swarm.byzantine
    assert not sent


def test_one_that_only_follows_asks_a_few_at_a_time() -> None:
    """A stranger that asks to join costs the swarm a few copies of what it needs, not one from every member."""
    copies: dict[tuple[int, int, int], int] = {}

    def route(now: float, sender: bytes, to: bytes, message: Message) -> float:
        if to == swarm.keys[12] and isinstance(message, m.AggregateChunk):
            place = (message.step, message.attempt, message.part)
            copies[place] = copies.get(place, 0) + 1
        return USUAL

    setup = Setup(founders=12, joiners=1, settings={"byzantine": 2, "steps": 10})
    swarm = Swarm(setup, 1, Links(route=route), keep_events=True)
    swarm.world.at(2.0, lambda: swarm.start(12))
    swarm.run(300.0, swarm.is_over)
    assert swarm.is_over()
    assert copies
    assert max(copies.values()) <= 6, "of three, and of three more if these are slow"
