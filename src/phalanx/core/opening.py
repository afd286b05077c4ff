"""Parts that everybody gets to see: those that an aggregator misses, and, before a vote on V3, all of a part."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.core import messages as m
from phalanx.core.checking import ask_part, fetch, is_proven
from phalanx.core.config import Config
from phalanx.core.effects import Broadcast, Effect, Sign, Story
from phalanx.core.handlers import send_part
from phalanx.core.merkle import hash_part
from phalanx.core.messages import Phase
from phalanx.core.peer import Own, Peer


def open_parts(peer: Peer, own: Own, requests: set[tuple[int, int]]) -> Story:
    """Broadcast the parts that aggregators miss; collect those of others. Returns what did not come."""
    view = peer.view
    for owner, part in sorted(requests):
        if view.roster[owner] == peer.key and peer.contributes:
            data, path = own.parts[view.attempt][part], own.paths[view.attempt][part]
            body = m.Opening(part, hash_part(data), path)
            opening = yield Sign(peer.level, view.step, view.attempt, Phase.AGGREGATE, peer.root, body)
            yield Broadcast(peer.others, opening)
            yield from send_part(peer, peer.others, (view.step, view.attempt, peer.key, part), data)
    places = {(view.step, view.attempt, view.roster[i], j): (i, j) for i, j in requests}

    def ask() -> Iterable[Effect]:
        for place in places:
            if not peer.has_part(place):
                yield from ask_part(peer, place, peer.others)

    peer.asked |= {("part", *place, key) for place in places for key in (place[2],)}
    until = peer.entered + find_opening_time(peer.config, 1)
    yield from fetch(peer, lambda: all(map(peer.has_part, places)), ask, until)
    find_wrong_openings(peer)
    unopened = sorted(pair for place, pair in places.items() if not peer.has_part(place))
    return tuple(unopened[: m.MAX_OPENINGS])  # everybody names the same ones


def find_opening_time(config: Config, rounds: int) -> float:
    """Seconds until a part that was opened is here: 3 delta until all know that it is asked for, and a round trip."""
    return rounds * (6 * config.delta + config.transfer_time)


def fetch_opened(peer: Peer, requests: set[tuple[int, int]]) -> Story:
    """What was opened so late that only others have it is still to be had from them: the more time is mine alone."""
    view = peer.view
    mine = [(view.step, view.attempt, view.roster[i], j) for i, j in requests if peer.member and j == peer.index]

    def ask() -> Iterable[Effect]:
        for place in mine:
            if not peer.has_part(place):
                yield from ask_part(peer, place, peer.others)

    until = peer.entered + find_opening_time(peer.config, 2)
    yield from fetch(peer, lambda: all(map(peer.has_part, mine)), ask, until)


def find_wrong_openings(peer: Peer) -> None:
    """E3: a signed opening that does not lead to the committed root is a proof."""
    commits = peer.transcript.phases[Phase.COMMIT]
    for (step, attempt, owner, _), letter in peer.openings.items():
        if (step, attempt) == (peer.view.step, peer.view.attempt) and owner in commits and owner not in peer.proofs:
            proof = m.WrongOpening(commits[owner].message, letter.message)
            if is_proven(peer.run, peer.examiner, proof):
                peer.keep_proof(owner, proof)
