"""The first node is lost, whose agent hosts the workers' store: another one does from then on, and the processes of the
others live on. The same for two nodes at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Job, events, wait_until
from tests.system.test_in_place_nodes import IN_PLACE, WHY, Nodes
from tests.system.test_lost_nodes import RANK_FIRST, STEP_S, check, held, loss_of, plain, release, replace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
drill = pytest.mark.drill

HOSTS = r"node (\d+) hosts the workers' store now \(this one\)"
THREE = ("--size", 144, *STEP_S)


@drill
def test_the_first_of_two_nodes_is_replaced_and_its_rank_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """On another machine: what was this rank's own comes from the records that the other node has kept."""
    undisturbed = plain(tmp_path, 2, 1)
    nodes, survivors = replace(tmp_path, 2, 1, "0:8:update:node")
    check(nodes, survivors, undisturbed, {0})
    assert [match[1] for match in nodes.found(HOSTS)] == ["1"], nodes.report()
    (survivor,) = [number for number, job in enumerate(nodes.jobs[:2]) if job is survivors[0]]
    (told,) = events(tmp_path / "hurt" / f"node{survivor}" / "run", "rejoin")
    assert told["outcome"] == "in place" and told["ranks"] == [0], told
    assert str(nodes.jobs[1 - survivor].process.pid) in told["node"], told
    assert str(nodes.jobs[2].process.pid) in told["taken_by"], told


@drill
@pytest.mark.parametrize("where", ["start", "forward", "backward", "mid", "after", "eval", "save"])
@pytest.mark.parametrize("what", ["agent", "node", RANK_FIRST])
def test_the_first_node_lost_at_any_place_of_a_step(tmp_path: Path, where: str, what: str) -> None:
    step = {"eval": 12, "save": 5}.get(where, 8)
    args = ("--evaluate", "no_grad", "--save-every", 5, *STEP_S)
    undisturbed = plain(tmp_path, 2, 1, *args)
    fault, *more = loss_of(0, step, where, what)
    nodes, survivors = replace(tmp_path, 2, 1, fault, *args, *more)
    check(nodes, survivors, undisturbed, {0})


@drill
@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.parametrize("stage", ["start", "guard", "connect"])
def test_a_recovery_whose_board_is_lost_begins_again(tmp_path: Path, stage: str, num_nodes: int) -> None:
    """Rank 0 dies, and the first node's agent when the new process has come to `stage`."""
    args = STEP_S if num_nodes == 2 else THREE
    words = (*args, "--meanwhile", f"new:{stage}:agent")
    nodes, survivors = replace(tmp_path, num_nodes, 1, "0:8:mid:kill", *words)
    check(nodes, survivors, plain(tmp_path, num_nodes, 1, *args), {0})
    assert len(nodes.found("^MEANWHILE new")) == 1, nodes.report()


@drill
@pytest.mark.parametrize("stage", ["restore", "ready"])
def test_the_first_node_is_lost_when_the_state_has_been_given(tmp_path: Path, stage: str) -> None:
    """A survivor's guard may be closed by then: in place or a restart, and exact."""
    nodes, _ = replace(tmp_path, 2, 1, "0:8:mid:kill", *STEP_S, "--meanwhile", f"new:{stage}:agent")
    assert nodes.end == plain(tmp_path, 2, 1, *STEP_S).end, nodes.report()
    assert not nodes.found("begin anew"), nodes.report()
    assert nodes.found(WHY) or nodes.found(IN_PLACE), nodes.report()


@drill
def test_the_first_node_with_two_ranks(tmp_path: Path) -> None:
    args = ("--size", 192, *STEP_S)
    nodes, survivors = replace(tmp_path, 2, 2, "1:6:mid:node", *args)
    check(nodes, survivors, plain(tmp_path, 2, 2, *args), {0, 1})


@drill
def test_the_first_of_three_nodes(tmp_path: Path) -> None:
    nodes, survivors = replace(tmp_path, 3, 1, "0:8:forward:node", *THREE)
    check(nodes, survivors, plain(tmp_path, 3, 1, *THREE), {0})
    assert len(nodes.found(HOSTS)) == 1, nodes.report()


@drill
def test_a_node_that_stands_by_takes_the_first_nodes_place(tmp_path: Path) -> None:
    nodes, survivors = replace(tmp_path, 2, 1, "0:12:mid:node", *STEP_S, early=True)
    check(nodes, survivors, plain(tmp_path, 2, 1, *STEP_S), {0})


