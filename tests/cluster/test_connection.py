"""What a member says to its table, and when, over a real connection."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

from mindx_elastic.cluster.connection import TableConnection
from mindx_elastic.cluster.messages import Beat, Message, Register
from mindx_elastic.cluster.wire import Line
from tests.harness import wait_until

WORK_S = 60.0
"""More than a member waits for a table that does not answer."""


def heard(sock: socket.socket) -> Iterator[Message]:
    """By the table, until the member ends the connection."""
    line = Line(sock, None, is_scheduler=True)
    with suppress(ConnectionError):
        while select.select([sock], [], [], WORK_S)[0]:
            yield from line.receive()


def test_a_member_beats_connects_again_and_ends_when_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WORK_S)
        member = TableConnection("127.0.0.1", server.getsockname()[1], None, node_id="a", heartbeat_s=100.0)
        member.say(size=1, recovery=True, store=("h", 1))
        member.start()
        for _ in range(2):
            with server.accept()[0] as sock:
                messages = heard(sock)
                assert isinstance(next(messages), Register)
                with member.changed:
                    member.ask_now()
                assert any(isinstance(message, Beat) for message in messages)
        with server.accept()[0]:
            member.close()
            wait_until(lambda: "mindx-cluster" not in {t.name for t in threading.enumerate()}, "its end", WORK_S)
