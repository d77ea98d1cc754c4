"""Gets a rank out of its collectives: shuts its connections to the other ranks down, from another thread.

A rank that talks to a dead one is thrown out at once. One that waits for a living rank, which is out already, waits
for the collective's time-out, half an hour as a rule; aborting the group does not free it. It is free at once when the
sockets below it are shut down.

Which of the process's sockets they are, the ranks find out together: a connection between two of them is seen from both
ends. So a connection to the store, to a data base or of a web server of the program's is not touched. A socket is known
by its inode, because the number of its descriptor is used again.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import xxhash

from mindx_elastic.agreement.gather import Answer, Merged, Part

__all__ = ["SocketsPart", "cut"]

_MOST_RANKS = 256
"""With more, what the ranks would have to tell each other is too much."""


class SocketsPart(Part):
    """Finds this rank's connections to the other ranks."""

    name = "sockets"

    def __init__(self, world_size: int) -> None:
        self._wanted = world_size <= _MOST_RANKS
        self._found = _connections() if self._wanted else {}
        self.inodes: frozenset[int] = frozenset()
        """Of the connections to other ranks."""

    def say(self) -> Any:
        return sorted(self._found)

    def merge(self, said: Sequence[Any]) -> Merged:
        counts = Counter(str(name) for each in said for name in set(map(str, each)))
        return Merged(None, [[name for name in each if counts[str(name)] == 2] for each in said])

    def hear(self, answer: Answer) -> None:
        self.inodes = frozenset(self._found[str(name)] for name in answer.own if str(name) in self._found)


def _connections() -> dict[str, int]:
    """The inodes of all connected stream sockets of the process, by a name that is the same at both ends."""
    found: dict[str, int] = {}
    for fd in _socket_fds():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                ends = sorted("|".join(map(str, end[:2])) for end in (copy.getsockname(), copy.getpeername()))
                found[xxhash.xxh3_64_hexdigest("-".join(ends).encode())] = os.fstat(copy.fileno()).st_ino
    return found


def cut(inodes: frozenset[int]) -> int:
    """Shut the sockets `inodes` down; returns how many were open. Any thread; never raises."""
    count = 0
    for fd in _socket_fds():
        # Another thread may close the descriptor, and the number may be another socket's then: look at a copy.
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if os.fstat(copy.fileno()).st_ino in inodes:
                copy.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _socket_fds() -> list[int]:
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(int(name))
    return found
