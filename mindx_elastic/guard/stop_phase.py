"""The phases of a stop, as one transition table.

======================  =====================================================================================
phase                   what is true
======================  =====================================================================================
TRAINING                nothing was heard
STOPPING                an alarm was heard; the training thread runs to the agreed boundary
SAVING                  one thread has claimed the save and writes
SAVED                   this rank's state is durable (or no policy wanted a file)
FAILED                  nothing could be saved, and the reason is recorded
======================  =====================================================================================
"""

from __future__ import annotations

from enum import Enum

__all__ = ["FINAL", "MOVES", "StopPhase"]


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
FINAL = (StopPhase.SAVED, StopPhase.FAILED)
