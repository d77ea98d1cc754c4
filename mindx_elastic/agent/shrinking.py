"""Goes on with fewer workers of a node where one cannot be replaced, and with all of them when it can again.

`places` decides. What is here tells it how the processes have ended, tries the lost places again now and then, by a
restart with all of them that does not count, and says what happens. Main thread only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from mindx_elastic.agent.attempt import Attempt
from mindx_elastic.agent.endings import Ending, Meaning, describe, meaning
from mindx_elastic.agent.places import ActivePlaces, NodePlaces, PlaceEnd, visible_devices
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.status_page import Status

__all__ = ["Shrinking"]

_LONGEST_START = 3.0
"""How many times as long as the longest start so far a process may take."""


class Shrinking:
    """One per agent of a job with ``--min-nproc``."""

    def __init__(self, places: NodePlaces, events: EventLog, *, patience_s: float, regrow_after_s: float) -> None:
        """`patience_s`: how long a new process may take to its guard, in addition to what starts have taken so far.
        `regrow_after_s`: until lost places are tried again; twice as long each time that it was in vain. 0: never."""
        self.places, self._events, self._patience_s = places, events, patience_s
        self._first_pause_s = self._pause_s = regrow_after_s
        self._grows_at: float | None = None
        self._devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._refusal, self._window, self._is_known = "", 1, False
        self._began = self._longest_s = 0.0
        self._has_pages = False
        self._wish = ""
        """Why there can be more workers, once there can."""
        self._growing: frozenset[int] = frozenset()
        self._returned: frozenset[int] = frozenset()
        self.has_fallen_back = False
        """The last attempt had more workers than the one before, and has failed because of that, at its start."""
        self.stops_with = ""
        """Why the job is to end here (``--on-shrink stop``); empty: it is not."""

    @property
    def size(self) -> int:
        """Workers of the next attempt."""
        return len(self.places.active)

    @property
    def reason(self) -> str:
        """Why there are fewer workers than places; empty: there are not."""
        lost = sorted(self.places.lost.items())
        return "; ".join(f"place {place}: {cause}" for place, cause in lost) if self.places.is_shrunk else ""

    def prepare(self) -> None:
        """Before the workers are started: their environment."""
        places = self.places
        _set_devices(self._devices)  # torch counts those that the variable leaves, which must not be an earlier choice
        num_devices = torch.cuda.device_count() if self._devices is None and places.is_shrunk else 0
        devices = visible_devices(places.active, places.count, self._devices, num_devices)
        if devices is not None:
            _set_devices(devices)
        os.environ["MINDX_PLACES"] = ",".join(map(str, places.active))

    def begin_attempt(self) -> None:
        """The workers run."""
        self._began, self._grows_at = time.monotonic(), None

    def look(self, statuses: Mapping[int, Status]) -> str:
        """Twice a second: why all workers are to stop and start again; empty: they are not."""
        places = self.places
        self._has_pages = self._has_pages or bool(statuses)
        self.learn(statuses)
        for rank, place in enumerate(places.active):
            if rank in statuses and statuses[rank].boundaries:
                places.note_passed(place)
        if len(statuses) < self.size or not all(status.boundaries for status in statuses.values()):
            return ""
        self._returned = frozenset()
        if not places.is_shrunk:
            self._pause_s = self._first_pause_s
            return ""
        if any(status.paused_ns for status in statuses.values()):
            return ""
        if self._wish:
            return self._wish
        self._grows_at = self._grows_at or time.monotonic() + self._pause_s
        if not self._pause_s or time.monotonic() < self._grows_at:
            return ""
        self._pause_s *= 2
        lost = sorted(places.lost)
        self._wish = f"place{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} tried again"
        self._growing = frozenset(lost)
        places.lost.clear()
        logger.warning("%s: %d workers instead of %d", self._wish, places.count, self.size)
        self._events.emit("grow", reason=self._wish, world_size=places.count, places=lost)
        return self._wish

    def late(self, statuses: Mapping[int, Status]) -> dict[int, str]:
        """Twice a second, but not during a recovery in place, which has its own time: ranks in places where the
        last process has failed, or that go on in their processes, and that do not come to their guards."""
        allowed_s = self._patience_s + _LONGEST_START * self._longest_s
        if not self._is_known or time.monotonic() - self._began < allowed_s:
            return {}
        places = self.places
        late = [rank for rank, place in enumerate(places.active) if place in places.suspects and rank not in statuses]
        return dict.fromkeys(late, f"its new process has not come to its guard in {allowed_s:.0f} s")

    def end_attempt(self, attempt: Attempt, ending: Ending, arenas: Iterable[str]) -> None:
        """All workers have ended. Decides how many are started next, if any. `arenas`: their memory."""
        places = self.places
        # Of a rank whose new process has failed there is the page of the one before.
        replaced = {end.rank: end.status for end in attempt.own_failures if end.status is not None}
        self.learn({**replaced, **attempt.workers.last_statuses()})
        ends = self._ends(attempt, ending)
        if ending.outcome in ("finished", "stopped"):
            return
        lost = places.note_ends(ends)
        self.has_fallen_back = bool(lost) and self._returned.issuperset(lost)
        for place in lost:
            logger.error("place %d cannot be filled: two processes in a row have failed there", place)
        before = places.active
        found = self._choose()
        if found.active:
            places.active = found.active
        elif places.mode == "stop":
            self.stops_with = found.why_not
        else:
            logger.warning("no fewer ranks: %s", found.why_not)
        if len(places.active) < len(before):
            from mindx_elastic.agent.holder import seal  # see `supervisor`

            for arena in arenas:
                seal(Path(arena), self.size)
            self._say_fewer(len(before))
        self._returned, self._growing, self._wish = self._growing, frozenset(), ""

    def _say_fewer(self, before: int) -> None:
        places = self.places
        how = {"keep": "with the same global batch", "scale-lr": "with smaller batches and a smaller learning rate"}
        logger.warning("%d workers instead of %d, %s: %s", self.size, before, how.get(places.mode, ""), self.reason)
        if not self._is_known and places.mode == "keep":
            logger.warning(
                "no guard has been entered yet, so it is not known whether the program accumulates over more batches; "
                "its guard refuses the first update if it does not, and a program without a guard is not checked"
            )
        self._events.emit("shrink", reason=self.reason, world_size=self.size, places=sorted(places.lost))

    def _choose(self) -> ActivePlaces:
        return self.places.choose(refusal=self._refusal, window=self._window)

    def learn(self, statuses: Mapping[int, Status]) -> None:
        """What the pages say about the program, once all ranks have made a step, or have asked over how many batches to
        accumulate."""
        told = all(status.boundaries or status.accumulates for status in statuses.values())
        if statuses and len(statuses) == self.size and told:
            self._is_known = True
            if not any(status.generation for status in statuses.values()):  # else all have entered again since
                entered = max(status.entered_ns for status in statuses.values()) / 1e9
                self._longest_s = max(self._longest_s, entered - self._began)
            self._refusal = next((s.fixed_size for s in statuses.values() if s.fixed_size), "")
            self._window = min(status.accumulates for status in statuses.values())

    def _ends(self, attempt: Attempt, ending: Ending) -> list[PlaceEnd]:
        """How the processes have ended, first those that were replaced in place because they had failed."""
        first = ending.rank if ending.first is None else ending.first.rank
        active, found = self.places.active, []
        # What a program without a guard has done is not known. One that ran for a while was not held up by its place.
        unseen = not self._has_pages and time.monotonic() - self._began > self._patience_s
        replaced = [end for end in attempt.own_failures if end not in attempt.workers.exits]
        for end in (*replaced, *attempt.workers.exits):
            failed = meaning(end) is Meaning.FAILED and (end.rank == first or end.code == -signal.SIGKILL)
            failed = failed or end in replaced
            # It was stuck, and ended for that.
            failed = failed or (end in attempt.own_failures and meaning(end) is Meaning.ENDED_BY_US)
            failed = failed or (end.rank == ending.rank and ending.outcome == "failed")
            passed = unseen if end.status is None else end.status.boundaries > 0
            cause = ending.cause if end.rank == ending.rank and ending.cause else describe(end)
            if end.rank < len(active):
                found.append(PlaceEnd(active[end.rank], failed, passed, cause))
        return found


def _set_devices(devices: str | None) -> None:
    """What ``CUDA_VISIBLE_DEVICES`` is; None: not set."""
    if devices is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
