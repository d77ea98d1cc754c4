"""The auditor: makes some steps of a living job again beside it, and compares.

What all ranks have kept of one step k in shared memory is copied while the job goes on, and what they have kept of a
later one, m. The job's own command goes on from k in private folders, as a restart after a SIGKILL would, up to m. Each
step is compared with what the job has kept of it, and at m the whole state with the job's snapshot (`audited`). What
differs is made a second time: where both runs agree with each other, the job's own steps were otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mindx_elastic.agent.history import AgentRun
from mindx_elastic.core.events import EVENTS_FILE, EventLog
from mindx_elastic.core.posix import is_alive
from mindx_elastic.core.printable import counted, listed
from mindx_elastic.core.status_page import read_pages
from mindx_elastic.errors import UsageError
from mindx_elastic.memory.folders import job_folder, make_private, make_user_folder, rank_folders
from mindx_elastic.memory.one_step import SNAPSHOT, copy_newest, lay_copy, newest_kept
from mindx_elastic.persist.format import open_checkpoint
from mindx_elastic.prove.audited import Unlike
from mindx_elastic.prove.causes import explain_chance
from mindx_elastic.prove.compare import Reference, earliest
from mindx_elastic.prove.control import Control
from mindx_elastic.prove.proof import failure
from mindx_elastic.prove.runs import Command, RunOutcome, Runs

__all__ = ["EXIT_CODES", "Audit", "LivingJob", "audit", "find_job", "note"]

EXIT_CODES = {"verified": 0, "differs": 1, "not deterministic": 3, "fails": 4}
_MEASURED = 64
"""Steps after which the interval of snapshots is measured."""
_LOOK_S = 0.005
_TRIES = 40
"""For a copy that is overtaken."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class LivingJob:
    """What can be seen of it from outside."""

    agent: AgentRun
    arenas: Path
    """Its folder in shared memory."""
    directory: Path
    run_id: str
    ranks: int
    environment: dict[str, str]
    """That its agent was started with."""
    folder: Path
    """That its agent was started in."""

    @property
    def command(self) -> Command:
        options = ["--nproc-per-node", str(self.ranks), "--max-restarts", "0", "--snapshot-every", "0"]
        return Command(script=tuple(self.agent.worker_command), agent=(*options, "--recover", "restart", "--no-python"))


@dataclass(kw_only=True)
class Audit:
    """What was found."""

    ranks: int
    first: int = 0
    """The step that it went on from."""
    last: int = 0
    outcome: str = "verified"
    """A key of `EXIT_CODES`."""
    unlike: list[tuple[int, Unlike]] = field(default_factory=list)
    """Rank, and what differs there: the first step first."""
    reason: str = ""
    """What it may mean."""
    seconds: float = 0.0
    lines: Sequence[str] = ()
    """The end of what the run has printed, where it failed."""

    @property
    def words(self) -> str:
        """``verified: steps 41 to 64 of 2 ranks, done again, are what they were``."""
        steps = f"steps {self.first + 1} to {self.last} of {counted(self.ranks, 'rank')}, done again"
        if self.outcome == "verified":
            return f"verified: {steps}, are what they were"
        if not self.unlike:
            return f"{steps}: {self.reason}"
        first = self.unlike[0]
        shown = [first, *[each for each in self.unlike[1:] if each[1].step == self.last != first[1].step][:1]]
        told = [f"step {e.step}, rank {rank}: {e.what} was {e.before}, and is {e.again} again" for rank, e in shown]
        more = f" (and {len(self.unlike) - len(shown)} more)" if len(self.unlike) > len(shown) else ""
        return f"{steps}: {'; '.join(told)}{more}"

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        unlike = [{"rank": rank, **each._asdict()} for rank, each in self.unlike]
        return {**asdict(self), "unlike": unlike, "exit_code": EXIT_CODES[self.outcome]}


