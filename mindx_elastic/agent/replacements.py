"""Starts the new process of a dead rank: a warm spare, a fork of the zygote, or a fresh interpreter.

It gets what torch has given the dead one: environment, log files, error file. Main thread only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindx_elastic.agent.forked_start import ForkedStart
from mindx_elastic.agent.recovery import NewProcess, joining_command
from mindx_elastic.agent.spares import Spares
from mindx_elastic.agent.zygote import ForkedWorker
from mindx_elastic.core.status_page import Status
from mindx_elastic.rejoin.record import FORKED, FRESH, SPARE
from mindx_elastic.rejoin.spare import environment_of_spare

__all__ = ["JOINER", "WATCHED", "Replacements"]

JOINER, _SPARE = "mindx_elastic.rejoin.joiner:prepare", "mindx_elastic.rejoin.spare:prepare"
WATCHED = "mindx_elastic.rejoin.asked:prepare"


class Replacements:
    """Of one attempt."""

    def __init__(
        self,
        forks: ForkedStart,
        context: Any,
        shim: Sequence[str],
        local_ranks: Mapping[int, int],
        *,
        folder: Path,
        num_spares: int,
    ) -> None:
        """`context`: torch's, with what it has started. `shim`: what stands before the workers' own command line.
        `local_ranks`: by rank. `folder`: private."""
        self._forks, self._context, self._shim, self._local = forks, context, tuple(shim), dict(local_ranks)
        self._spares: Spares | None = None
        if num_spares:
            self._spares = Spares(
                num_spares, folder, self._fork_spare, environment_of_spare(os.environ, context.envs[0])
            )

    def start(self, rank: int, generation: int, *, can_wait: bool) -> NewProcess | None:
        """The new process of `rank` in the recovery `generation`. With `can_wait` None where the zygote still imports:
        that has begun before a fresh interpreter could. Raises OSError, RuntimeError."""
        context, local = self._context, self._local[rank]
        arguments = [str(each) for each in context.args[local]]
        whole = [str(context.entrypoint), *arguments]
        own = {**context.envs[local], "MINDX_REJOIN": str(generation)}
        outputs = (context.stdouts[local] or "", context.stderrs[local] or "")
        found: Any = None if self._spares is None else self._spares.take(own, *outputs)
        by = SPARE
        if found is None:
            by, found = FORKED, self._forks.fork(whole, {**os.environ, **own}, *outputs, hook=JOINER)
        if found is None:
            if can_wait and self._forks.is_starting:
                return None
            by, found = FRESH, self._start_fresh(whole, {**os.environ, **own}, outputs)
        context.subprocess_handlers[local].proc = found
        return NewProcess(found, by)

    def use_store(self, address: str, port: int) -> None:
        """The workers' store is another one from now on."""
        for env in self._context.envs.values():
            env.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        if self._spares is not None:
            self._spares.renew(environment_of_spare(os.environ, self._context.envs[0]))

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

    def _fork_spare(self, env: Mapping[str, str]) -> ForkedWorker | None:
        arguments = [str(each) for each in self._context.args[0]]
        return self._forks.fork([str(self._context.entrypoint), *arguments], env, "", "", hook=_SPARE)

    def _start_fresh(
        self, whole: Sequence[str], env: Mapping[str, str], outputs: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        command = joining_command(whole[len(self._shim) :], sys.executable)
        if command is None:
            raise RuntimeError("the program is not run by this Python interpreter")
        with ExitStack() as stack:
            files = [stack.enter_context(open(path, "a")) if path else None for path in outputs]
            return subprocess.Popen(
                [*self._shim, *command], env=env, stdout=files[0], stderr=files[1], start_new_session=True
            )
