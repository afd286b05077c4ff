"""The command line: it parses arguments, calls, and prints. Exit 0 fine, 1 ran and found a failure, 2 bad input.

With ``--json`` the last line of stdout is one JSON object, and everything else goes to stderr.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from phalanx import __version__
from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError

app = typer.Typer(
    help="Train one PyTorch model together with people you do not trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]


def main() -> None:
    """Run the command line; what the user or the machine got wrong is one line on stderr and exit code 2."""
    try:
        app()
    except LocalError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"phalanx: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def keygen(
    file: Annotated[Path, typer.Argument(help="Where to write the key; an existing file is never overwritten.")],
    as_json: Json = False,
) -> None:
    """Make a peer's key: an Ed25519 key in libp2p's form, readable by its owner alone."""
    identity = Identity.generate()
    identity.save(file)
    if as_json:
        _print_json({"file": str(file), "peer_id": identity.peer_id})
    else:
        print(f"{identity.peer_id}\nwritten to {file}; keep it: it is this peer's name, and cannot be made again")


@app.command()
def demo(as_json: Json = False) -> None:
    """Seven of sixteen peers cheat: watch the mean fail and CenteredClip hold."""
    from phalanx.demo import STEPS, run_demo

    result = run_demo()
    curves = (result.honest, result.clipped, result.mean)
    table = Table(title="Distance to the true parameters")
    table.add_column("step", justify="right")
    for curve in curves:
        table.add_column(curve.name, justify="right")
    for step in (0, 1, 2, 5, 10, 20, 50, STEPS):
        table.add_row(str(step), *(_format_error(curve.errors[step]) for curve in curves))
    console = Console(stderr=as_json)
    console.print(table)
    console.print(
        f"Every attacker sent its gradient times -1000. The mean follows them; CenteredClip gave no attacker more than "
        f"{100 * result.attacker_weight:.2g}% of the weight (an equal share is {100 / 16:.2g}%)."
    )
    if as_json:
        names = ("honest", "clipped", "mean")
        errors = {f"{name}_error": curve.errors[-1] for name, curve in zip(names, curves, strict=True)}
        _print_json({**errors, "attacker_weight": result.attacker_weight})


def _format_error(error: float) -> str:
    return f"{error:.3g}" if math.isfinite(error) else "overflow"


def _print_json(values: dict[str, Any]) -> None:
    """One line; a number that is not finite is null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    print(json.dumps(clean, allow_nan=False), flush=True)
