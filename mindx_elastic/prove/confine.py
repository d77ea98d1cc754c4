"""A program that becomes another one, which may write to some folders only, and with it all that this one starts.

::

    python -I -S confine.py FOLDER... -- COMMAND [ARGUMENT...]

By Landlock, which needs no rights (Linux 5.13). Devices and ``/dev/shm`` stay open, where loader workers share memory.
Nothing but the standard library: it must start in milliseconds.
"""

import ctypes
import os
import sys

__all__ = ["shim", "why_not"]

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on all of torch's machines
_NO_NEW_PRIVS = 38
_FILE = 1 << 1  # to write to a file that is there; from version 3 on to cut it off, too
_FOLDER = sum(1 << bit for bit in range(4, 13))  # to make, and to remove
_ALWAYS = ("/dev", "/proc")


def shim(folders: list[str]) -> list[str]:
    """What stands before a command line that may write to `folders` only."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *folders, "--"]


def why_not() -> str:
    """Why the kernel cannot do it; empty: it can."""
    version = _call(_CREATE, None, 0, 1)
    return "" if version > 0 else os.strerror(ctypes.get_errno())


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(ctypes.c_long(number), *arguments))


def _confine(folders: list[str]) -> None:
    """Raises OSError."""
    version = _call(_CREATE, None, 0, 1)
    file = _FILE | (1 << 14) * (version >= 3)
    folder = file | _FOLDER | (1 << 13) * (version >= 2)
    wanted = ctypes.c_uint64(folder)
    rules = _call(_CREATE, ctypes.byref(wanted), ctypes.c_size_t(8), 0)
    libc = ctypes.CDLL(None, use_errno=True)
    for path in folders:
        fd = os.open(path, os.O_PATH)
        allowed = folder if os.path.isdir(path) else file
        rule = allowed.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        if _call(_ADD, rules, 1, rule, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        os.close(fd)
    if rules < 0 or libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or _call(_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _main() -> None:
    end = sys.argv.index("--")
    folders, command = sys.argv[1:end], sys.argv[end + 1 :]
    _confine([*_ALWAYS, *folders])
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main()
