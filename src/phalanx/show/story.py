"""What a log tells, put in order for showing: curves, bans, and the sentences about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.core.crypto import format_peer_id
from phalanx.core.errors import LocalError
from phalanx.events import (
    Banned,
    Evaluated,
    Event,
    Halted,
    Joined,
    Left,
    MarginLost,
    Removed,
    Resumed,
    RunFinished,
    RunStarted,
    StepFinished,
)

_NAMED = 4  # peers that a label names one by one


@dataclass(slots=True)
class Story:
    """One run, without the steps that a crash undid."""

    started: RunStarted
    steps: dict[int, StepFinished] = field(default_factory=dict)
    metrics: dict[int, float | None] = field(default_factory=dict)
    """By the number of steps finished."""
    bans: list[Banned] = field(default_factory=list)
    gone: list[Removed | Left] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)
    finished: RunFinished | None = None

    @property
    def final_metric(self) -> float | None:
        if self.finished is not None:
            return self.finished.metric
        return self.metrics[max(self.metrics)] if self.metrics else None

    @property
    def done(self) -> int:
        """How many steps are finished."""
        return max(self.steps, default=-1) + 1

    @property
    def caught(self) -> list[Banned]:
        return [ban for ban in self.bans if ban.peer in self.started.attackers]

    @property
    def wronged(self) -> list[Banned]:
        """Bans of honest peers. There must be none."""
        return [ban for ban in self.bans if ban.peer not in self.started.attackers]

    @property
    def traffic(self) -> float | None:
        """Bytes sent over those of an all-reduce among as many peers, in which each sends all but one part, twice."""
        plain = sum(2 * (x.members - 1) * self.started.size * self.started.number_bytes for x in self.steps.values())
        return sum(x.bytes_sent for x in self.steps.values()) / plain if plain > 0 else None

    def compute_delay(self, ban: Banned) -> int | None:
        """Steps from the beginning of the attack to an attacker's ban, both included."""
        start = self.started.start
        return ban.step - start + 1 if start is not None and ban.peer in self.started.attackers else None


def tell(events: Iterable[Event]) -> Story:
    """The story of a log. What was undone by going back to a checkpoint is left out."""
    story: Story | None = None
    for event in events:
        if isinstance(event, RunStarted):
            if story is not None:
                raise LocalError("the log holds two runs; a run's events.jsonl begins with its only RunStarted")
            story = Story(event)
            continue
        if story is None:
            raise LocalError("the log does not begin with RunStarted; give the whole events.jsonl of a run")
        if isinstance(event, Resumed):
            _undo(story, event.step)
        elif isinstance(event, StepFinished):
            story.steps[event.step] = event
        elif isinstance(event, Evaluated):
            story.metrics[event.step] = event.metric
        elif isinstance(event, Banned):
            story.bans = [ban for ban in story.bans if ban.peer != event.peer] + [event]
        elif isinstance(event, Removed | Left):
            story.gone += [event] if event not in story.gone else []
        elif isinstance(event, Joined):
            story.joined += [event] if event not in story.joined else []
        elif isinstance(event, RunFinished):
            story.finished = event
    if story is None:
        raise LocalError("the log is empty; the run has not begun")
    return story


def _undo(story: Story, first: int) -> None:
    """Forget the steps from ``first`` on: they are told again. Who came and went is told again too, and counts once."""
    story.steps = {step: event for step, event in story.steps.items() if step < first}
    story.metrics = {step: metric for step, metric in story.metrics.items() if step <= first}
    if story.finished is not None and story.finished.step > first:
        story.finished = None


# ---- Sentences


