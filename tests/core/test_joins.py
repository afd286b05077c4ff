"""What costs nothing to make, requests to join and signatures: how much of it is looked at and passed on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.crypto import Domain, Signer
from phalanx.core.effects import Broadcast, Delivery, Receive
from phalanx.core.envelope import Examiner, seal
from phalanx.core.handlers import HANDLERS
from phalanx.core.membership import make_genesis
from phalanx.core.messages import Message, Phase, Signed
from phalanx.core.peer import Peer
from phalanx.network.ideal import make_signers

SIGNERS, VERIFY = make_signers(304, 1, ideal=True)
MEMBERS, STRANGERS = [signer.key for signer in SIGNERS[:4]], SIGNERS[4:]
CONFIG = Config(founders=tuple(MEMBERS), byzantine=1, size=64, steps=10, state=bytes(32), delta=2.0).check()
JOINS = [seal(x, CONFIG.run, 0, 0, 0, Phase.COMMIT, bytes(32), m.Join(bytes(32), 0)) for x in STRANGERS]


class Counted(Examiner):
    """Counts the signatures that it had to check."""

    def __init__(self) -> None:
        self.checked = 0
        super().__init__(self._count)

    def _count(self, key: bytes, domain: Domain, payload: bytes, signature: bytes) -> bool:
        self.checked += 1
        return VERIFY(key, domain, payload, signature)


def make_peer() -> tuple[Peer, Counted]:
    view, examiner = make_genesis(CONFIG), Counted()
    return Peer(CONFIG, MEMBERS[0], examiner, view, lambda *_: view, HANDLERS), examiner


def hand_over(peer: Peer, now: float, sender: bytes, messages: Sequence[Message]) -> list[Signed]:
    """What the peer passes on of what it gets."""
    passed = []
    for message in messages:
        story = peer.receive(now)
        assert isinstance(next(story), Receive)
        try:
            effect = story.send(Delivery(now, sender, message))
            while True:
                assert isinstance(effect, Broadcast)
                assert isinstance(effect.message, Signed)
                passed.append(effect.message)
                effect = next(story)
        except StopIteration:
            pass
    return passed


def test_who_asks_is_known_to_all() -> None:
    peer, _ = make_peer()
    assert hand_over(peer, 1.0, STRANGERS[0].key, JOINS[:1]) == JOINS[:1]
    assert hand_over(peer, 1.0, STRANGERS[0].key, JOINS[:1]) == [], "once"
    assert list(peer.joins) == [STRANGERS[0].key]


def test_nobody_asks_for_others_but_members() -> None:
    peer, examiner = make_peer()
    assert hand_over(peer, 1.0, STRANGERS[0].key, JOINS[1:3]) == []
    assert examiner.checked == 0
    assert hand_over(peer, 1.0, MEMBERS[1], JOINS[1:3]) == JOINS[1:3]


def test_of_one_member_a_few_are_passed_on_at_a_time() -> None:
    """Also when steps take less than ``delta``: a new view is no new allowance."""
    peer, examiner = make_peer()
    passed = []
    for place, join in enumerate(JOINS):
        passed += hand_over(peer, 1.0 + place / 1000, MEMBERS[1], [join])
        peer.enter(structs.replace(peer.view, step=place))
    assert len(passed) == examiner.checked == 16
    assert hand_over(peer, 1.5, MEMBERS[2], JOINS[100:101]) == JOINS[100:101], "another member has its own"
    assert hand_over(peer, 4.0, MEMBERS[1], JOINS[200:201]) == JOINS[200:201], "and later there is room again"


def test_strangers_share_what_is_passed_on() -> None:
    peer, examiner = make_peer()
    passed = [x for y in range(200) for x in hand_over(peer, 1.0, STRANGERS[y].key, [JOINS[y]])]
    assert len(passed) == 64
    assert len(peer.joins) == 200, "who asks me itself is on my list all the same"
    assert examiner.checked == 200
    assert hand_over(peer, 1.0, MEMBERS[1], JOINS[250:251]) == JOINS[250:251], "members have their own"


def test_a_stranger_uses_up_nothing_with_requests_that_it_did_not_sign() -> None:
    peer, _ = make_peer()
    forged = [structs.replace(JOINS[0], step=step, signature=bytes(64)) for step in range(100)]
    assert hand_over(peer, 1.0, STRANGERS[0].key, forged) == []
    assert hand_over(peer, 1.0, STRANGERS[1].key, JOINS[1:2]) == JOINS[1:2]


@pytest.mark.parametrize("kind", ["certificate", "alarm"])
def test_requests_do_not_travel_in_anything_else(kind: str) -> None:
    peer, examiner = make_peer()
    some = tuple(JOINS[:200])
    message = m.Certificate(some) if kind == "certificate" else m.Alarm(0, 0, some)
    assert hand_over(peer, 1.0, MEMBERS[1], [message]) == []
    assert examiner.checked == 0
    assert not peer.joins


def make_certificate(signers: Sequence[Signer], each: int, forged: int | None = None) -> m.Certificate:
    bodies = [m.Commit(None, bytes([x]) * 32, bytes(32)) for x in range(each)]
    good = [seal(x, CONFIG.run, 0, 0, 0, Phase.COMMIT, bytes(32), body) for body in bodies for x in signers]
    return m.Certificate(
        tuple(structs.replace(x, signature=bytes(64)) if y == forged else x for y, x in enumerate(good))
    )


def test_who_passes_on_a_forgery_is_not_heard_for_a_while() -> None:
    peer, examiner = make_peer()
    hand_over(peer, 1.0, MEMBERS[1], [make_certificate(SIGNERS[1:4], 2, forged=3)])
    assert examiner.checked == 4, "what follows the forgery is not looked at"
    hand_over(peer, 1.5, MEMBERS[1], [make_certificate(SIGNERS[1:4], 2)])
    assert examiner.checked == 4
    hand_over(peer, 1.5, MEMBERS[2], [make_certificate(SIGNERS[1:4], 2)])
    assert examiner.checked == 7, "three were known"
    hand_over(peer, 3.5, MEMBERS[1], [make_certificate(SIGNERS[1:4], 3)])
    assert examiner.checked == 10


@pytest.mark.parametrize("seeking", [False, True])
def test_who_signs_without_end_does_not_have_us_check_without_end(seeking: bool) -> None:
    peer, examiner = make_peer()
    if seeking:
        peer.seek(0, bytes(32), tuple(MEMBERS))
    hand_over(peer, 1.0, MEMBERS[1], [make_certificate(SIGNERS[1:2], 200)])
    assert examiner.checked == 8
