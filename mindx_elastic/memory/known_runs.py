"""Which runs' memory a start may use: those that the checkpoint directory knows.

Memory outlives a checkpoint directory that a user has emptied to start over, and a machine that had no part in the last
runs still holds an older one's. A directory knows a run by its event log, or by a checkpoint file of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from mindx_elastic.core.events import EVENTS_FILE, lines_backwards, older_generation
from mindx_elastic.core.owners import Trust

__all__ = ["known_runs"]

_RUN_ID = b'"run_id": "'


def known_runs(
    directories: Sequence[Path], wanted: Collection[str] | None = None, trust: Trust | None = None
) -> set[str]:
    """The runs in the event logs of the directories.

    `wanted`: stop looking when these are found; the run with the newest line is always there. `trust`: whose files
    count. Reads bounded parts of the logs. Any thread; blocks on the disk.
    """
    found: set[str] = set()
    trust = trust or Trust()
    logs = [directory / EVENTS_FILE for directory in directories]
    for path in (each for log in logs for each in (log, older_generation(log))):
        for line in lines_backwards(path, owners=trust.of(path.parent)):
            start = line.rfind(_RUN_ID)  # of a line behind half of another one
            if start < 0:
                continue
            run = line[start + len(_RUN_ID) :].partition(b'"')[0].decode("utf-8", "replace")
            if run and run not in found:
                found.add(run)
                if wanted is not None and found >= set(wanted):
                    return found
    return found