def clean(text: str, limit: int = 200) -> str:
    """One line of printable text: what stands in a log may come from anybody."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def name_metric(started: RunStarted, limit: int = 24) -> str:
    """What evaluations measure, under another name than the loss of the batches."""
    name = clean(started.metric_name, limit)
    return "test loss" if name.strip().lower() == "loss" else name


def format_metric(started: RunStarted, metric: float | None) -> str:
    """An accuracy as a percentage, anything else as a number."""
    if metric is None:
        return "not a number"
    if "accuracy" in started.metric_name.lower() and 0 <= metric <= 1:
        return f"{100 * metric:.1f}%"
    return f"{metric:.4g}"


def format_peer(peer: int, key: str) -> str:
    """``peer 3 (12D3..x9Ab2C)``: the index in the run, and the ends of the id that libp2p prints."""
    peer_id = format_peer_id(bytes.fromhex(key))
    return f"peer {peer} ({peer_id[:4]}..{peer_id[-6:]})"


def format_peers(peers: Iterable[int]) -> str:
    """``peer 3``, ``peers 3, 5``, or only how many."""
    listed = sorted(peers)
    if len(listed) > _NAMED:
        return f"{len(listed)} peers"
    return f"peer{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed))}"


def format_evidence(ban: Banned) -> str:
    """What the offence rests on, with digests, how many messages more there are, and how the vote went.

    After a vote that is the first message, and the rest is the trial; a proof is two messages that do not go together.
    """
    if not ban.evidence:
        return "evidence: none in the log"
    shown = [
        (f"{clean(ban.exhibits[place])} " if place < len(ban.exhibits) else "message ") + f"[{digest[:8]}..]"
        for place, digest in enumerate(ban.evidence[: 2 if ban.votes is None else 1])
    ]
    more = len(ban.evidence) - len(shown)
    text = (
        "evidence: " + ", ".join(shown) + (f" and {more} more signed message{'s' if more > 1 else ''}" if more else "")
    )
    return text + (f", {ban.votes} of {ban.voters} votes" if ban.votes is not None and ban.voters is not None else "")


def describe_ban(ban: Banned) -> str:
    """Who, which rule, on what evidence."""
    accuser = f", accused by peer {ban.accuser}" if ban.accuser is not None else ""
    return (
        f"step {ban.step}: {format_peer(ban.peer, ban.key)} banned{accuser}, {clean(ban.rule)}: {clean(ban.reason)}; "
        f"{format_evidence(ban)}"
    )


def describe_halt(halt: Halted) -> str:
    """Why the run stands still."""
    if len(halt.silent) <= halt.allowed:
        return "messages took longer than delta"
    silent = format_peers(halt.silent)
    return f"more members are silent ({silent}) than the roster can spare ({halt.allowed})"


def describe_margin(event: MarginLost) -> str:
    """How close the run is to waiting."""
    if event.margin is None:
        return f"too few members for all validators, {event.missing} missing"
    many = {0: "no member may fall silent any more", 1: "one more member may fall silent"}
    return f"{many.get(event.margin, f'{event.margin} more members may fall silent')}, then the run waits"


def describe_floor(peers: int, byzantine: int, floor: int) -> str:
    """How many members a run can spare, and whether silent attackers can make it wait."""
    margin = peers - floor
    text = f"the run goes on while {floor} of its {peers} members can be reached: {margin or 'none'} may be away"
    if not byzantine:
        return text
    honest = margin - byzantine
    if honest >= 0:
        alone = f"while at most {honest} honest {'members are' if honest > 1 else 'member is'}" if honest else "alone"
        return f"{text}; attackers cannot halt it {alone}"
    at_floor = "one silent attacker" if not margin else "then one silent attacker"
    return f"{text}, and {at_floor} can make it wait; with {floor + byzantine} members attackers alone could not"


def describe_attack(started: RunStarted) -> str:
    """``3 of 8 peers attack from step 20``."""
    if started.attack is None or not started.byzantine:
        return f"{started.peers} {'founders' if started.clock == 'wall' else 'honest peers'}"
    verb = "attacks" if started.byzantine == 1 else "attack"
    when = f" from step {started.start}" if started.start is not None else ""
    often = f", every {started.every} steps" if started.every is not None and started.every > 1 else ""
    return f"{started.byzantine} of {started.peers} peers {verb}{when}{often}"


def describe_end(story: Story) -> str:
    """``all 3 banned by step 41, final accuracy 93.1%``."""
    started, parts = story.started, []
    if story.caught:
        last = max(ban.step for ban in story.caught)
        count = len(story.caught)
        whole = count == len(started.attackers)
        many = "it is" if len(started.attackers) == 1 else f"all {count}" if whole else f"{count}"
        parts.append(f"{many} banned by step {last}")
    elif started.attack is not None and started.byzantine:
        parts.append("none banned")
    if story.wronged:
        parts.append(f"{len(story.wronged)} honest banned")
    if story.metrics or story.finished is not None:
        when = "final" if story.finished is not None else f"after {story.done} steps"
        parts.append(f"{when} {clean(started.metric_name, 40)} {format_metric(started, story.final_metric)}")
    return ", ".join(parts) or f"{story.done} of {started.steps} steps finished"