def find_job(run: AgentRun) -> LivingJob:
    """The job of this agent, which runs on this machine. Raises UsageError for one that cannot be audited."""
    pages = read_pages(Path(run.agent_dir)) if run.agent_dir else {}
    last = run.records[-1] if run.records else None
    if not pages or last is None or not all(page.entered_ns for page in pages.values()):
        raise UsageError("no rank of the job trains under a guard yet: audit it when it does")
    if last.world_size != len(pages):
        raise UsageError(
            f"{last.world_size} ranks run, {len(pages)} of them on this machine: an audit needs all ranks of the job "
            "on one machine. mindx-elastic prove shows on one machine what a resume makes"
        )
    if last.full_size is not None:
        raise UsageError(f"the job runs with {last.world_size} of {last.full_size} ranks: audit it when all are there")
    arenas = {page.arena for page in pages.values()}
    if len(arenas) > 1 or not (arena := arenas.pop()):
        raise UsageError(
            "the job keeps no snapshots in memory that belong together: start it with --snapshot-every auto, without "
            "MINDX_ARENA_DIR=none"
        )
    if not run.worker_command:
        raise UsageError("the command of the job is not known: its agent's start is no longer in events.jsonl")
    page = pages[min(pages)]
    try:
        content = Path(f"/proc/{run.pid}/environ").read_bytes()
        folder = Path(os.readlink(f"/proc/{run.pid}/cwd"))
    except OSError as error:
        raise UsageError(f"agent {run.pid} cannot be looked at ({error}): audit as its user") from error
    pairs = [os.fsdecode(entry).partition("=") for entry in content.rstrip(b"\0").split(b"\0")]
    return LivingJob(
        agent=run,
        arenas=Path(arena),
        directory=Path(page.directory),
        run_id=page.run_id,
        ranks=len(pages),
        environment={name: value for name, _, value in pairs},
        folder=folder,
    )


def audit(job: LivingJob, runs: Runs, *, steps: int, timeout_s: float) -> Audit:
    """Make `steps` steps again, or more, up to the next snapshot. `timeout_s`: how long no rank may pass a step. Raises
    UsageError where the job ends, starts again or keeps no snapshot meanwhile. Main thread."""
    return _Auditor(job, runs, timeout_s).audit(steps)


