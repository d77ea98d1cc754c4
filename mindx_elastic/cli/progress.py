"""Progress bars: on stderr, only on a terminal, only from the first second on, gone when the work is done.

Whether stderr is a terminal is asked of the system, and not of rich: that takes variables like FORCE_COLOR, which
CI services set, for a terminal.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mindx_elastic.cli.common import make_console

__all__ = ["DELAY_S", "ProgressBar", "progress_of_bytes", "progress_of_runs"]

DELAY_S = 1.0
"""Work that is over by then shows nothing: a bar that comes and goes is only a flicker."""
_POLL_S = 0.2


class ProgressBar:
    """One line of progress. Its methods do nothing where no bar is shown, and may be called in any thread."""

    def __init__(self, progress: Progress, description: str, total: float | None) -> None:
        self._progress, self._task = progress, progress.add_task(description, total=total)
        self._begins = time.monotonic() + DELAY_S

    def advance(self, amount: float) -> None:
        """Note that so much more is done."""
        self.update(advance=amount)

    def update(self, **changes: Any) -> None:
        """``advance``, ``completed``, ``total``, ``description``: as of `rich.progress.Progress.update`."""
        self._progress.update(self._task, **changes)
        if time.monotonic() > self._begins:
            self._progress.start()

    def show_runs(self, done: int, planned: int, what: str) -> None:
        """Show how many runs of a script are done, and which one is under way."""
        self.update(completed=done, total=max(planned, done), description=what)

    @contextmanager
    def follow(self, measure: Callable[[], float]) -> Iterator[None]:
        """In the block, `measure()` says five times a second how much is done."""
        if self._progress.disable:
            yield
            return
        over = threading.Event()

        def look() -> None:
            while not over.wait(_POLL_S):
                self.update(completed=measure())

        thread = threading.Thread(target=look, name="mindx-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def progress_of_bytes(description: str, total: float | None) -> Iterator[ProgressBar]:
    """A bar over `total` bytes; None: not known yet."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with _shown(columns) as progress:
        yield ProgressBar(progress, description, total)


@contextmanager
def progress_of_runs() -> Iterator[ProgressBar]:
    """A bar over the runs of a script."""
    runs = TextColumn("run {task.completed} of {task.total}")
    with _shown((TextColumn("{task.description}"), BarColumn(), runs, TimeElapsedColumn())) as progress:
        yield ProgressBar(progress, "begins", None)


@contextmanager
def _shown(columns: tuple[ProgressColumn, ...]) -> Iterator[Progress]:
    is_hidden = not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown")
    progress = Progress(*columns, console=make_console(stderr=True), transient=True, disable=is_hidden)
    try:
        yield progress
    finally:
        progress.stop()
