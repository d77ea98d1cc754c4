"""Whether another restart is allowed (`Restarts`) and can help (`CrashLoop`).

The same failure at the same step, again and again, cannot be restarted away. Two failures are the same when their
causes are equal but for what differs between any two processes (pids, addresses, times) and they came after the same
boundary, on whatever rank. `repeats` of them in a row stop the job, with a text for the person who finds it in the
morning.

So do `repeats` attempts in a row, whatever their causes, that went on from the same checkpoint and passed no boundary:
the checkpoint itself may be the cause, and the text says how to go on from an older one.

A training that its guard has refused (`UnmanagedStateError`) is stopped at once: every attempt would be refused. So is
a program that makes a wrong call (`UsageError`: no process group, say), names a directory of others
(`UnsafeDirectoryError`), or has state that no file holds (`UnsupportedStateError`).

Pure: no clock, no files. One thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["CrashLoop", "Failure", "RestartVerdict", "Restarts", "advice", "same_cause"]


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
    rank: int
    """The global rank that failed first; -1 when it is not known."""
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

    repeats: how many equal failures in a row are too many; 0 switches the judgement off.
    """

    def __init__(self, repeats: int = 3) -> None:
        self._repeats = repeats
        self._row: list[Failure] = []
        """The newest failures, all the same."""
        self._resumes: list[Failure] = []
        """The newest failures of any cause that went on from the same checkpoint and passed no boundary."""

    def judge(self, failure: Failure) -> RestartVerdict:
        """Take one more failure into account and say what to do. Failures only: a stop that was asked for is none."""
        if failure.is_refusal:
            return RestartVerdict("stop", _explain_refusal(failure))
        if failure.is_usage:
            return RestartVerdict("stop", "no restart: every attempt would end with this error")
        if not self._repeats or not failure.guarded:
            return RestartVerdict("restart", "")
        self._row = [*self._row, failure] if self._row and _same(self._row[-1], failure) else [failure]
        self._count_resume(failure)
        if len(self._resumes) >= self._repeats:
            return RestartVerdict("stop", _explain_resumes(self._resumes))
        if len(self._row) >= self._repeats:
            return RestartVerdict("stop", _explain_loop(self._row))
        return RestartVerdict("restart", "")

    def _count_resume(self, failure: Failure) -> None:
        if failure.boundaries or failure.resumed_step < 0 or not failure.resumed_path:
            self._resumes = []
        elif self._resumes and self._resumes[-1].resumed_step == failure.resumed_step:
            # The step alone says which checkpoint: all files of one step hold the same state.
            self._resumes.append(failure)
        else:
            self._resumes = [failure]


_REFUSAL = "UnmanagedStateError: "
_USAGE = re.compile(r"(?<![\w.])(?:UsageError|UnsafeDirectoryError|UnsupportedStateError): ")
"""Of this package: one of another has the name of its module in front of it."""
_VARYING = (
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "#"),  # UUIDs
    (
        re.compile(r"(?:[+-]|\b)(?:0[xX][0-9a-fA-F]+|[0-9a-fA-F]{8,}|(?=[a-fA-F]*[0-9])[0-9a-fA-F]{4,})\b"),
        "#",
    ),  # addresses
    (re.compile(r"\btmp[a-z0-9_]{8}\b"), "tmp#"),  # Python's names for temporary files
    (re.compile(r"[+-]?\d+(?:[.,:]\d+)*(?:[eE][+-]?\d+)?"), "#"),
    (re.compile(r"\s+"), " "),
)
_TELLING = re.compile(r"(\b(?:exit code|exitcode|signal) -?\d+\b)")


def same_cause(cause: str) -> str:
    """`cause` without what differs between two processes: equal texts mean the same cause. Exit codes stay."""
    pieces = _TELLING.split(cause)
    return "".join(piece if index % 2 else _blur(piece) for index, piece in enumerate(pieces)).strip()


def _blur(text: str) -> str:
    for pattern, replacement in _VARYING:
        text = pattern.sub(replacement, text)
    return text


