"""Goes on with fewer workers of a node where one cannot be replaced, and with all of them when it can again.

`places` decides. What is here tells it how the processes have ended, tries now and then whether a process can be
started in a lost place (see `rejoin.trial`), and says what happens. Main thread only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.agent.attempt import Attempt
from mindx_elastic.agent.endings import Ending, Meaning, describe, meaning
from mindx_elastic.agent.forked_start import ForkedStart
from mindx_elastic.agent.holder import seal
from mindx_elastic.agent.places import Choice, PlaceEnd, Places, visible_devices
from mindx_elastic.agent.recovery import joining_command
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.status_page import Status
from mindx_elastic.rejoin.trial import WORKS

__all__ = ["Shrinking"]

_LONGEST_START = 3.0
"""How many times as long as the longest start so far a process may take."""
_LONGEST_PAUSE_S = 3600.0
_MODULE, _HOOK = "mindx_elastic.rejoin.trial", "mindx_elastic.rejoin.trial:prepare"
_NOT_ITS_OWN = ("TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES", "MINDX_REJOIN")


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
        self._trials = _Trials(regrow_after_s, run_dir / "trials")
        self._devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._refusal, self._window, self._is_known = "", 1, False
        self._began = self._longest_s = 0.0
        self._context: Any = None
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

    def begin_attempt(self, context: Any) -> None:
        """The workers run. `context`: torch's, with what it has started."""
        self._began, self._context = time.monotonic(), context

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
        late = [rank for rank, place in enumerate(places.active) if place in places.suspects and rank not in statuses]
        return dict.fromkeys(late, f"its new process has not come to its guard in {allowed_s:.0f} s")

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
        """A process that tries a place, a fork or a fresh interpreter, and prints to `output`. Raises OSError,
        RuntimeError."""
        context = self._context
        env = _environment_of_trial(context.envs[0], place, self.places.count, self._devices)
        command = [str(context.entrypoint), *(str(each) for each in context.args[0])]
        found = self._forks.fork(command, env, output, output, hook=_HOOK)
        if found is not None:
            return found
        own = joining_command(command[len(self._shim) :], sys.executable, _MODULE)
        if own is None:
            raise RuntimeError("the program is not run by this Python interpreter")
        with open(output, "a") as file:
            return subprocess.Popen([*self._shim, *own], env=env, stdout=file, stderr=file, start_new_session=True)


def _set_devices(devices: str | None) -> None:
    """What ``CUDA_VISIBLE_DEVICES`` is; None: not set."""
    if devices is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices


class _Trials:
    """One per agent. `close` it when an attempt ends."""

    def __init__(self, pause_s: float, folder: Path) -> None:
        """`pause_s`: until the first trial of all lost places; with each trial it doubles, until no place is lost.
        0: never. `folder`: what the processes print goes there."""
        self._first_s = self._pause_s = pause_s
        self._folder = folder
        self._due: float | None = None
        self._running: dict[int, Any] = {}
        """The processes, by place."""
        self._deadline = 0.0

    def look(self, lost: Collection[int], start: Callable[[int, str], Any], longest_s: float) -> list[int]:
        """Twice a second while fewer ranks train: the places that work again, when all lost ones have been tried.

        `start`: starts the process of a place, which prints to a file. `longest_s`: they may take so long."""
        now = time.monotonic()
        if not self._first_s or not lost:
            return []
        if self._due is None:
            self._due = now + self._pause_s
        if self._running:
            return self._look_at_running(now)
        if now >= self._due:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due, self._deadline = now + self._pause_s, now + longest_s
            for place in sorted(lost):
                try:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._running[place] = start(place, str(self._output(place)))
                except (OSError, RuntimeError) as error:
                    logger.info("place %d cannot be tried: %s", place, error)
        return []

    def begin_anew(self) -> None:
        """All places work: the next loss is the first one."""
        self._pause_s = self._first_s

    def close(self) -> None:
        """No trial goes on."""
        for process in self._running.values():
            self._end(process)
        self._running, self._due = {}, None

    def _output(self, place: int) -> Path:
        return self._folder / f"place_{place}.log"

    def _look_at_running(self, now: float) -> list[int]:
        codes = {place: process.poll() for place, process in self._running.items()}
        if None in codes.values() and now < self._deadline:
            return []
        for place, code in codes.items():
            if code is None:
                self._end(self._running[place])
            if code != WORKS:
                ended = "has not come to its guard" if code is None else f"ended with exit code {code}"
                logger.info(
                    "place %d does not work yet: a process that tried it %s (%s); once more in %.0f s",
                    *(place, ended, self._output(place), max(0.0, (self._due or now) - now)),
                )
        self._running = {}
        return [place for place, code in codes.items() if code == WORKS]

    @staticmethod
    def _end(process: Any) -> None:
        if process.poll() is None:
            with suppress(OSError):
                process.kill()
        end = time.monotonic() + 2.0
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.001)


def _environment_of_trial(own: Mapping[str, str], place: int, count: int, devices: str | None) -> dict[str, str]:
    """The variables of a process that tries `place`, one of `count`. `own`: of a worker. `devices`: what
    ``CUDA_VISIBLE_DEVICES`` is where all places have a worker; None: not set."""
    found = {**os.environ, **{name: value for name, value in own.items() if name not in _NOT_ITS_OWN}}
    found |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(place))
    found |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(count))
    found |= {"MINDX_PLACES": ",".join(map(str, range(count))), "MINDX_TRIAL": "1"}
    if devices is None:
        found.pop("CUDA_VISIBLE_DEVICES", None)  # that of the present workers
    else:
        found["CUDA_VISIBLE_DEVICES"] = devices
    return found