def lose_two(
    folder: Path, lost: set[int], *, undisturbed: Nodes, ends: Callable[[Nodes], None] = lambda nodes: None
) -> Nodes:
    """Of three nodes, one with a rank of `lost` kills itself and the other one with it; two others come."""
    with ExitStack() as stack:
        nodes = Nodes(stack, folder / "hurt", 3, 1, "--epochs", 2, *THREE, "--hold-at", 8)
        by_rank = held(nodes)
        for rank in lost:
            kill_node(by_rank[rank])
        (other,) = [job for rank, job in by_rank.items() if rank not in lost]
        release(nodes)
        new = [nodes.start() for _ in range(2)]
        for job in (other, *new):
            assert job.wait(400) == 0, nodes.report()
        assert nodes.end == undisturbed.end, nodes.report()
        assert not nodes.found("not bit for bit|may differ"), nodes.report()
        assert not nodes.found(WHY), nodes.report()
        for rank, pids in nodes.processes().items():
            assert len(pids) == (2 if rank in lost else 1), nodes.report()
        assert len(other.matches(IN_PLACE)) == 1, nodes.report()
        return nodes


def kill_node(job: Job) -> None:
    """The agent first, so that it cannot say anything of its ranks."""
    pids = list(job.pids().values())
    job.process.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@drill
@pytest.mark.parametrize("lost", [{0, 1}, {0, 2}, {1, 2}], ids=str)
def test_two_of_three_nodes_at_once(tmp_path: Path, lost: set[int]) -> None:
    lose_two(tmp_path, lost, undisturbed=plain(tmp_path, 3, 1, *THREE))


@drill
def test_the_first_node_is_lost_twice(tmp_path: Path) -> None:
    """The one that hosts the store since the first time is lost, too, when all train again."""
    undisturbed = plain(tmp_path, 3, 1, *THREE)
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", 3, 1, "--epochs", 2, *THREE, "--fault", "0:6:mid:node", "--hold-at", 14)
        wait_until(lambda: any(job.process.poll() is not None for job in nodes.jobs), "the first death", 200)
        nodes.start()
        by_rank = held_all(nodes, 3)
        (host,) = [job for job in nodes.jobs if job.matches(HOSTS)]
        (lost,) = [rank for rank, job in by_rank.items() if job is host]
        kill_node(host)
        release(nodes)
        nodes.start()
        for job in nodes.jobs:
            assert job.wait(400) == (0 if job.process.returncode == 0 else job.process.returncode)
        assert nodes.end == undisturbed.end, nodes.report()
        assert not nodes.found("not bit for bit|may differ"), nodes.report()
        assert not nodes.found(WHY), nodes.report()
        assert {rank: len(pids) for rank, pids in nodes.processes().items()} == {
            rank: 2 if rank in (0, lost) else 1 for rank in range(3)
        }, nodes.report()


def held_all(nodes: Nodes, world_size: int) -> dict[int, Job]:
    wait_until(
        lambda: len({match[1] for match in nodes.found(r"^HOLD (\d+)")}) == world_size,
        "all ranks behind a step",
        300,
    )
    by_rank = {int(match[1]): job for job in nodes.jobs for match in job.matches(r"^HOLD (\d+)")}
    assert len(by_rank) == world_size, nodes.report()
    return by_rank


@drill
def test_a_rank_dies_after_the_store_has_moved(tmp_path: Path) -> None:
    """Its new process, and the recovery, use the store of the second node."""
    undisturbed = plain(tmp_path, 2, 1, *STEP_S)
    with ExitStack() as stack:
        faults = ("--fault", "0:6:mid:node", "--fault", "1:14:forward")
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, "--epochs", 2, *STEP_S, *faults)
        wait_until(lambda: any(job.process.poll() is not None for job in nodes.jobs), "the first death", 200)
        (other,) = [job for job in nodes.jobs if job.process.poll() is None]
        new = nodes.start()
        assert other.wait(400) == 0 and new.wait(400) == 0, nodes.report()
        assert nodes.end == undisturbed.end, nodes.report()
        assert not nodes.found(WHY), nodes.report()
        assert [match[2] for match in other.matches(IN_PLACE)] == ["0", "1"], nodes.report()
        assert [len(pids) for _, pids in sorted(nodes.processes().items())] == [2, 2], nodes.report()


