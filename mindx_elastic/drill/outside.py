"""What a drill sees from outside of the script: what a fault has left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.core.posix import read_stat
from mindx_elastic.memory.folders import MAKER_FILE
from mindx_elastic.persist.storage import TEMP_SUFFIX

__all__ = ["DrillLeftovers", "adopt_orphans"]

_PR_SET_CHILD_SUBREAPER = 36
_GONE_S = 60.0
"""How long the processes of a run may take to end once the first of them has: a grace period, and more."""
_LOOK_S = 0.05


def adopt_orphans() -> bool:
    """From now on, processes whose parents are gone become children of this one, so that none gets lost. False: the
    kernel refuses."""
    with suppress(OSError, AttributeError):
        libc: Any = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    return False


@dataclass
class DrillLeftovers:
    """Looks for what the runs of one fault have left behind. Main thread."""

    known: set[int] = field(default_factory=set)
    """Process ids of ours that are no part of a run."""
    processes: list[str] = field(default_factory=list)
    """Found so far, and ended."""
    waits_s: float = _GONE_S

    def after_run(self, pid: int) -> None:
        """The run whose first process was `pid` is over, or hangs."""
        if (found := read_stat(pid)) is not None and not found.is_ending:
            return  # it hangs: nothing of it has been left behind yet
        end = time.monotonic() + self.waits_s
        while (left := self._descendants()) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        for each in left:
            self.processes.append(f"process {each}: {_command_of(each)}")
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    def end_all(self) -> None:
        """The drill is interrupted: end what runs below it. A rank that a fault has stopped would stay for ever."""
        for each in self._descendants():
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    def files(self, directories: Path, memory: Path | None, pids: Iterable[int]) -> list[str]:
        """Files that a job which has ended must not leave."""
        found = [str(path.relative_to(directories)) for path in sorted(directories.rglob(f"*{TEMP_SUFFIX}"))]
        if memory is not None:
            found += [str(path) for path in sorted(memory.rglob("*")) if path.is_file() and path != memory / MAKER_FILE]
        for pid in set(pids):
            found += [str(path) for path in sorted(Path("/dev/shm").glob(f"torch_{pid}_*"))]
        return found

    def _descendants(self) -> list[int]:
        """All processes below this one that run; those that have ended are waited for."""
        parents: dict[int, int] = {}
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with suppress(OSError, ValueError, IndexError):
                    fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                    parents[int(name)] = int(fields[1])
                    if fields[0] in "ZX":
                        if int(fields[1]) == os.getpid() and int(name) not in self.known:
                            with suppress(ChildProcessError):
                                os.waitpid(int(name), os.WNOHANG)
                        del parents[int(name)]
        found, own = set(), {os.getpid()}
        while own:
            own = {pid for pid, parent in parents.items() if parent in own and pid not in found}
            found |= own
        return sorted(found - self.known)


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "?"
