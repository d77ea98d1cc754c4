"""`mindx-elastic top` beside a real job, in a real terminal, and into a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fork_server import clean_environment
from tests.harness import start_agent, start_command
from tests.watchdog import Watchdog

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A terminal of 80 x 24 with a command in it."""

    def __init__(self, *words: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._slave, self._before = slave, termios.tcgetattr(slave)
        env = {**clean_environment(), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
        )
        self.output = b""

    def wait_for(self, pattern: bytes) -> None:
        watchdog = Watchdog(self.process.pid)
        while not re.search(pattern, self.output):
            assert self._read() or self.process.poll() is None, self.output
            watchdog.check(len(self.output))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait(self) -> int:
        watchdog = Watchdog(self.process.pid)
        while self.process.poll() is None:
            self._read()
            watchdog.check(len(self.output))
        while self._read():
            pass
        return self.process.returncode

    def is_as_before(self) -> bool:
        """The line's settings are, the main screen is shown, and the cursor."""
        shown = self.output.rindex(LEAVE_SCREEN), self.output.rindex(SHOW_CURSOR)
        hidden = self.output.rindex(b"\x1b[?1049h"), self.output.rindex(b"\x1b[?25l")
        return termios.tcgetattr(self._slave) == self._before and shown > hidden

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 0.1)[0]:
            return False
        self.output += os.read(self._master, 1 << 16)
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


_OWN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from mindx_elastic.cli.main import main
sys.argv[0] = "mindx-elastic"
main()
"""


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    made = Terminal(*words)
    try:
        yield made
    finally:
        made.close()


def leave(terminal: Terminal, *, by_key: bool) -> None:
    """Wait until it shows what it is for, end it, and see that the terminal is as it was."""
    terminal.wait_for(rb"killed now: .* lost")
    terminal.wait_for(rb"checkpoint of step \d+, .* old")
    if by_key:
        terminal.type(b"\x03")
    else:
        terminal.process.send_signal(signal.SIGTERM)
    assert terminal.wait() == (0 if by_key else 143)
    assert terminal.is_as_before()


@pytest.mark.drill
def test_a_job_is_watched_in_terminals_and_into_a_pipe(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ("top", str(run_dir), "--interval", "0.2")
    args = (tmp_path / "ckpt", "--steps", "100000", "--step-s", "0.02", "--save-at", "3")
    options = ["--snapshot-every", "2"]
    memory = {"MINDX_ARENA_DIR": str(tmp_path)}  # the job ends by a kill, and its snapshot outlives that
    with start_agent("agent_guarded.py", *args, options=options, run_dir=run_dir, env=memory) as job:
        job.wait_for(r"READY 0")
        for by_key in (True, False):
            with terminal(*words) as shown:
                leave(shown, by_key=by_key)
        with start_command(*words) as pipe:
            pipe.expect(0)
        assert pipe.matches("machine lost now") and "\x1b" not in pipe.report()
        assert job.process.poll() is None, "the job does not notice"
