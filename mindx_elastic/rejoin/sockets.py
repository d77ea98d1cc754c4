"""Gets a rank out of its collectives: ends its connections to the other ranks for reading, from another thread.

A rank that talks to a dead one is thrown out at once. One that waits for a living rank, which is out already, waits
for the collective's time-out, half an hour as a rule; aborting the group does not free it. It is free at once when the
sockets below it have come to their end.

They are ended for reading only, and kept open until every rank is out. For gloo forgets a send that it could not
write: a thread that waits for that one alone is not told of the error, and waits for the time-out. So a write must not
fail as long as another rank is still on its way out, neither here nor at the other end. The other end of a killed rank
is closed by the kernel all the same. Should a survivor wait for a send to it, there is a restart after
`--rejoin-timeout`; none of 900 kills amid collectives of 2 and 3 ranks came to that.

Which of the process's sockets they are, the ranks find out together: a connection between two of them is seen from both
ends. So a connection to the store, to a data base or of a web server of the program's is not touched. A socket is known
by its inode, because the number of its descriptor is used again.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import xxhash

from mindx_elastic.agreement.gather import Answer, Merged, Part

__all__ = ["SocketsPart"]


class SocketsPart(Part):
    """This rank's connections to the other ranks: finds them when the ranks meet, and cuts them. `cut` any thread."""

    name = "sockets"

    def __init__(self) -> None:
        self._found = _connections()
        self.inodes: frozenset[int] = frozenset()
        """Inodes of the connections to other ranks."""
        self._lock = threading.Lock()
        self._held: dict[int, socket.socket] | None = {}
        """Copies of the cut ones, by inode; None: nothing is cut any more."""

    def say(self) -> Any:
        return sorted(self._found)

    def merge(self, said: Sequence[Any]) -> Merged:
        counts = Counter(str(name) for each in said for name in set(map(str, each)))
        return Merged(None, [[name for name in each if counts[str(name)] == 2] for each in said])

    def hear(self, answer: Answer) -> None:
        self.inodes = frozenset(self._found[str(name)] for name in answer.own if str(name) in self._found)

    def cut(self) -> int:
        """End those that are open, and hold them; returns how many that are now. Never raises."""
        with self._lock:
            if self._held is None:
                return 0
            for fd in _socket_fds():
                # Another thread may close the descriptor, and the number may be another socket's then: look at a copy.
                with suppress(OSError):
                    copy = socket.socket(fileno=os.dup(fd))
                    inode = os.fstat(copy.fileno()).st_ino
                    if inode not in self.inodes or inode in self._held:
                        copy.close()
                        continue
                    self._held[inode] = copy
                    copy.shutdown(socket.SHUT_RD)
            return len(self._held)

    def release(self) -> None:
        """Every rank is out, or none waits for another any more: close what is held."""
        with self._lock:
            for copy in (self._held or {}).values():
                copy.close()
            self._held = None


def _connections() -> dict[str, int]:
    """The inodes of all connected stream sockets of the process, by a name that is the same at both ends."""
    found: dict[str, int] = {}
    for fd in _socket_fds():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                ends = sorted("|".join(map(str, end[:2])) for end in (copy.getsockname(), copy.getpeername()))
                found[xxhash.xxh3_64_hexdigest("-".join(ends).encode())] = os.fstat(copy.fileno()).st_ino
    return found


def _socket_fds() -> list[int]:
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(int(name))
    return found
