"""How the agent uses its zygote: when it starts one, what it lets it import, and which workers are forked from it.

The workers of the first attempt are fresh interpreters, unless MINDX_ZYGOTE=first; those of later attempts are forks
where that is possible. A worker that cannot be forked is started as ever. Torch's handlers keep their part (log files,
``--redirects``, ``--tee``, environment): only the process itself comes from elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import api as torch_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from mindx_elastic.agent.zygote import WORKER_DEFAULTS, ForkedWorker, Zygote, ZygoteError
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import read_small
from mindx_elastic.core.status_page import Status
from mindx_elastic.memory.agent_folder import modules_path

__all__ = ["ForkedStart"]

_ENTER_S = 30.0
"""A worker that has not entered a guard by then will not, or takes long anyway."""
_WAIT_S = 30.0
"""Its imports take as long as a fresh worker's, and have begun earlier. Longer: a file system hangs."""
_FIRST_WAIT_S = 600.0
"""Of the first attempt's workers, where that was asked for: a fresh interpreter would import the same."""
_MOST_ZYGOTES = 3
"""Who kills it more often has a reason."""
_MOST_BYTES = 1 << 20


class ForkedStart:
    """Main thread only. `close` it."""

    def __init__(
        self, shim: Sequence[str], folder: Path, *, num_workers: int, is_on: bool, also_first: bool = False
    ) -> None:
        """`shim`: what stands before the workers' own command line. `folder`: where the workers tell what they have
        imported. `is_on`: whether there is to be a zygote. `also_first`: the first attempt waits for it."""
        self._shim, self._folder = tuple(shim), folder
        self.num_workers = num_workers
        """Of this node, of the present attempt or the next."""
        self._zygotes_left = _MOST_ZYGOTES if is_on else 0
        self._also_first = is_on and also_first
        self._command: tuple[str, ...] = ()
        self._zygote: Zygote | None = None
        self._began = 0.0
        self._has_guards = False
        self._modules: list[str] = []
        self._may_preload = True
        self._said = ""
        self.num_forked = 0
        """Of the workers of the last start."""

    def prepare(self, number: int) -> None:
        """Before `start`: wait for imports that are still going on. Those of fresh workers would take longer, if they
        import torch. Only those that have guards are known to."""
        if number == 0 or not self._zygotes_left or not self._has_guards:
            return
        if self._zygote is None and self.num_workers >= _processors():
            self._start_zygote()  # one process imports faster than all of them at once
        if self._zygote is not None:
            self._zygote.wait(_WAIT_S)

    @contextmanager
    def start(self, number: int) -> Iterator[None]:
        """Within it, torch's start of workers forks them. `number`: of the attempt, from 0."""
        self._began, self.num_forked = time.monotonic(), 0
        original: Any = getattr(torch_processes, "get_subprocess_handler", None)
        if original is None:  # this torch does it otherwise
            self._zygotes_left = 0
        if not self._zygotes_left:
            yield
            return

        def handler(*arguments: Any, **more: Any) -> SubprocessHandler:
            return _Handler(self, number, *arguments, **more)

        torch_processes.get_subprocess_handler = handler
        try:
            yield
        finally:
            torch_processes.get_subprocess_handler = original
        if self.num_forked:
            took_ms = (time.monotonic() - self._began) * 1000
            logger.debug("%d workers forked from the zygote in %.0f ms", self.num_forked, took_ms)

    def look(self, statuses: Mapping[int, Status]) -> None:
        """Twice a second while an attempt runs, with the pages: start the zygote once the workers are up, and let it
        import what they have imported."""
        if not self._zygotes_left or not self._command:
            return
        self._has_guards = self._has_guards or bool(statuses)
        all_up = len(statuses) >= self.num_workers
        if self._zygote is None:
            # The workers' own imports go first.
            if all_up or time.monotonic() - self._began > _ENTER_S:
                self._start_zygote()
            return
        if problem := self._zygote.problem:
            may_help = self._zygote.has_died or bool(self._modules)  # which may have been the cause
            self._zygote.close()
            self._zygote = None
            self._zygotes_left = self._zygotes_left - 1 if may_help else 0
            if self._modules:
                self._may_preload, self._modules = False, []
            self._say(problem if self._zygotes_left == 0 else f"{problem}; another one is started")
            return
        all_in = all_up and all(status.entered_ns for status in statuses.values())
        if all_in and self._may_preload and not self._modules:
            self._modules = self._imported(min(statuses))
            if self._modules:
                self._zygote.preload(self._modules)

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], stdout: str | int, stderr: str | int, *, hook: str = ""
    ) -> ForkedWorker | None:
        """The worker, whose whole command line with the shim is given; None: it is to be a fresh process. `hook`: see
        `Zygote.fork`."""
        if (
            self._zygote is None or not self._zygote.is_ready() or tuple(command[: len(self._shim)]) != self._shim
        ):  # numactl stands before it
            return None
        try:
            worker = self._zygote.fork(env, command=command[len(self._shim) :], stdout=stdout, stderr=stderr, hook=hook)
        except ZygoteError as error:
            self._say(str(error))
            return None
        self.num_forked += 1
        return worker

    @property
    def is_starting(self) -> bool:
        """Whether the zygote still imports: it will be able to fork soon."""
        return self._zygote is not None and not self._zygote.is_ready() and not self._zygote.problem

    def is_for(self, number: int, command: Sequence[str]) -> bool:
        """Whether the worker with this whole command line is to be forked in the attempt `number`, from 0. The first
        worker of all waits for the imports then."""
        if number > 0:
            return True
        if self._also_first and not self._command:
            self.learn(command)
            if self._command:
                self._start_zygote()
                assert self._zygote is not None
                self._zygote.wait(_FIRST_WAIT_S)
        return self._also_first

    def learn(self, command: Sequence[str]) -> None:
        """The command line of a worker that is started fresh."""
        if tuple(command[: len(self._shim)]) == self._shim:
            self._command = tuple(command[len(self._shim) :])

    def close(self) -> None:
        """At the agent's end."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        self._zygotes_left = 0

    def _start_zygote(self) -> None:
        self._zygote = Zygote(self._command, {**WORKER_DEFAULTS, **os.environ})
        self._zygote.start()

    def _imported(self, rank: int) -> list[str]:
        with suppress(OSError, UnicodeDecodeError):
            return read_small(modules_path(self._folder, rank), _MOST_BYTES).decode().splitlines()
        return []

    def _say(self, problem: str) -> None:
        if problem != self._said:
            self._said = problem
            logger.info("restarted workers are fresh processes, not forks of the zygote: %s", problem)


class _Handler(SubprocessHandler):
    """Torch's, with a worker that is forked where that is possible."""

    def __init__(self, forks: ForkedStart, number: int, *arguments: Any, **more: Any) -> None:
        self._forks, self._number = forks, number
        super().__init__(*arguments, **more)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        if self._forks.is_for(self._number, args):
            outputs = ["" if file is None else file.fileno() for file in (self._stdout, self._stderr)]
            worker: Any = self._forks.fork(args, env, *outputs)
            if worker is not None:
                return worker  # type: ignore[no-any-return]
        self._forks.learn(args)
        return super()._popen(args, env)


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return 1
