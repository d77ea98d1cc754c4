"""Several nodes on this machine, as agents that share no memory."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from mindx_elastic.agent.nodes import NodeHost
from mindx_elastic.cluster.scheduler import listen
from mindx_elastic.cluster.table import Limits, Table
from tests.harness import Job, free_port, start_agent

__all__ = ["End", "Nodes", "end_of"]

CONF = "is_host=0,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"


def serve_table(stack: ExitStack, port: int, nnodes: str) -> None:
    """This process serves the table of a job, so that none of its agents is special."""
    least, _, most = nnodes.partition(":")
    listener = listen("127.0.0.1", port)
    limits = Limits(heartbeat_s=10.0, formation_s=math.inf, reconnect_s=3.0, last_call_s=5.0)
    now = time.monotonic()
    table = Table(
        int(most or least), least=int(least), run_id="nodes", job="job", recovery=True, limits=limits, now=now
    )
    host = NodeHost(table, listener, None)
    stack.callback(host.close, 0.0)


End = tuple[dict[int, str], dict[tuple[str, str], str]]


def end_of(*jobs: Job) -> End:
    """Hashes by rank, and the samples of each step by rank and step."""
    hashes = {rank: value for job in jobs for rank, value in job.hashes().items()}
    steps: dict[tuple[str, str], str] = {}
    for match in (match for job in jobs for match in job.matches(r"SEEN (\d+ [\d,]+) (\d+) (\d+)")):
        assert steps.setdefault((match[2], match[3]), match[1]) == match[1], "a step that is done again"
    return hashes, steps


class Nodes:
    """The agents of one job. This process serves their table; or one of them does, `host`: the one that is
    started so."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        num_nodes: int,
        ranks: int,
        *args: object,
        nnodes: str = "",
        host: int | None = None,
        options: Sequence[str] = (),
        script: str = "in_place.py",
        env: Mapping[str, str] | None = None,
        own_disks: bool = False,
    ):
        """`own_disks`: each node has a checkpoint directory of its own."""
        self.folder, self._stack, self._ranks, self._args, self._options = folder, stack, ranks, args, options
        self._script, self._env, self._own_disks = script, dict(env or {}), own_disks
        self._port, self._nnodes = free_port(), nnodes or str(num_nodes)
        if host is None:
            serve_table(stack, self._port, self._nnodes)
        self.jobs: list[Job] = []
        for number in range(num_nodes):
            self.start(hosts=number == host)

    def start(self, *more: str, hosts: bool = False) -> Job:
        """One more node, with shared memory of its own. `more`: options of its own. `hosts`: as the command on the
        machine of the endpoint."""
        own = self.folder / f"node{len(self.jobs)}"
        (own / "shm").mkdir(parents=True)
        options = ["--nnodes", self._nnodes, "--rdzv-backend", "c10d", "--rdzv-id", "nodes"]
        conf = CONF.replace("is_host=0", f"is_host={int(hosts)}")
        options += ["--rdzv-conf", conf, "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--local-addr", "127.0.0.1"]
        options += ["--log-dir", str(own / "logs"), *self._options, *more]
        env = {**self._env, "MINDX_ARENA_DIR": str(own / "shm")}
        args = ((own if self._own_disks else self.folder) / "job", *self._args)
        job = start_agent(self._script, *args, ranks=self._ranks, options=options, env=env, run_dir=own / "run")
        self.jobs.append(self._stack.enter_context(job))
        return self.jobs[-1]

    def expect(self, code: int = 0) -> None:
        for job in self.jobs:
            assert job.wait(400) == code, self.report()

    def found(self, pattern: str) -> list[re.Match[str]]:
        """In the lines of all nodes."""
        return [match for job in self.jobs for match in job.matches(pattern)]

    @property
    def end(self) -> End:
        return end_of(*self.jobs)

    def report(self) -> str:
        return "\n\n".join(f"=== node {number} ===\n{job.report()}" for number, job in enumerate(self.jobs))
