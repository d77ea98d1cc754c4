"""Recoveries in place over several nodes: agents on this machine that share neither memory nor sight of each other's
processes. A dead rank costs its own node one process, and no other node any."""

from __future__ import annotations

import base64
import os
import pickle
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.harness import Job, events, start_agent
from tests.system.test_agent import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
drill = pytest.mark.drill

JOB = "in_place.py"
CONF = "is_host=0,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"
IN_PLACE = r"recovery (\d+) in place: ranks? ([\d, ]+) replaced, all ranks train on from step (\d+)"
WHY = r"no recovery in place: (.*)"


class Nodes:
    """The agents of one job. This process hosts the rendezvous, so that none of them is special; or one of them does,
    `host`: the number of the one that is started so."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        num_nodes: int,
        ranks: int,
        *args: object,
        nnodes: str = "",
        host: int | None = None,
        rejoin_timeout: float = 120.0,
        options: Sequence[str] = (),
        script: str = JOB,
    ):
        self._script = script
        self.folder, self._stack, self._ranks, self._args, self._options = folder, stack, ranks, args, options
        self._port, self._nnodes, self._rejoin_timeout = free_port(), nnodes or str(num_nodes), rejoin_timeout
        if host is None:
            self._store = TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        self.jobs: list[Job] = []
        for number in range(num_nodes):
            self.start(hosts=number == host)

    def start(self, *, rejoin_timeout: float | None = None, plain: bool = False, hosts: bool = False) -> Job:
        """One more node, with shared memory of its own. `hosts`: as the command on the machine of the endpoint."""
        rejoin_timeout = rejoin_timeout or self._rejoin_timeout
        own = self.folder / f"node{len(self.jobs)}"
        (own / "shm").mkdir(parents=True)
        options = ["--nnodes", self._nnodes, "--rdzv-backend", "c10d", "--rdzv-id", "nodes"]
        conf = CONF.replace("is_host=0", f"is_host={int(hosts)}")
        options += ["--rdzv-conf", conf, "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--local-addr", "127.0.0.1"]
        options += ["--recover", "in-place", "--rejoin-timeout", f"{rejoin_timeout:g}", "--log-dir", str(own / "logs")]
        options += self._options
        env = {"MINDX_ARENA_DIR": str(own / "shm")}
        args = (self.folder / "job", *self._args)
        job = start_agent(
            self._script, *args, ranks=self._ranks, options=options, env=env, run_dir=own / "run", plain=plain
        )
        self.jobs.append(self._stack.enter_context(job))
        return self.jobs[-1]

    def met(self) -> tuple[int, bool]:
        """How many nodes are in torch's rendezvous, which this process hosts, and whether the meeting is over."""
        key = "torch.rendezvous.nodes"
        if not self._store.check([key]):
            return 0, False
        try:
            state = pickle.loads(base64.b64decode(self._store.get(key)))
        except (ValueError, pickle.UnpicklingError):  # nothing was written yet
            return 0, False
        return len(state.participants), state.complete

    def expect(self, code: int = 0) -> None:
        for job in self.jobs:
            assert job.wait(400) == code, self.report()

    def found(self, pattern: str) -> list[re.Match[str]]:
        """In the lines of all nodes."""
        return [match for job in self.jobs for match in job.matches(pattern)]

    @property
    def end(self) -> tuple[dict[int, str], dict[tuple[str, str], str]]:
        """Hashes by rank, and the samples of each step by rank and step."""
        hashes = {rank: value for job in self.jobs for rank, value in job.hashes().items()}
        steps: dict[tuple[str, str], str] = {}
        for match in self.found(r"SEEN (\d+ [\d,]+) (\d+) (\d+)"):
            assert steps.setdefault((match[2], match[3]), match[1]) == match[1], "a step that is done again"
        return hashes, steps

    def processes(self) -> dict[int, list[int]]:
        """The processes of each rank, in the order in which they came."""
        found: dict[int, list[int]] = {}
        for match in self.found(r"READY (\d+) (\d+)"):
            pids = found.setdefault(int(match[1]), [])
            if int(match[2]) not in pids:
                pids.append(int(match[2]))
        return found

    def report(self) -> str:
        return "\n\n".join(f"=== node {number} ===\n{job.report()}" for number, job in enumerate(self.jobs))


def run(
    folder: Path,
    num_nodes: int,
    ranks: int,
    *args: object,
    faults: Sequence[str] = (),
    meanwhile: Callable[[Nodes], None] = lambda nodes: None,
    options: Sequence[str] = (),
) -> Nodes:
    """Run it with and without the faults, and insist on the same end."""
    ends = []
    for name, orders in (("plain", ()), ("hurt", faults)):
        words = [word for order in orders for word in ("--fault", order)]
        with ExitStack() as stack:
            nodes = Nodes(stack, folder / name, num_nodes, ranks, "--epochs", 2, *args, *words, options=options)
            if name == "hurt":
                meanwhile(nodes)
            nodes.expect(0)
        assert len(nodes.found("^FAULT ")) == len(orders), nodes.report()
        ends.append(nodes.end)
    assert ends[0] == ends[1], nodes.report()
    assert not nodes.found("not bit for bit"), nodes.report()
    return nodes


