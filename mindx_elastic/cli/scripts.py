"""What the commands share that run the user's script many times: ``mindx-elastic prove`` and ``drill``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperCommand

from mindx_elastic.cli.common import fail, say
from mindx_elastic.core.posix import answered_by
from mindx_elastic.errors import UsageError

if TYPE_CHECKING:
    from mindx_elastic.prove.runs import Command

__all__ = [
    "SCRIPT_SETTINGS",
    "FreshOption",
    "KeepOption",
    "ScriptCommand",
    "ScriptOptions",
    "StepsOption",
    "TimeoutOption",
    "interruptible",
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
    steps: int
    fresh: bool
    timeout: float
    keep: Path | None
    as_json: bool

    @staticmethod
    def of(name: str, ctx: Any, **options: Any) -> ScriptOptions:
        """The options of a `ScriptCommand`. Ends the command for what would be found out by each run, or after the last
        one."""
        asked = ScriptOptions(script=list(ctx.meta[_MARK]), agent=list(ctx.args), **options)
        _check(name, asked.script, asked.agent)
        return asked

    @property
    def command(self) -> Command:
        from mindx_elastic.prove.runs import Command

        return Command(script=tuple(self.script), agent=tuple(self.agent) or None)

    @property
    def words(self) -> list[str]:
        """As a report names it."""
        return [*self.agent, *(["--"] if self.agent else []), *self.script]

    def print_notes(self, console: Console, notes: Sequence[str]) -> None:
        lines = [f"note: {note}" for note in notes]
        lines += [f"logs and witnesses: {self.keep}"] if self.keep is not None else []
        say(console, *lines)


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
def interruptible() -> Iterator[None]:
    """SIGTERM ends the runs and removes their folders, as Ctrl-C does."""

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    with answered_by(leave, (signal.SIGTERM, signal.SIGHUP)):
        yield
