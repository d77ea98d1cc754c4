"""Dynamic clusters of real processes: each role is started by itself, as a person would."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import JOBS, Job, _environment, free_port

__all__ = ["Processes", "cluster"]


class Processes:
    """The scheduler and the workers of one cluster in the working directory."""

    def __init__(self, size: int, *, recovery: bool, env: dict[str, str]) -> None:
        self.size, self.port = size, free_port()
        memory = Path("shm").absolute()  # of the test: a job that fails leaves its memory to the next start
        memory.mkdir(exist_ok=True)
        self._env = {
            "MS_WORKER_NUM": str(size),
            "MS_SCHED_HOST": "127.0.0.1",
            "MS_SCHED_PORT": str(self.port),
            "MS_RECOVERY_PATH": "./recovery",
            "MINDX_ARENA_DIR": str(memory),
            **({"MS_ENABLE_RECOVERY": "1"} if recovery else {}),
            **env,
        }
        self.all: list[Job] = []

    def scheduler(self, **env: str) -> Job:
        return self._start("cluster_scheduler.py", [], {"MS_ROLE": "MS_SCHED", "MS_NODE_ID": "sched", **env})

    def worker(
        self, node_id: object, *arguments: str, fresh: bool = True, script: str = "clustered.py", **env: str
    ) -> Job:
        """`fresh`: as users start it; one that starts over in place must be, else it is the fork server that does."""
        return self._start(script, arguments, {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(node_id), **env}, fresh=fresh)

    def workers(self, *arguments: str, fresh: bool = True) -> list[Job]:
        return [self.worker(number, *arguments, fresh=fresh) for number in range(self.size)]

    def _start(self, script: str, arguments: object, env: dict[str, str], *, fresh: bool = False) -> Job:
        command = [sys.executable, str(JOBS / script), *map(str, arguments)]  # type: ignore[call-overload]
        job = Job(command, _environment({**self._env, **env}), fresh=fresh)
        self.all.append(job)
        return job

    def go(self, step: int = 5) -> None:
        """Let workers that hold at `step` go on."""
        Path(f"go{step}").touch()


@contextmanager
def cluster(size: int = 2, *, recovery: bool = True, **env: str) -> Iterator[Processes]:
    """Ends all of its processes on leaving."""
    found = Processes(size, recovery=recovery, env=env)
    try:
        yield found
    finally:
        for job in found.all:
            job.end()
