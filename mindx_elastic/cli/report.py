"""``mindx-elastic report``: a run as one page to look at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mindx_elastic.cli.common import (
    EXIT_NOTHING,
    RUN_DIR,
    RunDirArgument,
    fail,
    read_log,
)
from mindx_elastic.core.printable import counted, human_size, printable

__all__ = ["report_command"]


def report_command(
    path: RunDirArgument = RUN_DIR,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write; replaced where it exists.")
    ] = Path("report.html"),
) -> None:
    """Write a run as one page: where the time went, each rank over time with faults, saves and recoveries, and
    every attempt.

    The page needs no network, runs no script, follows the browser's light or dark, and prints. Of several runs in one
    log the newest is shown. Lines of the logs that are torn are counted and left out.

    \b
    [bold]Exit code[/bold]
    0  the page was written
    2  wrong usage: no such RUN_DIR, or FILE cannot be written
    3  no agent has run there

    \b
    [bold]Examples[/bold]
    mindx-elastic report mindx-run -o report.html
    """
    from mindx_elastic.report.page import make_page
    from mindx_elastic.report.run_history import tell

    story = read_log(path, tell)
    if story is None:
        typer.echo(printable(f"no agent has run in {path}"))
        raise typer.Exit(EXIT_NOTHING)
    data = make_page(story).encode("utf-8", "backslashreplace")
    _write(output, data, story.sources)
    torn = f"; {story.torn} torn or foreign lines were left out" if story.torn else ""
    attempts = counted(len(story.run.records), "attempt")
    typer.echo(printable(f"{output}: {human_size(len(data))}, {attempts}{torn}"))


def _write(output: Path, data: bytes, sources: Sequence[Path]) -> None:
    """Replace `output`, whole or not at all. Ends the command where it may not, or cannot, be written."""
    if os.path.lexists(output) and not output.is_file():  # a device would be replaced by a file of its name
        fail(f"{output} is {'a folder' if output.is_dir() else 'not a regular file'}: give the name of a file")
    if any(output.exists() and output.samefile(source) for source in sources):
        fail(f"{output} is a log that the page is made from: give another name")
    temp = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temp.write_bytes(data)
        os.replace(temp, output)
    except OSError as error:
        temp.unlink(missing_ok=True)
        fail(f"{output} cannot be written: {error.strerror or error}")
