"""Starts the new process of a dead rank: a warm spare, or a fork of the zygote.

It gets what torch has given the dead one: environment, log files, error file. Main thread only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.agent.forked_start import ForkedStart
from mindx_elastic.agent.recovery import NewProcess
from mindx_elastic.agent.zygote import ForkedWorker, ZygoteError
from mindx_elastic.core.events import logger
from mindx_elastic.core.status_page import Status
from mindx_elastic.rejoin.record import FORKED, SPARE
from mindx_elastic.rejoin.spare import PIPE_VARIABLE, WAITS, environment_of_spare, promotion

__all__ = ["Replacements"]

_JOINER, _SPARE = "mindx_elastic.rejoin.joiner:prepare", "mindx_elastic.rejoin.spare:prepare"
_MOST_LOST = 5
"""Spares that end by themselves before the agent gives them up."""


class Replacements:
    """Of one attempt."""

    def __init__(
        self,
        forks: ForkedStart,
        context: Any,
        local_ranks: Mapping[int, int],
        *,
        folder: Path,
        num_spares: int,
    ) -> None:
        """`context`: torch's, with what it has started. `local_ranks`: by rank. `folder`: private."""
        self._forks, self._context, self._local = forks, context, dict(local_ranks)
        self._spares: _Spares | None = None
        if num_spares:
            env = environment_of_spare(os.environ, context.envs[0])
            self._spares = _Spares(num_spares, folder, self._fork, env)

    def start(self, rank: int, generation: int) -> NewProcess:
        """The new process of `rank` in the recovery `generation`. Raises OSError, RuntimeError."""
        context, local = self._context, self._local[rank]
        own = {**context.envs[local], "MINDX_REJOIN": str(generation)}
        outputs = (context.stdouts[local] or "", context.stderrs[local] or "")
        found: Any = None if self._spares is None else self._spares.take(own, *outputs)
        by = SPARE
        if found is None:
            by, found = FORKED, self._fork({**os.environ, **own}, *outputs, local=local, hook=_JOINER)
        if found is None:
            raise RuntimeError("its new process cannot be forked (MINDX_ZYGOTE=0, or the log says why)")
        context.subprocess_handlers[local].proc = found
        return NewProcess(found, by)

    def look(self, statuses: Mapping[int, Status]) -> None:
        """Twice a second: fork the spares that are missing, once all ranks train: in a recovery they need the
        processors."""
        trains = len(statuses) == len(self._local) and all(status.boundaries for status in statuses.values())
        if self._spares is not None and trains:
            self._spares.fill()

    def close(self) -> None:
        """End the spares."""
        if self._spares is not None:
            self._spares.close()

    def _fork(
        self, env: Mapping[str, str], stdout: str = "", stderr: str = "", *, local: int = 0, hook: str = _SPARE
    ) -> ForkedWorker | None:
        command = [str(each) for each in (self._context.entrypoint, *self._context.args[local])]
        return self._forks.fork(command, env, stdout, stderr, hook=hook)


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


class _Spares:
    """The spares of one attempt."""

    def __init__(
        self, count: int, folder: Path, fork: Callable[[Mapping[str, str]], ForkedWorker | None], env: Mapping[str, str]
    ) -> None:
        """`count`: how many to keep. `folder`: private, for their pipes. `fork`: forks one with these variables next to
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
