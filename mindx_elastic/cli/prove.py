"""``mindx-elastic prove``: does a stopped and resumed run do what the uninterrupted one does? If not, since when?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mindx_elastic.cli.common import JsonOption, fail, print_table, say, show
from mindx_elastic.cli.scripts import (
    FreshOption,
    KeepOption,
    ScriptOptions,
    StepsOption,
    TimeoutOption,
    print_difference,
    proof_in_words,
)
from mindx_elastic.core.printable import counted

if TYPE_CHECKING:
    from mindx_elastic.prove.proof import ProofReport, Row

__all__ = ["prove_command"]

_STOPS = 5
_COLUMNS = ("run", "resumed from", "steps compared", "result")

_Stops = Annotated[str, typer.Option(metavar="N|all", help="At how many boundaries the run is stopped and resumed.")]
_Seed = Annotated[int, typer.Option(help="Chooses the boundaries, and the rank that hears of a stop.")]


def prove_command(
    ctx: typer.Context,
    stops: _Stops = str(_STOPS),
    steps: StepsOption = 0,
    seed: _Seed = 0,
    fresh: FreshOption = False,
    timeout: TimeoutOption = 300.0,
    keep: KeepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run your script without a stop, then stopped and resumed; compare every step and name the first difference.

    Usage: mindx-elastic prove [OPTIONS] [OPTIONS OF mindx-elastic run] -- SCRIPT [ARGUMENTS]

    Weights, optimizer, random streams, batch, learning rates and flags of each step are compared. With options of
    `mindx-elastic run` (--nproc-per-node 2) the script runs under the agent, and each rank is compared. Checkpoints go
    to a temporary folder; files that the script writes by itself are written by each run.

    \b
    [bold]Exit code[/bold]
    0  every step of every run is equal
    1  a resumed run differs, never resumed, failed, or is refused
    2  wrong usage
    3  the script itself is not deterministic: two runs without a stop differ
    4  nothing could be compared: the script fails, is refused, has no guard, or makes too few steps for a stop
    130, 143  interrupted

    \b
    [bold]Examples[/bold]
    mindx-elastic prove -- train.py --epochs 2
    mindx-elastic prove --stops all --steps 12 -- train.py
    mindx-elastic prove --nproc-per-node 2 -- train.py
    mindx-elastic prove --json -- -m project.train
    """
    number = _number_of(stops)
    asked = ScriptOptions.of("prove", ctx, fresh=fresh, timeout=timeout, keep=keep)
    began = time.monotonic()
    from mindx_elastic.prove.proof import prove, to_json

    with asked.runs() as (runs, show_runs):
        proof = prove(runs, stops=number, steps=steps, seed=seed, show=show_runs)
    seconds = time.monotonic() - began
    document = to_json(proof, command=asked.words, seconds=seconds)
    show(document, as_json, lambda console, _: _print(console, proof, asked, seconds))
    raise typer.Exit(proof.exit_code)


def _number_of(stops: str) -> int | None:
    if stops == "all":
        return None
    if not stops.isdecimal() or int(stops) < 1:
        fail(f"--stops {stops}: give a number from 1, or all")
    return int(stops)


def _print(console: Console, proof: ProofReport, asked: ScriptOptions, seconds: float) -> None:
    rows = [_cells(row, proof) for row in proof.rows]
    print_table(console, _COLUMNS, rows, left="run|result", wraps="run|result")
    console.print()
    if not print_difference(console, proof):
        _print_equal(console, proof, seconds)
    asked.print_notes(console, proof.notes)


def _print_equal(console: Console, proof: ProofReport, seconds: float) -> None:
    from mindx_elastic.prove.causes import NOT_GOT_BACK, in_words

    made = f"{proof_in_words(proof)}, in {seconds:.0f} s"
    if lost := in_words(proof.lost):
        say(console, f"every step equal: {made}; not got back: {lost}", style="bold")
        say(console, f"  {NOT_GOT_BACK}")
    else:
        say(console, f"all equal: {made}", style="bold green")
    if not proof.has_ended:
        say(console, f"note: the training goes on after step {proof.steps}: --steps M proves more of it")


def _cells(row: Row, proof: ProofReport) -> tuple[str, str, str, str]:
    is_first, result = row is proof.rows[0], row.outcome
    if row.lost:
        result = f"equal; {counted(len(row.lost), 'variable')} not got back"
    elif result == "equal" and is_first:
        result = f"{counted(proof.steps, 'step')}{', the whole training' if proof.has_ended else ''}"
    elif result == "differs" and row.step is not None:
        result = f"differs at step {row.step}"
    resumed = "" if row.resumed is None else f"step {row.resumed}"
    return row.name, resumed, "" if is_first else str(row.compared), result
