"""What the arenas of a job hold for a start: snapshots, and each rank's own small state of its last boundaries.

A start may use those of the runs that the checkpoint directory knows, by its event log or by a checkpoint file.
Memory outlives a directory that a user has emptied to start over, and a machine that had no part in the last runs still
holds an older one's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from mindx_elastic.core.events import EVENTS_FILE, lines_backwards, logger, older_generation
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Owners, Trust, find_owners
from mindx_elastic.errors import UntrustedFileError
from mindx_elastic.memory.boundaries import BOUNDARIES_FILE, BoundaryRecord, OwnState, read_ring
from mindx_elastic.memory.folders import rank_folders

__all__ = [
    "RING_COPY",
    "known_runs",
    "own_rings",
    "own_states",
    "small_records",
    "snapshot_files",
]

RING_COPY = "boundaries.mindx"
"""Name of a ring's copy in the rank's folder on disk (see `agent.holder`)."""
_RUN_ID = b'"run_id": "'


def snapshot_files(arenas: Path) -> list[Path]:
    """The files that may hold snapshots, of all ranks of this machine."""
    return [path for folder in rank_folders(arenas).values() for path in sorted(folder.glob("slot_*.safetensors"))]


def own_rings(directories: Sequence[Path], arenas: Path | None, rank: int) -> list[Path]:
    """Where the boundary ring of `rank` may lie: in memory, and copies of it on disk."""
    in_memory = [] if arenas is None else [arenas / f"rank_{rank}" / BOUNDARIES_FILE]
    return [*in_memory, *(directory / f"rank_{rank}" / RING_COPY for directory in directories)]


def own_states(ring: Path, owners: Owners | None = None) -> dict[Moment, OwnState]:
    """What `ring` holds, by moment; a boundary goes before a forecast of the same. Whether a forecast may be used is
    for the caller to ask (`OwnState.trusted`)."""
    found: dict[Moment, OwnState] = {}
    for record in _all_records(ring, owners):
        found.setdefault(record.moment, record)
    return found


def small_records(ring: Path, owners: Owners | None = None, *, confirmed: Moment | None = None) -> list[BoundaryRecord]:
    """All that `ring` holds and may be used, the newest first; of one moment first the boundary, then its forecast.

    confirmed: a boundary that has come out on another rank as forecast there; a forecast of it counts, also one in a
    process's first step, before any other has come true.
    """
    return [record for record in _all_records(ring, owners) if record.trusted or record.moment == confirmed]


def _all_records(ring: Path, owners: Owners | None) -> list[BoundaryRecord]:
    try:
        return read_ring(ring, find_owners(ring.parent) if owners is None else owners)
    except UntrustedFileError as error:
        logger.warning("%s; it is left out", error)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("%s cannot be read: %s", ring, error)
    return []


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
