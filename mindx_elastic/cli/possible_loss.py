"""What a running job would lose if it died now: its newest boundary against the newest one in memory and on disk.

Where every process is killed, shared memory stays, and a start goes on from the newest snapshot there, or from disk if
that is newer. Where the machine is lost, disk alone counts. (Where one rank is killed, the others save their last
boundary, and nothing is lost; the same at a stop.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindx_elastic.core.status_page import Status, WorkerPhase

__all__ = ["DiskWatch", "PossibleLoss", "Rates", "Saved", "expect"]

_LEAST_PAUSE_S = 2.0
_PAUSE_TIMES = 20
"""A look at the disk is not repeated before so many times as long as it took."""


@dataclass(frozen=True)
class Saved:
    """The newest complete step on disk."""

    step: int
    created: float
    """Unix seconds."""
    name: str
    """The name of one of its files, for a person."""


@dataclass(frozen=True, kw_only=True)
class PossibleLoss:
    """None: not known, or there is none."""

    step: int | None = None
    """Newest boundary that a rank of this machine has passed."""
    directory: str | None = None
    """The folder of the checkpoints."""
    memory_step: int | None = None
    """Newest boundary from which a start could go on by memory."""
    disk: Saved | None = None
    lost_if_killed: int | None = None
    """Steps lost if every process of the machine were killed."""
    lost_if_machine_lost: int | None = None
    """Steps lost if the machine were lost."""


class Rates:
    """Steps a second of each rank, since the look before, or else since its first step. One thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[int, int]] = {}
        """When a boundary was passed and its number, by rank and process."""
        self._rates: dict[tuple[int, int], float] = {}

    def update(self, pages: Mapping[int, Status]) -> dict[int, float]:
        """The rate of each rank; a rank that has passed no second boundary has none."""
        rates: dict[tuple[int, int], float] = {}
        for rank, page in pages.items():
            key = rank, page.pid
            at_ns, number = self._before.get(key, (page.first_boundary_ns, 1))
            took_ns, passed = page.boundary_ns - at_ns, page.boundaries - number
            if passed > 0 and took_ns > 0:
                rates[key] = 1e9 * passed / took_ns
                self._before[key] = page.boundary_ns, page.boundaries
            elif key in self._rates:  # a rank that waits has no rate of before
                late_ns = max(1, time.monotonic_ns() - page.boundary_ns)
                rates[key] = min(self._rates[key], 1e9 / late_ns) if page.phase == WorkerPhase.TRAINING else 0.0
        self._rates = rates
        return {rank: rate for (rank, _), rate in rates.items() if rate}


@dataclass
class DiskWatch:
    """Looks for the newest complete step of a directory, by headers, as often as that is cheap. One thread."""

    _next: dict[Path, float] = field(default_factory=dict)
    _found: dict[Path, Saved | None] = field(default_factory=dict)
    _listed: dict[Path, str] = field(default_factory=dict)

    def newest(self, directory: Path, run_id: str) -> Saved | None:
        """The newest save of the run `run_id`. Raises nothing: a directory that cannot be read has none."""
        from mindx_elastic.errors import MindxError
        from mindx_elastic.start.findings import list_files

        began = time.monotonic()
        if began < self._next.get(directory, 0.0):
            return self._found.get(directory)
        try:
            listing = list_files([directory])
            if self._listed.get(directory) != listing.disk:
                self._found[directory] = _newest(directory, run_id)
                self._listed[directory] = listing.disk
        except (MindxError, OSError):
            self._found[directory] = None
        now = time.monotonic()
        self._next[directory] = now + max(_LEAST_PAUSE_S, _PAUSE_TIMES * (now - began))
        return self._found[directory]


def _newest(directory: Path, run_id: str) -> Saved | None:
    from mindx_elastic.start.findings import list_files, reader_trust, scan
    from mindx_elastic.start.inventory import Inventory

    found = Inventory.merge([scan(list_files([directory]), trust=reader_trust(directory))])
    newest = found.newest_complete(run_id or None)
    if newest is None:
        return None
    created = max((entry.info.created for entry in newest.entries if entry.info is not None), default=0.0)
    return Saved(newest.moment[2], created, newest.entries[0].path.name if newest.entries else "")


def expect(pages: Mapping[int, Status], disk: DiskWatch) -> PossibleLoss:
    """What the job of these pages would lose now. Ranks with their own folders in memory are separate jobs: the
    one that would lose most counts."""
    jobs: dict[str, list[Status]] = {}
    for page in pages.values():
        if page.step >= 0 or page.entered_ns:
            jobs.setdefault(page.arena, []).append(page)
    found = [_expect(arena, ranks, disk) for arena, ranks in jobs.items()]
    return max(
        found, key=lambda each: (each.lost_if_machine_lost or 0, each.lost_if_killed or 0), default=PossibleLoss()
    )


def _expect(arena: str, pages: Sequence[Status], disk: DiskWatch) -> PossibleLoss:
    step = max(page.step for page in pages)
    if step < 0:
        return PossibleLoss()
    directory = Path(pages[0].directory) if pages[0].directory else None
    memory = _in_memory(Path(arena)) if arena else None
    saved = None if directory is None else disk.newest(directory, pages[0].run_id)
    on_disk = 0 if saved is None else saved.step
    return PossibleLoss(
        step=step,
        directory=None if directory is None else str(directory),
        memory_step=memory,
        disk=saved,
        lost_if_killed=None if directory is None else max(0, step - max(on_disk, memory or 0)),
        lost_if_machine_lost=None if directory is None else max(0, step - on_disk),
    )


def _in_memory(arena: Path) -> int | None:
    """The newest step of which each rank that keeps snapshots has one; ranks that hold the same keep one together."""
    from mindx_elastic.memory.arena import SlotState, read_records
    from mindx_elastic.memory.folders import rank_folders

    newest = []
    for folder in rank_folders(arena).values():
        steps = [record.step for record in read_records(folder) if record.state is not SlotState.EMPTY]
        if steps:
            newest.append(max(steps))
    return min(newest, default=None)
