"""A peer's whole life: attempts, one after another.

A peer that is not (or no longer) a member follows them without a voice.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.core import messages as m
from phalanx.core.broadcast import join_slow_path
from phalanx.core.checking import fetch
from phalanx.core.conclusion import find_slow_time, follow
from phalanx.core.config import Config
from phalanx.core.crypto import compute_digest
from phalanx.core.effects import AdoptState, Broadcast, HasState, Keep, Note, Send, Story, Undo
from phalanx.core.envelope import Examiner
from phalanx.core.events import Banned, Jumped, MarginLost, Removed, RunFinished, StepFinished, Synced
from phalanx.core.handlers import HANDLERS, ask_back
from phalanx.core.justice import Offence, explain
from phalanx.core.membership import compute_margin, decode_view, encode_view, is_another_electorate, make_genesis
from phalanx.core.messages import Message, Rule
from phalanx.core.peer import Lost, Peer, StateFetch
from phalanx.core.step import run_attempt, run_closing
from phalanx.core.transcript import Transcript


def run_peer(
    config: Config, key: bytes, examiner: Examiner, kept: bytes | None = None, heard: Iterable[Message] = ()
) -> Story:
    """Take part until the run ends. ``kept`` and ``heard`` are on disk if this peer has been here before."""
    peer = make_peer(config, key, examiner, kept, heard)
    return run_made_peer(peer, returning=kept is not None or key not in config.founders)


def make_peer(
    config: Config, key: bytes, examiner: Examiner, kept: bytes | None = None, heard: Iterable[Message] = ()
) -> Peer:
    """A peer before its life begins: at the view kept, or with the founders; it knows the messages it ``heard``.

    Set :attr:`Peer.revived` if it has signed anything before.
    """
    view = (decode_view(kept) if kept is not None else None) or make_genesis(config)
    peer = Peer(config, key, examiner, view, follow, HANDLERS)
    peer.recall(heard)
    return peer


def run_made_peer(peer: Peer, returning: bool) -> Story:
    """A peer's life. One that is ``returning`` asks first how far the others are."""
    config, view = peer.config, peer.view
    yield from peer.receive(float("-inf"))  # what time is it?
    peer.enter(view)
    peer.join = join_slow_path
    riding = settled = False
    margin = compute_margin(config, view)
    while True:
        try:
            settled = False
            if returning:
                returning, peer.ask_at = False, peer.now + config.delta
                yield from catch_up(peer)
            yield from prepare(peer)
            if peer.view.step < config.steps:
                view, riding = yield from run_attempt(peer)
            elif peer.view.suspects:
                view, riding = yield from run_closing(peer)
            else:
                return (yield from linger(peer))
        except Lost as lost:
            view, riding, settled = lost.view, False, lost.is_final
            if peer.riding and view.step >= peer.view.step:
                yield Note(StepFinished(peer.view.step - 1, view))
            if is_another_electorate(peer.view, view):
                peer.remember_link(view, lost.messages)
            yield from announce_lost(peer, lost)
        before = peer.view
        peer.enter(view, riding=riding)
        if view.step <= before.step:
            peer.forget_later(view.step)
            yield Undo(view.step)
        if settled:
            peer.base = view
            yield Keep(encode_view(view), view.height)
        if not riding and view.step > before.step:
            yield Note(StepFinished(view.step - 1, view))
        before_it, margin = margin, compute_margin(config, view)
        if margin < before_it and margin <= 1:
            yield Note(MarginLost(view.step, max(margin, 0)))


def announce_lost(peer: Peer, lost: Lost) -> Story:
    """Who is missing in the view that a slow path led to, and why."""
    view, epoch = lost.view, lost.epoch
    if epoch is None:
        yield Note(Jumped(view))
        return
    for key in sorted(set(view.banned) - set(epoch.view.banned)):
        offence = epoch.offences.get(key) or find_equivocation(peer, epoch, key, lost)
        yield Note(Banned(key, offence.rule, offence.step, view.step, offence.reason, offence.evidence, offence.case))
    for key in sorted(set(epoch.view.roster) - set(view.roster) - set(view.banned)):
        yield Note(Removed(key, view.step, epoch.removals.get(key) or explain(epoch.view, key)))


def find_equivocation(peer: Peer, epoch: Transcript, key: bytes, lost: Lost) -> Offence:
    """The two messages that a slow path brought to light; without them, what its quorum signed."""
    pages = [page for height, page in sorted(peer.pages.items()) if height >= epoch.view.height and key in page.seconds]
    case = m.Equivocation(pages[-1].letters[key].message, pages[-1].seconds[key].message) if pages else None
    evidence = (case.first, case.second) if case is not None else lost.messages
    return Offence(Rule.EQUIVOCATION, epoch.view.step, "signed two messages at one height", evidence, case)


def catch_up(peer: Peer) -> Story:
    """Ask for the views that followed the one I know; :class:`Lost` brings the latest."""
    yield Broadcast(peer.others, m.PullChain(peer.base.height))
    end = peer.time + 2 * peer.config.delta
    while peer.time < end:
        yield from peer.listen(end)


def prepare(peer: Peer) -> Story:
    """Hold the state that the view starts from; ask to join if I am not in."""
    absent = peer.key in peer.absent
    if not peer.member and not peer.leaving and not absent and key_may_ask(peer):
        yield from ask_back(peer, 0)
    yield from hold_state(peer)
    peer.holding = True
    if absent and not peer.leaving:
        yield from ask_back(peer, 0)


def hold_state(peer: Peer) -> Story:
    """Get the state that the view starts from, unless it is here."""
    view = peer.view
    if (yield HasState(view.step, view.state)):
        return
    while True:
        server = min(peer.others, key=lambda key: (peer.failures.get(key, 0), compute_digest("server", peer.key, key)))
        peer.failures[server] = peer.failures.get(server, 0) + 1  # taken back below if it serves well
        data = yield from fetch_state(peer, server)
        if data is not None and (yield AdoptState(view.step, view.state, data)):
            peer.failures[server] = 0
            peer.forget_gradients()
            yield Note(Synced(view.step, view.state))
            return
        yield Broadcast(peer.others, m.PullChain(peer.base.height))  # we may be too late for this one


def key_may_ask(peer: Peer) -> bool:
    view = peer.view
    return peer.key not in view.banned and all(candidate.key != peer.key for candidate in view.candidates)


def fetch_state(peer: Peer, server: bytes) -> Story:
    """The state in chunks from one member; what it is worth shows when it is whole."""
    peer.state = state = StateFetch(peer.view.step, server)
    soon = peer.time + 4 * peer.config.delta
    until = soon + peer.config.transfer_time
    while peer.time < (until if state.size is not None else soon):
        got = len(state.data)
        if state.size is not None and got >= state.size:
            peer.state = None  # whoever takes the bytes holds them: nothing more may come
            return state.data
        yield Send(server, m.PullState(state.step, got))
        end = min(until, peer.time + 2 * peer.config.delta)
        while peer.time < end and len(state.data) == got and state.size != got:
            yield from peer.listen(end)
    return None


def linger(peer: Peer) -> Story:
    """The run is over: answer those who are not as far."""
    if not peer.member and peer.base != peer.view:  # what is only sealed may be replaced: those who voted would know
        end = peer.time + find_slow_time(peer)
        yield from fetch(
            peer, lambda: False, lambda: (Broadcast(peer.choose_some(), m.PullChain(peer.base.height)),), end
        )
    yield Note(RunFinished(peer.view))
    end = peer.time + 60 * peer.config.delta
    while peer.time < end:
        yield from peer.listen(end)
    return peer.view
