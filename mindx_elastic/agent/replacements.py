"""Starts the new process of a dead rank: a warm spare, or a fork of the zygote.

It gets what torch has given the dead one: environment, log files, error file. Main thread only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.agent.forked_start import ForkedStart
from mindx_elastic.agent.zygote import ForkedWorker
from mindx_elastic.core.events import logger
from mindx_elastic.core.status_page import Status
from mindx_elastic.rejoin.record import FORKED, SPARE
from mindx_elastic.rejoin.spare import PIPE_VARIABLE, WAITS, environment_of_spare, promotion

__all__ = ["Replacements"]

_JOINER, _SPARE = "mindx_elastic.rejoin.joiner:prepare", "mindx_elastic.rejoin.spare:prepare"
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

    def end(self) -> None:
        self.worker.kill()
        self.forget()
        end = time.monotonic() + 2.0
        while self.worker.poll() is None and time.monotonic() < end:
            time.sleep(0.001)


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
        """`context`: torch's, with what it has started. `local_ranks`: by rank. `folder`: private, for the spares'
        pipes."""
        self._forks, self._context, self._local = forks, context, dict(local_ranks)
        self._folder, self._num_spares = folder, num_spares
        self._environment = environment_of_spare(os.environ, context.envs[0]) if num_spares else {}
        self._spares: list[_Spare] = []
        self._number = self._lost = 0

    def start(self, rank: int, generation: int) -> tuple[ForkedWorker, str]:
        """The new process of `rank` in the recovery `generation`, and how it was started. Raises OSError,
        RuntimeError."""
        context, local = self._context, self._local[rank]
        own = {**context.envs[local], "MINDX_REJOIN": str(generation)}
        outputs = (context.stdouts[local] or "", context.stderrs[local] or "")
        by, found = SPARE, self._take_spare(own, *outputs)
        if found is None:
            by, found = FORKED, self._fork({**os.environ, **own}, *outputs, local=local, hook=_JOINER)
        if found is None:
            raise RuntimeError("its new process cannot be forked (MINDX_ZYGOTE=0, or the log says why)")
        context.subprocess_handlers[local].proc = found
        return found, by

    def look(self, statuses: Mapping[int, Status]) -> None:
        """Twice a second: fork the spares that are missing, once all ranks train: in a recovery they need the
        processors."""
        if self._num_spares and len(statuses) == len(self._local) and all(s.boundaries for s in statuses.values()):
            self._look_at_spares()
            while len(self._spares) < self._num_spares and self._lost < _MOST_LOST and self._add_spare():
                pass

    def close(self) -> None:
        """End the spares."""
        while self._spares:
            self._spares.pop().end()

    def _look_at_spares(self) -> None:
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

    def _add_spare(self) -> bool:
        """Whether one could be forked; it may be too early."""
        pipe = self._folder / f"spare_{self._number}"
        try:
            os.mkfifo(pipe, 0o600)  # before the fork: the spare waits on it
        except OSError as error:
            logger.warning("no spares: %s", error)
            self._lost = _MOST_LOST
            return False
        worker = self._fork({**self._environment, PIPE_VARIABLE: str(pipe)}, hook=_SPARE)
        if worker is None:
            pipe.unlink()
            return False
        self._number += 1
        self._spares.append(_Spare(worker, pipe))
        return True

    def _take_spare(self, variables: Mapping[str, str], stdout: str, stderr: str) -> ForkedWorker | None:
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
            spare.end()
            return None
        spare.forget()
        return spare.worker

    def _fork(
        self, env: Mapping[str, str], stdout: str = "", stderr: str = "", *, local: int = 0, hook: str
    ) -> ForkedWorker | None:
        command = [str(each) for each in (self._context.entrypoint, *self._context.args[local])]
        return self._forks.fork(command, env, stdout, stderr, hook=hook)