class _Auditor:
    def __init__(self, job: LivingJob, runs: Runs, timeout_s: float) -> None:
        if runs.memory is None:
            raise UsageError("there is no shared memory for the audit: give a memory file system in MINDX_ARENA_DIR")
        self._job, self._runs, self._timeout_s, self._memory = job, runs, timeout_s, runs.memory
        self._found = Audit(ranks=job.ranks)

    def audit(self, steps: int) -> Audit:
        began, found = time.monotonic(), self._found
        moment = self._copy("from", -1)
        found.first = moment[1]
        later = self._copy("to", moment[1] + steps - 1)
        found.last = later[1]
        if later[0] != moment[0]:
            raise UsageError("the job was started again while it was audited: call again")
        first = self._run(1)
        if not self._has_failed(first) and (unlike := self._unlike(first)):
            self._judge(first, self._run(2), unlike)
        found.seconds = time.monotonic() - began
        return found

    def _copy(self, name: str, after: int) -> tuple[int, int]:
        """The next step after `after` that all ranks keep, to a folder of this name."""
        num_overtaken = 0

        def look() -> tuple[int, int] | None:
            nonlocal num_overtaken
            kept = newest_kept(self._job.arenas)
            found = copy_newest(self._job.arenas, self._memory / name, after=after)
            num_overtaken += found is None and kept is not None and kept[1] > after
            if num_overtaken >= _TRIES:
                raise UsageError(
                    "the job overwrites its snapshots sooner than they can be copied: start it with a larger "
                    "--snapshot-every, or auto"
                )
            return found

        return self._wait_for(look)

    def _wait_for(self, look: Callable[[], _T | None]) -> _T:
        """What `look` gives once it gives anything; while the job passes steps."""
        since, seen = time.monotonic(), -1
        while (found := look()) is None:
            pages = read_pages(Path(self._job.agent.agent_dir))
            if len(pages) < self._job.ranks or not all(is_alive(page.pid, None) for page in pages.values()):
                raise UsageError("the job has ended, or starts again, while it was waited for its next snapshot")
            now = sum(page.boundaries for page in pages.values())
            if now != seen:
                since, seen = time.monotonic(), now
            elif time.monotonic() > since + self._timeout_s:
                raise UsageError(f"the job has passed no step for {self._timeout_s:g} s: audit it when it goes on")
            if now > _MEASURED * len(pages) and not any(page.snapshot_every for page in pages.values()):
                raise UsageError("the job keeps no snapshots in memory: start it with --snapshot-every auto")
            time.sleep(_LOOK_S)
        return found

    # --- a run ---

    def _run(self, number: int) -> RunOutcome:
        """The job's command, from the first step to the last."""
        job, runs, found = self._job, self._runs, self._found
        chain = runs.chain()
        directory = Control(folder=chain.directories, directories=chain.directories).directory_for(job.directory)
        directory.mkdir(mode=0o700)
        EventLog(directory / EVENTS_FILE, run_id=job.run_id).emit("audit", step=found.first)  # a run that it knows
        make_user_folder(self._memory)
        lay_copy(self._memory / "from", make_private(job_folder(self._memory, directory)))
        living = make_private(self._memory / f"living_{number}")
        lay_copy(self._memory / "to", living)
        return runs.run(chain, last=(0, found.last), living=living)

    def _has_failed(self, outcome: RunOutcome) -> bool:
        """Whether nothing was compared."""
        found, failed = self._found, failure(outcome, "the audit's run")
        lives = {life.rank: life for life in outcome.lives}
        what = "" if failed is None or failed.explained is None else failed.explained.what
        if not what and any(life.resumed != found.first for life in lives.values()):
            what = f"the program enters another guard first, or its start did not go on from step {found.first}"
        if not what and (len(lives) < found.ranks or any(life.unlike is None for life in lives.values())):
            what = f"the audit's run has not come to step {found.last}"
        if what and any("PermissionError" in line or "Permission denied" in line for line in outcome.lines):
            what += "; an audit may not write where the job does: --may-write PATH allows it"
        if what:
            found.outcome, found.reason, found.lines = "fails", what, outcome.last_lines
        return bool(what)

    @staticmethod
    def _unlike(outcome: RunOutcome) -> list[tuple[int, Unlike]]:
        found = [(life.rank, Unlike(*each)) for life in outcome.lives for each in life.unlike or ()]
        return sorted(found, key=lambda pair: pair[1].step)  # of one step: the order of the ranks, and of the state

    def _judge(self, first: RunOutcome, second: RunOutcome, unlike: list[tuple[int, Unlike]]) -> None:
        """The first run is not as the job; what does the second one show?"""
        found = self._found
        if self._has_failed(second):
            return
        again = self._unlike(second)
        found.unlike = [each for each in unlike if each in again]
        chance = earliest(Reference(lives=first.lives), second.lives)
        if chance is not None and not chance.is_fact:
            found.outcome, found.unlike = "not deterministic", unlike
            found.reason = f"two audits differ from each other: {explain_chance(chance).what}"
        elif found.unlike:
            found.outcome = "differs"
            names = self._not_kept()
            kept = f", such as {names}" if names else " (mindx-elastic prove names it)"
            found.reason = (
                "two audits agree with each other and not with the job: a bit has flipped in it, in its memory or on a "
                f"device; or it goes on with something that a resume does not get back{kept}. Audit again: only the "
                "latter comes again"
            )
        else:
            names = listed(list(dict.fromkeys(each.what for _, each in unlike)), 5)
            found.reason = f"not compared, because it differs each time: {names}"

    def _not_kept(self) -> str:
        for folder in rank_folders(self._memory / "to").values():
            if (path := folder / SNAPSHOT).exists():
                with open_checkpoint(path, sealed=False) as (_, header):
                    return header.info.not_kept
        return ""


def note(audit: Audit, run: AgentRun, path: Path) -> None:
    """Write it down in the events of the run."""
    EventLog(path).emit(
        "audit",
        step=audit.last,
        reason="; ".join(filter(None, [audit.words, audit.reason * bool(audit.unlike)])),
        duration_s=audit.seconds,
        outcome=audit.outcome,
        from_step=audit.first,
        ranks=audit.ranks,
        pid=run.pid,
        host=run.host,
    )
