"""Tells work that is slow from work that hangs, so that tests wait for work and not for time.

On a machine at ten times its load a job takes ten times as long, and a fixed time limit fails tests that are right. A
job makes progress as long as it prints lines, or as its processes get a noticeable share of a CPU: what waits for a
peer, a lock or a file gets next to none, on however busy a machine. Only what makes no progress for `IDLE_S` is taken
for a hang. Something that spins for ever makes progress by these rules; `MOST_S` ends it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fork_server import ForkedProcess

__all__ = ["IDLE_S", "MOST_S", "Stalled", "Watchdog", "children", "cpu_seconds", "finish"]

IDLE_S = 120.0
"""Seconds without progress."""
MOST_S = 1200.0
"""Seconds that any single wait may take. Below the limit that pytest has for slow tests (see conftest)."""
_SHARE = 0.03  # watchers that look around a few times a second stay below; one of 20 busy processes on 2 CPUs gets 0.1
_LOOK_S = 5.0  # long enough for that share to be seen in ticks of 10 ms
_TICKS = os.sysconf("SC_CLK_TCK")


class Stalled(AssertionError):
    """What was waited for makes no progress any more, or has taken too long."""


class Watchdog:
    """Watches one wait for one process and all below it. Used by one thread."""

    def __init__(
        self,
        pid: int,
        *,
        idle_s: float = IDLE_S,
        most_s: float = MOST_S,
        clock: Callable[[], float] = time.monotonic,
        used_s: Callable[[int], float] | None = None,
    ) -> None:
        """clock, used_s: what tells the time, and the CPU time that the processes have used so far; for tests."""
        self._pid, self._idle_s, self._most_s = pid, idle_s, most_s
        self._clock, self._used_s = clock, cpu_seconds if used_s is None else used_s
        self._began = self._looked = self._progress_at = clock()
        self._used = self._used_s(pid)
        self._output = 0

    def check(self, output: int) -> None:
        """Raise Stalled if there is no hope left; `output` grows with what the process says. Call it a few times a
        second."""
        now = self._clock()
        if output != self._output:
            self._output, self._progress_at = output, now
        if now - self._looked >= _LOOK_S:
            used = self._used_s(self._pid)
            if used - self._used >= _SHARE * (now - self._looked):
                self._progress_at = now
            self._used, self._looked = used, now
        if now - self._progress_at > self._idle_s:
            raise Stalled(f"no output, and less than {_SHARE:.0%} of a CPU used, for {self._idle_s:g} s")
        if now - self._began > self._most_s:
            raise Stalled(f"not there after {self._most_s:g} s, although something is being done")


def children(pid: int) -> list[int]:
    """Process ids of all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, wanted = [], [pid]
    while wanted:
        below = parents.get(wanted.pop(), [])
        found += below
        wanted += below
    return found


def cpu_seconds(pid: int) -> float:
    """What a process and its descendants have used, those included that it has waited for."""
    ticks = 0
    for each in (pid, *children(pid)):
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # user and system time, of itself and of its reaped children
    return ticks / _TICKS


def finish(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    fresh: bool = True,
    most_s: float = MOST_S,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured text and without input, and with a watchdog in place of a time limit.

    fresh: False: ``python ...`` is forked from one that has imported torch, see `tests.fork_server`. What hangs is
    killed with all below it, and its output is in the error.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start: Any = subprocess.Popen if fresh else ForkedProcess
        process = start(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )

        def text(file: object) -> str:
            return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")  # type: ignore[attr-defined]

        watchdog = Watchdog(process.pid, most_s=most_s)
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.25)
                    break
                watchdog.check(os.fstat(out.fileno()).st_size + os.fstat(err.fileno()).st_size)
        except Stalled as error:
            raise Stalled(f"{error}: {' '.join(map(str, command))}\n{text(out)}\n{text(err)}") from None
        finally:
            if process.poll() is None:
                for each in (*children(process.pid), process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(each, 9)
                process.wait()
        return subprocess.CompletedProcess(list(map(str, command)), process.wait(), text(out), text(err))
