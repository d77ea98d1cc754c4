"""What the ends of an attempt's workers mean together: finished, stopped as asked, or failed, and with which code.

==================  ================================================================================================
one worker          when
==================  ================================================================================================
`FINISHED`          exit code 0
`LEFT`              its page says that it left gracefully with this very code (or meant to, when the agent had to end
                    it on its way out); or a script without a guard chose one of the codes that say so
                    (`GRACEFUL_CODES`)
`ENDED_BY_US`       ended by a signal that the agent had sent it
`FAILED`            everything else
==================  ================================================================================================

Pure: no clock, no processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.alarm.alarm import signal_name
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY, STOP_SIGNALS, exit_code_of_signal
from mindx_elastic.core.status_page import WorkerPhase

__all__ = [
    "GRACEFUL_CODES",
    "Ending",
    "Meaning",
    "StopKind",
    "conclude",
    "describe",
    "meaning",
    "shell_code",
]

GRACEFUL_CODES = frozenset({*map(exit_code_of_signal, STOP_SIGNALS), EXIT_TEMPORARY})
# What a guarded rank gives as its reason when another rank has failed (`Alarms.of_death`, `Alarms.of_exception`).
_ELSEWHERE = re.compile(r"^(exception: |ranks? [\d, ]+ (is|are) (gone|stuck)|a node is lost|the agent .*is gone)")
_TERMINATED = re.compile(r"^SIGTERM\b(?: on rank (\d{1,18}))?")
_REHEARSAL = re.compile(r"^rehearsal at step (\d{1,18})\b")


class Meaning(Enum):
    """What the end of one worker means."""

    FINISHED = "finished"
    LEFT = "left gracefully"
    ENDED_BY_US = "ended by the agent"
    FAILED = "failed"


class StopKind(Enum):
    """Why the agent made its workers stop. Workers that ended by themselves have none of these."""

    SIGNAL = "signal"
    """The agent was told to stop."""
    FAULT = "fault"
    """The platform has reported a fault, or asks for the end."""
    MEMBERSHIP = "membership"
    """Nodes come or come back: all nodes meet again."""
    FAILURE = "failure"
    """A worker failed or hangs, or a node is lost."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended."""

    outcome: str
    """``finished``, ``stopped`` (no restart wanted), ``failed``, ``membership``, or ``rehearsed``: it stopped itself to
    try its resume."""
    code: int
    """What the agent leaves with, should this be the end."""
    cause: str = ""
    """For a person; empty when it finished."""
    rank: int = -1
    """The rank that failed; -1: not one in particular."""
    first: WorkerExit | None = None
    """The first worker that failed."""
    elsewhere: bool = False
    """The failure was another node's; ours only noticed it."""


def shell_code(code: int) -> int:
    """128 + number for a process that a signal ended, the code itself otherwise."""
    return code if code >= 0 else exit_code_of_signal(-code)


def meaning(end: WorkerExit) -> Meaning:
    if end.code == 0:
        return Meaning.FINISHED
    status = end.status
    if status is not None and status.phase == WorkerPhase.LEFT and status.exit_code == end.code:
        return Meaning.LEFT
    if end.code < 0 and _left_with(end) is not None:
        return Meaning.LEFT
    if end.code < 0 and -end.code in end.sent:
        return Meaning.ENDED_BY_US
    return Meaning.LEFT if end.code in GRACEFUL_CODES else Meaning.FAILED


def _left_with(end: WorkerExit) -> int | None:
    """The code that a rank had meant to leave with when it was killed on its way out; None: there was none."""
    status = end.status
    if end.code >= 0 or status is None or status.phase < WorkerPhase.STOPPING or status.exit_code < 0:
        return None
    return status.exit_code


def _code(end: WorkerExit) -> int:
    """With which code a rank has left gracefully."""
    meant = _left_with(end)
    return end.code if meant is None else meant


def describe(end: WorkerExit) -> str:
    """``killed by SIGKILL``, ``exit code 1: ValueError: bad sample``."""
    if end.code < 0:
        return f"killed by {signal_name(-end.code)}"
    reason = end.message
    if end.status is not None and end.status.reason:
        reason = end.status.reason.removeprefix("exception: ")
    return f"exit code {end.code}: {reason}" if reason else f"exit code {end.code}"


