"""Goes on with fewer workers of a node where one cannot be replaced (``--min-nproc``).

`places` decides. What is here tells it how the processes have ended, and says what happens. Main thread only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from mindx_elastic.agent.attempt import Attempt
from mindx_elastic.agent.endings import Ending, Meaning, describe, meaning
from mindx_elastic.agent.places import NodePlaces, PlaceEnd, visible_devices
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.status_page import Status

__all__ = ["Shrinking"]


class Shrinking:
    """One per agent of a job with ``--min-nproc``."""

    def __init__(self, places: NodePlaces, events: EventLog) -> None:
        self.places, self._events = places, events
        self._devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._refusal, self._window = "no guard has said over how many batches it accumulates", 1

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

    def look(self, statuses: Mapping[int, Status]) -> None:
        """Twice a second, and when the attempt has ended: what the pages say about the program, once all ranks have
        made a step, or have asked over how many batches to accumulate."""
        for rank, place in enumerate(self.places.active):
            if rank in statuses and statuses[rank].boundaries:
                self.places.note_passed(place)
        told = all(status.boundaries or status.accumulates for status in statuses.values())
        if statuses and len(statuses) == self.size and told:
            self._refusal = next((s.fixed_size for s in statuses.values() if s.fixed_size), "")
            self._window = min(status.accumulates for status in statuses.values())

    def end_attempt(self, attempt: Attempt, ending: Ending, arenas: Iterable[str]) -> None:
        """All workers have ended. Decides how many are started next, if any. `arenas`: their memory."""
        places = self.places
        ends = self._ends(attempt, ending)
        # Of a rank whose new process has failed there is the page of the one before.
        replaced = {end.rank: end.status for end in attempt.own_failures if end.status is not None}
        self.look({**replaced, **attempt.workers.last_statuses()})
        if ending.outcome in ("finished", "stopped"):
            return
        for place in places.note_ends(ends):
            logger.error("place %d cannot be filled: two processes in a row have failed there", place)
        before, (active, why_not) = places.active, places.choose(refusal=self._refusal, window=self._window)
        if not active:
            logger.warning("no fewer ranks: %s", why_not)
            return
        places.active = active
        if len(places.active) < len(before):
            from mindx_elastic.agent.holder import seal  # see `supervisor`

            for arena in arenas:
                seal(Path(arena), self.size)
            text = "%d workers instead of %d, with the same global batch: %s. A start of the job tries all places again"
            logger.warning(text, self.size, len(before), self.reason)
            self._events.emit("shrink", reason=self.reason, world_size=self.size, places=sorted(places.lost))

    def _ends(self, attempt: Attempt, ending: Ending) -> list[PlaceEnd]:
        """How the processes have ended, first those that were replaced in place because they had failed."""
        first = ending.rank if ending.first is None else ending.first.rank
        active, found = self.places.active, []
        replaced = [end for end in attempt.own_failures if end not in attempt.workers.exits]
        for end in (*replaced, *attempt.workers.exits):
            failed = meaning(end) is Meaning.FAILED and (end.rank == first or end.code == -signal.SIGKILL)
            failed = failed or end in replaced
            # It was stuck, and ended for that.
            failed = failed or (end in attempt.own_failures and meaning(end) is Meaning.ENDED_BY_US)
            failed = failed or (end.rank == ending.rank and ending.outcome == "failed")
            passed = end.status is not None and end.status.boundaries > 0
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
