"""``mindx-elastic drill``: breaks a script in named ways. Does it go on, since which step, and is it still the same?"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

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
from mindx_elastic.drill.faults import describe_kinds, parse_fault

if TYPE_CHECKING:
    from mindx_elastic.drill.drill import Drill

__all__ = ["drill_command"]

_Faults = Annotated[
    list[str] | None,
    typer.Option("--fault", metavar="KIND:KEY=VALUE,...", help="A fault, as often as wanted; --list names all."),
]
_Random = Annotated[int, typer.Option("--random", min=0, metavar="N", help="N faults, drawn by --seed.")]
_Seed = Annotated[int, typer.Option(help="Draws the faults of --random: kind, rank, step and place.")]
_List = Annotated[bool, typer.Option("--list", help="List the faults, with one line each, and exit.")]


def drill_command(
    ctx: typer.Context,
    fault: _Faults = None,
    random: _Random = 0,
    seed: _Seed = 0,
    steps: StepsOption = 0,
    fresh: FreshOption = False,
    timeout: TimeoutOption = 300.0,
    keep: KeepOption = None,
    list_faults: _List = False,
    as_json: JsonOption = False,
) -> None:
    """Break your script in named ways; say what was lost, how long it took to go on, and whether it is still the same.

    Usage: mindx-elastic drill [OPTIONS] [OPTIONS OF mindx-elastic run] -- SCRIPT [ARGUMENTS]

    Each fault is a separate job, started again with the same command until it has ended. Every step of all
    its processes is compared with the uninterrupted run, as by `mindx-elastic prove`. With options of
    `mindx-elastic run` (--nproc-per-node 2 --recover in-place) the script runs under the agent.

    \b
    [bold]Exit code[/bold]
    0  every fault has happened, and every job was exact, or inexact as its own resume said
    1  a fault did not happen; a job differs, failed, lost steps that can be kept, or left something after
    2  wrong usage: no such fault, rank or step
    3  the script itself is not deterministic: two runs without a fault differ
    4  nothing could be compared: the script fails without a fault, is refused, or has no guard
    130, 143  interrupted

    \b
    [bold]Examples[/bold]
    mindx-elastic drill --list
    mindx-elastic drill --fault kill:step=7,at=update --fault exception:step=3 -- train.py
    mindx-elastic drill --random 50 --seed 1 --nproc-per-node 2 --recover in-place -- train.py
    """
    if list_faults:
        _print_kinds(as_json)
        return
    began = time.monotonic()
    faults = [parse_fault(text) for text in fault or []]
    asked = ScriptOptions.of("drill", ctx, fresh=fresh, timeout=timeout, keep=keep)
    if not faults and not random:
        fail("name a fault (--fault kill:step=7), or a number of them (--random 20); --list names all")
    for each in faults:
        if each.about.agent and not asked.agent:
            fail(f"--fault {each}: only under mindx-elastic run; give one of its options, such as --nproc-per-node 1")
    from mindx_elastic.drill.drill import Drill, Driller, to_json
    from mindx_elastic.drill.outside import DrillLeftovers

    drill, interrupted, leftovers = Drill(), None, DrillLeftovers()
    try:
        with asked.runs(on_end=leftovers.after_run) as (runs, show_runs):
            leftovers.known |= runs.own_processes
            drawn: dict[str, Any] = {"number": random, "seed": seed, "steps": steps}
            Driller(runs, leftovers, faults=faults, show=show_runs, into=drill, **drawn).drill()
    except (KeyboardInterrupt, SystemExit) as error:
        if not drill.results:
            raise
        interrupted = error
        drill.notes.append(f"interrupted: {len(drill.results)} faults were made, and no others")
    seconds = time.monotonic() - began
    document = to_json(drill, command=asked.words, seconds=seconds)
    show(document, as_json, lambda console, _: _print(console, drill, asked, seconds))
    if interrupted is not None:
        raise interrupted
    raise typer.Exit(drill.exit_code)


def _print_kinds(as_json: bool) -> None:
    rows = describe_kinds()
    if as_json:
        typer.echo(json.dumps([{"fault": name, "says": says} for name, says in rows], indent=2))
        return
    for name, says in rows:
        typer.echo(f"{name}\n    {says}")


def _print(console: Console, drill: Drill, asked: ScriptOptions, seconds: float) -> None:
    from mindx_elastic.drill.drill import COLUMNS, GOOD, cells, summary

    if print_difference(console, drill.proof):
        return
    rows = [cells(result) for result in drill.results]
    print_table(console, COLUMNS, rows, left="fault|result", wraps="fault|result")
    console.print()
    for result in drill.results:
        if result.explained is not None:
            said = result.explained.lines
            is_good = result.outcome in GOOD
            say(console, f"{result.fault}: {said[0]}", style="" if is_good else "bold red")
            say(console, *(f"  {line}" for line in said[1:]), *(f"  | {line}" for line in result.lines))
    style = "bold green" if drill.exit_code == 0 else "bold red"
    say(console, f"{summary(drill)}; {proof_in_words(drill.proof)}, in {seconds:.0f} s", style=style)
    asked.print_notes(console, [*drill.proof.notes, *drill.notes])