@drill
def test_the_first_node_that_stood_still_takes_its_own_place_again(tmp_path: Path) -> None:
    """With new processes: the old ones must not go on."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, "--epochs", 2, *STEP_S, "--fault", "0:8:start:stop")
        for job in nodes.jobs:
            job.wait_for("READY")
        (job,) = [job for job in nodes.jobs if 0 in job.pids()]
        (other,) = [each for each in nodes.jobs if each is not job]
        job.wait_for("^FAULT ")
        os.kill(job.process.pid, signal.SIGSTOP)
        other.wait_for(HOSTS, 1, 200)
        os.kill(job.process.pid, signal.SIGCONT)  # its worker stays stopped until it is killed
        nodes.expect(0)
        job.wait_for("this node was taken for lost")
        assert nodes.end == plain(tmp_path, 2, 1, *STEP_S).end, nodes.report()
        assert [len(pids) for _, pids in sorted(nodes.processes().items())] == [2, 1], nodes.report()


def lose_first(nodes: Nodes) -> list[Job]:
    """Of nodes whose ranks all stand behind a step. Returns the others."""
    by_rank = held(nodes)
    kill_node(by_rank[0])
    release(nodes)
    return [job for rank, job in by_rank.items() if rank > 0]


@drill
def test_nobody_comes_in_time(tmp_path: Path) -> None:
    """The survivors save and wait for another node, as without recovery in place. It comes late, and all train on."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path, 0, 1, "--epochs", 2, *STEP_S, "--hold-at", 8, nnodes="2")
        for _ in range(2):
            nodes.start(rejoin_timeout=5)
        (other,) = lose_first(nodes)
        other.wait_for(r"no other node has taken the place of node 0 within 5 s", 1, 200)
        other.wait_for(r"restart 1", 1, 200)
        nodes.start()
        assert other.wait(400) == 0 and nodes.jobs[2].wait(400) == 0, nodes.report()
        assert not nodes.found(IN_PLACE), nodes.report()
        assert nodes.end == plain(tmp_path, 2, 1, *STEP_S).end, nodes.report()


@drill
def test_a_rank_dies_while_all_wait_for_another_node(tmp_path: Path) -> None:
    """Its own agent replaces it, in the same recovery; or all restart. Both are exact."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", 3, 1, "--epochs", 2, *THREE, "--hold-at", 8)
        others = lose_first(nodes)
        for job in others:
            job.wait_for("hosts the workers' store now", 1, 200)
        (victim,) = [job for job in others if 2 in job.pids()]
        os.kill(victim.pids()[2], signal.SIGKILL)
        victim.wait_for("rank 2 .*SIGKILL", 1, 100)
        new = nodes.start()
        for job in (*others, new):
            assert job.wait(400) == 0, nodes.report()
        assert nodes.end == plain(tmp_path, 3, 1, *THREE).end, nodes.report()


@drill
def test_the_last_rank_dies_while_the_nodes_meet_anew(tmp_path: Path) -> None:
    """The third node is lost, too, so that the second waits 10 s for its agent. All ranks are dead then: the job is
    restarted, unless the machine was so slow that the 10 s were over."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path, 3, 1, "--epochs", 2, *THREE, "--hold-at", 8)
        by_rank = held(nodes)
        other = by_rank[1]
        for rank in (0, 2):
            kill_node(by_rank[rank])
        other.wait_for("node 0 .* is lost", 1, 100)
        os.kill(other.pids()[1], signal.SIGKILL)
        release(nodes)
        other.wait_for("rank 1 has died while the nodes met anew|takes the place of rank 1", 1, 100)
        for _ in range(2):
            nodes.start()
        for job in (other, *nodes.jobs[3:]):
            assert job.wait(400) == 0, nodes.report()
        assert sorted(nodes.end[0]) == [0, 1, 2], nodes.report()


@drill
def test_an_agent_is_told_to_stop_while_all_wait_for_another_node(tmp_path: Path) -> None:
    """It saves and ends; the other one saves, too, and waits for others."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path, 3, 1, "--epochs", 2, *THREE, "--hold-at", 8)
        stopped, other = lose_first(nodes)
        for job in (stopped, other):
            job.wait_for("hosts the workers' store now", 1, 200)
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
def test_the_new_first_node_is_lost_while_all_wait(tmp_path: Path) -> None:
    """The third one saves, and the job is restarted with two others."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path, 3, 1, "--epochs", 2, *THREE, "--hold-at", 8)
        others = lose_first(nodes)
        for job in others:
            job.wait_for("hosts the workers' store now", 1, 200)
        (host,) = [job for job in others if job.matches(HOSTS)]
        (third,) = [job for job in others if job is not host]
        kill_node(host)
        third.wait_for(WHY, 1, 100)
        for _ in range(2):
            nodes.start()
        for job in (third, *nodes.jobs[3:]):
            assert job.wait(400) == 0, nodes.report()
        assert nodes.end == plain(tmp_path, 3, 1, *THREE).end, nodes.report()
