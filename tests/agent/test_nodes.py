"""How agents meet at the table, over real connections."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from mindx_elastic.agent import launcher
from mindx_elastic.agent import nodes as module
from mindx_elastic.agent.nodes import HostLostError, Membership, NodeHost, host_table
from mindx_elastic.agent.options import parse
from mindx_elastic.cluster.messages import Beat, Group
from mindx_elastic.cluster.scheduler import is_own_address
from mindx_elastic.cluster.wire import Line
from tests.harness import free_port, wait_until


def meet(member: Membership, workers: int, restarts: int, port: int) -> Group:
    return member.meet(workers, restarts, port, lambda: None)


def parameters(port: int, *, backend: str = "c10d", nodes: int = 2, **more: Any) -> RendezvousParameters:
    return RendezvousParameters(
        backend=backend,
        endpoint=f"127.0.0.1:{port}",
        run_id="job",
        min_nodes=nodes,
        max_nodes=nodes,
        local_addr="127.0.0.1",
        **more,
    )


class Agents:
    """Two of them in threads."""

    def __init__(self, stack: ExitStack, key: bytes | None = None) -> None:
        asked = parameters(free_port())
        host = host_table(asked, key)
        assert host is not None
        self.host: NodeHost = host
        self.members = [Membership(asked, key, workers=2, role="default") for _ in range(2)]
        for each in self.members:
            stack.callback(each.close)
        stack.callback(self.host.close, 0.0)

    def meet(self, restarts: int = 0) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []

        def run(number: int) -> None:
            group = meet(self.members[number], 2, restarts if number else 0, 1000 + number)
            found.append((group.node, group.size, group.restarts))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        return sorted(found)


@pytest.fixture
def agents() -> Iterator[Agents]:
    with ExitStack() as stack:
        yield Agents(stack)


def test_a_host_that_is_gone_is_named(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    agents.meet()
    agents.host.close(0.0)
    monkeypatch.setattr(module, "_HOST_AGAIN_S", 0.5)
    one = agents.members[0]
    wait_until(lambda: one.lost, "the loss")
    with pytest.raises(HostLostError, match=f"127.0.0.1:{one.port} is gone .*start the same command on all nodes"):
        meet(one, 2, 0, 1)


def test_nobody_at_the_endpoint_and_too_few_nodes() -> None:
    alone = Membership(parameters(free_port(), read_timeout=1), None, workers=1, role="x")
    with pytest.raises(RendezvousConnectionError, match=r"no agent of this job answers at .*refused.*same command"):
        meet(alone, 1, 0, 1)
    alone.close()
    asked = parameters(free_port(), join_timeout=1)
    host, one = host_table(asked, None), Membership(asked, None, workers=1, role="x")
    assert host is not None and host_table(asked, None) is None, "one serves it"
    with pytest.raises(RendezvousTimeoutError, match="too few nodes"):
        meet(one, 1, 0, 1)
    one.leave("failed", 1, "")
    host.close(5.0)


def test_enough_nodes_go_on_within_the_time_for_a_meeting() -> None:
    asked = parameters(free_port(), join_timeout=2)
    asked.min_nodes = 1
    host, one = host_table(asked, None), Membership(asked, None, workers=1, role="x")
    assert host is not None and meet(one, 1, 0, 1).nodes == 1
    one.leave("done", 0, "")
    host.close(5.0)


def test_who_has_not_the_jobs_key_is_not_heard_and_told_once_however_often_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = parameters(free_port(), nodes=1, join_timeout=2)
    host = host_table(asked, b"the job's key")
    assert host is not None
    stranger = Membership(asked, b"another key", workers=1, role="x")
    with pytest.raises(RendezvousTimeoutError):
        meet(stranger, 1, 0, 1)
    stranger.close()
    host.close(0.0)
    assert caplog.text.count("its message is not of this job") == 1


def test_an_agent_of_another_job_is_refused_also_if_it_comes_first() -> None:
    asked = parameters(free_port(), nodes=1)
    host, own = host_table(asked, None), Membership(asked, None, workers=1, role="x")
    asked = copy.copy(asked)
    asked.run_id = "another"
    other = Membership(asked, None, workers=1, role="x")
    assert host is not None
    with pytest.raises(RendezvousClosedError, match=r"--rdzv-id another, but the job .* a port of its own"):
        meet(other, 1, 0, 1)
    assert other.over is not None and other.over.code == 2, "no restart of that command helps"
    assert meet(own, 1, 0, 1).nodes == 1
    own.leave("done", 0, "")
    host.close(5.0)


def test_the_static_backend_has_its_host_and_the_workers_store_at_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "a-name-that-nobody-knows")
    asked = parameters(free_port(), backend="static", rank=1)
    asked.local_addr = None
    assert host_table(asked, None) is None
    assert Membership(asked, None, workers=1, role="x").node_id == "1"
    asked.config["rank"] = 0
    assert Membership(asked, None, workers=1, role="x").address == "127.0.0.1"


def test_a_machine_knows_its_own_name_before_the_name_service_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-0.train.space.invalid")
    assert is_own_address("train-0.train") and is_own_address("train-0")
    assert not is_own_address("train-1.train") and not is_own_address("train-0.tr.invalid")


@pytest.mark.parametrize(
    ("endpoint", "is_alone"), [("localhost:0", True), ("127.0.0.1:0", True), ("127.0.0.1:29400", False)]
)
def test_a_job_of_one_node_meets_nobody_where_no_port_is_known(endpoint: str, is_alone: bool) -> None:
    plan = parse(["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "-m", "json"])
    assert launcher.is_alone(plan) == is_alone


def test_who_has_not_registered_is_not_answered(agents: Agents) -> None:
    with socket.create_connection(("127.0.0.1", agents.members[0].port)) as stranger:
        line = Line(stranger, None, is_scheduler=False)
        line.send(Beat())
        heard: list[object] = []

        def is_closed() -> bool:
            try:
                heard.extend(line.receive())
            except OSError:
                return True
            return False

        wait_until(is_closed, "the end of the connection")
    assert not heard
