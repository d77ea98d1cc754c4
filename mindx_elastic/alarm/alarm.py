"""One alarm: why the job must stop, and how it will leave."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from mindx_elastic.alarm.deadline import Deadline

__all__ = ["Alarm", "exit_code_of_signal", "signal_name"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Heard by one rank, told to all. Immutable; passes between threads."""

    kind: str
    """``signal``, ``flag``, ``exception``, ``fault``, ``peer`` or ``request``."""
    reason: str
    """For people: ``SIGTERM``, ``flag file /x/graceful_exit.json``, ``exception: ValueError: ...``."""
    deadline: Deadline
    """When the process must be gone."""
    exit_code: int
    """What the process returns once its state is durable."""
    origin: int = 0
    """Rank that heard it first."""
    signum: int | None = None
    """The signal's number, for kind ``signal``."""


def exit_code_of_signal(signum: int) -> int:
    """128 + number, the shell's convention; 143 for SIGTERM."""
    return 128 + signum


def signal_name(signum: int) -> str:
    """``SIGTERM`` for 15; ``signal 40`` where the platform has no name for it."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
