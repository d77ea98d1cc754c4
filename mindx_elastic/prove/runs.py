"""Runs the script once and reads what its guards have noted: the folders, the environment, the end of a stuck run.

A run is forked from a process that has imported torch, or is a fresh interpreter. Each leads its own session, so that
what it leaves behind can be ended with it, and ends when this process does.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from mindx_elastic.agent import child
from mindx_elastic.agent.zygote import ForkedWorker, Zygote, ZygoteError
from mindx_elastic.config import MemorySettings
from mindx_elastic.core.posix import members_of, size_of
from mindx_elastic.errors import UsageError
from mindx_elastic.memory.folders import make_own_folder, make_user_folder, remove_dead, remove_own
from mindx_elastic.prove import confine
from mindx_elastic.prove.control import Control
from mindx_elastic.prove.records import ProcessRecord, read_lives

__all__ = ["Command", "RunChain", "RunOutcome", "Runs"]

_LOOK_S = 0.02
_LAST_LINES = 12
_END_S = 10.0
_REFUSED = re.compile(r"\bUnmanagedStateError: (.*)")
_PYTHON = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
"""Environment of each run. A line must be seen at once: silence counts as hanging."""
_IMPORTS_S = 600.0
_Process: TypeAlias = "ForkedWorker | subprocess.Popen[bytes]"
_UNSET = ("GROUP_INFO_FILE", "MINDX_AGENT_DIR", "MINDX_AGENT_PID", "MINDX_RUN_DIR", "MINDX_ATTEMPT")
"""Variables that would make a run write where the user's own job writes."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What the user runs."""

    script: tuple[str, ...]
    """The script, or ``-m`` and a module, and its arguments."""
    agent: tuple[str, ...] | None = None
    """Options of ``mindx-elastic run``; None: the script is started by itself."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """One run, from the start of its process to the end."""

    code: int
    lives: Sequence[ProcessRecord]
    log: Path
    folder: Path = Path()
    """The folder of the run."""
    hung_s: float = 0.0
    """It was ended because it passed no step and printed nothing for so long."""

    @property
    def lines(self) -> list[str]:
        """What it printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.strip()]

    @property
    def last_lines(self) -> list[str]:
        return self.lines[-_LAST_LINES:]

    @property
    def refusal(self) -> str:
        """Why the guard refused it: state of the training that it does not keep; empty: it did not."""
        found = (_REFUSED.search(line) for line in self.lines if self.code)
        return next((match[1] for match in found if match), "")


@dataclass
class RunChain:
    """Runs that go on from each other, in their own checkpoint directories."""

    directories: Path
    runs: list[RunOutcome] = field(default_factory=list)


