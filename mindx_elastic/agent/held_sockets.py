"""Keeps the workers' connections to each other open for a moment after their death, in the agent.

The kernel closes the sockets of a killed worker at once. gloo forgets a send that it cannot write any more when its own
thread writes it, and not the caller's: a survivor that waits for that one alone is never told, and stands there until
the collective's time-out (`rejoin.sockets`; three of 400 kills amid collectives, two processes on one core). So the
agent holds copies of the workers' sockets: what a survivor sends to a dead rank meets an open socket, until its watcher
has cut the connection and it is out.

Each worker connects to a Unix socket in the agent's folder, sends its descriptors (`rejoin.sockets.SocketsPart.lend`),
and keeps that connection for as long as it wants them held. Its end, by a death or by a close, is all there is to say.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from mindx_elastic.core.events import logger
from mindx_elastic.core.wakeup import Wakeup
from mindx_elastic.rejoin.sockets import LENDING_FILE, MOST_AT_ONCE, short_path

__all__ = ["HeldSockets"]

_AFTER_S = 3.0
"""A survivor's watcher hears of a death and cuts in milliseconds, on a machine at ten times its load in tenths."""
_MOST_SHARE = 0.5
"""Of the descriptors that this process may have."""


class HeldSockets:
    """A daemon thread that takes descriptors, and closes them `_AFTER_S` after the end of their sender.

    Where the socket cannot be made, a warning is all: recoveries work without it, nearly always. `close` any thread.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: the agent's private one."""
        self._path = folder / LENDING_FILE
        self._most = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * _MOST_SHARE)
        self._held: dict[socket.socket, list[int]] = {}
        """Descriptors, by the connection that they came by."""
        self._due: list[tuple[float, list[int]]] = []
        """What is closed at a time (`time.monotonic`), in that order."""
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._is_closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self._path) as path:
                self._listener.bind(path)
            self._listener.listen(128)
        except OSError as error:
            logger.warning("connections of a killed rank are not held open: %s: %s", self._path, error)
        else:
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup.fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mindx-held-sockets", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all that is held, and end the thread."""
        if not self._is_closing:
            self._is_closing = True
            self._wakeup.ring()
            self._thread.join()
            self._wakeup.close()

    @property
    def count(self) -> int:
        """How many descriptors are held. Any thread; a moment old."""
        return sum(len(each) for each in [*self._held.values(), *(each for _, each in self._due)])

    def _run(self) -> None:
        try:
            while not self._is_closing:
                left = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
                for key, _ in self._selector.select(left):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._held:
                        self._hear(key.fileobj)
                while self._due and self._due[0][0] <= time.monotonic():
                    _close(self._due.pop(0)[1])
        finally:
            for connection, descriptors in self._held.items():
                connection.close()
                _close(descriptors)
            for _, descriptors in self._due:
                _close(descriptors)
            self._held, self._due = {}, []
            self._selector.close()
            self._listener.close()
            with suppress(OSError):
                self._path.unlink()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._held[connection] = []
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        try:
            said, descriptors, _, _ = socket.recv_fds(connection, 1, MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("a worker's connections are not held: %s", error)
            said, descriptors = b"", []
        if self.count + len(descriptors) > self._most:
            logger.debug("a worker's connections are not held: %d are, of %d at most", self.count, self._most)
            _close(descriptors)
        else:
            self._held[connection] += descriptors
        if not said:  # the worker is gone, or wants them back
            self._selector.unregister(connection)
            connection.close()
            self._due.append((time.monotonic() + _AFTER_S, self._held.pop(connection)))


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        with suppress(OSError):
            os.close(each)
