"""The agent holds the workers' connections to each other, and lets them go a moment behind their death."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindx_elastic.agent import held_sockets
from mindx_elastic.agent.held_sockets import HeldSockets
from mindx_elastic.rejoin.sockets import LENDING_FILE, SocketsPart
from tests.harness import no_descriptor_left, wait_until

_RANK = """
import socket, sys
from pathlib import Path
from mindx_elastic.rejoin.sockets import SocketsPart
peer = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
part = SocketsPart()
part.inodes = frozenset(part._found.values())
part.lend(Path(sys.argv[1]))
print("LENT", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldSockets]:
    found = HeldSockets(tmp_path)
    yield found
    found.close()
    assert not (tmp_path / LENDING_FILE).exists()


@pytest.fixture
def rank(tmp_path: Path, held: HeldSockets) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A process with a connection to this one, which it has lent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", _RANK, str(tmp_path), port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            mine, _ = server.accept()
            assert process.stdout is not None and process.stdout.readline() == "LENT\n"
            wait_until(lambda: held.count == 1, "the descriptor")
            mine.setblocking(False)
            try:
                yield process, mine
            finally:
                mine.close()
                process.kill()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_the_connection_of_a_killed_rank_takes_what_is_sent(
    rank: tuple[subprocess.Popen[str], socket.socket], held: HeldSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_sockets, "_AFTER_S", 60.0)
    process, mine = rank
    mine.send(b"unread, so that a close would be a reset")
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not held._held, "the end of the rank's own connection")
    assert mine.send(b"more") == 4 and not _is_closed(mine)
    assert held.count == 1


def test_it_is_closed_a_moment_later(
    rank: tuple[subprocess.Popen[str], socket.socket], held: HeldSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_sockets, "_AFTER_S", 0.05)
    process, mine = rank
    process.kill()
    process.wait()
    wait_until(lambda: _is_closed(mine), "the end of the connection")
    wait_until(lambda: held.count == 0, "nothing is held")


def test_the_end_of_the_agent_closes_all(
    rank: tuple[subprocess.Popen[str], socket.socket], held: HeldSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_sockets, "_AFTER_S", 60.0)
    process, mine = rank
    process.kill()
    process.wait()
    held.close()
    assert held.count == 0
    wait_until(lambda: _is_closed(mine), "the end of the connection")


def test_no_more_than_its_share_of_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_sockets, "_MOST_SHARE", 0.0)
    held = HeldSockets(tmp_path)
    with no_descriptor_left():
        try:
            with _lent(tmp_path) as part:
                wait_until(lambda: len(held._held) == 1, "the connection")
                part.release()
                wait_until(lambda: not held._held, "its end")
                assert held.count == 0
        finally:
            held.close()


def test_without_an_agent_that_holds_nothing_happens(tmp_path: Path) -> None:
    with _lent(tmp_path) as part:
        part.release()


def test_a_folder_that_is_too_deep_for_a_socket_s_name(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120) / ("e" * 120)
    folder.mkdir(parents=True)
    held = HeldSockets(folder)
    try:
        with _lent(folder):
            wait_until(lambda: held.count == 2, "both ends")
    finally:
        held.close()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    HeldSockets(tmp_path / "missing").close()
    assert "connections of a killed rank are not held open" in caplog.text


class _lent:  # noqa: N801
    """Both ends of a connection of this process, lent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> SocketsPart:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
        self._part = SocketsPart()
        self._part.inodes = frozenset(os.fstat(each.fileno()).st_ino for each in self._ends)
        self._part.lend(self._folder)
        return self._part

    def __exit__(self, *exc_info: object) -> None:
        self._part.release()
        for each in self._ends:
            each.close()