def check_in_place(nodes: Nodes, faults: Sequence[str]) -> None:
    """Each death cost its own rank a process, and no other rank; every agent has seen every recovery."""
    dead = [int(order.partition(":")[0]) for order in faults]
    for job in nodes.jobs:
        assert [int(match[2]) for match in job.matches(IN_PLACE)] == dead, nodes.report()
    for rank, pids in nodes.processes().items():
        assert len(pids) == 1 + dead.count(rank), nodes.report()
    assert not nodes.found(WHY), nodes.report()
    for node in range(len(nodes.jobs)):
        assert not any((nodes.folder / f"node{node}" / "shm").rglob("*.safetensors")), "shared memory is given back"


@drill
def test_the_only_ranks_of_two_nodes_killed_in_turn(tmp_path: Path) -> None:
    """The state comes from the other node each time, and is in the shared memory of both before a guard is closed."""
    faults = ["1:3:forward", "0:6:mid", "1:9:update", "0:11:after", "1:12:eval"]
    nodes = run(tmp_path, 2, 1, "--evaluate", "no_grad", "--save-every", 5, faults=faults)
    check_in_place(nodes, faults)
    for node in (0, 1):
        told = events(tmp_path / "hurt" / f"node{node}" / "run", "rejoin")
        assert [event["outcome"] for event in told] == ["in place"] * len(faults)
        assert [event["ranks"] for event in told] == [[1], [0], [1], [0], [1]]


@drill
@pytest.mark.parametrize("catch", ["backward", "translate"])
def test_errors_that_a_program_catches_or_makes_other_ones_of(tmp_path: Path, catch: str) -> None:
    """The word of a death on another node comes behind the error."""
    faults = ["1:4:mid", "0:7:mid", "1:10:forward", "0:13:mid"]
    check_in_place(run(tmp_path, 2, 1, "--catch", catch, faults=faults), faults)


@drill
def test_a_survivor_of_another_node_that_is_behind_gets_the_state_too(tmp_path: Path) -> None:
    """Rank 1 waits in front of its update for rank 2, which is killed, while rank 0 passes the boundary."""
    faults = ["2:6:share", "1:11:mid"]
    nodes = run(tmp_path, 3, 1, "--size", 144, "--share", faults=faults)
    check_in_place(nodes, faults)
    assert [event["behind"] for event in events(tmp_path / "hurt" / "node0" / "run", "rejoin")] == [[1], []]


@drill
def test_ranks_of_two_nodes_at_once(tmp_path: Path) -> None:
    """Either all agents replace both, or all restart."""
    nodes = run(tmp_path, 3, 1, "--size", 144, faults=["0:6:start", "2:6:start"])
    outcomes = [{match[1] for match in job.matches(IN_PLACE)} for job in nodes.jobs]
    assert outcomes[0] == outcomes[1] == outcomes[2], nodes.report()
    assert outcomes[0] or nodes.found(WHY), nodes.report()


@drill
@pytest.mark.parametrize("who", ["survivor", "new"])
def test_a_second_death_while_a_recovery_is_under_way(tmp_path: Path, who: str) -> None:
    def kill(nodes: Nodes) -> None:
        (match,) = nodes.jobs[1].wait_for(r"a new process \(pid (\d+)\) takes the place of rank 1")
        os.kill(int(match[1]) if who == "new" else nodes.processes()[0][0], signal.SIGKILL)

    nodes = run(tmp_path, 2, 1, "--step-s", 0.02, faults=["1:6:forward"], meanwhile=kill)
    assert nodes.found(IN_PLACE) or nodes.found(WHY), nodes.report()


@drill
@pytest.mark.parametrize(
    ("args", "fault", "reason"),
    [
        (("--with-guard",), "1:6:start", "not inside of guard.run"),
        ((), "1:6:start:raise", ""),
        (("--setup", "gather"), "1:6:start", "all_gather"),
    ],
)
def test_what_does_not_go_in_place_restarts_all_nodes(
    tmp_path: Path, args: Sequence[object], fault: str, reason: str
) -> None:
    nodes = run(tmp_path, 2, 1, *args, faults=[fault])
    assert not reason or any(reason in match[1] for match in nodes.found(WHY)), nodes.report()
    assert not nodes.found(IN_PLACE), nodes.report()


@drill
@pytest.mark.parametrize("what", ["stop", "spin"])
def test_a_rank_that_hangs_restarts_all_nodes(tmp_path: Path, what: str) -> None:
    """Its own agent could tell, but not the other one, whose rank waits for it."""
    nodes = run(tmp_path, 2, 1, faults=[f"1:6:mid:{what}"], options=("--hang-timeout", "5"))
    assert nodes.found(r"rank \d hangs.* after step 5"), nodes.report()
    assert any("which rank the others wait for" in match[1] for match in nodes.found(WHY)), nodes.report()
    assert not nodes.found(IN_PLACE), nodes.report()
