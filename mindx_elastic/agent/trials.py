"""Tries now and then whether a process can be started in a place where one has failed (see `rejoin.trial`).

Main thread only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindx_elastic.agent.recovery import joining_command
from mindx_elastic.core.events import logger
from mindx_elastic.rejoin.trial import WORKS

__all__ = ["Trials", "environment_of_trial", "start_trial", "whole_environment"]

_LONGEST_PAUSE_S = 3600.0
_MODULE, _HOOK = "mindx_elastic.rejoin.trial", "mindx_elastic.rejoin.trial:prepare"
_NOT_ITS_OWN = ("TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES", "MINDX_REJOIN")


class Trials:
    """One per agent. `close` it when an attempt ends."""

    def __init__(self, pause_s: float, folder: Path) -> None:
        """`pause_s`: until the first trial of all lost places; with each trial it doubles, until no place is lost.
        0: never.
        `folder`: what the processes print goes there."""
        self._first_s = self._pause_s = pause_s
        self.folder = folder
        """What the processes print goes there."""
        self._due: float | None = None
        self._waiting: list[int] = []
        self._running: tuple[int, Any, float] | None = None
        self._found: list[int] = []

    def look(self, lost: Collection[int], start: Callable[[int, str], Any], longest_s: float) -> list[int]:
        """Twice a second while fewer ranks train: the places that work again, when all lost ones have been tried.

        `start`: starts the process of a place, which prints to a file. `longest_s`: it may take so long."""
        now = time.monotonic()
        if not self._first_s or not lost:
            return []
        if self._due is None:
            self._due = now + self._pause_s
        if self._running is not None:
            self._look_at_running(now)
        elif self._waiting:
            self._start(self._waiting.pop(0), start, now + longest_s)
        elif self._found:
            found, self._found = self._found, []
            return found
        elif now >= self._due:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due, self._waiting = now + self._pause_s, sorted(lost)
        return []

    def begin_anew(self) -> None:
        """All places work: the next loss is the first one."""
        self._pause_s = self._first_s

    def close(self) -> None:
        """No trial goes on."""
        if self._running is not None:
            self._end(self._running[1])
        self._running, self._due, self._waiting, self._found = None, None, [], []

    def _start(self, place: int, start: Callable[[int, str], Any], deadline: float) -> None:
        file = self.folder / f"place_{place}.log"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._running = place, start(place, str(file)), deadline
        except (OSError, RuntimeError) as error:
            logger.info("place %d cannot be tried: %s", place, error)

    def _look_at_running(self, now: float) -> None:
        assert self._running is not None
        place, process, deadline = self._running
        code = process.poll()
        if code is None and now < deadline:
            return
        self._running = None
        if code == WORKS:
            self._found.append(place)
            return
        if code is None:
            self._end(process)
        ended = "has not come to its guard" if code is None else f"ended with exit code {code}"
        logger.info(
            "place %d does not work yet: a process that tried it %s (%s); once more in %.0f s",
            *(place, ended, self.folder / f"place_{place}.log", max(0.0, (self._due or now) - now)),
        )

    @staticmethod
    def _end(process: Any) -> None:
        if process.poll() is None:
            with suppress(OSError):
                process.kill()
        end = time.monotonic() + 2.0
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.001)


def environment_of_trial(own: Mapping[str, str], place: int, count: int, devices: str | None) -> dict[str, str]:
    """The variables of a process that tries `place`, one of `count`. `own`: of a worker. `devices`: what
    ``CUDA_VISIBLE_DEVICES`` is where all places have a worker; None: not set."""
    found = {name: value for name, value in own.items() if name not in _NOT_ITS_OWN}
    found |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(place))
    found |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(count))
    if devices is not None:
        found["CUDA_VISIBLE_DEVICES"] = devices
    return {**found, "MINDX_PLACES": ",".join(map(str, range(count))), "MINDX_TRIAL": "1"}


def start_trial(forks: Any, shim: Sequence[str], command: Sequence[str], env: Mapping[str, str], output: str) -> Any:
    """A process that tries a place: a fork, or a fresh interpreter. `command`: of the workers, with the shim before it.
    Raises OSError, RuntimeError."""
    found = forks.fork(list(command), env, output, output, hook=_HOOK)
    if found is not None:
        return found
    own = joining_command(command[len(shim) :], sys.executable, _MODULE)
    if own is None:
        raise RuntimeError("the program is not run by this Python interpreter")
    with open(output, "a") as file:
        return subprocess.Popen([*shim, *own], env=env, stdout=file, stderr=file, start_new_session=True)


def whole_environment(env: Mapping[str, str], devices: str | None) -> dict[str, str]:
    """This process's own, with `env`; without the devices of the present workers where all have them."""
    found = {**os.environ, **env}
    if devices is None:
        found.pop("CUDA_VISIBLE_DEVICES", None)
    return found
