"""What a member may vote for in a later round of the slow path."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from phalanx.core import messages as m
from phalanx.core.broadcast import _choose, _Exchange, _name_outcome
from phalanx.core.config import Config
from phalanx.core.envelope import Letter, seal
from phalanx.core.handlers import HANDLERS
from phalanx.core.membership import make_genesis
from phalanx.core.messages import Phase
from phalanx.core.peer import Peer
from phalanx.network.ideal import IdentityExaminer, make_signers

SIGNERS, VERIFY = make_signers(4, 7, ideal=True)
CONFIG = Config(founders=tuple(x.key for x in SIGNERS), byzantine=1, size=64, steps=5, partition_safe=True).check()
EXAMINER = IdentityExaminer(VERIFY)
HEIGHT, ROUND = 0, 1


def sign(peer: int, body: m.Body) -> Letter:
    previous = make_genesis(CONFIG).previous
    letter = EXAMINER.examine(seal(SIGNERS[peer], CONFIG.run, HEIGHT, 0, 0, Phase.COMMIT, previous, body))
    assert letter is not None
    return letter


def make_exchange(prepared: Sequence[bytes | None]) -> _Exchange:
    """All messages of a height, and what each member says that it holds of the round before."""
    view = make_genesis(CONFIG)
    peer = Peer(CONFIG, SIGNERS[0].key, EXAMINER, view, lambda *_: view, HANDLERS)
    peer.transcript.heights[HEIGHT] = Phase.COMMIT
    exchange = _Exchange(peer, peer.transcript, HEIGHT, ROUND)
    for index in range(4):
        assert exchange.offer([sign(index, m.Commit(None, bytes(32), view.digest))])
    for index, name in enumerate(prepared):
        peer.take(sign(index, m.Timeout((), ROUND, name)).message)
    return exchange


def make_votes() -> list[Letter]:
    """A quorum of first votes of the round before, for another outcome than what was seen now."""
    outcome = m.Outcome(0, False, b"s" * 32, True, b"v" * 32)
    return [sign(index, outcome) for index in range(3)]


def test_whoever_holds_nothing_leaves_the_choice_to_what_was_seen() -> None:
    exchange = make_exchange([None, None, None])
    chosen = _choose(exchange)
    assert chosen is not None
    assert not chosen.ends
    assert exchange.peer.settlements[chosen.settlement].out == ()


def test_a_quorum_has_to_say_what_it_holds() -> None:
    assert _choose(make_exchange([None, None])) is None


def test_what_is_said_to_be_prepared_waits_for_its_votes() -> None:
    """They may be late, and what they settle may have been acted on: no other outcome is voted for meanwhile."""
    votes = make_votes()
    exchange = make_exchange([None, None, _name_outcome(votes[0])])
    assert _choose(exchange) is None
    assert exchange.offer(votes)
    assert _choose(exchange) == msgspec.structs.replace(votes[0].body, round=0, final=False)


def test_a_claim_that_nobody_can_show_silences_only_who_makes_it() -> None:
    chosen = _choose(make_exchange([None, None, None, b"x" * 32]))
    assert chosen is not None
