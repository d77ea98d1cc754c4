"""What the commands share that run the user's script many times: ``mindx-elastic prove`` and ``drill``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

from typer.core import TyperCommand

from mindx_elastic.cli.common import fail
from mindx_elastic.errors import UsageError

__all__ = ["SCRIPT_SETTINGS", "ScriptCommand", "check_line", "interruptible", "script_of", "split_line"]

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


def script_of(ctx: Any) -> list[str]:
    """The script and its arguments, of a `ScriptCommand`."""
    return list(ctx.meta[_MARK])


def check_line(
    command: str, script: Sequence[str], agent: Sequence[str], junit: Path | None, own: Sequence[str]
) -> None:
    """Refuse at once what would otherwise be found out by each run, or after the last one."""
    if not script:
        fail(f'name the script behind "--": mindx-elastic {command} -- train.py')
    if script[0] == "-m" and len(script) < 2:
        fail("-m needs the name of a module")
    if script[0] == "-m" and PathFinder.find_spec(script[1].partition(".")[0], [os.getcwd(), *sys.path]) is None:
        fail(f"-m {script[1]}: no such module")
    if script[0] != "-m" and not os.path.isfile(script[0]):
        fail(f"{script[0]}: no such file")
    if agent and not agent[0].startswith("-"):
        fail(f'{agent[0]} is no option; the script comes behind "--"')
    if agent:
        _check_agent(command, agent, own)
    if junit is not None and (junit.is_dir() or not os.access(junit.absolute().parent, os.W_OK | os.X_OK)):
        fail(f"--junit {junit}: no file can be written there")


def _check_agent(command: str, agent: Sequence[str], own: Sequence[str]) -> None:
    """`own`: the names of our options, one of which may have been meant."""
    from mindx_elastic.agent.options import check_options

    try:
        check_options(agent)
    except UsageError as error:
        near = get_close_matches(agent[0].partition("=")[0], own, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        fail(f"{error}; neither of {command} nor of mindx-elastic run{hint}" if "no such" in str(error) else str(error))


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the runs and removes their folders, as Ctrl-C does."""

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
