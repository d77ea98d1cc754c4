"""The agent is lost that hosts the store of the rendezvous. The same command at the same endpoint hosts another one,
and the processes of the other nodes live on."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Job, events
from tests.system.test_first_nodes import HOSTS, THREE, kill_node
from tests.system.test_in_place_nodes import IN_PLACE, WHY, Nodes
from tests.system.test_lost_nodes import RANK_FIRST, STEP_S, check, held, loss_of, plain, release, stand_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
drill = pytest.mark.drill

WAITS = r"the host of the rendezvous is lost; this node's ranks wait up to"
TWO = ("--size", 192, *STEP_S)


def replace(
    folder: Path, num_nodes: int, ranks: int, fault: str, *args: object, host: int = 0, early: bool = False
) -> tuple[Nodes, list[Job]]:
    """The node that hosts the rendezvous is lost by `fault`, and the same command is started at its endpoint once the
    others wait. `early`: another node stands by. Returns the survivors, too."""
    with ExitStack() as stack:
        args = ("--epochs", 2, *args, *(("--hold-at", 8) if early else ()), "--fault", fault)
        nodes = Nodes(stack, folder / "hurt", num_nodes, ranks, *args, host=host, rejoin_timeout=400)
        if early:
            stand_by(nodes)
        nodes.jobs[host].wait(400)
        survivors = [job for number, job in enumerate(nodes.jobs[:num_nodes]) if number != host]
        survivors[0].wait_for(WAITS, 1, 200)
        new = nodes.start(hosts=True)
        for job in survivors:
            assert job.wait(400) == 0, nodes.report()
        assert early or new.wait(400) == 0, nodes.report()
        assert len(nodes.found("^FAULT ")) == 1, nodes.report()
        return nodes, survivors


@drill
def test_the_host_of_the_rendezvous_is_replaced_and_its_rank_goes_on_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = plain(tmp_path, 2, 1)
    nodes, survivors = replace(tmp_path, 2, 1, "0:8:update:node")
    check(nodes, survivors, undisturbed, {0})
    assert len(nodes.found(HOSTS)) == 1, nodes.report()
    (told,) = events(tmp_path / "hurt" / "node1" / "run", "rejoin")
    assert told["outcome"] == "in place" and told["ranks"] == [0], told
    assert str(nodes.jobs[0].process.pid) in told["node"], told
    assert str(nodes.jobs[2].process.pid) in told["taken_by"], told


@drill
@pytest.mark.parametrize("where", ["start", "forward", "backward", "mid", "after", "eval", "save"])
@pytest.mark.parametrize("what", ["agent", "node", RANK_FIRST])
def test_the_host_lost_at_any_place_of_a_step(tmp_path: Path, where: str, what: str) -> None:
    step = {"eval": 12, "save": 5}.get(where, 8)
    args = ("--evaluate", "no_grad", "--save-every", 5, *STEP_S)
    undisturbed = plain(tmp_path, 2, 1, *args)
    fault, *more = loss_of(0, step, where, what)
    nodes, survivors = replace(tmp_path, 2, 1, fault, *args, *more)
    check(nodes, survivors, undisturbed, {0})


@drill
def test_a_host_with_two_ranks(tmp_path: Path) -> None:
    nodes, survivors = replace(tmp_path, 2, 2, "1:6:mid:node", *TWO)
    check(nodes, survivors, plain(tmp_path, 2, 2, *TWO), {0, 1})


@drill
@pytest.mark.parametrize("host", [0, 2])
def test_the_host_among_three_nodes(tmp_path: Path, host: int) -> None:
    """As the first node of the job, and as the last one: then the first one lives, and waits for the endpoint."""
    nodes, survivors = replace(tmp_path, 3, 1, f"{host}:8:forward:node", *THREE, host=host)
    check(nodes, survivors, plain(tmp_path, 3, 1, *THREE), {host})
    assert len(nodes.found(HOSTS)) == (host == 0), nodes.report()


@drill
def test_a_node_that_settled_nothing_goes_over_to_the_new_store_too(tmp_path: Path) -> None:
    """The last of three nodes hosts the rendezvous and is lost; the first one settles that alone, and the other one
    only hears of the recovery. It must not be missing in the new store, nor at the end of the job."""
    args = ("--size", 144, "--step-s", 0.5)
    nodes, survivors = replace(tmp_path, 3, 1, "2:8:forward:node", *args, host=2)
    check(nodes, survivors, plain(tmp_path, 3, 1, *args), {2})
    for job in survivors:
        assert len(job.matches(r"the endpoint \S+ answers: claim")) == 1, nodes.report()
    assert not nodes.found("Error waiting on exit barrier"), nodes.report()


@drill
def test_a_host_that_is_not_the_first_of_two_nodes(tmp_path: Path) -> None:
    nodes, survivors = replace(tmp_path, 2, 1, "1:8:backward:node", *STEP_S, host=1)
    check(nodes, survivors, plain(tmp_path, 2, 1, *STEP_S), {1})


@drill
def test_a_node_that_stands_by_waits_for_the_survivors(tmp_path: Path) -> None:
    """With the new host it would be as many nodes as the job needs: they must not begin it anew without the survivor.
    One of the two has the place, and the other one stands by to the end."""
    nodes, survivors = replace(tmp_path, 2, 1, "0:12:mid:node", *STEP_S, early=True)
    check(nodes, survivors, plain(tmp_path, 2, 1, *STEP_S), {0})


@drill
def test_two_of_three_nodes_and_the_host_among_them(tmp_path: Path) -> None:
    undisturbed = plain(tmp_path, 3, 1, *THREE)
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", 3, 1, "--epochs", 2, *THREE, "--hold-at", 8, host=0, rejoin_timeout=400)
        by_rank = held(nodes)
        for rank in (0, 1):
            kill_node(by_rank[rank])
        release(nodes)
        by_rank[2].wait_for(WAITS, 1, 200)
        new = [nodes.start(hosts=True), nodes.start()]
        for job in (by_rank[2], *new):
            assert job.wait(400) == 0, nodes.report()
        assert nodes.end == undisturbed.end, nodes.report()
        assert not nodes.found("not bit for bit|may differ"), nodes.report()
        assert not nodes.found(WHY), nodes.report()
        assert {rank: len(pids) for rank, pids in nodes.processes().items()} == {0: 2, 1: 2, 2: 1}, nodes.report()


@drill
def test_the_host_is_lost_twice(tmp_path: Path) -> None:
    """The second time it is the node that has come for the first one."""
    undisturbed = plain(tmp_path, 2, 1, *STEP_S)
    with ExitStack() as stack:
        faults = ("--fault", "0:6:mid:node", "--fault", "0:14:forward:node")
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, "--epochs", 2, *STEP_S, *faults, host=0, rejoin_timeout=400)
        other = nodes.jobs[1]
        other.wait_for(WAITS, 1, 200)
        nodes.start(hosts=True)
        other.wait_for(WAITS, 2, 300)
        new = nodes.start(hosts=True)
        assert other.wait(400) == 0 and new.wait(400) == 0, nodes.report()
        assert nodes.end == undisturbed.end, nodes.report()
        assert not nodes.found(WHY), nodes.report()
        assert not nodes.found("not bit for bit|may differ"), nodes.report()
        assert {rank: len(pids) for rank, pids in nodes.processes().items()} == {0: 3, 1: 1}, nodes.report()
        assert len(other.matches(IN_PLACE)) == 2, nodes.report()


@drill
def test_another_node_is_lost_after_the_host(tmp_path: Path) -> None:
    """What is settled then is settled in the new store."""
    undisturbed = plain(tmp_path, 2, 1, *STEP_S)
    with ExitStack() as stack:
        faults = ("--fault", "0:6:mid:node", "--fault", "1:14:forward:node")
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, "--epochs", 2, *STEP_S, *faults, host=0, rejoin_timeout=400)
        nodes.jobs[1].wait_for(WAITS, 1, 200)
        first = nodes.start(hosts=True)
        first.wait_for("hosts the workers' store now|in the place of node|is lost", 1, 300)
        nodes.jobs[1].wait()
        second = nodes.start()
        assert first.wait(400) == 0 and second.wait(400) == 0, nodes.report()
        assert nodes.end == undisturbed.end, nodes.report()
        assert not nodes.found(WHY), nodes.report()
        assert {rank: len(pids) for rank, pids in nodes.processes().items()} == {0: 2, 1: 2}, nodes.report()


def stop(job: Job) -> list[int]:
    """The agent and its ranks stand still."""
    pids = [job.process.pid, *job.pids().values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


@drill
@pytest.mark.parametrize("size", [(2, 1), (2, 2), (3, 1)], ids=str)
def test_a_host_that_stands_still_and_is_ended(tmp_path: Path, size: tuple[int, int]) -> None:
    """Its store does not answer, and nobody else can have its port until it is ended."""
    args = {(2, 1): STEP_S, (2, 2): TWO, (3, 1): THREE}[size]
    undisturbed = plain(tmp_path, *size, *args)
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", *size, "--epochs", 2, *args, "--hold-at", 8, host=0, rejoin_timeout=400)
        by_rank = held(nodes)
        host, others = by_rank[0], {job for job in nodes.jobs if job is not by_rank[0]}
        ranks = set(host.pids())
        stopped = stop(host)
        release(nodes)
        for job in others:
            job.wait_for(WAITS, 1, 200)
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
        new = nodes.start(hosts=True)
        for job in (*others, new):
            assert job.wait(400) == 0, nodes.report()
        assert nodes.end == undisturbed.end, nodes.report()
        assert not nodes.found("not bit for bit|may differ"), nodes.report()
        assert not nodes.found(WHY), nodes.report()
        found = {rank: len(pids) for rank, pids in nodes.processes().items()}
        assert found == {rank: 2 if rank in ranks else 1 for rank in found}, nodes.report()


@drill
@pytest.mark.parametrize("size", [(2, 1), (3, 1)], ids=str)
def test_a_host_that_stands_still_and_goes_on_takes_its_place_again(tmp_path: Path, size: tuple[int, int]) -> None:
    """Its store answers again: the others settle there that it is out, it ends its ranks, and takes the place as any
    other node. To torch all nodes are dead then, because none of them could write a heartbeat meanwhile."""
    args = {(2, 1): STEP_S, (3, 1): THREE}[size]
    undisturbed = plain(tmp_path, *size, *args)
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", *size, "--epochs", 2, *args, "--hold-at", 8, host=0, rejoin_timeout=400)
        by_rank = held(nodes)
        host, others = by_rank[0], [job for job in nodes.jobs if job is not by_rank[0]]
        stopped = stop(host)
        release(nodes)
        for job in others:
            job.wait_for(WAITS, 1, 200)
        os.kill(stopped[0], signal.SIGCONT)
        host.wait_for("this node was taken for lost", 1, 200)
        nodes.expect(0)
        check(nodes, others, undisturbed, {0})
        assert len(nodes.found("has taken the place of node 0")) == 1, nodes.report()
        assert len(nodes.found(HOSTS)) == 1, nodes.report()


@drill
@pytest.mark.parametrize("host", [0, 1])
def test_nobody_comes_to_the_endpoint_in_time(tmp_path: Path, host: int) -> None:
    """The survivors save and end, and say what to do; the same command on both nodes goes on from there."""
    with ExitStack() as stack:
        args = ("--epochs", 2, *STEP_S, "--hold-at", 8)
        nodes = Nodes(stack, tmp_path, 2, 1, *args, host=host, rejoin_timeout=5)
        by_rank = held(nodes)
        kill_node(by_rank[host])
        release(nodes)
        other = by_rank[1 - host]
        assert other.wait(400) == 75, nodes.report()
        remedy = rf"start the same command on the machine that has the address 127\.0\.0\.1:{nodes._port}"
        why = rf"no recovery in place: no other host of the rendezvous has come within 5 s .*{remedy}"
        assert other.matches(why), nodes.report()
        assert other.matches(r"the job has failed.*start the same command on all nodes"), nodes.report()
        assert any((tmp_path / "job").rglob("*_8_breakpoint.safetensors")), nodes.report()
        again = [nodes.start(hosts=True), nodes.start()]
        for job in again:
            assert job.wait(400) == 0, nodes.report()
        assert nodes.end == plain(tmp_path, 2, 1, *STEP_S).end, nodes.report()
