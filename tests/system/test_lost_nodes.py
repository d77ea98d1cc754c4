"""A whole node is lost, agent and workers; another one takes its place, and the processes of the others live on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Job, events, wait_until
from tests.system.test_in_place_nodes import IN_PLACE, WHY, Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
drill = pytest.mark.drill

TAKEN = r"has taken the place of node (\d+)"
OPEN = r"wait up to [\d.]+ s for another node in the place of node (\d+)"
STEP_S = ("--step-s", 0.05)


def plain(folder: Path, num_nodes: int, ranks: int, *args: object) -> Nodes:
    """The undisturbed run."""
    with ExitStack() as stack:
        nodes = Nodes(stack, folder / "plain", num_nodes, ranks, "--epochs", 2, *args)
        nodes.expect(0)
        return nodes


RANK_FIRST = "rank-first"
"""A node is lost by the death of its rank, and of its agent when that has begun to replace it."""


def loss_of(rank: int, step: int, where: str, what: str) -> tuple[str, ...]:
    """The fault, and the words behind it, that lose the node of a rank there."""
    if what != RANK_FIRST:
        return (f"{rank}:{step}:{where}:{what}",)
    return (f"{rank}:{step}:{where}:kill", "--meanwhile", "new:start:agent")


def held(nodes: Nodes) -> dict[int, Job]:
    """Wait until all ranks stand behind the same step. Returns the agents' jobs by rank."""
    for job in nodes.jobs:
        job.wait_for("^HOLD ", 1, 200)
    return {rank: job for job in nodes.jobs for rank in job.pids()}


def release(nodes: Nodes) -> None:
    (nodes.folder / "job" / "go").touch()


def kill_node(job: Job) -> None:
    """The agent first, so that it cannot say anything of its ranks."""
    pids = list(job.pids().values())
    job.process.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def dead_and_others(nodes: Nodes) -> tuple[Job, list[Job]]:
    """The agent that was killed, once it is gone, and the others."""
    wait_until(lambda: any(job.process.poll() is not None for job in nodes.jobs), "an agent's death", 120)
    (dead,) = [job for job in nodes.jobs if job.process.poll() is not None]
    return dead, [job for job in nodes.jobs if job is not dead]


def stand_by(nodes: Nodes, num: int = 1) -> None:
    """The nodes have met, and `num` others come, before the ranks that hold go on."""
    held(nodes)
    for _ in range(num):
        nodes.start().wait_for("this one waits for a place", 1, 200)
    release(nodes)


def replace(
    folder: Path,
    num_nodes: int,
    ranks: int,
    fault: str,
    *args: object,
    early: bool = False,
    meanwhile: Callable[[Nodes], None] = lambda nodes: None,
    num: int = 1,
) -> tuple[Nodes, list[Job]]:
    """A node is lost by `fault`, and `num` others come. `early`: they stand by when that happens, behind step 8.
    Returns the survivors, too."""
    with ExitStack() as stack:
        words = ("--hold-at", 8) if early else ()
        nodes = Nodes(stack, folder / "hurt", num_nodes, ranks, "--epochs", 2, *args, *words, "--fault", fault)
        if early:
            stand_by(nodes, num)
        dead, _ = dead_and_others(nodes)
        for _ in range(0 if early else num):
            nodes.start()
        meanwhile(nodes)
        survivors = [job for job in nodes.jobs[:num_nodes] if job is not dead]
        for job in survivors:
            assert job.wait(400) == 0, nodes.report()
        dead.wait()
        finished = [job for job in nodes.jobs[num_nodes:] if job.wait(400) == 0]
        assert len(finished) == 1, nodes.report()
        assert len(nodes.found("^FAULT ")) == 1, nodes.report()
        return nodes, survivors


def why_not(survivors: list[Job]) -> list[str]:
    """Why they have restarted. A rank of the lost node may live on for a moment, and says so of itself."""
    return [match[1] for job in survivors for match in job.matches(WHY)]


def check(nodes: Nodes, survivors: list[Job], undisturbed: Nodes, ranks_lost: set[int]) -> None:
    """The same end; each lost rank had two processes, each other one its only one."""
    assert nodes.end == undisturbed.end, nodes.report()
    assert not nodes.found("not bit for bit|may differ"), nodes.report()
    assert not why_not(survivors), nodes.report()
    for rank, pids in nodes.processes().items():
        assert len(pids) == (2 if rank in ranks_lost else 1), nodes.report()
    for job in survivors:
        assert len(job.matches(IN_PLACE)) == 1, nodes.report()
    assert len(nodes.found(OPEN)) == 1, nodes.report()


