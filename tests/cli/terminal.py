"""A process whose stderr, or all of it, is a terminal."""

from __future__ import annotations

import os
import pty
from collections.abc import Mapping, Sequence

from tests.fork_server import fork_child


def run_in_terminal(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, typed: str = ""
) -> tuple[int, str, str]:
    """Exit code, what stdout has as a pipe, and what the terminal on stdin and stderr has shown."""
    main, side = pty.openpty()
    read, write = os.pipe()
    process = fork_child(command, env=os.environ if env is None else env, stdin=side, stdout=write, stderr=side)
    os.close(side)
    os.close(write)
    os.write(main, typed.encode())
    shown = b""
    while True:
        try:
            more = os.read(main, 65536)
        except OSError:  # the last process with the terminal has ended
            break
        if not more:
            break
        shown += more
    with open(read, "rb") as output:
        printed = output.read()
    code = process.wait()
    os.close(main)
    return code, printed.decode(), shown.decode()
