"""The state machine of a stop: its phases as one transition table, and the claim to save.

======================  =================================================================================
phase                   what is true
======================  =================================================================================
TRAINING                no alarm was heard
STOPPING                an alarm was heard; the training thread runs to the agreed boundary
SAVING                  one thread has claimed the save and writes
SAVED                   this rank's state is durable (or no policy wanted a file)
FAILED                  nothing could be saved, and the reason is recorded
======================  =================================================================================

Alarms come in on the watcher thread (signals, flag file, other ranks) or on the training thread (exceptions), and both
may save. The thread that claims the save first writes; the other one waits for it.
"""

from __future__ import annotations

import threading
import time
from enum import Enum

from mindx_elastic.alarm.alarm import Alarm

__all__ = ["MOVES", "SETTLED", "StopPhase", "StopState"]


class StopPhase(Enum):
    """See the module's table."""

    TRAINING = 0
    STOPPING = 1
    SAVING = 2
    SAVED = 3
    FAILED = 4


MOVES = {
    StopPhase.TRAINING: {StopPhase.STOPPING},
    StopPhase.STOPPING: {StopPhase.SAVING},
    # back to STOPPING: the claim was given up because another rank is one boundary ahead, or the gate was not clean
    StopPhase.SAVING: {StopPhase.SAVED, StopPhase.FAILED, StopPhase.STOPPING},
    StopPhase.SAVED: set(),
    StopPhase.FAILED: set(),
}
SETTLED = (StopPhase.SAVED, StopPhase.FAILED)


class StopState:
    """The phase of a stop, its alarm, and which thread has claimed the save. Any thread; the lock is held over
    assignments only."""

    def __init__(self) -> None:
        self.phase = StopPhase.TRAINING
        self.alarm: Alarm | None = None
        """Set together with STOPPING and never changed afterwards."""
        self.heard_at = 0.0
        self.finished = False
        """The training has ended; no stop follows."""
        self._changed = threading.Condition()
        self._owner: int | None = None
        self.is_writing = False
        """The thread that has the claim writes its file: the process must not end meanwhile."""

    @property
    def is_settled(self) -> bool:
        """Whether the save is over, one way or the other."""
        return self.phase in SETTLED

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the claim."""
        return self._owner == threading.get_ident()

    def accept(self, alarm: Alarm) -> bool:
        """TRAINING -> STOPPING. False: an earlier alarm was accepted, or the training has finished."""
        with self._changed:
            if self.phase is not StopPhase.TRAINING or self.finished:
                return False
            self.alarm, self.heard_at = alarm, time.monotonic()
            self._enter(StopPhase.STOPPING)
            return True

    def finish(self) -> None:
        """The training has ended, unless an alarm was accepted."""
        with self._changed:
            self.finished |= self.phase is StopPhase.TRAINING

    def claim(self) -> bool:
        """STOPPING -> SAVING: this thread writes. False: another thread has the claim, or the stop is settled."""
        with self._changed:
            if self.phase is not StopPhase.STOPPING:
                return False
            self._enter(StopPhase.SAVING)
            return True

    def move(self, phase: StopPhase) -> None:
        """The claim's owner: go on to `phase`. Raises RuntimeError for a move that is not in `MOVES`."""
        with self._changed:
            self._enter(phase)

    def wait_while(self, *phases: StopPhase, timeout_s: float | None = None) -> StopPhase:
        with self._changed:
            self._changed.wait_for(lambda: self.phase not in phases, timeout_s)
            return self.phase

    def _enter(self, phase: StopPhase) -> None:
        if phase not in MOVES[self.phase]:
            raise RuntimeError(f"a stop cannot go from {self.phase.name} to {phase.name}")
        self.phase, self.is_writing = phase, False
        self._owner = threading.get_ident() if phase is StopPhase.SAVING else None
        self._changed.notify_all()