def test_a_lost_node_is_replaced_and_its_rank_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """On another machine: what was this rank's own comes from the records that the first node has kept."""
    undisturbed = plain(tmp_path, 2, 1)
    nodes, survivors = replace(tmp_path, 2, 1, "1:8:update:node")
    check(nodes, survivors, undisturbed, {1})
    (first,) = [number for number, job in enumerate(nodes.jobs[:2]) if job is survivors[0]]
    for node in (first, 2):
        (told,) = events(tmp_path / "hurt" / f"node{node}" / "run", "rejoin")
        assert told["outcome"] == "in place" and told["ranks"] == [1], told
        assert str(nodes.jobs[1 - first].process.pid) in told["node"], told
        assert str(nodes.jobs[2].process.pid) in told["taken_by"], told


@drill
@pytest.mark.parametrize("where", ["start", "forward", "backward", "after", "eval", "save"])
@pytest.mark.parametrize("what", ["agent", "node", RANK_FIRST])
def test_a_node_lost_at_any_place_of_a_step(tmp_path: Path, where: str, what: str) -> None:
    step = {"eval": 12, "save": 5}.get(where, 8)
    args = ("--evaluate", "no_grad", "--save-every", 5, *STEP_S)
    undisturbed = plain(tmp_path, 2, 1, *args)
    fault, *more = loss_of(1, step, where, what)
    nodes, survivors = replace(tmp_path, 2, 1, fault, *args, *more)
    check(nodes, survivors, undisturbed, {1})


@drill
def test_a_node_lost_before_the_first_boundary_restarts_the_job_with_another(tmp_path: Path) -> None:
    undisturbed = plain(tmp_path, 2, 1, *STEP_S)
    nodes, survivors = replace(tmp_path, 2, 1, "1:1:forward:node", *STEP_S)
    assert nodes.end == undisturbed.end, nodes.report()
    assert any("which is too early" in reason for reason in why_not(survivors)), nodes.report()
    assert len(survivors[0].matches(r"restart \d+")) == 1, nodes.report()
    assert not nodes.found(IN_PLACE), nodes.report()


@drill
def test_a_node_with_two_ranks(tmp_path: Path) -> None:
    args = ("--size", 192, *STEP_S)
    nodes, survivors = replace(tmp_path, 2, 2, "3:6:mid:node", *args)
    check(nodes, survivors, plain(tmp_path, 2, 2, *args), {2, 3})


@drill
def test_one_of_three_nodes(tmp_path: Path) -> None:
    args = ("--size", 144, *STEP_S)
    nodes, survivors = replace(tmp_path, 3, 1, "2:8:forward:node", *args)
    check(nodes, survivors, plain(tmp_path, 3, 1, *args), {2})


@drill
def test_a_node_that_stands_by_takes_the_place(tmp_path: Path) -> None:
    """It was there all the time, and the job did not mind."""
    nodes, survivors = replace(tmp_path, 2, 1, "1:12:mid:node", *STEP_S, early=True)
    check(nodes, survivors, plain(tmp_path, 2, 1, *STEP_S), {1})


@drill
def test_of_two_new_nodes_one_takes_the_place(tmp_path: Path) -> None:
    """The other one waits in front of the job until that is over."""
    nodes, survivors = replace(tmp_path, 2, 1, "1:8:mid:node", *STEP_S, num=2)
    check(nodes, survivors, plain(tmp_path, 2, 1, *STEP_S), {1})


@drill
def test_nobody_comes_in_time(tmp_path: Path) -> None:
    """The survivors save and wait for another node, as without recovery in place. It comes late, and all train on; what
    the first node has kept of the lost rank is on disk then."""
    undisturbed = plain(tmp_path, 2, 1)
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path, 0, 1, "--epochs", 2, "--fault", "1:8:mid:node", nnodes="2")
        for _ in range(2):
            nodes.start(rejoin_timeout=5)
        _, (other,) = dead_and_others(nodes)
        other.wait_for(r"no other node has taken the place of node 1 within 5 s", 1, 200)
        other.wait_for(r"restart 1", 1, 200)
        nodes.start()
        assert other.wait(400) == 0 and nodes.jobs[2].wait(400) == 0, nodes.report()
        assert not nodes.found(IN_PLACE), nodes.report()
        assert nodes.end == undisturbed.end, nodes.report()
        folder = tmp_path / f"node{nodes.jobs.index(other)}" / "run"
        for name in ("attempt_end", "restart"):
            reason = events(folder, name)[0]["reason"]
            assert re.fullmatch(r"node 1 \(.*\) is lost: its agent is gone", reason), reason


