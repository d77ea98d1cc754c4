"""Goes on with fewer workers of a node where one cannot be replaced, and with all of them when it can again.

`places` decides; this room tells it how the processes have ended, tries lost places (`trials`), and says what happens.
Main thread only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.agent.attempt import Attempt
from mindx_elastic.agent.endings import Ending, Meaning, describe, meaning
from mindx_elastic.agent.forked_start import ForkedStart
from mindx_elastic.agent.holder import seal
from mindx_elastic.agent.places import Choice, PlaceEnd, Places, visible_devices
from mindx_elastic.agent.trials import Trials, environment_of_trial, start_trial, whole_environment
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.status_page import Status
from mindx_elastic.rejoin.parking import Keeps

__all__ = ["Shrinking"]

_LONGEST_START = 3.0
"""How many times as long as the longest start so far a process may take."""


class Shrinking:
    """One per agent of a job with ``--min-nproc``."""

    def __init__(
        self,
        places: Places,
        events: EventLog,
        forks: ForkedStart,
        shim: Sequence[str],
        *,
        patience_s: float,
        regrow_after_s: float,
        run_dir: Path,
    ) -> None:
        """`patience_s`: how long a new process may take to its guard, beside what starts have taken so far."""
        self.places, self._events, self._forks, self._shim = places, events, forks, tuple(shim)
        self._patience_s = patience_s
        self._trials = Trials(regrow_after_s, run_dir / "trials")
        self._devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._refusal, self._window, self._is_known = "", 1, False
        self._began = self._longest_s = 0.0
        self._context: Any = None
        self._has_pages = False
        self._wish = ""
        """Why there can be more workers, once there can."""
        self._growing: frozenset[int] = frozenset()
        self._returned: frozenset[int] = frozenset()
        self.keeps_processes = False
        """Those that live go on in their processes, if these can."""
        self._is_in_place = self._will_be = False
        """The attempt, or the next one, goes on in the processes of the one before."""
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

    def who_stays(self, rank: int) -> Keeps | None:
        """Who goes on with fewer workers, where the place of `rank` is lost now; None: nobody in place."""
        if not self.keeps_processes or not self._is_known:
            return None
        before, place = self.places.active, self.places.active[rank]
        active = self._without(place)
        if not active or not set(active) < set(before):
            return None
        return Keeps(len(active), {before.index(each): new for new, each in enumerate(active)})

    def note_in_place(self, before: int) -> None:
        """The next attempt goes on in the processes of this one."""
        self._will_be = True
        logger.warning("world %d -> %d in place: the processes stay", before, self.size)
        self._events.emit("shrink_in_place", world_size=self.size, reason=self.reason)

    def _without(self, place: int) -> tuple[int, ...]:
        places = replace(self.places, lost={**self.places.lost, place: ""})
        return places.choose(refusal=self._refusal, window=self._window).active

    def begin_attempt(self, context: Any) -> None:
        """The workers run. `context`: torch's, with what it has started."""
        self._began, self._context = time.monotonic(), context
        self._is_in_place, self._will_be = self._will_be, False

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
            self._trials.begin_anew()
            return ""
        if any(status.paused_ns for status in statuses.values()):
            return ""
        if self._wish:
            return self._wish
        works = self._trials.look(places.lost, self._start_trial, self._patience_s + _LONGEST_START * self._longest_s)
        for place in works:
            places.note_works(place)
        found = self._choose()
        if not works or len(found.active) <= self.size:
            return ""
        reason = f"place{'s' * (len(works) > 1)} {', '.join(map(str, works))} can be used again"
        logger.warning("%s: %d workers instead of %d", reason, len(found.active), self.size)
        self._events.emit("grow", reason=reason, world_size=len(found.active), places=works)
        self._growing, self._wish = frozenset(works), reason
        return reason

    def late(self, statuses: Mapping[int, Status]) -> dict[int, str]:
        """Twice a second, but not during a recovery in place, which has a time of its own: ranks in places where the
        last process has failed, or that go on in their processes, and that do not come to their guards."""
        allowed_s = self._patience_s + _LONGEST_START * self._longest_s
        if not self._is_known or time.monotonic() - self._began < allowed_s:
            return {}
        places = self.places
        expected, new = (places.active, "") if self._is_in_place else (places.suspects, "new ")
        late = [rank for rank, place in enumerate(places.active) if place in expected and rank not in statuses]
        return dict.fromkeys(late, f"its {new}process has not come to its guard in {allowed_s:.0f} s")

    def end_attempt(self, attempt: Attempt, ending: Ending, arenas: Iterable[str]) -> None:
        """All workers have ended. Decides how many are started next, if any. `arenas`: their memory."""
        self._trials.close()
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

    def _choose(self) -> Choice:
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

    def _start_trial(self, place: int, output: str) -> Any:
        context = self._context
        env = environment_of_trial(context.envs[0], place, self.places.count, self._devices)
        command = [str(context.entrypoint), *(str(each) for each in context.args[0])]
        return start_trial(self._forks, self._shim, command, whole_environment(env, self._devices), output)


def _set_devices(devices: str | None) -> None:
    """What ``CUDA_VISIBLE_DEVICES`` is; None: not set."""
    if devices is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
