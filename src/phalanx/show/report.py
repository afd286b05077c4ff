"""A run as one HTML file that stands alone: no scripts, nothing fetched from elsewhere, all text escaped."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from phalanx.core.crypto import format_peer_id
from phalanx.events import Banned, Event, explain_rule
from phalanx.show.plots import DARK, LIGHT, Theme, plot_duel, plot_run
from phalanx.show.story import Story, clean, describe_attack, describe_end, format_metric, tell

_MOST_DIGESTS = 64  # of one ban; the log has all

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --faint: #666; --line: #ddd; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e8e8e8; --faint: #a0a6af; --line: #363a42; --bad: #ff8a80; }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2rem; }
img { width: 100%; height: auto; } figure { margin: 1rem 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); }
td.number { font-variant-numeric: tabular-nums; } .faint { color: var(--faint); } .bad { color: var(--bad); }
code, pre { font: .85em/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { border: 1px solid var(--line); border-radius: .4rem; padding: .7rem; white-space: pre-wrap; }
details code { display: block; }
"""


def write_report(
    path: Path,
    events: Iterable[Event],
    *,
    unprotected: Iterable[Event] | None = None,
    command: str | None = None,
    log: str = "events.jsonl",
    head: str | None = None,
) -> None:
    """Write the report of a run, and with ``unprotected`` of the same attack on a run without protection.

    ``command`` is what makes the run again; ``log`` where its events are, as the reader finds them; ``head`` the hash
    of the log's last line.
    """
    events = list(events)
    bare = list(unprotected) if unprotected is not None else None
    story = tell(events)
    other = tell(bare) if bare is not None else None
    headline = f"{describe_attack(story.started)}: {describe_end(story)}"
    sections = [
        f"<h1>{_text(headline)}</h1>",
        _tell_what_ran(story, other),
        _show_picture(events, bare, headline),
        "<h2>Bans</h2>",
        _list_bans(story),
        "<h2>Numbers</h2>",
        _list_numbers(story, other),
        "<h2>Make it again</h2>",
        f"<pre>{_text(command or _guess_command(story), 2000)}</pre>",
        "<p>The same seed, options and software give the same states and the same log, byte for byte. Options that the "
        "log does not hold are in the run's manifest.</p>",
        "<h2>Check it</h2>",
        _tell_how_to_check(story, log, head),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<title>{_text(headline)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _text(value: object, limit: int = 400) -> str:
    return escape(clean(str(value), limit))


def _tell_what_ran(story: Story, other: Story | None) -> str:
    started = story.started
    text = (
        f"Task <b>{_text(started.task)}</b>, {started.size:,} parameters, {started.peers} peers, "
        f"{started.validators} validator{'s' if started.validators != 1 else ''} a step, seed {started.seed}, "
        f"{story.done} of {started.steps} steps. Defense: <b>{_text(started.defense)}</b>."
    )
    if started.attack is not None and started.byzantine:
        who = ", ".join(map(str, started.attackers))
        text += f" Attack: <b>{_text(started.attack)}</b>, by peers {_text(who)}."
    if other is not None:
        text += f" The other curve is the same attack with the defense <b>{_text(other.started.defense)}</b>."
    software = ", ".join(f"{name} {version}" for name, version in started.software.items())
    return f'<p>{text}</p>\n<p class="faint">Run <code>{_text(started.run)}</code>. {_text(software)}</p>'


def _show_picture(events: Sequence[Event], bare: Sequence[Event] | None, alt: str) -> str:
    light, dark = (_draw(events, bare, theme) for theme in (LIGHT, DARK))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{_text(alt)}"></picture></figure>'
    )


def _draw(events: Sequence[Event], bare: Sequence[Event] | None, theme: Theme) -> str:
    file = io.BytesIO()
    if bare is not None:
        plot_duel(bare, events, file, theme)
    else:
        plot_run(events, file, theme)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _list_bans(story: Story) -> str:
    if not story.bans:
        return "<p>Nobody was banned.</p>"
    rows = "\n".join(_list_ban(story, ban) for ban in story.bans)
    rules = sorted({ban.rule for ban in story.bans})
    legend = "; ".join(f"<b>{_text(rule)}</b>: {_text(explain_rule(rule))}" for rule in rules if explain_rule(rule))
    return (
        '<div class="wide"><table>\n<tr><th>who</th><th>rule</th><th>attacked at</th><th>banned at</th>'
        "<th>steps to ban</th><th>why, and on what evidence</th></tr>\n"
        f'{rows}\n</table></div>\n<p class="faint">{legend}</p>\n'
        '<p class="faint">Attacked at: the step that the evidence is about. Steps to ban: since the attack began.</p>'
    )


def _list_ban(story: Story, ban: Banned) -> str:
    delay = story.compute_delay(ban)
    honest = "" if ban.peer in story.started.attackers else ' <b class="bad">honest</b>'
    accuser = f" Accused by peer {ban.accuser}." if ban.accuser is not None else ""
    votes = f" {ban.votes} of {ban.voters} votes." if ban.votes is not None and ban.voters is not None else ""
    digests = "".join(
        f"<code>{_text(digest)}{' ' + _text(ban.exhibits[k]) if k < len(ban.exhibits) else ''}</code>"
        for k, digest in enumerate(ban.evidence[:_MOST_DIGESTS])
    )
    more = len(ban.evidence) - _MOST_DIGESTS
    digests += f"and {more} more, in the log" if more > 0 else ""
    peer_id = _text(format_peer_id(bytes.fromhex(ban.key)))
    cells = [
        f'<td>peer {ban.peer}{honest}<br><code class="faint">{peer_id}</code></td>',
        f"<td>{_text(ban.rule)}</td>",
        f'<td class="number">{ban.offence_step}</td>',
        f'<td class="number">{ban.step}</td>',
        f'<td class="number">{delay if delay is not None else "-"}</td>',
        f"<td>{_text(ban.reason)}.{accuser}{votes}"
        f"<details><summary>{len(ban.evidence)} signed messages</summary>{digests}</details></td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _list_numbers(story: Story, other: Story | None) -> str:
    started = story.started
    wronged = len(story.wronged)
    rows = [(f"final {started.metric_name}", format_metric(started, story.final_metric), "")]
    if other is not None:
        rows.append((f"the same, {other.started.defense}", format_metric(other.started, other.final_metric), ""))
    rows += [
        ("attackers banned", f"{len(story.caught)} of {len(started.attackers)}", ""),
        ("honest peers banned", str(wronged), "bad" if wronged else ""),
        ("removed without stigma, or left", str(len(story.gone)), ""),
    ]
    traffic = story.traffic
    if traffic is not None:
        rows.append(("bytes sent, over those of a plain all-reduce", f"{traffic:.4g}", ""))
    seconds = sum(event.seconds or 0 for event in story.steps.values())
    rows.append((f"seconds ({started.clock} time)", f"{seconds:.4g}", ""))
    cells = "\n".join(
        f'<tr><td>{_text(name)}</td><td class="number {style}">{_text(value)}</td></tr>' for name, value, style in rows
    )
    return f"<table>\n{cells}\n</table>"


def _guess_command(story: Story) -> str:
    """What would run this again, as far as the log tells."""
    started = story.started
    options = {
        "task": started.task,
        "peers": started.peers,
        "steps": started.steps,
        "validators": started.validators,
        "seed": started.seed,
        "defense": started.defense,
    }
    if started.attack is not None and started.byzantine:
        attack = {"byzantine": started.byzantine, "attack": started.attack}
        options |= attack | {"start": started.start, "every": started.every}
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return f"phalanx simulate {' '.join(words)} --out DIR"


def _tell_how_to_check(story: Story, log: str, head: str | None) -> str:
    end = f" Its last line has the hash <code>{_text(head)}</code>." if head is not None else ""
    state = f" The final state is <code>{_text(story.finished.state)}</code>." if story.finished is not None else ""
    arguments = f"Path({log!r})" + (f", head={head!r}" if head is not None else "")
    read = f"from pathlib import Path\nfrom phalanx.events import read_events\n\nread_events({arguments})"
    lines = "\n".join(_text(line) for line in read.split("\n"))
    return (
        f"<p>Everything here comes from <code>{_text(log)}</code>, in which every line names the hash of the one "
        f"before. This raises an error, with the line, if the chain is broken:</p>\n<pre>{lines}</pre>\n"
        f"<p>Run it again with the command above, and compare the logs.{end}{state}</p>"
    )