def _same(one: Failure, other: Failure) -> bool:
    return one.step == other.step and same_cause(one.cause) == same_cause(other.cause)


def _text(headline: str, **rows: str) -> str:
    """For the person who finds the job in the morning."""
    return "\n".join([headline, *(f"  {name.replace('_', ' ') + ':':<12}{row}" for name, row in rows.items())])


def _explain_refusal(failure: Failure) -> str:
    return _text(
        "The guard has refused the training: a checkpoint would lack part of its state. So would every attempt.",
        what=failure.cause,
        where=f"{_place(failure)}; {_ranks([failure])}",
        to_go_on='correct the program as it says, or Guard(unmanaged="warn") (MINDX_UNMANAGED=warn)',
    )


def _explain_loop(row: Sequence[Failure]) -> str:
    last = row[-1]
    return _text(
        f"{_times(row)} the same way at the same step. Another restart would do so too, so the job is stopped.",
        what=last.cause,
        where=f"{_place(last)}; {_ranks(row)}",
        how_often=f"{len(row)} attempts in a row; {_origins(row)}",
        look_at=advice(last.cause, last.rank, last.step),
        to_go_on=_way_on(last),
    )


def _explain_resumes(row: Sequence[Failure]) -> str:
    last = row[-1]
    origin = f"right after they had gone on from the checkpoint of step {last.resumed_step}"
    return _text(
        f"{_times(row)} {origin}, before they passed a single step. The job is stopped.",
        what="; then ".join(dict.fromkeys(failure.cause for failure in row)),
        where=_ranks(row),
        checkpoint=last.resumed_path,
        look_at=advice(last.cause, last.rank, last.step),
        to_go_on=f"{_way_on(last)}. From an older one: move all files of step {last.resumed_step} out of the directory",
    )


def _times(row: Sequence[Failure]) -> str:
    return "The last attempt failed" if len(row) == 1 else f"The last {len(row)} attempts failed"


def _place(failure: Failure) -> str:
    if failure.step < 0:
        return "before the first step was done"
    return f"after step {failure.step}, so in step {failure.step + 1} or on the way to it"


def _ranks(row: Sequence[Failure]) -> str:
    ranks = sorted({failure.rank for failure in row if failure.rank >= 0})
    if not ranks:
        return "the rank is not known"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} in turn"


def _origins(row: Sequence[Failure]) -> str:
    steps = list(dict.fromkeys(failure.resumed_step for failure in row))
    texts = ["a fresh start" if step < 0 else f"step {step}" for step in steps]
    return "they began with " + ", then ".join(texts)


_HINTS = (
    (
        r"\bSIGKILL\b",
        "who sent it: most often the kernel, for want of memory (dmesg, the container's memory limit and events)",
    ),
    (
        r"\bSIGBUS\b",
        "shared memory: /dev/shm may be full (df /dev/shm), or a file was cut while it was mapped",
    ),
    (
        r"\b(SIGSEGV|SIGABRT|SIGILL|SIGFPE)\b",
        "native code (a kernel, an extension, a driver): the last lines of the rank's output, a core dump",
    ),
    (
        r"\b(hang|hung|stuck|no step for)\b",
        "the stacks under stacks/ in the run directory: where the rank named above waits, and for whom",
    ),
    (
        r"(?i)out of ?memory",
        "memory: batch size, longest sample of this step, other jobs on the device",
    ),
)


def advice(cause: str, rank: int, step: int) -> str:
    """Where to look after a failure of `rank` (-1: none in particular) after `step` (-1: before the first one)."""
    for pattern, hint in _HINTS:
        if re.search(pattern, cause):
            return hint
    whose = "the failed rank" if rank < 0 else f"rank {rank}"
    data = "" if step < 0 else f", and at the batch of step {step + 1}"
    return f"the traceback of {whose} (mindx-elastic logs){data}"


def _way_on(failure: Failure) -> str:
    if failure.step < 0 and failure.resumed_step < 0:
        return "remove the cause and start the same command again"
    return "remove the cause and start the same command again; it goes on from the newest good checkpoint"
