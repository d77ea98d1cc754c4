"""Files of a job on a disk that fails: it loses its power at any call, tears what it writes, lies, or is full.

Real are the writer with its second names and quarantine, retention, the small files, and what a start does: the scan,
the plan, the reader with its digests. Simulated is what is on the disk after the failure (`disk`).

What must hold in every schedule:

* A step that all ranks have reported as saved is found after a power cut, or a newer one; unless the disk has lied.
* What is read is what was written, bit for bit: nothing torn is resumed.
* After a save that failed the older step is still there.
* A small file is the old one or the new one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from mindx_elastic.errors import MindxError, SaveError
from mindx_elastic.persist import storage
from mindx_elastic.persist.catalog import read_entries
from mindx_elastic.persist.reader import read_checkpoint
from mindx_elastic.platforms.small_files import write_whole
from mindx_elastic.start.facts import FileFact, Refusal, ResumePlan, World
from mindx_elastic.start.inventory import newest_complete, until_sound
from tests.checkpoint_files import write
from tests.simulation.disk import Disk
from tests.simulation.schedules import Fault, Played, quiet
from tests.start.looks import look_alone

__all__ = ["KINDS", "Outcome", "Plan", "plan_of", "play"]

KINDS = ("power cut", "power cut", "lies", "full", "broken")
"""Of disks. `lies`: flushes are none from then on, until the cut; `full` and `broken`: a call fails, and later the
power is cut."""
_RUN = "run-a"
_SMALL = "scheduler.json"
_BASE = "/dev/shm" if os.path.isdir("/dev/shm") else None


@dataclass(frozen=True)
class Plan:
    """One schedule."""

    seed: int
    world_size: int
    steps: tuple[int, ...]
    """Those that are saved, one after the other."""
    keep: int
    """How many steps retention leaves."""
    is_one_name: bool
    """All saves of a rank have one name: the older one is kept as its second."""
    faults: tuple[Fault, ...]


@dataclass
class Outcome(Played):
    """What a schedule came to."""

    found: int | None = None
    """The step that a start takes."""
    calls: int = 0
    damaged: int = 0

    def count(self) -> Counter[str]:
        return super().count() + Counter(calls=self.calls, damaged=self.damaged)


def plan_of(seed: int) -> Plan:
    """A schedule from its seed."""
    random = Random(seed)
    world_size, count = random.choice((1, 1, 2, 3)), random.randint(1, 4)
    last = 12 * world_size * count
    faults = [Fault(random.choice(KINDS), at=random.randint(0, last)) for _ in range(random.randint(1, 3))]
    return Plan(
        seed,
        world_size,
        steps=tuple(range(1, count + 1)),
        keep=random.choice((1, 2, 9)),
        is_one_name=random.random() < 0.3,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


class _PowerCutError(BaseException):
    pass


class _Job:
    def __init__(self, plan: Plan, outcome: Outcome, folder: Path) -> None:
        self.plan, self.outcome, self.random = plan, outcome, Random(plan.seed)
        self.root, self.after = folder / "ckpt", folder / "after"
        self.root.mkdir()
        self.disk = Disk(folder)
        self.disk.before = self._before
        self._due = list(plan.faults)
        self.saved = 0
        """The newest step that all ranks have reported as saved."""
        self.small = self.reported_small = 0
        self.has_lied = False

    def note(self, text: str) -> None:
        self.outcome.story.append((1000.0 + self.outcome.calls, text))

    def _before(self, call: str) -> None:
        if self.after.exists():
            return
        self.outcome.calls += 1
        while self._due and self._due[0].at < self.outcome.calls:
            fault = self._due.pop(0)
            self.note(f"{fault.kind} before {call}")
            if fault.kind == "power cut":
                self.disk.cut(self.after, self.random)
                raise _PowerCutError
            if fault.kind == "lies":
                self.disk.lies = self.has_lied = True
            else:
                raise OSError(errno.ENOSPC if fault.kind == "full" else errno.EIO, fault.kind)

    def run(self) -> None:
        """The training, as far as it has to do with files."""
        for step in self.plan.steps:
            saved = [self._save(rank, step) for rank in range(self.plan.world_size)]
            if all(saved):
                self.saved = step
                self.note(f"step {step} is saved")
                self._prune()
            elif self.plan.is_one_name:
                return  # one older step has a second name, and two saves in turn that fail on one rank leave none
            self.small = step
            try:
                write_whole(self.root / _SMALL, json.dumps({"step": step}).encode())
                self.reported_small = step
            except SaveError as error:
                self.note(str(error))

    def _save(self, rank: int, step: int) -> bool:
        folder = self.root / f"rank_{rank}"
        name = "net-1_breakpoint" if self.plan.is_one_name else f"net-1_{step}"
        try:
            storage.make_directory_durable(folder)
            write(
                folder / f"{name}.safetensors",
                step=step, rank=rank, world_size=self.plan.world_size, run_id=_RUN, state=_state(rank, step),
            )  # fmt: skip
        except (OSError, MindxError) as error:
            self.note(f"rank {rank}: {error}")
            return False
        return True

    def _prune(self) -> None:
        """As retention: what is older than the newest complete step goes, but for so many steps."""
        entries = [entry for entry in read_entries(self.root) if entry.info is not None]
        newest = newest_complete(entries, _RUN)
        moments = sorted({entry.header.info.moment for entry in entries if entry.header is not None})
        old = [moment for moment in moments[: -self.plan.keep] if newest is not None and moment < newest]
        for entry in entries:
            if entry.header is not None and entry.header.info.moment in old:
                try:
                    entry.path.unlink()
                except OSError as error:
                    self.note(str(error))

    # --- what a start finds ---

    def look(self) -> Iterable[str]:
        """What does not hold."""
        inventory = look_alone(self.after / "ckpt") if (self.after / "ckpt").exists() else None
        read: dict[str, object] = {}

        def check(plan: ResumePlan | Refusal) -> Iterable[tuple[int | None, FileFact, str]]:
            if isinstance(plan, Refusal):
                return
            for rank in range(self.plan.world_size):
                fact = plan.ranks[rank].file
                try:
                    read[fact.path] = read_checkpoint(fact.path).state
                except MindxError as error:
                    self.note(f"is not read: {error}")
                    yield None, fact, str(error)

        plan = (
            None
            if inventory is None
            else until_sound(inventory, lambda: inventory.plan(World(self.plan.world_size)), check)
        )
        if inventory is not None:
            self.outcome.damaged += len(inventory.rejected)
        if isinstance(plan, ResumePlan):
            self.outcome.found = plan.step
            for rank in range(self.plan.world_size):
                state = read[plan.ranks[rank].file.path]
                if not _is_same(state, _state(plan.ranks[rank].file.rank, plan.step)):
                    yield f"rank {rank} resumes what it has not saved at step {plan.step}"
        if not self.has_lied and (self.outcome.found or 0) < self.saved:
            yield f"step {self.saved} was reported as saved, and a start finds {self.outcome.found}"
        yield from self._look_at_small()

    def _look_at_small(self) -> Iterable[str]:
        if self.has_lied:
            return
        path = self.after / "ckpt" / _SMALL
        try:
            step = json.loads(path.read_bytes())["step"]
        except FileNotFoundError:
            step = 0
        except ValueError:
            yield f"{_SMALL} is torn"
            return
        if not self.reported_small <= step <= self.small:
            yield f"{_SMALL} has step {step}, and {self.reported_small} was reported"


def _state(rank: int, step: int) -> dict[str, object]:
    return {"weight": torch.full((700,), float(step)), "rank": rank, "step": step}


def _is_same(one: object, other: dict[str, object]) -> bool:
    assert isinstance(one, dict)
    same = all(one[name] == other[name] for name in ("rank", "step"))
    return same and torch.equal(one["weight"], other["weight"])  # type: ignore[arg-type]


def play(plan: Plan) -> Outcome:
    """Play one schedule to its end. Any number, one after the other."""
    outcome = Outcome(plan)
    folder = Path(tempfile.mkdtemp(prefix="mindx_files_", dir=_BASE))
    try:
        with quiet():
            storage._flushed.clear()
            job = _Job(plan, outcome, folder)
            with job.disk.active(), suppress(_PowerCutError):
                job.run()
            if not job.after.exists():
                job.disk.cut(job.after, job.random)
            outcome.wrong = [*job.look()]
    finally:
        shutil.rmtree(folder)
    return outcome
