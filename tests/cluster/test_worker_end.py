"""How a worker's process ends, and what its end hears."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from mindx_elastic.cluster.connection import SchedulerConnection
from mindx_elastic.cluster.messages import Dead, Group, Message, Welcome
from mindx_elastic.cluster.settings import WORKER, ClusterSettings
from mindx_elastic.cluster.wire import Line
from mindx_elastic.cluster.worker_end import WorkerEnd

GROUP = Group(generation=0, rank=0, size=2, local_rank=0, local_size=2, host="127.0.0.1", port=1)


def say(server: socket.socket, *messages: Message) -> None:
    """A scheduler that admits one worker, says these and no more."""
    server.accept()[0].close()  # by which the worker learns its own address
    sock, _ = server.accept()
    with sock:
        line = Line(None, is_scheduler=True)
        sock.sendall(line.greeting())
        while not line.is_open:
            list(line.feed(sock.recv(1 << 16)))
        sock.sendall(b"".join(map(line.pack, messages)))
        while sock.recv(1 << 16):
            pass


def test_a_worker_that_is_dead_right_behind_its_group_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, str]] = []
    has_begun = threading.Event()

    def begin_again(self: Any, env: dict[str, str]) -> None:
        begun.append(env)
        has_begun.set()

    monkeypatch.setattr("mindx_elastic.cluster.worker_end.SameProgram.begin_again", begin_again)
    monkeypatch.setattr("mindx_elastic.cluster.worker_end.logging.shutdown", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        welcome = Welcome(job="job", node_id="0", heartbeat_s=5.0)
        words = (welcome, GROUP, Dead("it has sent nothing for 1 s"))
        threading.Thread(target=say, args=(server, *words), daemon=True).start()
        port = int(server.getsockname()[1])
        connection = SchedulerConnection(
            ClusterSettings(role=WORKER, size=2, host="127.0.0.1", port=port, recovery=True), None
        )
        WorkerEnd(connection, {"A": "1"})
        connection.start()
        assert connection.wait_for_group() == GROUP
        assert has_begun.wait(60) and begun == [{"A": "1", "MS_NODE_ID": "0"}]
        connection.close()
