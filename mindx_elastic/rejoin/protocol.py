"""The rules of an in-place recovery. Pure: no torch, threads, clock or files.

::

    RUN --death--> CUT --all reports--> AGREED --donor's state, all ready--> RUN
                    |                      |
                    +------ anything that does not fit ------> FALLBACK (save and restart)

A recovery has a number, its *generation*. The survivors of a death leave their collectives and report where they
stand. All of them read the same reports, so each works out the same `RecoveryVerdict` by itself (`decide`): they go on
from the most advanced boundary at which a survivor is whole, and each rank that is not takes its state. A report is
written once: if a rank dies before it has reported, the coordinator writes its death in that place. Only ranks that all
hold the whole state take part: another one's report says so, and the job is restarted.

The coordinator (`Coordinator`: the agent) only starts a generation, notes deaths and watches the clock. It cannot
change a verdict; it can end the recovery. Up to the donor's word that its state is in shared memory, the survivors'
guards are open and save their last boundaries by themselves (`Fallback.SAVE`). After it, all that a restart needs is in
shared memory, and the processes are ended (`Fallback.KILL`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Annotated, Any, NamedTuple

from mindx_elastic.core.fields import Words, read
from mindx_elastic.core.rank_lists import rank_list

__all__ = ["Coordinator", "Fallback", "Phase", "RecoveryVerdict", "Report", "decide"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where a survivor stands, outside of its collectives."""

    rank: int
    run_id: str
    attempt: int
    step: int
    """Its last boundary."""
    clean: bool
    """Its weights are those of that boundary; else it has been cut off in the middle of an update."""
    groups: str
    """A digest of its process groups: names, members, backends."""
    orders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The order of gradients of each DDP module; see `capture.ddp`."""
    lacked: Sequence[str] = field(default_factory=list)
    """The modules that other ranks have and this one has not (an average on rank 0): it cannot give them its state."""
    problem: Annotated[str, Words(2000)] = ""
    """Why this rank cannot take part; empty: it can."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, rank: int, content: Mapping[str, Any]) -> Report:
        """Raises ValueError for anything else than a report."""
        return read(cls, {**content, "rank": rank})


class RecoveryVerdict(NamedTuple):
    """What all ranks do next."""

    refusal: str = ""
    """Why there is no in-place recovery; empty: there is one, and the rest counts."""
    run_id: str = ""
    attempt: int = 0
    """The attempt of the boundary."""
    next_attempt: int = 0
    """All go on in this one."""
    step: int = 0
    """The boundary that all go on from."""
    donor: int = -1
    """The living rank that puts its state into memory for those that lack it."""
    dead: tuple[int, ...] = ()
    """Ranks whose places new processes take."""
    behind: tuple[int, ...] = ()
    """Survivors whose own state is not that of the boundary."""

    @property
    def needy(self) -> tuple[int, ...]:
        """The ranks that take the donor's state."""
        return tuple(sorted({*self.dead, *self.behind}))


def decide(reports: Mapping[int, Report | None], *, world_size: int) -> RecoveryVerdict:
    """The verdict on the reports of all ranks of a world; None: that rank is dead. A boundary below step 1 is not
    taken."""
    dead = tuple(rank for rank in range(world_size) if reports.get(rank) is None)
    alive = [report for rank in range(world_size) if (report := reports.get(rank)) is not None]
    if not dead:
        return RecoveryVerdict(refusal="every rank has reported, and none is dead")
    if not alive:
        return RecoveryVerdict(refusal="no rank is left")
    for report in alive:
        if report.problem:
            return RecoveryVerdict(refusal=f"rank {report.rank}: {report.problem}")
    if len({(report.run_id, report.attempt) for report in alive}) > 1:
        return RecoveryVerdict(refusal="the ranks are in different attempts of the run")
    if len({report.groups for report in alive}) > 1:
        return RecoveryVerdict(refusal="the ranks have made different process groups")
    clean = [report for report in alive if report.clean]
    if not clean:
        ranks = rank_list(report.rank for report in alive)
        were = "was" if len(alive) == 1 else "were all"
        return RecoveryVerdict(refusal=f"{ranks} {were} cut off in an update: none has the state of a boundary")
    step = max(report.step for report in clean)
    if max(report.step for report in alive) > step:
        return RecoveryVerdict(refusal="the rank that was furthest was cut off in an update")
    if step < 1:
        return RecoveryVerdict(refusal=f"the ranks stand at step {step}, which is too early")
    whole = [report for report in clean if report.step == step]
    donors = [report.rank for report in whole if not report.lacked]
    if not donors:
        names = ", ".join(map(str, whole[0].lacked))
        return RecoveryVerdict(refusal=f"no living rank has all modules of step {step}: {names} not on every rank")
    return RecoveryVerdict(
        run_id=alive[0].run_id,
        attempt=alive[0].attempt,
        next_attempt=alive[0].attempt + 1,
        step=step,
        donor=min(donors),
        dead=dead,
        behind=tuple(report.rank for report in alive if report not in whole),
    )


