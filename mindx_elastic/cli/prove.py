"""``mindx-elastic prove``: does a stopped and resumed run do what the uninterrupted one does? If not, since when?"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mindx_elastic.cli.common import JsonOption, fail, make_console, make_table
from mindx_elastic.cli.progress import progress_of_runs
from mindx_elastic.cli.scripts import check_line, interruptible, script_of
from mindx_elastic.core.printable import listed, printable

if TYPE_CHECKING:
    from mindx_elastic.prove.baseline import Proof, Row

__all__ = ["prove_command"]

_STOPS = 5
_COLUMNS = ("run", "resumed from", "steps compared", "result")

_Stops = Annotated[str, typer.Option(metavar="N|all", help="At how many boundaries the run is stopped and resumed.")]
_Steps = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="M",
        help="Length of the runs; 0: until the end, at most 30 steps, a little over an epoch, or 100 quick ones. "
        "The result names the number that repeats it.",
    ),
]
_Seed = Annotated[int, typer.Option(help="Chooses the boundaries, and the rank that hears of a stop.")]
_Kill = Annotated[bool, typer.Option("--kill", help="Also kill a rank at as many boundaries, under mindx-elastic run.")]
_Fresh = Annotated[bool, typer.Option("--fresh", help="A new interpreter for each run, in place of a forked process.")]
_Timeout = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="A run without a step and without output for so long hangs.")
]
_Keep = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep logs, witnesses and checkpoints in this new folder.")
]
_Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JUnit's XML, too.")]


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What the command line asks for."""

    script: list[str]
    agent: list[str]
    """Options of ``mindx-elastic run``; empty: without the agent."""
    stops: int | None
    """None: at each boundary."""
    steps: int
    seed: int
    kill: bool
    fresh: bool
    timeout: float
    keep: Path | None

    @property
    def command(self) -> list[str]:
        """As a report names it."""
        return [*self.agent, *(["--"] if self.agent else []), *self.script]

    def repeat(self, steps: int) -> list[str]:
        """The line that makes the same runs again, on a machine of any speed. `steps`: see `Proof.repeating_steps`."""
        stops = "all" if self.stops is None else str(self.stops)
        line = ["mindx-elastic", "prove", "--stops", stops, "--steps", str(steps), "--seed", str(self.seed)]
        return [*line, *["--kill"] * self.kill, *["--fresh"] * self.fresh, *self.agent, "--", *self.script]


def prove_command(
    ctx: typer.Context,
    stops: _Stops = str(_STOPS),
    steps: _Steps = 0,
    seed: _Seed = 0,
    kill: _Kill = False,
    fresh: _Fresh = False,
    timeout: _Timeout = 300.0,
    keep: _Keep = None,
    as_json: JsonOption = False,
    junit: _Junit = None,
) -> None:
    """Run your script without a stop, then stopped and resumed; compare every step and name the first difference.

    Usage: mindx-elastic prove [OPTIONS] [OPTIONS OF mindx-elastic run] -- SCRIPT [ARGUMENTS]

    Weights, optimizer, random streams, batch, learning rates and flags of each step are compared. With options of
    `mindx-elastic run` (--nproc-per-node 2) the script runs under the agent, and each rank is compared. Checkpoints go
    to a temporary folder; what the script itself writes is named.

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
    mindx-elastic prove --nproc-per-node 2 --kill -- train.py
    mindx-elastic prove --junit prove.xml -- -m project.train
    """
    script, agent = script_of(ctx), list(ctx.args)
    number = _number_of(stops)
    check_line("prove", script, agent, junit, [name for parameter in ctx.command.params for name in parameter.opts])
    wanted = _Wanted(
        script=script,
        agent=agent,
        stops=number,
        steps=steps,
        seed=seed,
        kill=kill,
        fresh=fresh,
        timeout=timeout,
        keep=keep,
    )
    began = time.monotonic()
    with interruptible():
        proof = _prove(wanted)
    _tell(proof, wanted, time.monotonic() - began, as_json=as_json, junit=junit)
    raise typer.Exit(proof.exit_code)


def _number_of(stops: str) -> int | None:
    if stops == "all":
        return None
    if not stops.isdecimal() or int(stops) < 1:
        fail(f"--stops {stops}: give a number from 1, or all")
    return int(stops)


