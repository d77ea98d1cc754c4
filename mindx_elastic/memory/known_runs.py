"""Which runs' memory a start may use: those that the checkpoint directory knows.

Memory outlives a checkpoint directory that a user has emptied to start over, and a machine that had no part in the last
runs still holds an older one's. A directory knows a run by its event log, by a checkpoint file of the run, or by the
*marker* that a run leaves there when its event log cannot be written. A marker is an empty file, so a full disk has
room for it; where not even that can be made, a start is refused (`persist.storage`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from mindx_elastic.core.events import EVENTS_FILE, lines_backwards, logger, older_generation
from mindx_elastic.core.owners import Owners, Trust
from mindx_elastic.core.posix import open_regular

__all__ = ["known_runs", "leave_trace", "logged_runs", "marked_runs"]

_MARK_PREFIX, _MARK_SUFFIX = "run-", ".mindx-run"
_LONGEST_NAME = 255
_RUN_ID = b'"run_id": "'


def known_runs(
    directories: Sequence[Path], wanted: Collection[str] | None = None, trust: Trust | None = None
) -> set[str]:
    """The runs in the event logs and markers of the directories.

    `wanted`: stop looking when these are found; the run with the newest line is always there. `trust`: whose files
    count. Reads bounded parts of the logs. Any thread; blocks on the disk.
    """
    found: set[str] = set()
    trust = trust or Trust()
    for directory in directories:
        owners = trust.of(directory)
        found |= logged_runs(directory, wanted, owners) | marked_runs(directory, owners)
    return found


def logged_runs(directory: Path, wanted: Collection[str] | None = None, owners: Owners | None = None) -> set[str]:
    """The runs in the event log of `directory`; see `known_runs`."""
    found: set[str] = set()
    newest = directory / EVENTS_FILE
    for path in (newest, older_generation(newest)):
        for line in lines_backwards(path, owners=owners):
            start = line.find(_RUN_ID)
            if start < 0:
                continue
            run = line[start + len(_RUN_ID) :].partition(b'"')[0].decode("utf-8", "replace")
            if run and run not in found:
                found.add(run)
                if wanted is not None and found >= set(wanted):
                    return found
    return found


def marked_runs(directory: Path, owners: Owners | None = None) -> set[str]:
    """The runs with a marker in `directory`; see `known_runs`."""
    found: set[str] = set()
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_MARK_PREFIX) and entry.name.endswith(_MARK_SUFFIX):
                with suppress(OSError):
                    if owners is None or owners.problem(entry.stat(follow_symlinks=False)) is None:
                        found.add(unquote(entry.name[len(_MARK_PREFIX) : -len(_MARK_SUFFIX)]))
    return found


def _marker(directory: Path, run_id: str) -> Path | None:
    name = f"{_MARK_PREFIX}{quote(run_id, safe='')}{_MARK_SUFFIX}"
    return directory / name if len(name) <= _LONGEST_NAME else None


def leave_trace(directory: Path, run_id: str, *, logged: bool) -> bool:
    """Make `directory` know the run; returns whether it does. Main thread, at each start.

    `logged`: its event log does. If not, a marker is left; it goes with the first start whose line can be written.
    """
    marker = _marker(directory, run_id)
    if logged:
        if marker is not None:
            with suppress(OSError):
                marker.unlink(missing_ok=True)
        return True
    if marker is not None:
        try:
            os.close(open_regular(marker, os.O_WRONLY | os.O_CREAT, 0o644))
        except OSError as error:
            logger.debug("%s cannot be made: %s", marker, error)
        else:
            return True
    if run_id in logged_runs(directory, [run_id]):
        return True  # another rank could write
    logger.warning(
        "%s: nothing can be written there any more, not even which run this is; should it be killed before that works "
        "again, a start does not use what it has kept in memory. Make room there",
        directory,
    )
    return False
