"""What the commands share: exit codes, the argument PATH, and how sizes and ages are shown.

Imports no torch: ``--help`` and ``--version`` must answer at once.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindx_elastic.core.printable import printable

if TYPE_CHECKING:
    from mindx_elastic.agent.history import AgentRun

__all__ = [
    "EXIT_BAD",
    "EXIT_CODES_HELP",
    "EXIT_GOOD",
    "EXIT_INTERNAL",
    "EXIT_NOTHING",
    "EXIT_USAGE",
    "JSON_SCHEMA",
    "RUN_DIR",
    "JsonOption",
    "PathArgument",
    "RunDirArgument",
    "agent_in_words",
    "debugging",
    "fail",
    "find_runs",
    "human_age",
    "is_folder",
    "is_running",
    "make_console",
    "moment",
    "parse_size",
    "print_table",
    "read_log",
    "say",
    "show",
    "tell_error",
    "unwrapped",
]

EXIT_GOOD, EXIT_BAD, EXIT_USAGE, EXIT_NOTHING = 0, 1, 2, 3
EXIT_CODES_HELP = (
    "0 good, 1 something is damaged or cannot be resumed, 2 wrong usage (no such path), "
    "3 no checkpoint, or no run, found, 70 an error of mindx-elastic itself"
)
EXIT_INTERNAL = 70
"""An exception that nothing expects: no verdict on any checkpoint, as 1 would be."""
JSON_SCHEMA = 1
"""Value of ``schema`` in every ``--json`` document; raised when a key changes its meaning or goes away."""

PathArgument = Annotated[
    Path,
    # readable=False: `is_folder` checks that, with one message of one line for all cases
    typer.Argument(
        metavar="PATH",
        help="A checkpoint directory, a rank folder, or one file.",
        show_default=False,
        readable=False,
    ),
]

RunDirArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN_DIR", help="The --run-dir of mindx-elastic run, or its events.jsonl.", readable=False),
]
RUN_DIR = Path("mindx-run")
"""Where `mindx-elastic run` writes if it is not told otherwise."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

_T = TypeVar("_T")
_UNITS = {"": 0, "ki": 10, "mi": 20, "gi": 30, "ti": 40}
_PIPE_WIDTH = 1000  # output that goes to a file or to grep is not wrapped; a table is only as wide as its content


def debugging() -> bool:
    """Whether errors are to show their traceback."""
    return os.environ.get("MINDX_DEBUG", "").strip() not in ("", "0")


def tell_error(message: object) -> None:
    """One line on stderr; while an exception is handled, and only with --debug, its traceback in front."""
    if debugging() and sys.exc_info()[0] is not None:
        traceback.print_exc()
    typer.echo(f"mindx-elastic: error: {printable(message)}", err=True)


def fail(message: str) -> NoReturn:
    """End with the usage exit code and one line on stderr."""
    tell_error(message)
    raise typer.Exit(EXIT_USAGE)


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder that can be listed (links to folders count); False: a file or a link to one.

    Anything else ends the command with the usage exit code.
    """
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode) or (stat.S_ISLNK(mode) and os.path.isdir(path)):
            os.listdir(path)
            return True
    except FileNotFoundError:
        fail(f"{path} does not exist")
    except OSError as error:
        fail(f"{path} cannot be looked at: {error.strerror}")
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        fail(f"{path} is neither a folder nor a file")
    return False


def read_log(path: Path, read: Callable[[Path], _T]) -> _T | None:
    """What `read` makes of the event log of a RUN_DIR, or of the log itself; None: there is no log. Ends the command
    where the path does not exist or cannot be read."""
    from mindx_elastic.core.events import EVENTS_FILE

    file = path / EVENTS_FILE if is_folder(path) else path
    try:
        return read(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror or error}")


def find_runs(path: Path) -> list[AgentRun]:
    """The runs of agents in a RUN_DIR, the oldest first; none where there is no log. See `read_log`."""
    from mindx_elastic.agent.history import load_runs

    return read_log(path, load_runs) or []


def is_running(run: AgentRun) -> bool | None:
    """None: it is another machine's, so this one cannot tell."""
    from mindx_elastic.core.posix import is_alive

    if run.ended is not None:
        return False
    if run.host and run.host != socket.gethostname():
        return None
    return run.pid is not None and is_alive(run.pid, run.started)


