"""How the agent uses its zygote: when it starts one, and which workers are forked from it.

The workers of the first attempt are fresh interpreters, unless MINDX_ZYGOTE=first; those of later attempts are forks
where that is possible. A worker that cannot be forked is started as ever. Torch's handlers keep their part (log files,
``--redirects``, ``--tee``, environment): only the process itself comes from elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing import api as torch_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from mindx_elastic.agent.zygote import WORKER_DEFAULTS, ForkedWorker, Zygote, ZygoteError
from mindx_elastic.core.events import logger
from mindx_elastic.core.status_page import Status

__all__ = ["ForkedStart"]

_ENTER_S = 30.0
"""A worker that has not entered a guard by then will not, or takes long anyway."""
_WAIT_S = 30.0
"""Its imports take as long as a fresh worker's, and have begun earlier. Longer: a file system hangs."""
_FIRST_WAIT_S = 600.0
"""Of the first attempt's workers, where that was asked for: a fresh interpreter would import the same."""
_LOOK_S = 0.1


class ForkedStart:
    """Main thread only. `close` it."""

    def __init__(
        self,
        shim: Sequence[str],
        command: Sequence[str],
        *,
        num_workers: int,
        is_on: bool,
        also_first: bool = False,
    ) -> None:
        """`shim`: what stands before the workers' own command line, `command`. `is_on`: whether there is to be a
        zygote. `also_first`: the first attempt waits for it."""
        self.shim, self._command = tuple(shim), tuple(command)
        self.num_workers = num_workers
        """Of this node, of the present attempt or the next."""
        self._is_on, self._also_first = is_on, also_first
        self._zygote: Zygote | None = None
        self._began = 0.0
        self._said = ""

    def prepare(self, number: int, check: Callable[[], None]) -> None:
        """Before `start`: wait for imports that are still going on. Those of fresh workers would take longer. In the
        first attempt only where that was asked for. `check`: called meanwhile; what it raises ends the wait."""
        if number == 0 and self._also_first:
            self._start_zygote()
        if (zygote := self._zygote) is not None:
            end = time.monotonic() + (_WAIT_S if number else _FIRST_WAIT_S)
            while not zygote.wait(_LOOK_S) and not zygote.problem and time.monotonic() < end:
                check()

    @contextmanager
    def start(self) -> Iterator[None]:
        """Within it, torch's start of workers forks them where that is possible."""
        self._began = time.monotonic()
        original: Any = getattr(torch_processes, "get_subprocess_handler", None)
        if original is None or not self._is_on:  # None: this torch does it otherwise
            yield
            return

        def handler(*arguments: Any, **more: Any) -> SubprocessHandler:
            return _Handler(self, *arguments, **more)

        torch_processes.get_subprocess_handler = handler
        try:
            yield
        finally:
            torch_processes.get_subprocess_handler = original

    def look(self, statuses: Mapping[int, Status]) -> None:
        """Twice a second while an attempt runs, with the pages: start the zygote once the workers are up, since their
        own imports go first."""
        all_up = len(statuses) >= self.num_workers
        if self._is_on and self._zygote is None and (all_up or time.monotonic() - self._began > _ENTER_S):
            self._start_zygote()
        elif self._zygote is not None and not self._zygote.wait() and self._zygote.problem:
            self._say(self._zygote.problem)

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], stdout: str | int, stderr: str | int, *, hook: str = ""
    ) -> ForkedWorker | None:
        """The worker, whose whole command line with the shim is given; None: it is to be a fresh process. `hook`: see
        `Zygote.fork`."""
        if self._zygote is None or not self._zygote.wait():
            return None
        if tuple(command[: len(self.shim)]) != self.shim:
            self._say("another program (numactl) starts the worker's own")
            return None
        try:
            worker = self._zygote.fork(env, command=command[len(self.shim) :], stdout=stdout, stderr=stderr, hook=hook)
        except ZygoteError as error:
            self._say(str(error))
            return None
        logger.debug("process %d is forked from the zygote", worker.pid)
        return worker

    def close(self) -> None:
        """At the agent's end."""
        if self._zygote is not None:
            self._zygote.close()
        self._is_on = False

    def _start_zygote(self) -> None:
        self._zygote = Zygote(self._command, {**WORKER_DEFAULTS, **os.environ})
        self._zygote.start()

    def _say(self, problem: str) -> None:
        if problem != self._said:
            self._said = problem
            logger.info("restarted workers are fresh processes, not forks of the zygote: %s", problem)


class _Handler(SubprocessHandler):
    """Torch's, with a worker that is forked where that is possible."""

    def __init__(self, forks: ForkedStart, *arguments: Any, **more: Any) -> None:
        self._forks = forks
        super().__init__(*arguments, **more)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        outputs = ["" if file is None else file.fileno() for file in (self._stdout, self._stderr)]
        worker: Any = self._forks.fork(args, env, *outputs)
        return super()._popen(args, env) if worker is None else worker
