"""Takes snapshots: the last boundary's state, copied into shared memory beside the training.

The training thread lends the update gate to the copy and goes on with forward and backward; `optimizer.step()` waits
if the copy is not done by then. With ``every=1`` the copy is made before the step ends instead: then a step that is
over is kept, whatever happens next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.told import whole_number
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.errors import ArenaError, UnsupportedStateError
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.slots import Snapshot, copy_snapshot, lay_out, reserve_slots, seal_slot
from mindx_elastic.memory.snapshot_schedule import SnapshotSchedule
from mindx_elastic.persist.format import CheckpointInfo

__all__ = ["ANY_INTERVAL", "Snapshotter", "reach"]

ANY_INTERVAL = "1"
"""The proposal of a rank that takes no snapshots: the others' are larger."""

_AGREEMENT_S, _ASK_AGAIN_S = 20.0, 0.002  # ranks pass a step at about the same time


def reach(stage: str) -> None:
    """Called at each stage of a copy; does nothing. Tests put a kill here."""


class Snapshotter:
    """One per guard. `at_boundary` belongs to the training thread."""

    def __init__(
        self,
        arena: RankArena,
        collector: Collector,
        update_gate: UpdateGate,
        schedule: SnapshotSchedule,
        describe: Callable[[], CheckpointInfo],
        exchange: Exchange,
        events: EventLog,
        *,
        instead: Callable[[], None] | None = None,
    ) -> None:
        """`describe` gives the header facts of the collector's current boundary.

        `instead`: what to do in place of a copy, where another rank of the machine copies a state that all share.
        """
        self._instead = instead
        self._arena, self._collector, self._gate = arena, collector, update_gate
        self.schedule, self._describe, self._exchange, self._events = schedule, describe, exchange, events
        self._sequence = arena.newest().sequence
        self._taken = -1  # step of the last snapshot of ours
        self._wanted = threading.Condition()
        self._pending = self._copying = self._working = self._closed = False
        self._thread: threading.Thread | None = None
        self._step_began: float | None = None
        self._extra = False
        self._nbytes = 0  # of the last snapshot; 0: not known
        self._reserved = self._reserving = self._hurry = False
        self.broken = False
        """Shared memory has no room, or the state has no form; said once, training goes on without snapshots."""

    def at_boundary(self, step: int) -> None:
        """The boundary `step` has just been passed, its volatile state is copied."""
        if self.broken:
            if self.schedule.every is None:
                self.schedule.every = 0
                with suppress(Exception):  # a lost store: nobody waits at it
                    self._exchange.publish("snapshot_every", ANY_INTERVAL)
            return
        now = time.perf_counter()
        if self._step_began is not None:
            self.schedule.note(now - self._step_began, extra=self._extra)
        self._extra = self.schedule.due(step)
        if self._extra and self._instead is not None:
            self._instead()
        elif self._extra and (self.schedule.synchronous or self._gate.unguarded):
            self._hurry = True
            self.drain()  # the copier's digests: it may have had the last one
            self._copy()
            self._hurry = False
        elif self._extra:
            self._hand_over()
        elif (proposal := self.schedule.proposal()) is not None:
            self._agree(proposal)
        if not self._reserved and self._instead is None:
            self._reserve_beside()
        self._step_began = now if self._extra else time.perf_counter()

    def _hand_over(self) -> None:
        with self._wanted:
            if self._copying:
                self._events.emit("snapshot", step=self._collector.position.step, outcome="skipped: still busy")
                return
            if not self._has_thread():
                return
            self._gate.lend()
            self._copying = self._pending = True  # a seal in progress gives way
            self._wake()

    def _reserve_beside(self) -> None:
        """Memory that is touched for the first time can be ten times as slow as the copy itself: get it beforehand."""
        try:
            if not self._nbytes and not self._copying:
                self._lay_out()
        except Exception as error:
            self._give_up(error)
            return
        with self._wanted:
            self._reserving = True
            self._wake()

    def _wake(self) -> None:
        if self._has_thread():
            self._working = True
            self._wanted.notify_all()

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mindx-snapshot", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process is at its limit
                self._give_up(error)
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._pending or self._reserving or self._closed)
                if self._closed and not self._pending:
                    return
                pending, self._pending, self._reserving = self._pending, False, False
            if pending:
                try:
                    index = self._copy()
                finally:
                    with self._wanted:
                        self._copying = False
                    self._gate.give_back()
                if index is not None:
                    self._seal(index)
            if not self._reserved and not self.broken:
                self._reserve()
            with self._wanted:
                self._working = self._pending or self._reserving
                self._wanted.notify_all()

    def _reserve(self) -> None:
        try:
            self._reserved = reserve_slots(
                self._arena, self._nbytes, go_on=lambda: not (self._closed or self._pending or self._hurry)
            )
        except Exception as error:
            self._give_up(error)

    def _lay_out(self) -> Snapshot:
        collector = self._collector
        snapshot = lay_out(collector.state(), self._describe(), collector.layout())
        self._nbytes = snapshot.nbytes
        return snapshot

    def _copy(self) -> int | None:
        """Training thread, or the copier while the gate is lent. The slot, if the copy is good."""
        collector = self._collector
        try:
            snapshot = self._lay_out()
            sequence = self._sequence + 1
            event = collector.boundary_event
            changed = self._gate.changed_since_boundary
            index = copy_snapshot(self._arena, snapshot, sequence, boundary_event=event, at=reach, changed=changed)
        except Exception as error:  # whatever it is, also a `state_dict` of the user's that raises: training goes on
            self._give_up(error)
            return None
        if index is None:
            self._events.emit("snapshot", step=snapshot.info.step, outcome=f"dropped: {changed()}")
        else:
            self._sequence, self._taken = sequence, snapshot.info.step
        return index

    def _seal(self, index: int) -> None:
        try:
            # Not sealed is as good for whoever adopts the slot; not taken is not, and the other ranks would take it.
            if seal_slot(self._arena, index, go_on=lambda: not (self._closed or self._pending)):
                reach("sealed")
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.broken = True
        expected = isinstance(error, (ArenaError, UnsupportedStateError, OSError))
        remedy = "training goes on without snapshots, checkpoints on disk are not affected"
        logger.error("%s; %s", error, remedy, exc_info=not expected)
        self._events.emit("snapshot", step=self._collector.position.step, outcome=f"failed: {error}")

    def _agree(self, proposal: int) -> None:
        """Once a job: all ranks come here after the same step, and take up the same interval at the same step.

        A rank that took it up later would hold other steps than the others, and no step would be whole.
        """
        end = time.monotonic() + _AGREEMENT_S
        try:
            self._exchange.publish("snapshot_every", str(proposal))
            while (found := self._exchange.try_collect("snapshot_every")) is None:
                if time.monotonic() > end:
                    raise TimeoutError(f"a rank is {_AGREEMENT_S:g} s behind")
                time.sleep(_ASK_AGAIN_S)
            intervals = [whole_number(text, 1, 10**9) for text in found]
        except Exception as error:
            logger.warning("the ranks could not agree on a snapshot interval (%s); there are no snapshots", error)
            self.schedule.every = 0
            return
        self.schedule.agree(intervals)
        self._arena.interval = interval = self.schedule.every or 0
        logger.info("a snapshot in memory every %d steps costs less than 1%% of the step time", interval)
        self._events.emit("snapshot_every", step=self._collector.position.step, outcome=str(interval))

    def take_last(self) -> bool:
        """Keep the last boundary, due or not. False: it could not be, or the state has been changed since."""
        self.drain()
        with self._gate.hold(0.0) as problem:
            position = self._collector.position
            if problem or self.broken or position.step == 0:
                return False
            if self._instead is not None:
                self._instead()
                return True
            if self._taken != position.step:  # what lies there may be another run's
                self._copy()
            return not self.broken

    def drain(self, timeout_s: float = 60.0) -> None:
        """Wait for a copy in progress and its digests."""
        with self._wanted:
            self._wanted.wait_for(lambda: not self._working, timeout_s)

    def close(self) -> None:
        """End the thread after the copy in progress; a seal in progress is broken off. Training thread."""
        with self._wanted:
            self._closed = True
            self._wanted.notify_all()
        if self._thread is not None:
            self._thread.join(60.0)