def conclude(
    exits: Sequence[WorkerExit],
    stop: StopKind | None,
    *,
    signum: int | None = None,
    cause: str = "",
    rank: int = -1,
) -> Ending:
    """How an attempt ended whose workers have all ended.

    exits: in the order in which they were noticed. signum: the first signal that the agent got. cause, rank: why the
    agent stopped them, for `FAILURE` and `FAULT`.
    """
    meanings = [meaning(end) for end in exits]
    if all(m is Meaning.FINISHED for m in meanings):
        return Ending(outcome="finished", code=0)
    left = [end for end, m in zip(exits, meanings, strict=True) if m is Meaning.LEFT]
    failed = [end for end, m in zip(exits, meanings, strict=True) if m is Meaning.FAILED]
    if signum is not None:
        return Ending(outcome="stopped", code=_stop_code(exits, left, signum), cause=signal_name(signum))
    if stop is StopKind.FAULT:
        return Ending(outcome="stopped", code=_code(left[0]) if left else EXIT_TEMPORARY, cause=cause)
    if failed or stop is StopKind.FAILURE:
        asked = next((end for end in exits if _was_asked(end, exits)), None)
        if asked is not None and asked.status is not None:
            return Ending(outcome="stopped", code=asked.status.asked_code, cause=asked.status.reason, first=asked)
        return _failure(failed, left, cause, rank)
    if stop is StopKind.MEMBERSHIP:
        return Ending(outcome="membership", code=EXIT_TEMPORARY, cause="nodes have come or come back")
    if not left:  # signals of ours without a reason of ours: cannot be
        return Ending(outcome="failed", code=EXIT_TEMPORARY, cause="stopped without a reason")
    first = left[0]
    reason = "" if first.status is None else first.status.reason
    if all(map(_has_rehearsed, exits)):
        return Ending(outcome="rehearsed", code=EXIT_TEMPORARY, cause=reason, first=first)
    if _code(first) == EXIT_TEMPORARY and _ends_for_failure(first):
        return Ending(outcome="failed", code=EXIT_TEMPORARY, cause=reason, first=first, elsewhere=True)
    cause = reason or f"rank {first.rank}: {describe(first)}"
    return Ending(outcome="stopped", code=_code(first), cause=cause, first=first)


def _has_rehearsed(end: WorkerExit) -> bool:
    """Whether a rank has stopped itself to try its resume, and its state is on disk."""
    found = None if end.status is None else _REHEARSAL.match(end.status.reason)
    return found is not None and end.status is not None and end.status.saved_step >= int(found[1])


def _ends_for_failure(end: WorkerExit) -> bool:
    """Whether a guarded rank ended because it, another rank, a node or an agent had failed."""
    return end.status is not None and _ELSEWHERE.match(end.status.reason) is not None


def _was_asked(end: WorkerExit, exits: Sequence[WorkerExit]) -> bool:
    """Whether a rank was on its way out because the job is to stop: then another failure is not a reason
    to start the job again. With code 0 the program says that it has done all: that needs all ranks. A SIGTERM counts
    where it came to a rank of this node, and the agent had not sent one before."""
    if meaning(end) is Meaning.FAILED or end.status is None or end.status.asked_code <= 0:
        return False
    if (found := _TERMINATED.match(end.status.reason)) is None:
        return True
    heard = end.rank if found[1] is None else int(found[1])
    return any(other.rank == heard and not other.urged for other in exits)


def _failure(failed: Sequence[WorkerExit], left: Sequence[WorkerExit], cause: str, rank: int) -> Ending:
    first = failed[0] if failed else None
    if first is not None and not cause:
        cause, rank = describe(first), first.rank
    if first is not None:
        code = shell_code(first.code)
    else:
        code = _code(left[0]) if left else EXIT_TEMPORARY
    return Ending(outcome="failed", code=code, cause=cause, rank=rank, first=first, elsewhere=rank < 0)


def _stop_code(exits: Sequence[WorkerExit], left: Sequence[WorkerExit], signum: int) -> int:
    """Exit code after a signal to the agent: what the workers make of it, else 128 + number. Not what they make of a
    failure at the same time: the job is stopped all the same."""
    of_stop = [end for end in left if not _ends_for_failure(end)]
    if of_stop:
        return _code(of_stop[0])
    guarded = [end for end in exits if end.status is not None and end.code > 0]
    if guarded:
        in_stop = (end for end in guarded if end.status and end.status.phase == WorkerPhase.STOPPING)
        return next((end.code for end in in_stop if not _ends_for_failure(end)), exit_code_of_signal(signum))
    codes = {end.code for end in exits}
    only = codes.pop()
    return only if not codes and only > 0 else exit_code_of_signal(signum)
