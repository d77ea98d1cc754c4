"""Which ranks do not end although their training has ended: stuck in what a script does after its guard.

Such a rank may be stopped (SIGSTOP), wait for another one in a collective (destroying the group), or work for a long
time on a last evaluation or an export, which must not be taken for the first two.

With a timeout from the user a rank counts as stuck so many seconds after it has left its guard, whatever it does.
Without one:

* a stopped process after a minute: it does nothing, and nothing can be waiting for it to go on;
* else only when all ranks that still live here have left their guards and none of them (or of their children) has
  worked for half an hour: the longest that torch's collectives wait by themselves. A rank that idles while another one
  of the machine works may be waiting for it in a barrier. With several nodes the one that works may be on another
  machine, so nothing but a stopped process is judged.

The whole machine may have stood still: then all clocks start anew, as in `hang`.

Pure: times are passed in. One thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ExitWatch", "Leaver", "Overdue", "Work"]

STOPPED_S = 60.0
IDLE_S = 1800.0
WORK_SHARE, WORK_BYTES = 0.02, 1 << 20
"""Less than this share of one processor, and fewer bytes than these between two looks, is no work."""
JUMP_S = 30.0
"""Looks come twice a second; a gap of so many seconds is a standstill of the machine."""
_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the living workers of this machine and their children have done so far, all together."""

    processor_s: float
    nbytes: int
    """Read and written."""


@dataclass(frozen=True, kw_only=True)
class Leaver:
    """A living rank that has left its guard."""

    pid: int
    left_ns: int
    """When, `time.monotonic_ns`."""
    stopped: bool
    """By a signal, as SIGSTOP."""


@dataclass(frozen=True)
class Overdue:
    """A rank that should have ended."""

    rank: int
    seconds: float
    """That count against it."""
    stopped: bool


class ExitWatch:
    """Looks at the ranks that have left their guards, again and again.

    timeout_s: seconds after the guard's end; None: as the module says, 0: never judges. alone: there is no other node.
    """

    def __init__(self, timeout_s: float | None, *, alone: bool = True) -> None:
        self.timeout_s, self._alone = timeout_s, alone
        self.reset()

    def reset(self, now_ns: int = 0) -> None:
        """Forget all that was seen; nothing before `now_ns` counts against a rank, because the machine stood still, or
        the rank that the others had waited for has only just been ended."""
        self._since_ns = now_ns
        self._stopped_ns: dict[int, int] = {}
        self._last_look_ns: int | None = None
        self._work: Work | None = None
        self._work_ns = self._worked_ns = 0

    @property
    def wants_work(self) -> bool:
        """Whether `observe` judges by what the processes do."""
        return self.timeout_s is None and self._alone

    def observe(
        self, leavers: Mapping[int, Leaver], now_ns: int, *, num_live: int, work: Work | None = None
    ) -> list[Overdue]:
        """The ranks that are to be ended now.

        Stopped ones come alone, for the others may be waiting for them; call `reset` when they are ended. num_live:
        workers of this machine that have not ended. work: None when it was not measured at this look.
        """
        if self.timeout_s == 0 or not leavers:
            self.reset()
            return []
        self._look(leavers, now_ns)
        if self.timeout_s is not None:
            found = {rank: (now_ns - max(each.left_ns, self._since_ns)) / _NS for rank, each in leavers.items()}
            found = {rank: seconds for rank, seconds in found.items() if seconds > self.timeout_s}
        else:
            found = {rank: (now_ns - since) / _NS for rank, since in self._stopped_ns.items()}
            found = {rank: seconds for rank, seconds in found.items() if seconds > STOPPED_S}
            if not found and self._alone and len(leavers) == num_live:
                idle_s = self._idle_s(leavers, work, now_ns)
                found = dict.fromkeys(leavers, idle_s) if idle_s > IDLE_S else {}
        overdue = [Overdue(rank, found[rank], leavers[rank].stopped) for rank in sorted(found)]
        return [each for each in overdue if each.stopped] or overdue

    def _look(self, leavers: Mapping[int, Leaver], now_ns: int) -> None:
        last, self._last_look_ns = self._last_look_ns, now_ns
        if last is not None and now_ns - last > JUMP_S * _NS:
            self.reset(now_ns)
            self._last_look_ns = now_ns
        for rank, each in leavers.items():
            if each.stopped:
                self._stopped_ns.setdefault(rank, now_ns)
            else:
                self._stopped_ns.pop(rank, None)
        for rank in self._stopped_ns.keys() - leavers.keys():
            del self._stopped_ns[rank]

    def _idle_s(self, leavers: Mapping[int, Leaver], work: Work | None, now_ns: int) -> float:
        if work is not None:
            before, elapsed_s = self._work, (now_ns - self._work_ns) / _NS
            # Less than before: a child has ended, whose share is gone from the sum.
            if (
                before is None
                or abs(work.processor_s - before.processor_s) > WORK_SHARE * elapsed_s
                or abs(work.nbytes - before.nbytes) > WORK_BYTES
            ):
                self._worked_ns = now_ns
            self._work, self._work_ns = work, now_ns
        if self._work is None:
            return 0.0
        newest = max(each.left_ns for each in leavers.values())
        return (now_ns - max(newest, self._worked_ns, self._since_ns)) / _NS
