"""Whether another restart is allowed (`Restarts`) and can help (`CrashLoop`).

A job that fails after the same boundary again and again gets no further, and cannot be restarted away: `repeats` such
failures in a row stop it, whatever their causes, with a text for the person who finds it in the morning. The checkpoint
itself may be the cause: then the text says how to go on from an older one.

A training that its guard has refused (`UnmanagedStateError`) is stopped at once: every attempt would be refused. So is
a program that makes a wrong call (`UsageError`: no process group, say), names a directory of others
(`UnsafeDirectoryError`) or one that cannot be written to, or has state that no file holds (`UnsupportedStateError`).

Pure: no clock, no files. One thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["CrashLoop", "Failure", "RestartVerdict", "Restarts"]


class Restarts:
    """Counts the restarts after failures."""

    def __init__(self, most: int, window_s: float | None = None) -> None:
        """most: allowed in all, or with `window_s` within any `window_s` seconds."""
        self.most, self.window_s = most, window_s
        self.total = 0
        self._times: list[float] = []

    def take(self, now: float) -> bool:
        """Use one up at `now` (seconds, any monotonic clock); False: none is left."""
        if self.window_s is not None:
            self._times = [then for then in self._times if then > now - self.window_s]
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        self.total += 1
        return True

    @property
    def count(self) -> str:
        """``1 of 3``, for a person."""
        within = "" if self.window_s is None else f" within {self.window_s:g} s"
        return f"{len(self._times)} of {self.most}{within}"

    @property
    def why_not(self) -> str:
        """Why `take` said no."""
        if not self.most:
            return "--max-restarts is 0"
        within = "" if self.window_s is None else f" within {self.window_s:g} s (--max-restarts-window)"
        return f"all {self.most} restarts{within} are used up (--max-restarts)"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one attempt ended, seen from the agent."""

    cause: str
    """For a person: ``killed by SIGKILL``, ``exit code 1: ValueError: bad sample``."""
    step: int
    """Last boundary that every rank of the node had passed; -1 when there was none."""
    resumed_step: int = -1
    """Step that the attempt went on from; -1 for a fresh start, and when the attempt died before it was known."""
    resumed_path: str = ""
    """One file of that checkpoint; empty for a fresh start."""
    boundaries: int = 0
    """How many boundaries the attempt has passed."""
    guarded: bool = True
    """Whether the worker told where it stood. If not, nothing is known about its step, and nothing is judged:
    such a script is restarted as torchrun restarts it."""

    @property
    def is_refusal(self) -> bool:
        """Whether the guard has refused the program, here or on another node."""
        return _REFUSAL in self.cause

    @property
    def is_usage(self) -> bool:
        """Whether the program has to be corrected, or its directory, before any attempt can begin."""
        return _USAGE.search(self.cause) is not None

    @property
    def leaves_nothing(self) -> bool:
        """Whether what is in memory is of no use: it was begun by a refused attempt, and the corrected program has
        state that is not in it."""
        return self.is_refusal and self.resumed_step < 0 and self.boundaries > 0 and not self.resumed_path


@dataclass(frozen=True)
class RestartVerdict:
    """What to do about a failure."""

    action: Literal["restart", "stop"]
    explanation: str
    """Why, in lines for a person; empty for a restart."""


class CrashLoop:
    """Judges the failures of a job, one after the other.

    repeats: how many failures in a row after the same boundary are too many; 0 switches the judgement off.
    """

    def __init__(self, repeats: int = 3) -> None:
        self._repeats = repeats
        self._row: list[Failure] = []
        """The newest failures, all after the same boundary."""

    def judge(self, failure: Failure) -> RestartVerdict:
        """Take one more failure into account and say what to do. Failures only: a stop that was asked for is none."""
        if failure.is_refusal:
            return RestartVerdict("stop", _explain_refusal(failure))
        if failure.is_usage:
            return RestartVerdict("stop", "no restart: every attempt would end with this error")
        if not self._repeats or not failure.guarded:
            return RestartVerdict("restart", "")
        self._row = [*self._row, failure] if self._row and self._row[-1].step == failure.step else [failure]
        if len(self._row) >= self._repeats:
            return RestartVerdict("stop", _explain_loop(self._row))
        return RestartVerdict("restart", "")


_REFUSAL = "UnmanagedStateError: "
_USAGE = re.compile(
    r"(?<![\w.])(?:(?:UsageError|UnsafeDirectoryError|UnsupportedStateError): |OddStepError: .*: it is the program's "
    r"own|SaveError: .*: cannot write there: )"
)
"""Of this package: one of another has the name of its module in front of it. The last one is a start's in a directory
where nothing can be written (`persist.storage.prepare_owned_directory`): the disk is full, say."""


def _text(headline: str, **rows: str) -> str:
    """For the person who finds the job in the morning."""
    return "\n".join([headline, *(f"  {name.replace('_', ' ') + ':':<12}{row}" for name, row in rows.items())])


def _explain_refusal(failure: Failure) -> str:
    return _text(
        "The guard has refused the training: a checkpoint would lack part of its state. So would every attempt.",
        what=failure.cause,
        where=_place(failure),
        to_go_on='correct the program as it says, or Guard(unmanaged="warn") (MINDX_UNMANAGED=warn)',
    )


def _explain_loop(row: Sequence[Failure]) -> str:
    last = row[-1]
    onward = "remove the cause and start the same command again"
    if last.resumed_path and not last.boundaries:
        onward += f". From an older checkpoint: move all files of step {last.resumed_step} out of the directory"
    return _text(
        f"{len(row)} attempts in a row failed at the same step. So would another one, and the job is stopped.",
        what="; then ".join(dict.fromkeys(failure.cause for failure in row)),
        where=_place(last),
        checkpoint=last.resumed_path or ("none, a fresh start" if last.boundaries else "none was loaded"),
        look_at="the traceback (mindx-elastic logs), the stacks in the run directory, the system's log (dmesg)",
        to_go_on=onward,
    )


def _place(failure: Failure) -> str:
    if failure.step < 0:
        return "before the first step was done"
    return f"after step {failure.step}, so in step {failure.step + 1} or on the way to it"
