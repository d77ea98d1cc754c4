"""What the commands share that run the user's script many times: ``mindx-elastic prove`` and ``drill``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from typer.core import TyperCommand

from mindx_elastic.cli.common import fail, make_console, say
from mindx_elastic.core.posix import answered_by
from mindx_elastic.core.printable import counted
from mindx_elastic.errors import UsageError

if TYPE_CHECKING:
    from mindx_elastic.prove.proof import ProofReport
    from mindx_elastic.prove.runs import Runs

__all__ = [
    "SCRIPT_SETTINGS",
    "FreshOption",
    "KeepOption",
    "ScriptCommand",
    "ScriptOptions",
    "StepsOption",
    "TimeoutOption",
    "print_difference",
    "proof_in_words",
    "split_line",
]

StepsOption = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="M",
        help="Length of the runs; 0: until the end, at most 30 steps, or a little over an epoch of up to 95 batches.",
    ),
]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="A new interpreter for each run, in place of a forked process.")
]
TimeoutOption = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="A run without a step and without output for so long hangs.")
]
KeepOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep logs, witnesses and checkpoints in this new folder.")
]

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
class ScriptOptions:
    """What the command line says besides the command's own options; checked."""

    script: list[str]
    agent: list[str]
    """Options of ``mindx-elastic run``; empty: without the agent."""
    fresh: bool
    timeout: float
    keep: Path | None

    @staticmethod
    def of(name: str, ctx: Any, **options: Any) -> ScriptOptions:
        """The options of a `ScriptCommand`. Ends the command for what would be found out by each run, or after the last
        one."""
        asked = ScriptOptions(script=list(ctx.meta[_MARK]), agent=list(ctx.args), **options)
        _check(name, asked.script, asked.agent)
        return asked

    @property
    def words(self) -> list[str]:
        """As a report names it."""
        return [*self.agent, *(["--"] if self.agent else []), *self.script]

    @contextmanager
    def runs(self, **more: Any) -> Iterator[tuple[Runs, Callable[[int, int, str], None]]]:
        """What makes the runs, with `more` options of it; and what shows how far they are. SIGTERM ends them and
        removes their folders, as Ctrl-C does."""
        from mindx_elastic.prove.runs import Command, Runs

        command = Command(script=tuple(self.script), agent=tuple(self.agent) or None)
        made = Runs(command, fresh=self.fresh, keep=self.keep, timeout_s=self.timeout, **more)
        with answered_by(_leave, (signal.SIGTERM, signal.SIGHUP)), _progress_of_runs() as show, made as runs:
            yield runs, show

    def print_notes(self, console: Console, notes: Sequence[str]) -> None:
        lines = [f"note: {note}" for note in notes]
        lines += [f"logs and witnesses: {self.keep}"] if self.keep is not None else []
        say(console, *lines)


def _leave(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def print_difference(console: Console, proof: ProofReport) -> bool:
    """What is wrong with the first run that is not equal. False: all are."""
    from mindx_elastic.prove.causes import in_words

    row = next((row for row in proof.rows if row.outcome != "equal"), None)
    if row is None:
        return False
    assert row.explained is not None
    what, *others = row.explained.lines
    if not row.explained.variables and (lost := in_words(proof.lost)):
        what += f"; not got back in other runs: {lost}"
    rank = f" (rank {row.rank})" if proof.num_ranks > 1 and row.rank is not None else ""
    stopped = f"{row.name}: " if row.resumed is not None else ""
    say(console, f"{stopped}{what}{rank}", style="bold red")
    say(console, *(f"  {line}" for line in others))
    say(console, *(f"  | {line}" for line in row.lines), style="dim")
    return True


def proof_in_words(proof: ProofReport) -> str:
    """``12 steps of 2 ranks, the whole training``."""
    ranks = f" of {counted(proof.num_ranks, 'rank')}" if proof.num_ranks > 1 else ""
    return f"{counted(proof.steps, 'step')}{ranks}{', the whole training' if proof.has_ended else ''}"


def _check(command: str, script: Sequence[str], agent: Sequence[str]) -> None:
    if not script:
        fail(f'name the script after "--": mindx-elastic {command} -- train.py')
    if script[0] == "-m" and len(script) < 2:
        fail("-m needs the name of a module")
    if script[0] == "-m" and PathFinder.find_spec(script[1].partition(".")[0], [os.getcwd(), *sys.path]) is None:
        fail(f"-m {script[1]}: no such module")
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