class Phase(Enum):
    """The phases of a coordinator."""

    RUN = "run"
    CUT = "cut"
    AGREED = "agreed"
    FALLBACK = "fallback"


class Fallback(Enum):
    """How a recovery that does not succeed ends."""

    SAVE = "save"
    """The survivors still have their last boundaries under their guards, and save them."""
    KILL = "kill"
    """All that a restart needs is in shared memory."""


class Coordinator:
    """The coordinator's view of one attempt. Each method is an event; it changes the fields and returns nothing."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.phase = Phase.RUN
        self.generation = 0
        self.dead: set[int] = set()
        """In this generation, as known before the verdict."""
        self.reports: dict[int, Report | None] = {}
        self.verdict: RecoveryVerdict | None = None
        self.has_state = False
        """The donor's state is in shared memory."""
        self.ready: set[int] = set()
        self.reason = ""
        """Why it is a fallback."""
        self.fallback: Fallback | None = None

    def begin(self, dead: Collection[int]) -> None:
        """`dead` ranks were found while all trained: a new generation."""
        if self.phase is not Phase.RUN:
            raise ValueError(f"a generation is under way ({self.phase.value})")
        self.generation += 1
        self.phase, self.dead = Phase.CUT, set(dead)
        self.reports, self.verdict, self.has_state, self.ready = dict.fromkeys(sorted(dead)), None, False, set()
        self._decide()

    def note_death(self, rank: int) -> None:
        """One more process has died since `begin`: a survivor, or the new process of a dead rank."""
        if self.phase is Phase.CUT and rank not in self.reports:
            self.dead.add(rank)
            self._note(rank, None)
        elif self.phase is Phase.CUT and self.reports[rank] is None:
            self._fall(f"the new process of rank {rank} has died")
        elif self.phase in (Phase.CUT, Phase.AGREED):
            who = "the new process of rank" if rank in self.dead else "rank"
            self._fall(f"{who} {rank} has died during the recovery")

    def note_report(self, report: Report) -> None:
        """A survivor has reported."""
        if self.phase is Phase.CUT and report.rank not in self.reports:
            self._note(report.rank, report)

    def note_state(self) -> None:
        """The donor's state is in shared memory."""
        if self.phase is Phase.AGREED:
            self.has_state = True
            self._conclude()

    def note_ready(self, rank: int) -> None:
        """A rank, old or new, trains again."""
        if self.phase is Phase.AGREED and 0 <= rank < self.world_size:
            self.ready.add(rank)
            self._conclude()

    def note_refusal(self, reason: str) -> None:
        """A rank has found that it cannot go on, or time is up."""
        if self.phase in (Phase.CUT, Phase.AGREED):
            self._fall(reason)

    @property
    def missing(self) -> list[int]:
        """The ranks that the recovery waits for now."""
        if self.phase is Phase.CUT:
            return [rank for rank in range(self.world_size) if rank not in self.reports]
        if self.phase is Phase.AGREED and not self.has_state and self.verdict is not None:
            return [self.verdict.donor]
        return [rank for rank in range(self.world_size) if rank not in self.ready]

    def _note(self, rank: int, report: Report | None) -> None:
        self.reports[rank] = report
        self._decide()

    def _decide(self) -> None:
        if len(self.reports) < self.world_size:
            return
        self.verdict = decide(self.reports, world_size=self.world_size)
        if self.verdict.refusal:
            self._fall(self.verdict.refusal)
        else:
            self.phase = Phase.AGREED

    def _conclude(self) -> None:
        if self.has_state and len(self.ready) == self.world_size:
            self.phase = Phase.RUN

    def _fall(self, reason: str) -> None:
        self.phase, self.reason = Phase.FALLBACK, reason
        self.fallback = Fallback.KILL if self.has_state else Fallback.SAVE
