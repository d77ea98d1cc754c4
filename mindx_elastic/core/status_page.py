"""One page of memory per worker: the worker writes its progress, its agent reads it, and neither waits.

The page is a small file below the agent's private folder, mapped by both. Fixed 8-byte fields, one writer; on the
machines that torch runs on an aligned 8-byte store is seen whole or not at all. Times are `time.monotonic_ns`, the
same clock in all processes of a machine. The training thread pays a few stores a step.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from mindx_elastic.core.posix import new_map, read_small

__all__ = [
    "NUM_STEPS",
    "PAGE_BYTES",
    "Status",
    "StatusPage",
    "WorkerPhase",
    "page_path",
    "read_page",
    "read_pages",
    "who_waits",
    "why_gone_on",
]

PAGE_BYTES = 12288
NUM_STEPS = 64
"""Of as many steps, the last ones, a page says how long they took, and how long the rank has waited in each."""
_LEAST_NS = 10_000_000  # to time a wait takes 20 to 60 us: where steps are shorter, it is not done
_STEPS = 8192 // 8  # where they are, by words
_MAGIC = 0x6D696E6478303036  # "mindx006"
# offset, room
_TEXTS = {
    "fixed_size": (288, 224),
    "pause_reason": (512, 512),
    "reason": (1024, 1024),
    "resumed_path": (2048, 1024),
    "run_id": (3072, 128),
    "arena": (3200, 896),
    "directory": (4096, 4096),
}


class WorkerPhase(IntEnum):
    """What a worker is doing."""

    STARTING = 1
    """The guard is being entered: reading checkpoints, waiting for the other ranks."""
    TRAINING = 2
    BETWEEN = 3
    """Between two steps, for as long as it takes: an evaluation, a periodic save."""
    STOPPING = 4
    """An alarm was heard; the state is being saved."""
    LEFT = 5
    """The guard was left: finished, stopped gracefully (`exit_code`), or failed."""


class Status(NamedTuple):
    """The content of one page at one moment."""

    pid: int = 0
    phase: int = 0
    """A `WorkerPhase`; 0 while there is no guard."""
    step: int = -1
    """Last boundary passed."""
    boundary_ns: int = 0
    """When; 0 before the first boundary of this attempt."""
    first_boundary_ns: int = 0
    """When the first boundary of this attempt was passed; 0 before."""
    boundaries: int = 0
    """How many in this attempt."""
    resumed_step: int = -1
    """Step this attempt went on from; -1 for a fresh start, and before it is known."""
    saved_step: int = -1
    """Step that was saved because of an alarm; -1 when none was."""
    saved_ns: int = 0
    alarm_ns: int = 0
    """When the alarm was heard; 0 while none was."""
    exit_code: int = -1
    """What a graceful stop leaves with; -1 for none."""
    entered_ns: int = 0
    """When the guard was entered and the state was back."""
    finished: int = 0
    """1: its block has ended by itself, so that the training is done; the process may have more to do."""
    in_place: int = 0
    """1: a new process can take this rank's place while the others live on."""
    generation: int = 0
    """The generation of the last recovery that it took part in."""
    pause_heard: int = 0
    """Number of the newest order of a command, to pause or to go on, that this rank has passed on; 0: none."""
    pause_order: int = 0
    """Newest order to pause (odd) or to go on (even) that this rank knows; 0: none was given in this attempt."""
    paused_step: int = -1
    """Boundary at which the training thread waits; -1: it does not."""
    paused_ns: int = 0
    """Since when; 0: it does not wait."""
    all_paused: int = 0
    """The order by which every rank of the job waits; 0: not every rank does."""
    accumulates: int = 0
    """The program accumulates over so many batches, or a multiple, when all ranks are there, and asks
    `Guard.accumulation` how many it is with fewer; 0: it does not ask."""
    save_every_s: int = 0
    """Seconds between two periodic saves, where that is measured (``save_checkpoint_steps="auto"``); 0: it is not, or
    not yet. Rank 0's page."""
    snapshot_every: int = 0
    """Steps between two snapshots in memory; 0: there are none, or the interval is not measured yet."""
    durable_step: int = -1
    """Newest step that this process has brought to disk, so that a start can go on from it; -1: none."""
    durable_ns: int = 0
    """When; 0: it has not."""
    durable_bytes: int = 0
    """Bytes of all such files of this process."""
    stall_ns: int = 0
    """How long periodic saves have held up its training."""
    asked_code: int = -1
    """The exit code of the stop under way, if it was asked for (`Alarm.asked_code`); -1: there is none."""
    timed: int = 0
    """How many steps have been timed in this attempt: those that follow one of 10 ms or more."""
    fixed_size: str = ""
    """Why the program cannot go on with another number of ranks; empty: nothing is known against it."""
    pause_reason: str = ""
    """Why `pause_order` was given."""
    reason: str = ""
    """The alarm's or the exception's, one line."""
    resumed_path: str = ""
    run_id: str = ""
    arena: str = ""
    """Folder of the job's arenas in shared memory; empty where there are none."""
    directory: str = ""
    """Where the rank saves its checkpoints."""
    waits_ns: tuple[int, ...] = ()
    """How long it has waited for other ranks in each of the last `timed` steps, `NUM_STEPS` at most; -1: not known."""
    steps_ns: tuple[int, ...] = ()
    """How long these steps took."""


