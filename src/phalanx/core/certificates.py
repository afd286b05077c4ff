"""Who may say that a view follows another: a quorum of final votes, or every member."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.crypto import Domain
from phalanx.core.envelope import Examiner
from phalanx.core.membership import View, compute_quorum, compute_roster_digest
from phalanx.core.messages import Phase, Signed


def find_certificate(
    config: Config, examiner: Examiner, before: View, view: View, messages: Iterable[Signed]
) -> tuple[Signed, ...] | None:
    """Those of the messages with which the roster of ``before`` says that ``view`` follows; None if it does not.

    A quorum of final votes says so; or SEAL, ABORT or COMMIT of one height from *every* member, since one that is not
    complete may still be replaced by a slow path. Of these all but ``bound`` have to name the view: a Byzantine member
    may sign for a view of its own.

    Or all members of ``view`` have committed to it, a quorum of ``before``'s among them: so whoever walks the chain may
    leave out views between the two.

    Whoever leaves out a link, so that the roster seems not to have changed, must not have a smaller quorum accepted:
    votes bear their roster, COMMIT comes from the view's own, and who sealed an attempt is on record in the view.
    """
    rosters = {compute_roster_digest(before.roster): (before.roster, compute_quorum(config, before))}
    for record in before.attempts[-1:]:
        sealed = (record.roster, compute_quorum(config, record))
        rosters.setdefault(compute_roster_digest(record.roster), sealed)
    whole: dict[int, dict[bytes, tuple[Signed, bool]]] = {}
    commits: dict[bytes, tuple[Signed, bool]] = {}
    votes: dict[tuple[int, int, bytes], dict[bytes, Signed]] = {}
    for message in messages:
        if message.run != config.run or message.height < before.height - 1:
            continue
        letter = examiner.examine(message)
        body = letter.body if letter is not None else None
        if letter is not None and message.domain is Domain.AGREED and message.height == view.height:
            commits[message.sender] = (message, isinstance(body, m.Commit) and body.view == view.digest)
        if letter is not None and message.domain is Domain.AGREED and message.sender in before.roster:
            named = isinstance(body, m.Seal | m.Abort | m.Commit) and body.view == view.digest
            if named and _find_roster(view, message) not in (before.roster, None):
                continue
            whole.setdefault(message.height, {})[message.sender] = (message, named)
        elif isinstance(body, m.Outcome) and body.final and body.view == view.digest:
            # Those who sealed this view may have replaced it by another, in a slow path at the height before.
            roster, _ = rosters.get(message.previous, ((), 0))
            if message.sender in roster and (roster == before.roster or message.height == before.height - 1):
                votes.setdefault((message.height, body.round, message.previous), {})[message.sender] = message
    for place, ballots in votes.items():
        if len(ballots) >= rosters[place[2]][1]:
            return tuple(ballots.values())
    quorum = compute_quorum(config, before)
    for said in whole.values():
        naming = sum(named for _, named in said.values())
        if len(said) == len(before.roster) and naming >= max(len(before.roster) - before.bound, quorum):
            return tuple(message for message, _ in said.values())
    signers = {key for key, (_, named) in commits.items() if named and key in view.roster}
    enough = len(signers) >= max(len(view.roster) - view.bound, compute_quorum(config, view))
    if enough and {*view.roster} <= commits.keys() and len(signers.intersection(before.roster)) >= quorum:
        return tuple(commits[key][0] for key in view.roster)
    return None


def find_phase(messages: Iterable[Signed]) -> Phase:
    """The phase of most of these: of one height, and so of all honest members."""
    return Counter(message.phase for message in messages).most_common(1)[0][0]


def _find_roster(view: View, message: Signed) -> tuple[bytes, ...] | None:
    """Whose agreed messages these are, as far as the view that they name tells."""
    if message.phase is Phase.COMMIT:
        return view.roster
    records = (x.roster for x in view.attempts if (x.step, x.attempt) == (message.step, message.attempt))
    return next(records, None)
