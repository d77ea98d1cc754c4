"""How far a command is that runs a script many times: a bar on stderr, only on a terminal, gone when the work is done.

Whether stderr is a terminal is asked of the system, and not of rich: that takes variables like FORCE_COLOR, which
CI services set, for a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TimeElapsedColumn

from mindx_elastic.cli.common import make_console

__all__ = ["progress_of_runs"]


@contextmanager
def progress_of_runs() -> Iterator[Callable[[int, int, str], None]]:
    """Gives the function that is told how many runs are done, how many there will be, and which one is under way."""
    is_hidden = not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown")
    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True, disable=is_hidden) as progress:
        task = progress.add_task("begins", total=None)

        def show(done: int, planned: int, what: str) -> None:
            total = max(planned, done)
            progress.update(task, completed=done, total=total, description=f"{what}: run {done} of {total}")

        yield show
