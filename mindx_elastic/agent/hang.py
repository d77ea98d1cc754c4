"""Which ranks are stuck in the training.

The whole machine may have stood still (suspended, frozen container, stopped agent): then the time since the last look
is far longer than usual, and all clocks start again.

Pure: times are passed in. One thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindx_elastic.core.status_page import Status, WorkerPhase

__all__ = ["HangWatch", "Stuck", "is_between_steps"]


MIN_INTERVALS = 10
LEAST_TIMEOUT_S = 60.0
TIMES_LONGEST, TIMES_MEAN = 10.0, 30.0
TIMES_FIRST, LEAST_FIRST_S = 10.0, 30.0
JUMP_FACTOR, LEAST_JUMP_S = 10.0, 2.0
"""A look that comes later than this many times the usual wait, and than this many seconds, follows a standstill."""
_NS = 1_000_000_000


@dataclass(frozen=True)
class Stuck:
    """A rank beyond the timeout."""

    rank: int
    step: int
    """The last boundary it has passed."""
    idle_s: float
    """Seconds that count against it."""


@dataclass
class _Seen:
    """What was known of one rank at the last look."""

    pid: int
    boundaries: int
    boundary_ns: int
    since_ns: int
    """Its time counts from here or from its last boundary, whichever is later."""
    clean: bool = True
    """Whether the step it is in can be learned from: not interrupted by an evaluation or a standstill."""


class HangWatch:
    """Looks at the workers' pages, again and again, and names the ranks that are stuck in the training.

    A rank is stuck when it trains and has passed no boundary for longer than the timeout. An evaluation or a save
    (`WorkerPhase.BETWEEN`) takes as long as it takes: neither that rank nor one that may be waiting for it is judged,
    and their time starts again afterwards. Nor are ranks judged that know of a pause (`mindx-elastic pause`), until
    they know that they are to go on. The first step of an attempt (compilation, data) may take ten times as long as the
    timeout, and half a minute at least; what comes before it, loading a checkpoint, is not judged.

    timeout_s: seconds without a boundary; 0 never judges. None learns it from the steps: ten times the longest step
    seen, thirty times the mean one, at least a minute, whichever is longest. It never shrinks.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        """Seconds; None while it is not known, 0 when nothing is judged."""
        self._learns = timeout_s is None
        self._seen: dict[int, _Seen] = {}
        self._last_look_ns: int | None = None
        self._usual_ns: float | None = None
        self._count, self._total_ns, self._longest_ns = 0, 0, 0
        self._announced_s = 0.0
        self._announcement: str | None = None

    @property
    def announcement(self) -> str | None:
        """A line for the user, handed out once: the learned timeout when it is first known, and when it has doubled."""
        text, self._announcement = self._announcement, None
        return text

    def reset(self) -> None:
        """A new attempt begins. What was learned about the steps stays: it is the same program."""
        self._seen.clear()
        self._last_look_ns = self._usual_ns = None

    def observe(self, statuses: Mapping[int, Status], now_ns: int) -> list[Stuck]:
        """The ranks that are stuck now, the likeliest culprit first: where all wait, it is the slowest one.

        statuses: what the pages say, by global rank; ranks without a page are left out. now_ns: `time.monotonic_ns`.
        """
        if self.timeout_s == 0:
            return []
        jumped = self._has_jumped(now_ns)
        for rank in self._seen.keys() - statuses.keys():
            del self._seen[rank]
        for rank, status in statuses.items():
            self._look_at(rank, status, now_ns, jumped)
        self._excuse_waiting(statuses, now_ns)
        self._learn()
        return [] if jumped or self.timeout_s is None else self._judge(statuses, now_ns)

    def _has_jumped(self, now_ns: int) -> bool:
        last, self._last_look_ns = self._last_look_ns, now_ns
        if last is None:
            return False
        gap = now_ns - last
        usual = self._usual_ns
        if usual is None:
            self._usual_ns = float(gap)
            return False
        if gap > max(JUMP_FACTOR * usual, LEAST_JUMP_S * _NS):
            self._usual_ns = max(usual * 2, 1.0)  # if it comes this slowly from now on, it is soon the usual wait
            return True
        self._usual_ns = 0.9 * usual + 0.1 * gap
        return False

    def _look_at(self, rank: int, status: Status, now_ns: int, jumped: bool) -> None:
        seen = self._seen.get(rank)
        if seen is None or seen.pid != status.pid or status.boundaries < seen.boundaries:
            since = now_ns if jumped or not _is_judged(status) else 0
            self._seen[rank] = _Seen(status.pid, status.boundaries, status.boundary_ns, since, clean=not jumped)
            return
        num_steps = status.boundaries - seen.boundaries
        if num_steps:
            if seen.clean and not jumped and seen.boundaries and status.boundary_ns > seen.boundary_ns:
                # With several steps between two looks the longest is not known, but it is no longer than all of them.
                took = status.boundary_ns - seen.boundary_ns
                self._count += num_steps
                self._total_ns += took
                self._longest_ns = max(self._longest_ns, took)
            seen.boundaries, seen.boundary_ns, seen.clean = status.boundaries, status.boundary_ns, True
        if jumped or not _is_judged(status):
            seen.since_ns, seen.clean = now_ns, False

    def _excuse_waiting(self, statuses: Mapping[int, Status], now_ns: int) -> None:
        """Ranks that have come as far as one that is between two steps may be waiting for it."""
        between = [status.step for status in statuses.values() if status.phase == WorkerPhase.BETWEEN]
        if not between:
            return
        for rank, status in statuses.items():
            if status.step >= min(between):
                self._seen[rank].since_ns, self._seen[rank].clean = now_ns, False

    def _learn(self) -> None:
        if not self._learns or self._count < MIN_INTERVALS:
            return
        longest, mean = self._longest_ns / _NS, self._total_ns / self._count / _NS
        timeout = max(LEAST_TIMEOUT_S, TIMES_LONGEST * longest, TIMES_MEAN * mean, self.timeout_s or 0.0)
        self.timeout_s = timeout
        if timeout >= 2 * self._announced_s:
            word = "longer" if self._announced_s else "now known"
            self._announcement = (
                f"hang timeout {word}: a rank that passes no step for {timeout:.0f} s counts as stuck (steps took "
                f"{_duration(mean)} on average, {_duration(longest)} at most; --hang-timeout sets it)"
            )
            self._announced_s = timeout

    def _judge(self, statuses: Mapping[int, Status], now_ns: int) -> list[Stuck]:
        assert self.timeout_s is not None
        found = []
        for rank, status in statuses.items():
            if status.phase != WorkerPhase.TRAINING:
                continue
            # A recovery in place lets a rank enter its guard again, with boundaries that it has passed before.
            timeout_s, last_ns = self.timeout_s, max(status.boundary_ns, status.entered_ns)
            if not status.boundaries:
                timeout_s, last_ns = max(TIMES_FIRST * timeout_s, LEAST_FIRST_S), status.entered_ns
            idle_s = (now_ns - max(last_ns, self._seen[rank].since_ns)) / _NS
            if idle_s > timeout_s:
                found.append((status.step, status.boundary_ns, rank, idle_s))
        return [Stuck(rank, step, idle_s) for step, _, rank, idle_s in sorted(found)]


def _is_judged(status: Status) -> bool:
    return status.phase == WorkerPhase.TRAINING and status.pause_order % 2 == 0


def is_between_steps(status: Status) -> bool:
    """Whether a rank may be at work between two steps, so that no step need be expected of it. Not in a pause."""
    return status.phase == WorkerPhase.BETWEEN and not status.paused_ns


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
