"""Whom a peer sends the state: members and candidates as they ask, former members and strangers within a budget."""

from __future__ import annotations

from msgspec import structs

from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.effects import Delivery, ReadState, Receive, Send
from phalanx.core.envelope import Examiner
from phalanx.core.handlers import HANDLERS
from phalanx.core.membership import Count, View, make_genesis
from phalanx.core.peer import Peer

KEYS = [bytes([number]) * 32 for number in range(1, 60)]
MEMBERS, FORMER, CANDIDATE, STRANGERS = KEYS[:4], KEYS[4], KEYS[5], KEYS[6:]
CONFIG = Config(founders=tuple(MEMBERS), byzantine=1, size=1024, steps=10, state=bytes(32), delta=2.0).check()
STATE = bytes(3 * m.MAX_CHUNK)
SECOND = 1 << 22
"""Bytes that strangers may draw in one."""


def make_view() -> View:
    return structs.replace(make_genesis(CONFIG), absences=(Count(FORMER, 1),))


def make_peer() -> Peer:
    view = make_view()
    peer = Peer(CONFIG, MEMBERS[0], Examiner(), view, lambda *_: view, HANDLERS)
    peer.enter(view)
    peer.circle = {*peer.circle, CANDIDATE}  # as a view with a candidate makes it
    return peer


def draw(peer: Peer, now: float, sender: bytes, times: int, offset: int = 0) -> int:
    """Bytes of state that somebody gets of so many requests."""
    got = 0
    for _ in range(times):
        story = peer.receive(now)
        assert isinstance(next(story), Receive)
        try:
            effect = story.send(Delivery(now, sender, m.PullState(0, offset)))
            while True:
                assert isinstance(effect, ReadState | Send)
                if isinstance(effect, Send):
                    assert effect.to == sender
                    assert isinstance(effect.message, m.StateChunk)
                    got += len(effect.message.data)
                effect = story.send(STATE if isinstance(effect, ReadState) else None)
        except StopIteration:
            pass
    return got


def test_strangers_together_draw_no_more_than_their_budget() -> None:
    peer = make_peer()
    got = sum(draw(peer, 1.0, key, 10) for key in STRANGERS)
    assert SECOND * CONFIG.delta / 2 < got <= SECOND * (CONFIG.delta + 0.2) + m.MAX_CHUNK
    assert draw(peer, 1.0, STRANGERS[-1], 1) == 0
    assert draw(peer, 1.0 + CONFIG.delta, STRANGERS[-1], 1) == m.MAX_CHUNK, "a moment later there is more"


def test_a_new_attempt_is_no_new_budget() -> None:
    """Steps may take a tenth of ``delta``, and strangers drew as much again in each of them."""
    peer, got = make_peer(), 0
    for place in range(20):
        peer.enter(make_view())
        got += sum(draw(peer, 1.0 + 0.01 * place, key, 2) for key in STRANGERS)
    assert got <= SECOND * (CONFIG.delta + 0.2) + m.MAX_CHUNK


def test_requests_that_bring_little_or_nothing_count_too() -> None:
    peer = make_peer()
    assert draw(peer, 1.0, STRANGERS[0], 3000, offset=len(STATE)) == 0
    assert draw(peer, 1.0, STRANGERS[1], 1) == 0


def test_members_candidates_and_former_members_get_the_state_when_strangers_have_drawn_all() -> None:
    peer = make_peer()
    while draw(peer, 1.0, STRANGERS[0], 1):
        pass
    for key in (MEMBERS[1], CANDIDATE, FORMER):
        assert draw(peer, 1.0, key, 3) == 3 * m.MAX_CHUNK


def test_former_members_together_have_a_budget_too() -> None:
    """One may have been removed for its deeds: it takes nothing from newcomers."""
    peer = make_peer()
    got = draw(peer, 1.0, FORMER, 100)
    assert got <= SECOND * (CONFIG.delta + 0.2) + m.MAX_CHUNK
    assert draw(peer, 1.0, STRANGERS[0], 1) == m.MAX_CHUNK
