"""Faults that the platform reports while the job runs: the fault ConfigMap and ``reset.json``; see `faults`.

A report that is already there at the start names the devices that the platform has replaced before it started us; to
stop the new run because of it would stop every run. So only a *change* after the start counts, or a report whose own
time stamp or file is younger than this process, and not from the future: a platform's clock may be ahead of ours. The
file of a mount may be written again because another key of the ConfigMap has changed: contents are compared, not file
times.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, NamedTuple

from mindx_elastic.config import FaultPaths
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import process_started_at
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.platforms.faults import FAULT_KEY, RESET_KEY, Faults, parse_key
from mindx_elastic.platforms.small_files import read_text

__all__ = ["FaultEvent", "FaultWatch"]

_MAX_PROBLEMS = 8  # in a line for a person


class FaultEvent(NamedTuple):
    """The platform wants the job to stop."""

    kind: Literal["fault", "request"]
    """The alarm's kind: ``fault`` for named ranks, ``request`` for ``"GracefulExit": 1``."""
    reason: str
    """One line for a person."""
    ranks: frozenset[int]
    """The ranks named; empty for a request."""
    source: Path | str
    grace_s: float | None = None
    """How long the workers may take, where the platform says it."""


class FaultWatch:
    """Watches the platform's files. `poll` and `flushing` are used by one thread. Neither raises for what a file holds.

    * `world_size`: ranks from here on are named in a warning and left out; None: unknown. May be set at any time.
    * `started_at`: unix seconds; None: the start of this process.

    A defect (half-written, too large, unknown keys) is one warning; the file is read again at the next poll.
    """

    def __init__(self, paths: FaultPaths, *, world_size: int | None = None, started_at: float | None = None) -> None:
        self.paths = paths
        self.world_size = world_size
        self._started_at = process_started_at() if started_at is None else started_at
        self._known: dict[Path, Faults] = {}
        self._handled: dict[Path, tuple[object, ...]] = {}  # what has been judged already, good or bad
        self._warned: dict[Path, str] = {}
        self._flushing = False

    def poll(self) -> FaultEvent | None:
        """What has happened since the last call; one event at a time."""
        return self._poll_report() or self._poll_reset()

    def flushing(self) -> bool:
        """Whether the platform forbids a start at this moment (``"FaultFlushing": true``). While the file cannot be
        read the last state that could be counts."""
        try:
            self._flushing = parse_key(RESET_KEY, read_text(self.paths.reset_dir / RESET_KEY)[0]).initializing
        except FileNotFoundError:
            self._flushing = False
        except (OSError, ValueError) as error:
            self._warn_of_file(self.paths.reset_dir / RESET_KEY, error)
        return self._flushing

    def _poll_report(self) -> FaultEvent | None:
        path = self.paths.fault_dir / FAULT_KEY
        found = self._read(path)
        if found is None or found[0].initializing:
            return None
        report, written = found
        known, self._known[path] = self._known.get(path), report
        shown = rank_list(report.ranks)
        if known is None:
            if not report.ranks:
                return None
            if not self._is_fresh(report.created, written):
                logger.info(
                    "%s names %s since before this start, or with a time in the future: done, until it changes",
                    path,
                    shown,
                )
                return None
        elif not _has_news(known, report):
            return None
        return FaultEvent("fault", f"fault report {path}: {shown}", report.ranks, path)

    def _poll_reset(self) -> FaultEvent | None:
        path = self.paths.reset_dir / RESET_KEY
        found = self._read(path)
        if found is None:
            return None
        state, written = found
        known, self._known[path], self._flushing = self._known.get(path), state, state.initializing
        if known is None:
            if not self._is_fresh(state.created, written):
                if state.exit_requested or state.unrecovered:
                    logger.info(
                        "what %s asks for is from before this start, or the future: done, until it changes", path
                    )
                return None
            known = Faults()
        if state.unrecovered - known.unrecovered:
            return FaultEvent("fault", f"{path}: {rank_list(state.unrecovered)} not recovered", state.unrecovered, path)
        if state.exit_requested and not known.exit_requested:
            return FaultEvent("request", f'"GracefulExit": 1 in {path}', frozenset(), path)
        return None

    def _read(self, path: Path) -> tuple[Faults, float] | None:
        """Content and modification time of a key file that has changed since it was judged; None: there is no news, or
        nothing that can be used yet."""
        try:
            text, status = read_text(path)
            content = (text, self.world_size)
            if self._handled.get(path) == content:  # parsing 1 MiB of nonsense five times a second would cost
                return None
            self._handled[path] = content
            faults = parse_key(path.name, text, world_size=self.world_size)
        except FileNotFoundError:
            # No report is a state too, but only at the start: some writers delete the file before they write it.
            self._known.setdefault(path, Faults())
            return None
        except (OSError, ValueError) as error:
            self._warn_of_file(path, error)
            return None
        problems = "; ".join(faults.problems[:_MAX_PROBLEMS])
        if problems:
            self._warn(path, problems, "the rest of it counts")
        else:
            self._warned.pop(path, None)
        return faults, status.st_mtime

    def _is_fresh(self, stamped: float | None, written: float) -> bool:
        now = time.time()
        return any(self._started_at <= when <= now for when in (stamped, written) if when is not None)

    def _warn_of_file(self, path: Path, error: Exception) -> None:
        text = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        self._warn(path, text, "it will be read again")

    def _warn(self, path: Path, text: str, then: str) -> None:
        if self._warned.get(path) != text:
            self._warned[path] = text
            logger.warning("%s %s; %s", path, text, then)


def _has_news(known: Faults, report: Faults) -> bool:
    """Whether `report` tells of a fault that `known` did not. A rank that is gone from the list is none."""
    if report.ranks - known.ranks:
        return True
    younger = report.created is not None and report.created > (known.created or 0.0)
    return bool(report.ranks) and report.ranks == known.ranks and younger