def _prove(wanted: _Wanted) -> Proof:
    from mindx_elastic.prove.proof import prove
    from mindx_elastic.prove.runs import Command, Runs

    with progress_of_runs() as bar:
        now = {"what": "", "step": 0}

        def show(done: int, planned: int, what: str) -> None:
            now.update(what=what, step=0)
            bar.update(completed=done, total=max(planned, done), description=what)

        def on_step(step: int) -> None:
            bar.update(description=f"{now['what']}: {step} step{'s' * (step != 1)}")

        command = Command(script=tuple(wanted.script), agent=tuple(wanted.agent) or None)
        with Runs(command, fresh=wanted.fresh, keep=wanted.keep, timeout_s=wanted.timeout, on_step=on_step) as runs:
            return prove(runs, stops=wanted.stops, steps=wanted.steps, seed=wanted.seed, kill=wanted.kill, show=show)


def _tell(proof: Proof, wanted: _Wanted, seconds: float, *, as_json: bool, junit: Path | None) -> None:
    from mindx_elastic.prove.report import to_json, to_junit

    repeat = wanted.repeat(proof.repeating_steps or wanted.steps)
    if as_json:
        typer.echo(json.dumps(to_json(proof, command=wanted.command, seconds=seconds, repeat=repeat), indent=2))
    else:
        _print(proof, wanted, seconds, repeat)
    if junit is not None:
        try:
            junit.write_text(to_junit(proof, command=wanted.command, seconds=seconds), encoding="utf-8")
        except OSError as error:
            fail(f"--junit {junit}: {error.strerror}")


def _print(proof: Proof, wanted: _Wanted, seconds: float, repeat: Sequence[str]) -> None:
    console = make_console()
    rows = [_cells(row, proof) for row in proof.rows]
    console.print(make_table(_COLUMNS, rows, left="run|result", wraps="run|result"))
    console.print()
    _print_result(console, proof, seconds)
    _print_notes(console, proof, wanted)
    if proof.repeating_steps and not wanted.steps:
        console.print(printable(f"the same runs again: {shlex.join(repeat)}"), soft_wrap=True)


def _print_result(console: Console, proof: Proof, seconds: float) -> None:
    from mindx_elastic.prove.baseline import steps_in_words
    from mindx_elastic.prove.report import describe

    first = next((row for row in proof.rows if row.verdict.outcome != "equal"), None)
    if first is None:
        ranks = f" of {proof.num_ranks} ranks" if proof.num_ranks > 1 else ""
        rest = ", the whole training" if proof.has_ended else ""
        steps = steps_in_words(proof.steps)
        console.print(f"all equal: {steps}{ranks}{rest}, in {seconds:.0f} s", style="bold green")
        if not proof.has_ended:
            console.print(f"note: the training goes on after step {proof.steps}: --steps M proves more of it")
        return
    what, *others = describe(first)
    rank = f" (rank {first.verdict.rank})" if proof.num_ranks > 1 and first.verdict.rank is not None else ""
    stopped = f"{first.name}: " if first.resumed is not None else ""
    console.print(printable(f"{stopped}{what}{rank}"), style="bold red", soft_wrap=True)
    for line in others:
        console.print(printable(f"  {line}"), soft_wrap=True)
    for line in first.verdict.lines:
        console.print(printable(f"  | {line}"), style="dim", soft_wrap=True)


def _print_notes(console: Console, proof: Proof, wanted: _Wanted) -> None:
    notes = [f"note: {note}" for note in proof.notes]
    if proof.writes:
        notes.append(f"note: the script itself has written to {listed(proof.writes, 3)}")
    if wanted.agent and not wanted.kill and len(proof.rows) > 2:
        notes.append("note: the ranks were stopped, and none was killed: --kill does that, too")
    if wanted.keep is not None:
        notes.append(f"logs and witnesses: {wanted.keep}")
    for note in notes:
        console.print(printable(note), soft_wrap=True)


def _cells(row: Row, proof: Proof) -> tuple[str, str, str, str]:
    from mindx_elastic.prove.baseline import steps_in_words

    is_first = row is proof.rows[0]
    result = row.verdict.outcome
    if result == "equal" and is_first:
        result = f"{steps_in_words(proof.steps)}{', the whole training' if proof.has_ended else ''}"
    if result == "differs" and row.verdict.step is not None:
        result = f"differs at step {row.verdict.step}"
    resumed = "" if row.resumed is None else f"step {row.resumed}"
    return row.name, resumed, "" if is_first else str(row.compared), result