_NUMBERS = {name: value for name, value in Status._field_defaults.items() if isinstance(value, int)}
_INDEX = {"magic": 0} | {name: number for number, name in enumerate(_NUMBERS, start=1)}
_TIMED = _INDEX["timed"]


def page_path(agent_dir: Path, rank: int) -> Path:
    """The path of the page of global rank `rank`."""
    return agent_dir / f"rank_{rank}.page"


class StatusPage:
    """The worker's side. Any thread may set a field; `pass_boundary` belongs to the training thread."""

    def __init__(self, path: Path | None = None) -> None:
        """Create the page, replacing an older one of the same rank. Raises OSError. Without a `path` (there is no
        agent) no process reads it."""
        self._map = mmap.mmap(-1, PAGE_BYTES) if path is None else new_map(path, PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")
        for name, value in _NUMBERS.items():
            self._words[_INDEX[name]] = value
        self._words[_INDEX["pid"]] = os.getpid()
        self._words[_INDEX["phase"]] = WorkerPhase.STARTING
        self._words[_INDEX["magic"]] = _MAGIC
        self.is_timed = False
        """Waits of the step that is under way are to be noted."""
        self._waited_ns, self._began_ns = -1, time.monotonic_ns()

    @property
    def phase(self) -> int:
        return self._words[_INDEX["phase"]]

    @property
    def started(self) -> bool:
        """Whether a boundary was passed in this attempt."""
        return self._words[_INDEX["boundaries"]] > 0

    def set(self, **fields: int) -> None:
        for name, value in fields.items():
            self._words[_INDEX[name]] = value

    def set_text(self, name: str, text: str) -> None:
        """One of the texts of `Status`; cut off where there is no more room."""
        offset, room = _TEXTS[name]
        data = text.encode("utf-8", "replace")[: room - 1].ljust(room, b"\0")
        self._map[offset : offset + room] = data

    def pass_boundary(self, step: int, *, cut: bool = True) -> None:
        """`cut`: a boundary that can be resumed from; without it only the clock goes on."""
        words, now = self._words, time.monotonic_ns()
        if not words[5]:
            words[5] = now
        if cut:
            if step != words[3]:  # else once more, after the code that follows an epoch
                took = now - self._began_ns
                if self.is_timed:
                    place = _STEPS + 2 * (words[_TIMED] % NUM_STEPS)
                    words[place], words[place + 1] = self._waited_ns, took
                    words[_TIMED] += 1
                self.is_timed = took >= _LEAST_NS
                self._waited_ns, self._began_ns = -1, now
            words[3] = step
        words[4] = now
        words[6] += 1

    def note_wait(self, waited_ns: int) -> None:
        """The rank has waited for other ranks, in the step that is not over yet. The thread of a backward, too."""
        self._waited_ns = max(0, self._waited_ns) + waited_ns

    def close(self) -> None:
        self._words.release()
        self._map.close()


def read_page(path: Path) -> Status | None:
    """The agent's side: what `path` says now; None when there is no page (yet), or another program's file."""
    try:
        data = read_small(path, PAGE_BYTES)
    except OSError:
        return None
    if len(data) != PAGE_BYTES:
        return None
    words = memoryview(data).cast("q")
    if words[0] != _MAGIC:
        return None
    texts = {
        name: data[offset : offset + room].partition(b"\0")[0].decode("utf-8", "replace")
        for name, (offset, room) in _TEXTS.items()
    }
    numbers = {name: words[index] for name, index in _INDEX.items() if name != "magic"}
    steps = words[_STEPS : _STEPS + 2 * min(NUM_STEPS, max(0, words[_TIMED]))].tolist()
    content: dict[str, Any] = {**numbers, **texts, "waits_ns": tuple(steps[::2]), "steps_ns": tuple(steps[1::2])}
    return Status(**content)


def read_pages(agent_dir: Path) -> dict[int, Status]:
    """What the pages in an agent's folder say now, by rank; those that cannot be read are left out."""
    found = {}
    for path in sorted(agent_dir.glob("rank_*.page")):
        rank, status = path.stem.removeprefix("rank_"), read_page(path)
        if rank.isdecimal() and status is not None:
            found[int(rank)] = status
    return found


def who_waits(statuses: Mapping[int, Status]) -> int:
    """The number of the pause in which every rank of the job waits; 0: not every rank does. `statuses`: the pages of
    this node's ranks."""
    orders = {
        status.all_paused for status in statuses.values() if status.phase in (WorkerPhase.TRAINING, WorkerPhase.BETWEEN)
    }
    return orders.pop() if len(orders) == 1 else 0


def why_gone_on(statuses: Mapping[int, Status]) -> str:
    """Why the ranks wait no longer, as they say it; empty: they do not."""
    gone_on = [status for status in statuses.values() if status.pause_order and not status.pause_order % 2]
    return "; ".join(sorted({status.pause_reason for status in gone_on} - {"", "mindx-elastic pause"}))