@drill
def test_the_node_that_has_come_is_lost_while_it_joins(tmp_path: Path) -> None:
    """The job is restarted, with one more node, and what was the lost rank's own is still there."""
    undisturbed = plain(tmp_path, 2, 1, *STEP_S)
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path, 2, 1, "--epochs", 2, *STEP_S, "--fault", "1:8:mid:node")
        _, (other,) = dead_and_others(nodes)
        new = nodes.start()
        other.wait_for(TAKEN, 1, 200)
        new.process.kill()
        other.wait_for(r"restart 1", 1, 200)
        nodes.start()
        assert other.wait(400) == 0 and nodes.jobs[3].wait(400) == 0, nodes.report()
        assert other.matches(WHY), nodes.report()
        assert nodes.end == undisturbed.end, nodes.report()


@drill
def test_a_node_lost_twice(tmp_path: Path) -> None:
    """The one that has come is lost, too, when all train again."""
    faults = ("--fault", "1:6:mid:node", "--fault", "1:15:forward:node")
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, "--epochs", 2, *STEP_S, *faults)
        _, (other,) = dead_and_others(nodes)
        new = nodes.start()
        wait_until(lambda: new.process.poll() is not None, "the second death", 200)
        nodes.start()
        assert other.wait(400) == 0 and nodes.jobs[3].wait(400) == 0, nodes.report()
        assert len(other.matches(IN_PLACE)) == 2, nodes.report()
        assert nodes.end == plain(tmp_path, 2, 1, *STEP_S).end, nodes.report()
        assert [len(pids) for _, pids in sorted(nodes.processes().items())] == [1, 3], nodes.report()