def agent_in_words(run: AgentRun, running: bool | None, age: str = "") -> str:
    """How the agent of a run is. `running`: as `is_running` has said. `age`: goes behind the verb."""
    name = ("agent" if run.pid is None else f"agent {run.pid}") + (f" on {run.host}" if run.host else "")
    if run.ended is not None:
        outcome = f": {run.outcome}" if run.outcome else ""
        if outcome.startswith(": failed") and run.reason:
            code = outcome.rpartition(", ")[2]  # which the reason may begin with, too
            outcome += f": {run.reason.removeprefix(f'{code}: ')}"
        return f"{name} has ended{age}{outcome}"
    if running:
        return f"{name} runs{age}"
    if running is None:
        return f"{name} has not recorded its end{age}; whether it runs can be seen on that machine only"
    more = "it was killed, or runs in another container"
    return f"{name} is gone without recording its end: {more}{age}; start the same command again to go on"


def make_console(*, stderr: bool = False) -> Console:
    """A console on today's stdout or stderr, of unlimited width where it is not a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    wide = not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit()
    return Console(file=stream, width=_PIPE_WIDTH if wide else None, highlight=False, markup=False, emoji=False)


def say(console: Console, *lines: str | Text, style: str = "") -> None:
    """Print lines, which the terminal alone may wrap. Those that are no `Text` are from others and are escaped."""
    for line in lines:
        console.print(line if isinstance(line, Text) else printable(line), style=style, soft_wrap=True)


def show(document: dict[str, Any], as_json: bool, draw: Callable[[Console, dict[str, Any]], None]) -> None:
    """Print the document itself, or what `draw` makes of it for a person: the two cannot disagree."""
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        draw(make_console(), document)


def print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, left: str) -> None:
    """A table in the style of all commands. `left`: names of columns, with | between, that are not aligned to the
    right. Cells that are no `Text` come from others and are escaped."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in left.split("|") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    console.print(table)


def parse_size(text: str) -> int:
    """The SIZE of ``--state``: ``18GiB`` (also ``18Gi``) -> bytes. A number without a unit ends the command, as one
    that is not a size: people mean GiB by it, and others bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]i)B?|B)", text.strip(), re.IGNORECASE | re.ASCII)
    size = 0 if found is None else int(float(found[1]) * (1 << _UNITS[(found[2] or "").lower()]))
    if not 0 < size < 1 << 50:
        fail(f"--state {text}: give a size with its unit: 18GiB (KiB, MiB, GiB, TiB; B for bytes)")
    return size


def human_age(seconds: float) -> str:
    """A rough duration for a table; negative ones (another machine's clock is ahead) are said to be so."""
    if seconds < -1:
        return "in future"
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    for limit, size, unit in ((6000, 60, "min"), (100 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def moment(created: float) -> str:
    """Unix seconds as a date and an age. A header may hold any number."""
    age = human_age(time.time() - created)
    try:
        date = f"{datetime.fromtimestamp(created, tz=timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"at a time that no calendar has ({created:g})"
    return f"{date}, {age}" + ("" if age == "in future" else " ago")


def unwrapped(text: str | None) -> str:
    """A docstring as help text: paragraphs on one line, so that they are wrapped at the reader's width and not at ours.

    Paragraphs that begin with a backspace character (click's mark) keep their lines.
    """
    paragraphs = cleandoc(text or "").split("\n\n")
    return "\n\n".join(p if p.startswith("\b") else " ".join(p.split("\n")) for p in paragraphs)
