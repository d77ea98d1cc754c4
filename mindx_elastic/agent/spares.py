"""Warm spares: forked before a rank dies, they wait with the program built (see `rejoin.spare`).

Main thread only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.agent.zygote import ForkedWorker, ZygoteError
from mindx_elastic.core.events import logger
from mindx_elastic.rejoin.spare import PIPE_VARIABLE, WAITS, promotion

__all__ = ["Spares"]

_MOST_LOST = 5
"""Spares that end by themselves before the agent gives them up."""


@dataclass
class _Spare:
    worker: ForkedWorker
    pipe: Path
    told: bool = False
    """That it waits."""

    @property
    def waits(self) -> bool:
        """Whether it has come as far as it can without its rank."""
        return os.path.exists(f"{self.pipe}{WAITS}")

    def forget(self) -> None:
        """Remove its files."""
        self.pipe.unlink(missing_ok=True)
        Path(f"{self.pipe}{WAITS}").unlink(missing_ok=True)


class Spares:
    """The spares of one attempt."""

    def __init__(
        self, count: int, folder: Path, fork: Callable[[Mapping[str, str]], ForkedWorker | None], env: Mapping[str, str]
    ) -> None:
        """`count`: how many to keep. `folder`: private, for their pipes. `fork`: forks one with these variables beside
        its environment `env`, or None while that is not possible; raises ZygoteError where it never will be."""
        self._count, self._folder, self._fork, self._env = count, folder, fork, dict(env)
        self._spares: list[_Spare] = []
        self._number = self._lost = 0

    def fill(self) -> None:
        """Fork what is missing. Cheap when there is nothing to do."""
        for spare in list(self._spares):
            if spare.worker.poll() is not None:
                self._spares.remove(spare)
                spare.forget()
                self._lost += 1
                logger.info("a spare has ended with exit code %s", spare.worker.returncode)
                if self._lost == _MOST_LOST:
                    logger.warning("%d spares have ended by themselves: there are none any more", self._lost)
            elif spare.waits and not spare.told:
                spare.told = True
                logger.info("a spare (pid %d) waits", spare.worker.pid)
        while len(self._spares) < self._count and self._lost < _MOST_LOST:
            self._number += 1
            pipe = self._folder / f"spare_{self._number}"
            try:
                os.mkfifo(pipe, 0o600)  # before the fork: the spare waits on it
                worker = self._fork({**self._env, PIPE_VARIABLE: str(pipe)})
                if worker is None:
                    pipe.unlink()
                    self._number -= 1
                    return
            except (ZygoteError, OSError) as error:
                logger.warning("no spares: %s", error)
                self._lost = _MOST_LOST
                return
            self._spares.append(_Spare(worker, pipe))

    def take(self, variables: Mapping[str, str], stdout: str, stderr: str) -> ForkedWorker | None:
        """A spare that now knows that it is the rank of `variables`, and writes to these files (see `promotion`); None:
        there is none that waits."""
        spare = next((each for each in self._spares if each.waits), None)
        if spare is None:  # a fork is as fast as one that still builds
            return None
        self._spares.remove(spare)
        try:
            fd = os.open(spare.pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails where it is gone, or has not opened it yet
            try:
                os.write(fd, promotion(variables, stdout, stderr).encode())
            finally:
                os.close(fd)
        except OSError:
            self._end(spare)
            return None
        spare.forget()
        return spare.worker

    def renew(self, env: Mapping[str, str]) -> None:
        """End all of them: their connections lead nowhere. Those from now on have the environment `env`."""
        self.close()
        self._env = dict(env)

    def close(self) -> None:
        """End all of them."""
        while self._spares:
            self._end(self._spares.pop())

    def _end(self, spare: _Spare) -> None:
        spare.worker.kill()
        spare.forget()
        end = time.monotonic() + 2.0
        while spare.worker.poll() is None and time.monotonic() < end:
            time.sleep(0.001)
