"""Breaks TCP connections of another process from outside, as a firewall or ``ss -K`` does."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from contextlib import suppress

__all__ = ["can_reset", "reset_connections"]

_PIDFD_GETFD = 438  # the same on all architectures since 5.6


def reset_connections(pid: int) -> int:
    """Shut down both directions of every established TCP connection of `pid`; how many there were.

    Listening sockets stay, so that the process can be reached again.
    """
    count, pidfd = 0, os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=_take(pidfd, int(name))) as other:
                    if other.family in (socket.AF_INET, socket.AF_INET6) and other.type == socket.SOCK_STREAM:
                        other.getpeername()  # raises for one that only listens
                        other.shutdown(socket.SHUT_RDWR)
                        count += 1
    finally:
        os.close(pidfd)
    return count


def can_reset() -> bool:
    """Whether this user and kernel allow it."""
    if sys.platform != "linux":
        return False
    reader, writer = os.pipe()
    pidfd = os.pidfd_open(os.getpid())
    try:
        os.close(_take(pidfd, reader))
        return True
    except OSError:
        return False
    finally:
        for fd in (reader, writer, pidfd):
            os.close(fd)


def _take(pidfd: int, fd: int) -> int:
    """A duplicate of another process's descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.syscall(_PIDFD_GETFD, pidfd, fd, 0))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
