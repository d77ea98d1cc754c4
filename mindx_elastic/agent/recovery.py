"""Recoveries in place, from the agent's side: a new process for a dead rank, while the others live on.

`rejoin.protocol.Coordinator` decides; this room does it: writes deaths to the board, starts the new process, watches
the clock, and says when it has succeeded or the job has to be restarted after all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindx_elastic.agent.endings import Meaning, describe, meaning
from mindx_elastic.agent.workers import Process, WorkerExit, Workers
from mindx_elastic.agreement.sealed import NotOursError
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.rejoin.board import Board
from mindx_elastic.rejoin.protocol import Coordinator, Fallback, Phase, Report
from mindx_elastic.rejoin.record import (
    FINISHED,
    IN_PLACE,
    RESTART,
    STOPPED,
    RecoveryRecord,
    Replacement,
)
from mindx_elastic.rejoin.spare import UNFIT

__all__ = ["ERRORS", "LOOK_S", "Recovery"]

LOOK_S = 0.005
_MOST_ALIKE = 2
_LONGEST = 300
ERRORS = (OSError, RuntimeError, NotOursError, ValueError, KeyError, TypeError, AttributeError)
"""What a board, a note on it and the start of a process raise."""


@dataclass
class _Generation:
    """What an agent knows of the recovery under way, or of the last one."""

    began: float
    """`time.time` of the failure, as far as the agent knows it."""
    noticed: float
    """`time.time`."""
    cause: str
    deadline: float
    """`time.monotonic`."""
    ready: dict[int, dict[str, Any]] = field(default_factory=dict)
    stood_in: dict[int, Replacement] = field(default_factory=dict)
    told: bool = False


class Recovery:
    """One per attempt. Main thread."""

    def __init__(
        self,
        workers: Workers,
        board_of: Callable[[int], Board],
        start: Callable[[int, int], tuple[Process, str]],
        *,
        timeout_s: float,
        most: int,
        note: Callable[[RecoveryRecord], None],
    ) -> None:
        """`board_of`: the board of a generation. `start`: starts the new process of a rank in a generation, and says
        how (`rejoin.record.Replacement`). Raises OSError, RuntimeError. `most`: recoveries, after which the job is
        restarted instead: each leaves a little behind in the survivors. `note` is told of each recovery when it is
        over."""
        self._workers, self._board_of, self._start = workers, board_of, start
        self._timeout_s, self._most, self._note = timeout_s, most, note
        self._machine = Coordinator(len(workers.processes))
        self._row: list[str] = []
        self._row_step = -1
        self._board: Board | None = None
        self._has_given_up = self._has_finished = self._is_stopped = False
        self._now: _Generation | None = None

    @property
    def is_active(self) -> bool:
        """Whether a recovery is under way."""
        return self._machine.phase in (Phase.CUT, Phase.AGREED)

    @property
    def has_failed(self) -> bool:
        """Whether the last one has come to nothing, as far as is known without a look at the board."""
        return self._now is not None and self._machine.phase is Phase.FALLBACK

    @property
    def reason(self) -> str:
        """Why the last one has come to nothing."""
        return self._machine.reason

    @property
    def must_kill(self) -> bool:
        """After one that came to nothing: the processes cannot save any more, and need not."""
        return self._machine.fallback is Fallback.KILL

    @property
    def moments(self) -> tuple[float, float]:
        """`time.monotonic` of the failure that the last recovery was for, and of the moment at which it was noticed."""
        assert self._now is not None
        noticed = self._now.deadline - self._timeout_s
        return noticed - (self._now.noticed - self._now.began), noticed

    @property
    def cause(self) -> str:
        """The failure that the recovery under way, or given up, is about; empty: there is none."""
        return "" if self._now is None else self._now.cause

    def begin(self, end: WorkerExit, cause: str, *, stuck_s: float = 0.0) -> bool:
        """A worker has died, after it had been stuck for so long. Whether its place is taken by a new one; else the
        survivors are told that it is not."""
        generation = self._machine.generation + 1
        reason = self.why_not([end.rank], end) or self._is_loop(end, cause)
        self.look_at_first_step(self._pages(end))
        self._tell()
        try:
            board = self._board_of(generation)
            if reason:
                if any(status.in_place for status in self._workers.statuses().values()):
                    board.write(f"{generation}/plan", {"refusal": reason})
            else:
                board.write(f"{generation}/out/{end.rank}", {"dead": True})
                board.write(f"{generation}/plan", {"generation": generation, "rank": end.rank, "cause": cause})
                self._machine.begin([end.rank])
                self._board = board
                noticed, deadline = time.time(), time.monotonic() + self._timeout_s
                self._now = _Generation(noticed - stuck_s, noticed, cause, deadline)
                self._replace(end.rank)
        except ERRORS as error:
            reason = reason or f"{type(error).__name__}: {error}"
            self._machine.note_refusal(reason)
        if reason:
            self.refuse([end.rank], cause, reason, stuck_s=stuck_s)
        return not reason

    def refuse(self, ranks: Sequence[int], cause: str, reason: str, *, stuck_s: float = 0.0) -> None:
        """Say that there is no recovery in place, which has not begun."""
        self._tell()
        if self._machine.phase is Phase.FALLBACK and self._now is not None and self._now.told:
            return  # it is the same failure: the agent has seen several deaths at once
        logger.warning("no recovery in place: %s", reason)
        if self._now is not None:
            self._now.told = True
        self._note(
            RecoveryRecord(
                generation=self._machine.generation + (self._machine.phase is Phase.RUN),
                outcome=RESTART,
                cause=cause,
                reason=reason,
                ranks=tuple(ranks),
                duration_s=stuck_s,
            )
        )

    def close(self, *, is_stopped: bool = False) -> None:
        """The attempt has ended; `is_stopped`: as it was told to."""
        self._is_stopped = is_stopped
        if self.is_active:  # the job has been stopped meanwhile, perhaps a moment after all had come back
            self._take_in()
            if self._machine.phase is not Phase.RUN:
                self._tell_of_failure(STOPPED)
        else:  # the last process may have died: why there is a restart is said all the same
            self.look()
        self._tell()

    def _pages(self, end: WorkerExit) -> dict[int, Status]:
        """Of all ranks, the one that has just ended, too."""
        return {**self._workers.statuses(), **({} if end.status is None else {end.rank: end.status})}

    def hear_end(self, end: WorkerExit) -> None:
        """A worker, old or new, has ended during the recovery."""
        machine, generation = self._machine, self._machine.generation
        if end.code == UNFIT and end.rank in machine.dead:  # it has taken no part yet
            try:
                self._replace(end.rank)
                return
            except ERRORS as error:
                logger.debug("%s", error)
        if meaning(end) is Meaning.FINISHED:
            self._has_finished = self._has_finished or machine.phase is not Phase.FALLBACK
            machine.note_refusal(f"rank {end.rank} has finished its training")
        elif meaning(end) is Meaning.LEFT:
            machine.note_refusal(f"rank {end.rank} has left: {describe(end)}")
        machine.note_death(end.rank)
        if machine.phase is Phase.FALLBACK:  # as where its report was known, or it was a new process itself
            return
        try:
            assert self._board is not None
            note = self._board.write(f"{generation}/out/{end.rank}", {"dead": True})
            if not note.get("dead"):
                machine.note_refusal(f"rank {end.rank} has died during the recovery")
                return
            self._replace(end.rank)
        except ERRORS as error:
            machine.note_refusal(f"{type(error).__name__}: {error}")

    def look(self) -> Phase:
        """Take in what has been written to the board. Returns the phase: `FALLBACK` when it has come to nothing."""
        if self.is_active:
            self._take_in()
        if self.is_active and self._now is not None and time.monotonic() > self._now.deadline:
            self._machine.note_refusal(self._why_late())
        if self._machine.phase is Phase.FALLBACK and not self._has_given_up:
            self._give_up()
        return self._machine.phase

    def _take_in(self) -> None:
        """What has been written to the board."""
        assert self._board is not None and self._now is not None
        machine, generation = self._machine, self._machine.generation
        try:
            if machine.phase is Phase.CUT:
                for rank, note in self._notes("out", machine.missing).items():
                    machine.note_report(Report.from_json(rank, note))
            state, refusal = f"{generation}/state", f"{generation}/refusal"
            if said := self._board.read([refusal]).get(refusal):
                rank, why = int(said["rank"]), printable(str(said["refusal"]), _LONGEST)
                machine.note_refusal(why if why.startswith("rank ") else f"rank {rank}: {why}")
            if machine.phase is Phase.AGREED and "path" in self._board.read([state]).get(state, {}):
                machine.note_state()
            if machine.phase is Phase.AGREED and machine.has_state:
                for rank, note in self._notes("ready", machine.missing).items():
                    self._now.ready[rank] = note
                    machine.note_ready(rank)
        except ERRORS as error:
            machine.note_refusal(f"{type(error).__name__}: {error}")

    def _why_late(self) -> str:
        """What has not come when the time is over."""
        machine = self._machine
        missing = listed([f"rank {rank}" for rank in machine.missing], 5)
        what = {Phase.CUT: "come out of the training", Phase.AGREED: "come back"}[machine.phase]
        return f"{missing} did not {what} within {self._timeout_s:g} s (--rejoin-timeout)"

    def look_at_first_step(self, statuses: Mapping[int, Status]) -> bool:
        """After a success: whether all ranks have passed a boundary, or have ended; says so once."""
        now, verdict = self._now, self._machine.verdict
        if now is None or verdict is None or now.told or self._machine.phase is not Phase.RUN:
            return True
        trains = [status for status in statuses.values() if status.phase in (WorkerPhase.TRAINING, WorkerPhase.BETWEEN)]
        if any(status.generation != self._machine.generation or status.step <= verdict.step for status in trains):
            return False
        self._tell()
        return True

    def _tell(self) -> None:
        """Of the success, once."""
        now, verdict = self._now, self._machine.verdict
        if now is None or verdict is None or now.told or self._machine.phase is not Phase.RUN:
            return
        record = self._record(now, IN_PLACE)
        self._note(record)
        logger.info(
            "recovery %d in place: rank%s %s replaced, all ranks train on from step %d after %.2f s",
            self._machine.generation,
            "s" * (len(verdict.dead) > 1),
            ", ".join(map(str, verdict.dead)),
            verdict.step,
            record.duration_s,
        )

    def _tell_of_failure(self, outcome: str) -> None:
        if self._now is not None and not self._now.told:
            self._note(self._record(self._now, outcome))

    def _record(self, now: _Generation, outcome: str) -> RecoveryRecord:
        """Of this recovery, which is told of once."""
        now.told = True
        machine, verdict = self._machine, self._machine.verdict
        heard = [float(note["heard"]) for note in now.ready.values() if "heard" in note]  # a survivor may have earlier
        took = time.time() - min([now.began, *heard])
        record = RecoveryRecord(
            generation=machine.generation,
            outcome=outcome,
            cause=now.cause,
            stood_in=tuple(now.stood_in[rank] for rank in sorted(now.stood_in)),
            duration_s=took,
        )
        if outcome != IN_PLACE or verdict is None:
            return replace(record, reason=machine.reason, ranks=tuple(sorted(machine.dead)))
        return replace(
            record,
            ranks=verdict.dead,
            behind=verdict.behind,
            donor=verdict.donor,
            step=verdict.step,
            steps_lost=0,
        )

    def _is_loop(self, end: WorkerExit, cause: str) -> str:
        """Whether the same happens at the same step again and again: then the restart decides whether to go on."""
        step = -1 if end.status is None else end.status.step
        self._row = [*self._row, cause] if step == self._row_step and cause in self._row else [cause]
        self._row_step = step
        return f"{cause} after step {step}, {len(self._row)} times in a row" if len(self._row) > _MOST_ALIKE else ""

    # --- parts --------------------------------------------------------------------------------------------------------

    def why_not(self, ranks: Sequence[int], end: WorkerExit | None = None) -> str:
        """Why new processes cannot take the places of `ranks` now; empty: they can. `end`: how the one has ended."""
        statuses = self._workers.statuses()
        if self._machine.phase is not Phase.RUN:
            return self._machine.reason or "the last one is not over"
        if self._machine.generation >= self._most:
            return f"there were {self._most} in this attempt, and each leaves threads and descriptors behind"
        if not self._workers.live.keys() - set(ranks):
            return "no other rank lives"
        if end is not None and (end.status is None or not end.status.in_place):
            return f"rank {end.rank} was not inside of guard.run(...), or a warning has said why it cannot be replaced"
        for rank in sorted(self._workers.live.keys() - set(ranks)):
            status = statuses.get(rank)
            if status is not None and status.in_place and status.phase == WorkerPhase.STOPPING:
                why = f" ({printable(status.reason, _LONGEST)})" if status.reason else ""
                return f"rank {rank} stops already{why}"
            if status is None or not status.in_place or status.phase not in (WorkerPhase.TRAINING, WorkerPhase.BETWEEN):
                return f"rank {rank} is not inside of guard.run(...)"
            if status.finished:
                return f"rank {rank} has finished its training"
        return ""

    def _replace(self, rank: int) -> None:
        process, by = self._start(rank, self._machine.generation)
        self._workers.replace(rank, process)
        if self._now is not None:
            self._now.stood_in[rank] = Replacement(rank=rank, pid=process.pid, by=by)
        logger.info("a new process (pid %d) takes the place of rank %d", process.pid, rank)

    def _notes(self, what: str, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        assert self._board is not None
        keys = {f"{self._machine.generation}/{what}/{rank}": rank for rank in ranks}
        return {keys[key]: note for key, note in self._board.read(list(keys)).items()}

    def _give_up(self) -> None:
        """Release the survivors that wait for something which does not come."""
        assert self._board is not None
        self._has_given_up = True
        generation = self._machine.generation
        refusal: dict[str, Any] = {"refusal": self._machine.reason}
        try:
            note = self._board.write(f"{generation}/state", refusal)
            if "path" in note and not self._machine.has_state:  # the donor was faster
                self._machine.has_state, self._machine.fallback = True, Fallback.KILL
            for rank in range(self._machine.world_size):
                self._board.write(f"{generation}/out/{rank}", refusal)
        except ERRORS as error:
            logger.debug("the board cannot be written to: %s", error)
        # Whether there is a restart after a finish is said when all ranks of the node have ended.
        stops = self._is_stopped or any(status.asked_code > 0 for status in self._workers.statuses().values())
        what_then = "; the job stops" if stops else "" if self._has_finished else "; the job is restarted"
        logger.warning("no recovery in place: %s%s", self._machine.reason, what_then)
        self._tell_of_failure(FINISHED if self._has_finished else STOPPED if self._is_stopped else RESTART)