@drill
def test_a_node_that_stood_still_finds_itself_out(tmp_path: Path) -> None:
    """Agent and worker are stopped, another node takes the place, they go on: the worker must not, and does not."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, "--epochs", 2, *STEP_S, "--fault", "1:8:start:stop")
        for job in nodes.jobs:
            job.wait_for("READY")
        (job,) = [job for job in nodes.jobs if 1 in job.pids()]
        (other,) = [each for each in nodes.jobs if each is not job]
        job.wait_for("^FAULT ")
        worker = job.pids()[1]
        os.kill(job.process.pid, signal.SIGSTOP)
        other.wait_for(OPEN, 1, 200)
        new = nodes.start()
        other.wait_for(IN_PLACE, 1, 400)
        os.kill(job.process.pid, signal.SIGCONT)
        os.kill(worker, signal.SIGCONT)
        job.wait_for("this node was taken for lost", 1, 100)
        assert other.wait(400) == 0 and new.wait(400) == 0, nodes.report()
        job.wait(400)
        assert not job.hashes(), nodes.report()
        undisturbed = plain(tmp_path, 2, 1, *STEP_S)
        ends = {rank: value for each in (other, new) for rank, value in each.hashes().items()}
        assert ends == undisturbed.end[0], nodes.report()
        steps = [int(match[1]) for match in job.matches(r"^SEEN \d+ [\d,]+ \d+ (\d+)")]
        assert max(steps) == 8, nodes.report()


@drill
@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_stands_still_while_its_ranks_train_is_not_lost(tmp_path: Path, rank: int) -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path, 2, 1, "--epochs", 2, "--step-s", 1.0)
        for job in nodes.jobs:
            job.wait_for("READY")
        (job,) = [job for job in nodes.jobs if rank in job.pids()]
        os.kill(job.process.pid, signal.SIGSTOP)
        other = next(each for each in nodes.jobs if each is not job)
        other.wait_for(rf"^SEEN \d+ [\d,]+ {1 - rank} (1[6-9]|2\d)", 1, 100)
        os.kill(job.process.pid, signal.SIGCONT)
        nodes.expect(0)
        assert not nodes.found("is lost") and not nodes.found(IN_PLACE), nodes.report()


def lose_last_of_three(stack: ExitStack, folder: Path) -> tuple[Nodes, Job, Job]:
    """The third node is lost when all ranks stand behind a step. Returns the agents of the others, which wait."""
    nodes = Nodes(stack, folder, 3, 1, "--epochs", 2, "--size", 144, *STEP_S, "--hold-at", 8)
    by_rank = held(nodes)
    kill_node(by_rank[2])
    release(nodes)
    by_rank[0].wait_for(OPEN, 1, 200)
    return nodes, by_rank[0], by_rank[1]


@drill
def test_a_rank_dies_while_all_wait_for_another_node(tmp_path: Path) -> None:
    """Its own agent replaces it, in the same recovery; or all restart. Both are exact."""
    with ExitStack() as stack:
        nodes, first, victim = lose_last_of_three(stack, tmp_path / "hurt")
        os.kill(victim.pids()[1], signal.SIGKILL)
        victim.wait_for("rank 1 .*SIGKILL", 1, 100)
        new = nodes.start()
        for job in (first, victim, new):
            assert job.wait(400) == 0, nodes.report()
        assert nodes.end == plain(tmp_path, 3, 1, "--size", 144, *STEP_S).end, nodes.report()


@drill
def test_an_agent_is_told_to_stop_while_all_wait_for_another_node(tmp_path: Path) -> None:
    """It saves and ends; the other one saves, too, and waits for others."""
    with ExitStack() as stack:
        nodes, other, stopped = lose_last_of_three(stack, tmp_path)
        stopped.process.terminate()
        assert stopped.wait(200) == 143, nodes.report()
        other.wait_for(WHY, 1, 100)
        other.wait_for("restart 1", 1, 100)
        for _ in range(2):
            nodes.start()
        for job in (other, *nodes.jobs[3:]):
            assert job.wait(400) == 0, nodes.report()
        assert sorted(nodes.end[0]) == [0, 1, 2], nodes.report()


@drill
def test_a_node_lost_behind_the_last_step_ends_no_training(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path, 2, 1, "--epochs", 2, "--fault", "1:24:after:node")
        _, (other,) = dead_and_others(nodes)
        assert other.wait(400) == 0, nodes.report()
    assert not other.matches("the job is restarted|Error waiting on exit barrier"), other.report()
    assert other.matches("no recovery in place: rank 0 has finished its training"), other.report()


@drill
@pytest.mark.parametrize("rank", [0, 1])
def test_a_restart_passes_the_lock_of_its_own_jobs_machine_that_stands_still(tmp_path: Path, rank: int) -> None:
    """Nobody has come in time, so the job restarts with another node, while the old process still has its byte of the
    lock. Rank 0 would take another job for its holder, and wait for two minutes in vain."""
    with ExitStack() as stack:
        args = ("--epochs", 2, *STEP_S, "--fault", f"{rank}:8:start:stop")
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, *args, rejoin_timeout=5.0, options=("--grace", "2"))
        wait_until(lambda: nodes.found("^FAULT "), "the stop", 200)
        (job,) = [job for job in nodes.jobs if rank in job.pids()]
        (other,) = [each for each in nodes.jobs if each is not job]
        worker = job.pids()[rank]
        os.kill(job.process.pid, signal.SIGSTOP)
        other.wait_for("restart 1", 1, 200)
        new = nodes.start()
        assert other.wait(400) == 0 and new.wait(400) == 0, nodes.report()
        passed = [match for each in (other, new) for match in each.matches(rf"rank {rank} goes on, though .*{worker}")]
        assert len(passed) == 1, nodes.report()
        assert {**other.hashes(), **new.hashes()} == plain(tmp_path, 2, 1, *STEP_S).end[0], nodes.report()
        for pid in (job.process.pid, worker):
            os.kill(pid, signal.SIGCONT)
        job.wait_for("this node was taken for lost", 1, 100)
        job.wait(400)
        assert not job.hashes(), nodes.report()


@drill
@pytest.mark.parametrize("options", [(), ("--recover", "restart")], ids=["in-place", "restart"])
def test_a_node_that_dies_while_the_nodes_meet_is_missed(tmp_path: Path, options: tuple[str, ...]) -> None:
    """It has joined, and is dead when the meeting is over. Torch's agents would wait for its part for a minute."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, "--epochs", 2, nnodes="2:3", options=options)
        wait_until(lambda: nodes.met()[0] == 2, "both nodes in the meeting", 200)
        nodes.jobs[1].process.kill()
        wait_until(lambda: nodes.met()[1], "the end of the meeting", 200)
        new = nodes.start()
        assert nodes.jobs[0].wait(400) == 0 and new.wait(400) == 0, nodes.report()
        assert nodes.jobs[0].matches(r"have not met: .*node \d gives no sign of life since the nodes have met")
        assert not nodes.found("wait timeout after"), nodes.report()
        assert nodes.end == plain(tmp_path, 2, 1).end, nodes.report()
