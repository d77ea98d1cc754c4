"""``mindx-elastic prove`` and ``drill``: run the user's script many times, stopped or broken, and compare the runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from typer.core import TyperCommand

from mindx_elastic.cli.common import JsonOption, fail, make_console, print_table, say, show
from mindx_elastic.core.posix import answered_by
from mindx_elastic.core.printable import counted
from mindx_elastic.drill.faults import describe_kinds, parse_fault
from mindx_elastic.errors import UsageError

if TYPE_CHECKING:
    from mindx_elastic.drill.drill import Drill
    from mindx_elastic.prove.proof import ProofReport, Row
    from mindx_elastic.prove.runs import Runs

__all__ = ["SCRIPT_SETTINGS", "ScriptCommand", "drill_command", "leave", "prove_command", "split_line"]

_Steps = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="M",
        help="Length of the runs; 0: until the end, at most 30 steps, or a little over an epoch of up to 95 batches.",
    ),
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="A new interpreter for each run, in place of a forked process.")]
_Timeout = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="A run without a step and without output for so long hangs.")
]
_Keep = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep logs, witnesses and checkpoints in this new folder.")
]

_SCHEMA = 5
"""Of the documents of ``--json``."""
SCRIPT_SETTINGS: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}
_MARK = "--mindx-script--"  # stands between the agent's options and the script


class ScriptCommand(TyperCommand):
    """Leaves alone what comes after ``--``: the script, its options and its own ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, script = split_line(args)
        ctx.meta[_MARK] = script
        return super().parse_args(ctx, own)