class Runs:
    """Context manager. Main thread."""

    def __init__(
        self,
        command: Command,
        *,
        fresh: bool = False,
        keep: Path | None = None,
        timeout_s: float = 300.0,
        environment: Mapping[str, str] | None = None,
        writes: Sequence[str] | None = None,
    ) -> None:
        """`fresh`: a new interpreter for each run. `keep`: the folder for everything, which then stays. `timeout_s`:
        how long a run may pass no step and print nothing. `environment`: in place of this process's. `writes`: where
        a run may write, besides the private folders; None: anywhere. Then each run is a new interpreter."""
        self.command, self._keep, self._timeout_s = command, keep, timeout_s
        self.is_fresh = fresh
        self.why_fresh = "" if not fresh else "--fresh"
        self._number = self._chains = 0
        self._zygotes: list[Zygote] = []
        given = os.environ if environment is None else environment
        self._writes = writes
        self.environment = {name: value for name, value in given.items() if name not in _UNSET} | _PYTHON
        """Of each run."""

    def __enter__(self) -> Runs:
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.folder = self._make_folder(stack)
            self.memory = _make_memory(stack)
            if not self.is_fresh:
                self._open_zygotes(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def chain(self) -> RunChain:
        """A new one: its first run starts without a checkpoint."""
        self._chains += 1
        directories = self.folder / f"checkpoints_{self._chains}"
        directories.mkdir(mode=0o700)
        return RunChain(directories)

    def drop(self, chain: RunChain) -> None:
        """Remove its checkpoints, unless they are to be kept."""
        if self._keep is None:
            shutil.rmtree(chain.directories, ignore_errors=True)

    def run(self, chain: RunChain, *, hashes: int = 0, **told: Any) -> RunOutcome:
        """Start the script and wait for its end. `hashes`: which of two seeds of Python's hashes (0 or 1) it gets,
        where the environment names none. `told`: see `Control`."""
        self._number += 1
        folder = self.folder / f"run_{self._number:03d}"
        folder.mkdir(mode=0o700)
        control = Control(folder=folder, directories=chain.directories, **told)
        variables = {**self.environment, "MINDX_PROVE": str(control.write(folder / "control.json"))}
        if self.memory is not None:
            variables["MINDX_ARENA_DIR"] = str(self.memory)
        log, command = folder / "output.log", self.command.script
        if self.command.agent is not None:
            command = ("-m", "mindx_elastic", "run", *self.command.agent, "--run-dir", str(folder / "agent"), *command)
            if not self.is_fresh:
                variables.setdefault("MINDX_ZYGOTE", "first")  # the imports of each rank are most of a short run
        process = self._start(command, variables, log, hashes)
        try:
            hung_s = self._wait(process, folder, log)
            code = process.poll()
        finally:
            _end(process, gently=self.command.agent is not None)
        lives = read_lives(folder)
        outcome = RunOutcome(code=1 if code is None else code, lives=lives, log=log, folder=folder, hung_s=hung_s)
        chain.runs.append(outcome)
        return outcome

    def _start(self, command: Sequence[str], env: Mapping[str, str], log: Path, hashes: int) -> _Process:
        whole = [sys.executable, *command]
        if not self.is_fresh:
            zygote = self._zygotes[hashes % len(self._zygotes)]
            try:
                zygote.wait(_IMPORTS_S)
                return zygote.fork(env, command=whole, stdout=str(log), stderr=str(log))
            except ZygoteError as error:  # a fork would not be as good as a fresh interpreter
                self.is_fresh, self.why_fresh = True, str(error)
        if self._writes is not None:
            (temporary := self.folder / "tmp").mkdir(exist_ok=True)
            env = {**env, "TMPDIR": str(temporary)}
            whole = [*confine.shim([*map(str, (self.folder, self.memory)), *self._writes]), *whole]
        with open(log, "ab") as file:
            return subprocess.Popen(
                [*child.shim(), *whole],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _open_zygotes(self, stack: ExitStack) -> None:
        for _ in range(1 if self.environment.get("PYTHONHASHSEED", "random") != "random" else 2):
            zygote = Zygote([sys.executable, "-m", "mindx_elastic"], self.environment)
            stack.callback(zygote.close)
            zygote.start()
            self._zygotes.append(zygote)

    def _wait(self, process: _Process, folder: Path, log: Path) -> float:
        """Until its end; the seconds after which it counts as stuck, 0 if it does not."""
        seen, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(_LOOK_S)
            size = sum(size_of(path) for path in (log, *folder.glob("rank_*.jsonl")))
            if size != seen:
                seen, since = size, time.monotonic()
            elif time.monotonic() > since + self._timeout_s:
                return self._timeout_s
        return 0.0

    def _make_folder(self, stack: ExitStack) -> Path:
        if self._keep is None:
            folder = Path(tempfile.mkdtemp(prefix="mindx-prove-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            return folder
        folder = self._keep.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if any(folder.iterdir()):
                raise UsageError(f"--keep {folder}: the folder is not empty; give a new one")
        except OSError as error:
            raise UsageError(f"--keep {folder}: {error.strerror}; give another folder") from error
        return folder


def _end(process: _Process, *, gently: bool) -> None:
    """End a run and what it has left behind, if need be. `gently`: it is the agent, which must get the time to end its
    workers."""
    if gently and process.poll() is None:
        process.terminate()
        _wait_for(process)
    left = [process.pid] if process.poll() is None else []
    for pid in [*left, *members_of({process.pid})]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    _wait_for(process)


def _wait_for(process: _Process) -> None:
    end = time.monotonic() + _END_S
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


def _make_memory(stack: ExitStack) -> Path | None:
    """A private folder in the memory file system, for snapshots and the agent's folder; None: there is none."""
    base = MemorySettings.from_env().base
    if base is None:
        return None
    try:
        remove_dead(make_user_folder(base))
        folder = make_own_folder(base, "prove")
    except OSError as error:
        print(f"mindx-elastic: {base} cannot be used ({error.strerror}): no snapshots", file=sys.stderr)
        return None
    stack.callback(remove_own, folder)
    return folder
