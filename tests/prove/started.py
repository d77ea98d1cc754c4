"""Starts the processes of a proof in tests, and waits for them as long as they work."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from mindx_elastic.agent.zygote import Zygote
from mindx_elastic.prove.processes import Process
from tests.watchdog import Watchdog

__all__ = ["ROOT", "environment", "forking", "is_gone", "wait_for", "wait_until"]

ROOT = Path(__file__).parents[2]
_LOOK_S = 0.01


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "PROBE": "1", **more}


@contextmanager
def forking(env: Mapping[str, str]) -> Iterator[Zygote]:
    """A process from which runs with the environment `env` can be forked."""
    with closing(Zygote([sys.executable, "-m", "mindx_elastic"], env)) as made:
        made.start()
        assert made.wait(600), made.problem
        yield made


def wait_for(process: Process) -> int:
    """Its exit code, once it has ended."""
    wait_until(process, lambda: process.poll() is not None)
    code = process.poll()
    process.end(gently=False)
    assert code is not None
    return code


def wait_until(process: Process, condition: Callable[[], bool], output: Callable[[], int] = lambda: 0) -> None:
    """Raises Stalled when the process makes no progress, by its `output` and CPU time, before the condition holds."""
    watchdog = Watchdog(process.pid)
    while not condition():
        watchdog.check(output())
        time.sleep(_LOOK_S)


def is_gone(pid: int) -> bool:
    """A zombie counts as gone: its parent may not have looked yet."""
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