def split_line(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options and the agent's; the script and its arguments. Without ``--`` the script is the first word that names
    a Python file."""
    if "--" in args:
        at = list(args).index("--")
        return list(args[:at]), list(args[at + 1 :])
    for at, word in enumerate(args):
        if word.endswith(".py") and not word.startswith("-"):
            return list(args[:at]), list(args[at:])
    return list(args), []


@dataclass(frozen=True, kw_only=True)
class _ScriptOptions:
    """What the command line says besides the command's own options; checked."""

    script: list[str]
    agent: list[str]
    """Options of ``mindx-elastic run``; empty: without the agent."""
    fresh: bool
    timeout: float
    keep: Path | None

    @staticmethod
    def of(name: str, ctx: Any, **options: Any) -> _ScriptOptions:
        """The options of a `ScriptCommand`. Ends the command for what would be found out by each run, or after the last
        one."""
        asked = _ScriptOptions(script=list(ctx.meta[_MARK]), agent=list(ctx.args), **options)
        _check(name, asked.script, asked.agent)
        return asked

    def document(self, result: ProofReport | Drill, seconds: float) -> dict[str, Any]:
        """For ``--json``."""
        command = [*self.agent, *(["--"] if self.agent else []), *self.script]
        return {"schema": _SCHEMA, "command": command, "seconds": round(seconds, 1), **result.document}

    @contextmanager
    def runs(self) -> Iterator[tuple[Runs, Callable[[int, int, str], None]]]:
        """What makes the runs, and what shows how far they are. SIGTERM ends them and removes their folders, as Ctrl-C
        does."""
        from mindx_elastic.prove.runs import Command, Runs

        command = Command(script=tuple(self.script), agent=tuple(self.agent) or None)
        made = Runs(command, fresh=self.fresh, keep=self.keep, timeout_s=self.timeout)
        with answered_by(leave, (signal.SIGTERM, signal.SIGHUP)), _progress_of_runs() as show, made as runs:
            yield runs, show

    def print_notes(self, console: Console, notes: Sequence[str]) -> None:
        lines = [f"note: {note}" for note in notes]
        lines += [f"logs and witnesses: {self.keep}"] if self.keep is not None else []
        say(console, *lines)


def leave(signum: int, frame: object) -> NoReturn:
    """A signal ends the command, which removes its folders."""
    raise SystemExit(128 + signum)


def _print_difference(console: Console, proof: ProofReport) -> bool:
    """What is wrong with the first run that is not equal. False: all are."""
    from mindx_elastic.prove.causes import in_words

    row = proof.verdict
    if row.explained is None:
        return False
    what, *others = row.explained.lines
    if not row.explained.variables and (lost := in_words(proof.lost)):
        what += f"; not got back in other runs: {lost}"
    rank = f" (rank {row.rank})" if proof.num_ranks > 1 and row.rank is not None else ""
    stopped = f"{row.name}: " if row.resumed is not None else ""
    say(console, f"{stopped}{what}{rank}", style="bold red")
    say(console, *(f"  {line}" for line in others))
    say(console, *(f"  | {line}" for line in row.lines), style="dim")
    return True


def _proof_in_words(proof: ProofReport) -> str:
    """``12 steps of 2 ranks, the whole training``."""
    ranks = f" of {counted(proof.num_ranks, 'rank')}" if proof.num_ranks > 1 else ""
    return f"{counted(proof.steps, 'step')}{ranks}{', the whole training' if proof.has_ended else ''}"


def _check(command: str, script: Sequence[str], agent: Sequence[str]) -> None:
    if not script:
        fail(f'name the script after "--": mindx-elastic {command} -- train.py')
    if script[0] != "-m" and not os.path.isfile(script[0]):
        fail(f"{script[0]}: no such file")
    if agent and not agent[0].startswith("-"):
        fail(f'{agent[0]} is not an option; the script comes after "--"')
    if agent:
        from mindx_elastic.agent.options import check_options

        try:
            check_options(agent)
        except UsageError as error:
            more = f"; neither of {command} nor of mindx-elastic run" if "no such" in str(error) else ""
            fail(f"{error}{more}")


@contextmanager
def _progress_of_runs() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, gone when the work is done. Gives the function that is told how many runs are done, how many
    there will be, and which one is under way."""
    # Only on a terminal, of which the system is asked: rich takes variables like FORCE_COLOR, which CI services set,
    # for one.
    is_hidden = not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown")
    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True, disable=is_hidden) as progress:
        task = progress.add_task("begins", total=None)

        def show(done: int, planned: int, what: str) -> None:
            total = max(planned, done)
            progress.update(task, completed=done, total=total, description=f"{what}: run {done} of {total}")

        yield show


# --- prove ---

_STOPS = 5
_PROOF_COLUMNS = ("run", "resumed from", "steps compared", "result")

_Stops = Annotated[str, typer.Option(metavar="N|all", help="At how many boundaries the run is stopped and resumed.")]
_ProofSeed = Annotated[int, typer.Option(help="Chooses the boundaries, and the rank that hears of a stop.")]


def prove_command(
    ctx: typer.Context,
    stops: _Stops = str(_STOPS),
    steps: _Steps = 0,
    seed: _ProofSeed = 0,
    fresh: _Fresh = False,
    timeout: _Timeout = 300.0,
    keep: _Keep = None,
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
    asked = _ScriptOptions.of("prove", ctx, fresh=fresh, timeout=timeout, keep=keep)
    began = time.monotonic()
    from mindx_elastic.prove.proof import prove

    with asked.runs() as (runs, show_runs):
        proof = prove(runs, stops=number, steps=steps, seed=seed, show=show_runs)
    seconds = time.monotonic() - began
    show(asked.document(proof, seconds), as_json, lambda console, _: _print_proof(console, proof, asked, seconds))
    raise typer.Exit(proof.exit_code)


def _number_of(stops: str) -> int | None:
    if stops == "all":
        return None
    if not stops.isdecimal() or int(stops) < 1:
        fail(f"--stops {stops}: give a number from 1, or all")
    return int(stops)


def _print_proof(console: Console, proof: ProofReport, asked: _ScriptOptions, seconds: float) -> None:
    rows = [_proof_cells(row, proof) for row in proof.rows]
    print_table(console, _PROOF_COLUMNS, rows, left="run|result")
    console.print()
    if not _print_difference(console, proof):
        _print_equal(console, proof, seconds)
    asked.print_notes(console, proof.notes)


def _print_equal(console: Console, proof: ProofReport, seconds: float) -> None:
    from mindx_elastic.prove.causes import NOT_GOT_BACK, in_words

    made = f"{_proof_in_words(proof)}, in {seconds:.0f} s"
    if lost := in_words(proof.lost):
        say(console, f"every step equal: {made}; not got back: {lost}", style="bold")
        say(console, f"  {NOT_GOT_BACK}")
    else:
        say(console, f"all equal: {made}", style="bold green")
    if not proof.has_ended:
        say(console, f"note: the training goes on after step {proof.steps}: --steps M proves more of it")


def _proof_cells(row: Row, proof: ProofReport) -> tuple[str, str, str, str]:
    is_first, result = row is proof.rows[0], row.outcome
    if row.lost:
        result = f"equal; {counted(len(row.lost), 'variable')} not got back"
    elif result == "equal" and is_first:
        result = f"{counted(proof.steps, 'step')}{', the whole training' if proof.has_ended else ''}"
    elif result == "differs" and row.step is not None:
        result = f"differs at step {row.step}"
    resumed = "" if row.resumed is None else f"step {row.resumed}"
    return row.name, resumed, "" if is_first else str(row.compared), result


# --- drill ---

_Faults = Annotated[
    list[str] | None,
    typer.Option("--fault", metavar="KIND:KEY=VALUE,...", help="A fault, as often as wanted; --list names all."),
]
_Random = Annotated[int, typer.Option("--random", min=0, metavar="N", help="N faults, drawn by --seed.")]
_DrillSeed = Annotated[int, typer.Option(help="Draws the faults of --random: kind, rank, step and place.")]
_List = Annotated[bool, typer.Option("--list", help="List the faults, with one line each, and exit.")]


def drill_command(
    ctx: typer.Context,
    fault: _Faults = None,
    random: _Random = 0,
    seed: _DrillSeed = 0,
    steps: _Steps = 0,
    fresh: _Fresh = False,
    timeout: _Timeout = 300.0,
    keep: _Keep = None,
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
    1  a fault did not happen; a job differs or failed
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
        for name, says in describe_kinds():
            typer.echo(f"{name}\n    {says}")
        return
    began = time.monotonic()
    faults = [parse_fault(text) for text in fault or []]
    asked = _ScriptOptions.of("drill", ctx, fresh=fresh, timeout=timeout, keep=keep)
    if not faults and not random:
        fail("name a fault (--fault kill:step=7), or a number of them (--random 20); --list names all")
    for each in faults:
        if each.about.agent and not asked.agent:
            fail(f"--fault {each}: only under mindx-elastic run; give one of its options, such as --nproc-per-node 1")
    from mindx_elastic.drill.drill import Drill, Driller

    drill, interrupted = Drill(), None
    try:
        with asked.runs() as (runs, show_runs):
            drawn: dict[str, Any] = {"number": random, "seed": seed, "steps": steps}
            Driller(runs, faults=faults, show=show_runs, into=drill, **drawn).drill()
    except (KeyboardInterrupt, SystemExit) as error:
        if not drill.results:
            raise
        interrupted = error
        drill.notes.append(f"interrupted: {len(drill.results)} faults were made, and no others")
    seconds = time.monotonic() - began
    show(asked.document(drill, seconds), as_json, lambda console, _: _print_drill(console, drill, asked, seconds))
    if interrupted is not None:
        raise interrupted
    raise typer.Exit(drill.exit_code)


def _print_drill(console: Console, drill: Drill, asked: _ScriptOptions, seconds: float) -> None:
    from mindx_elastic.drill.drill import COLUMNS, GOOD, cells, summary

    if _print_difference(console, drill.proof):
        return
    rows = [cells(result) for result in drill.results]
    print_table(console, COLUMNS, rows, left="fault|result")
    console.print()
    for result in drill.results:
        if result.explained is not None:
            said = result.explained.lines
            is_good = result.outcome in GOOD
            say(console, f"{result.fault}: {said[0]}", style="" if is_good else "bold red")
            say(console, *(f"  {line}" for line in said[1:]), *(f"  | {line}" for line in result.lines))
    style = "bold green" if drill.exit_code == 0 else "bold red"
    say(console, f"{summary(drill)}; {_proof_in_words(drill.proof)}, in {seconds:.0f} s", style=style)
    asked.print_notes(console, [*drill.proof.notes, *drill.notes])
