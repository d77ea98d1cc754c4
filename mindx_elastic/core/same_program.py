"""Replaces a process by a new one of the same program, with ``exec``: same pid, command line, stdout and variables.

What must not be carried over ``exec`` is closed or put back first: descriptors that C code has opened, loader workers,
ignored signals.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from mindx_elastic.core.stop_cause import flush_output

__all__ = ["SameProgram"]

_FIRST_FD = 3


class SameProgram:
    """How this process was started. Make it early, in the main thread: what there is by then is carried over."""

    def __init__(self) -> None:
        self._folder = _working_directory()
        self._inherited = {fd for fd in _open_fds() if not _closes_on_exec(fd)}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}

    def begin_again(self, env: Mapping[str, str]) -> NoReturn:
        """Begin the program again, with these variables. What was printed is flushed before. Raises OSError where the
        system refuses it."""
        for child in multiprocessing.active_children():
            child.kill()
            child.join(1.0)
        flush_output()
        command = _command()
        for number in signal.valid_signals():
            if signal.getsignal(number) is signal.SIG_IGN and number not in self._ignored:
                with suppress(OSError, ValueError):  # not from another thread
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        os.chdir(self._folder)
        for fd in _open_fds():
            if fd >= _FIRST_FD and fd not in self._inherited:
                with suppress(OSError):
                    os.set_inheritable(fd, False)
        os.execve(command[0], command, dict(env))


def _command() -> list[str]:
    """The command line of this program, with the script's absolute path."""
    command = [sys.executable, *sys.orig_argv[1:]]
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = sys.argv[0] if sys.argv else ""
    if main and script and os.path.basename(main) == os.path.basename(script):
        for number, word in enumerate(command[1:], start=1):
            if word == script:
                command[number] = os.path.abspath(main)
                break
    return command


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return "/"


def _open_fds() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []


def _closes_on_exec(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
    except OSError:
        return True
