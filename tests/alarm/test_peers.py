"""Deaths of other ranks' processes on this machine, with real processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from mindx_elastic.alarm.peers import PeerWatch, own_identity
from mindx_elastic.alarm.watcher import Watcher

WAIT_S = 120.0
_PEER = """
import sys, threading
from mindx_elastic.alarm.peers import own_identity
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(own_identity(), flush=True)
sys.stdin.read()
"""


class Peer:
    """The process of another rank."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.identity = self.process.stdout.readline()

    def end(self, how: Any = "exit", *, reap: bool = True) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        if how == "exit":
            self.process.stdin.close()
        else:
            self.process.send_signal(how)
        if reap:
            self.process.wait()
        else:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer())
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    made = Watcher(lambda signum: None)
    made.start()
    yield made
    made.stop()


def pidfds() -> set[int]:
    """This process's open descriptors of processes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            if "pidfd" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


def changed(identity: str, **fields: object) -> str:
    return json.dumps({**json.loads(identity), **fields})


def test_a_death_is_heard_whatever_its_cause(start: Callable[[], Peer], watcher: Watcher) -> None:
    peers = [start(), start()]
    watch = PeerWatch(dict(enumerate([own_identity(), *(peer.identity for peer in peers)])), rank=0)
    assert (watch.gone, watch.look()) == ([], [])
    heard: queue.Queue[int] = queue.Queue()
    watch.start(watcher, heard.put)
    peers[1].end(signal.SIGKILL)
    assert heard.get(timeout=WAIT_S) == 2
    assert (watch.gone, watch.look()) == ([2], [2])
    peers[0].end("exit")
    assert heard.get(timeout=WAIT_S) == 1
    assert (watch.gone, watch.look()) == ([2, 1], [2, 1])
    assert heard.empty(), "once each"
    watcher.stop()
    watch.close()


@pytest.mark.parametrize("reap", [True, False])
def test_dead_before_the_watch_began(start: Callable[[], Peer], watcher: Watcher, reap: bool) -> None:
    """The launcher collects its children a moment later."""
    peer = start()
    before = PeerWatch(dict(enumerate([own_identity(), peer.identity])), rank=0)
    peer.end(signal.SIGKILL, reap=reap)
    assert (before.gone, before.look()) == ([], [1])
    watch = PeerWatch(dict(enumerate([own_identity(), peer.identity])), rank=0)
    assert watch.look() == [1]
    heard: queue.Queue[int] = queue.Queue()
    watch.start(watcher, heard.put)
    assert heard.get(timeout=WAIT_S) == 1
    watcher.stop()
    before.close()
    watch.close()


@pytest.mark.parametrize("space", ["another-machine/pid:[1]", ""])
def test_ranks_elsewhere_are_not_watched(start: Callable[[], Peer], space: str) -> None:
    peer = start()
    watch = PeerWatch(dict(enumerate([own_identity(), changed(peer.identity, space=space)])), rank=0)
    unknown = PeerWatch(dict(enumerate([changed(own_identity(), space=""), changed(peer.identity, space="")])), rank=0)
    peer.end()
    assert watch.look() == []
    assert unknown.look() == [], "where /proc does not say, no rank is taken for a neighbour"


def test_a_system_that_forbids_it(start: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    peer = start()
    fired = []

    def forbidden(pid: int) -> int:
        fired.append(pid)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    watch = PeerWatch(dict(enumerate([own_identity(), peer.identity])), rank=0)
    assert fired == [peer.process.pid]
    peer.end()
    assert (watch.gone, watch.look()) == ([], [])


def test_a_descriptor_that_somebody_has_closed_is_no_death(start: Callable[[], Peer], watcher: Watcher) -> None:
    """A program that closes all descriptors it does not know."""
    peer = start()
    before = pidfds()
    watch = PeerWatch(dict(enumerate([own_identity(), peer.identity])), rank=0)
    ours = pidfds() - before
    assert ours
    for fd in ours:
        os.close(fd)
    assert watch.look() == []
    heard: queue.Queue[int] = queue.Queue()
    watch.start(watcher, heard.put)
    for turn in (-1, -2, -3):
        watcher.post(lambda turn=turn: heard.put(turn))  # type: ignore[misc]
        assert heard.get(timeout=WAIT_S) == turn
    watcher.stop()
    watch.close()
