"""A process whose stderr, or all of it, is a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Mapping, Sequence

from tests.fork_server import ForkedProcess


def run_in_terminal(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, typed: str = ""
) -> tuple[int, str, str]:
    """Exit code, what stdout has as a pipe, and what the terminal on stdin and stderr has shown."""
    main, side = pty.openpty()
    process = ForkedProcess(command, env=env, stdin=side, stdout=subprocess.PIPE, stderr=side)
    os.close(side)
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
    with process.stdout as output:
        printed = output.read()
    code = process.wait()
    os.close(main)
    return code, printed, shown.decode()
