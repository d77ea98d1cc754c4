"""Watches the other ranks on this machine: their death is seen at once, without an agent, a store or a collective.

Each rank tells the others its process id and the process-id namespace it lives in; those that share it are watched
through a pidfd, which becomes readable when the process is gone, however it died (SIGKILL by the OOM killer, a
segmentation fault), and where a signal ends it through two of its threads, which are gone while it still gives its
memory back. The process's start time shows whether its number was reused meanwhile.

Rejected: time-outs on the store (5 s instead of a millisecond); messages from the agent (plain torchrun has none);
connections between ranks (a listener and a port a rank, for the same information).
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Mapping
from contextlib import suppress

from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import boot_id, killed_by, open_pidfd, start_ticks, thread_pidfds

__all__ = ["PeerWatch", "own_identity", "own_space", "report_death", "space_of"]

_LONGEST_IDENTITY = 1000
_MOST_PID = 1 << 22  # the kernel's own limit


def own_identity() -> str:
    """What a rank publishes at the start: JSON of its pid, start time and process-id namespace."""
    return json.dumps({"pid": os.getpid(), "started": start_ticks(os.getpid()), "space": own_space()})


def own_space() -> str:
    """A name of the process-id namespace that no other machine has; empty where /proc does not say."""
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _parse(text: str) -> tuple[int, str, str]:
    """Process id, start time and namespace. Raises ValueError, also for what only looks like them."""
    content = json.loads(text) if len(text) <= _LONGEST_IDENTITY else None
    if isinstance(content, dict):
        pid, started, space = content.get("pid"), content.get("started"), content.get("space")
        # 0 and negative numbers stand for groups of processes.
        if type(pid) is int and 0 < pid <= _MOST_PID and isinstance(started, str) and isinstance(space, str):
            return pid, started, space
    raise ValueError("no process id, start time and namespace")


def space_of(identity: str) -> str:
    """Equal for two ranks that can watch each other; empty where that is not known. Raises ValueError."""
    return _parse(identity)[2]


_started: list[PeerWatch] = []


def report_death(rank: int) -> bool:
    """Tell every watch of this process that `rank` is dead, as somebody else has seen: the scheduler of a cluster sees
    those of other machines, too. False: no watch is there to hear it. Any thread."""
    watches = list(_started)
    for watch in watches:
        watch.report(rank)
    return bool(watches)


class PeerWatch:
    """Watches the peers of this machine."""

    def __init__(self, identities: Mapping[int, str], *, rank: int) -> None:
        """`identities`: by rank, as `own_identity` made them; of this rank and of all on this machine at least. Raises
        ValueError for others."""
        self.gone: list[int] = []
        """Ranks found dead so far, in the order in which they were found."""
        self._fds: dict[int, int] = {}
        self._threads: dict[int, tuple[int, int, str]] = {}
        """By descriptor of a thread: the peer, its process id and start time."""
        self._report: Callable[[int], None] = lambda peer: None
        _, _, space = _parse(identities[rank])
        found = {peer: _parse(text) for peer, text in identities.items()}
        for peer, (pid, started, other) in found.items():
            if peer != rank and space and other == space:
                self._open(peer, pid, started)

    def _open(self, peer: int, pid: int, started: str) -> None:
        try:
            self._fds[peer] = open_pidfd(pid, started)
            self._threads |= dict.fromkeys(thread_pidfds(pid), (peer, pid, started))
        except ProcessLookupError:
            self.gone.append(peer)
        except OSError as error:  # an old kernel, or a sandbox that forbids it
            logger.debug("rank %d cannot be watched (%s)", peer, error)

    def start(self, watcher: Watcher, on_death: Callable[[int], None]) -> None:
        """Call ``on_death(rank)`` in the watcher thread for each peer that is or will be gone."""
        self._report = lambda peer: watcher.post(lambda: self._hear(peer, on_death))
        _started.append(self)
        for peer in list(self.gone):
            watcher.post(lambda peer=peer: on_death(peer))  # type: ignore[misc]
        for peer, fd in self._fds.items():
            watcher.watch(fd, lambda peer=peer: self._hear(peer, on_death))  # type: ignore[misc]
        for fd in self._threads:
            watcher.watch(fd, lambda fd=fd: self._hear_thread(fd, on_death))  # type: ignore[misc]

    def report(self, peer: int) -> None:
        """Another source says that `peer` is dead. Any thread."""
        if peer not in self.gone:
            self._report(peer)

    def _hear(self, peer: int, on_death: Callable[[int], None]) -> None:
        if peer not in self.gone:
            self.gone.append(peer)
            on_death(peer)

    def _hear_thread(self, fd: int, on_death: Callable[[int], None]) -> None:
        """A thread has ended: of itself, or because its process is being killed."""
        peer, pid, started = self._threads[fd]
        if peer not in self.gone and killed_by(pid, started):
            self._hear(peer, on_death)

    def look(self) -> list[int]:
        """Peers that are gone now, whether or not the watcher has seen it yet. Any thread, never blocks."""
        poll = select.poll()
        peers = {fd: peer for peer, fd in self._fds.items()}
        for fd in peers:
            poll.register(fd, select.POLLIN)
        found = [peers[fd] for fd, event in poll.poll(0) if event & select.POLLIN]
        return list(dict.fromkeys([*self.gone, *found]))

    def close(self) -> None:
        """After the watcher has stopped."""
        with suppress(ValueError):
            _started.remove(self)
        for fd in (*self._fds.values(), *self._threads):
            with suppress(OSError):
                os.close(fd)
        self._fds.clear()
        self._threads.clear()
