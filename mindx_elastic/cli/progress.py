"""Progress bars: on stderr, only on a terminal, gone when the work is done.

Whether stderr is a terminal is asked of the system, and not of rich: that takes variables like FORCE_COLOR, which
CI services set, for a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, SpinnerColumn, TimeElapsedColumn

from mindx_elastic.cli.common import make_console

__all__ = ["progress_of_bytes", "progress_of_runs", "working"]


def _progress(*columns: ProgressColumn) -> Progress:
    is_hidden = not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown")
    console = make_console(stderr=True)
    ends = TimeElapsedColumn()
    return Progress("{task.description}", *columns, ends, console=console, transient=True, disable=is_hidden)


@contextmanager
def working(description: str) -> Iterator[None]:
    """In the block, the description and the time that has passed are shown."""
    with _progress(SpinnerColumn()) as progress:
        progress.add_task(description, total=None)
        yield


@contextmanager
def progress_of_bytes(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes. Gives the function that is told how many more are done."""
    with _progress(BarColumn(), DownloadColumn(binary_units=True)) as progress:
        task = progress.add_task(description, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextmanager
def progress_of_runs() -> Iterator[Callable[[int, int, str], None]]:
    """A bar over the runs of a script. Gives the function that is told how many are done, how many there will be, and
    which one is under way."""
    with _progress(BarColumn()) as progress:
        task = progress.add_task("begins", total=None)

        def show(done: int, planned: int, what: str) -> None:
            total = max(planned, done)
            progress.update(task, completed=done, total=total, description=f"{what}: run {done} of {total}")

        yield show
