"""Runs jobs as real processes, waits for their lines, signals them, and leaves nothing behind.

Everything is ordered by lines that the job prints; a test that fails shows all of them.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tests.fork_server import ForkedProcess, clean_environment
from tests.watchdog import IDLE_S, Stalled, Watchdog, children

__all__ = [
    "JOBS",
    "Job",
    "children",
    "events",
    "job_status",
    "run_command",
    "run_job",
    "start_agent",
    "start_command",
    "start_job",
    "unignore_signals",
]

JOBS = Path(__file__).parent / "jobs"
_ROOT = Path(__file__).parent.parent


class Job:
    """One launched job: a plain process, or torchrun with its workers."""

    def __init__(self, command: Sequence[str], env: dict[str, str], *, fresh: bool = True) -> None:
        """fresh: a new interpreter; else one that is forked, see `tests.fork_server`."""
        self.command = list(command)
        self.process: subprocess.Popen[str] | ForkedProcess
        # A session of its own: what is left of the job can be ended by its group and session, never by name.
        if fresh:
            self.process = subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=env,
                start_new_session=True,
            )
        else:
            self.process = ForkedProcess(self.command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._closed = True
            self._more.notify_all()

    def wait_for(self, pattern: str, count: int = 1, idle_s: float = IDLE_S) -> list[re.Match[str]]:
        """The first `count` matches of `pattern` in the output, as soon as they are there.

        Raises AssertionError when the job ends without them, `Stalled` when it makes no progress for `idle_s`.
        """

        def found() -> list[re.Match[str]]:
            return [m for line in self.lines if (m := re.search(pattern, line))]

        watchdog = Watchdog(self.process.pid, idle_s=idle_s)
        with self._more:
            while not (self._closed or len(found()) >= count):
                if not self._more.wait(0.25):
                    self._check(watchdog, f"waiting for {count} lines that match {pattern!r}")
            matches = found()
        if len(matches) < count:
            raise AssertionError(f"{len(matches)} of {count} lines match {pattern!r}\n{self.report()}")
        return matches[:count]

    def _check(self, watchdog: Watchdog, what: str) -> None:
        try:
            watchdog.check(len(self.lines))
        except Stalled as error:
            raise Stalled(f"{what}: {error}\n{self.report()}") from None

    def matches(self, pattern: str) -> list[re.Match[str]]:
        """All matches in the output of the finished job."""
        return [m for line in self.lines if (m := re.search(pattern, line))]

    def pids(self) -> dict[int, int]:
        """Worker process ids by rank, from the READY lines printed so far."""
        return {int(m[1]): int(m[2]) for m in self.matches(r"READY (\d+) (\d+)")}

    def processes(self) -> dict[int, list[int]]:
        """All processes of each rank, in the order in which they came, from the READY lines printed so far."""
        found: dict[int, list[int]] = {}
        for match in self.matches(r"READY (\d+) (\d+)"):
            pids = found.setdefault(int(match[1]), [])
            if int(match[2]) not in pids:
                pids.append(int(match[2]))
        return found

    def resumed(self) -> list[str]:
        """The step that each process went on from, None for a fresh start, from the READY lines."""
        return [match[1] for match in self.matches(r"READY \d+ \d+ (\w+)")]

    def signal_rank(self, rank: int, signum: int = signal.SIGTERM) -> None:
        os.kill(self.pids()[rank], signum)

    def signal_launcher(self, signum: int) -> None:
        """Torchrun, or the agent; a job of one rank without one is its own."""
        os.kill(self.process.pid, signum)

    def wait(self, idle_s: float = IDLE_S) -> int:
        """Exit code of the launched process, once all its output has been read."""
        watchdog = Watchdog(self.process.pid, idle_s=idle_s)
        while True:
            try:
                code = self.process.wait(0.25)
                break
            except subprocess.TimeoutExpired:
                self._check(watchdog, "the job did not end")
        self._reader.join(30)
        return code

    def expect(self, code: int) -> Job:
        """Wait for the end and insist on the exit code."""
        actual = self.wait()
        assert actual == code, f"exit code {actual}, expected {code}\n{self.report()}"
        return self

    def hashes(self) -> dict[int, str]:
        """Final weights by rank, from the DONE lines."""
        return {int(m[1]): m[2] for m in self.matches(r"DONE (\d+) (\w+)")}

    def seen(self) -> dict[int, list[int]]:
        """Sample indices by epoch, over all ranks, in the order printed."""
        result: dict[int, list[int]] = {}
        for match in self.matches(r"SEEN (\d+) ([\d,]+)"):
            result.setdefault(int(match[1]), []).extend(int(i) for i in match[2].split(","))
        return result

    def report(self) -> str:
        return f"command: {' '.join(self.command)}\n--- output ---\n" + "\n".join(self.lines[-400:])

    def end(self) -> None:
        """Kill whatever is left of the job, by process id."""
        # Descendants too: the workers of a launcher lead sessions of their own, and some may not be READY yet.
        for pid in [*self.pids().values(), *children(self.process.pid), *_session(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _session(leader: int) -> list[int]:
    """Process ids whose session is the job's (torchrun gives its workers sessions of their own: see `Job.pids`)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except (ProcessLookupError, PermissionError):
                continue
    return found


def _environment(extra: dict[str, str] | None) -> dict[str, str]:
    env = clean_environment()
    paths = [str(_ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONWARNINGS="ignore", **(extra or {}))
    return env


@contextmanager
def start_job(
    script: str,
    *args: object,
    ranks: int = 1,
    env: dict[str, str] | None = None,
    restarts: int = 0,
    fresh: bool = False,
) -> Iterator[Job]:
    """Start ``tests/jobs/{script}`` alone or under torchrun; ends it on leaving, whatever happened.

    fresh: see `Job`. What a forked torchrun starts is forked, too.
    """
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launcher += ["--max-restarts", str(restarts)]
    job = Job([*launcher, str(JOBS / script), *map(str, args)], _environment(env), fresh=fresh)
    try:
        yield job
    finally:
        job.end()


@contextmanager
def start_agent(
    script: str | None,
    *args: object,
    ranks: int = 1,
    options: Sequence[str] = (),
    env: dict[str, str] | None = None,
    run_dir: Path | None = None,
    under: Sequence[str] = (),
    plain: bool = False,
) -> Iterator[Job]:
    """Start ``tests/jobs/{script}`` (or, with a slash in it, any path; None: nothing) under ``mindx-elastic run``;
    ends it on leaving.

    plain: the first workers are fresh interpreters, as users have them; fast where the script does not import torch.
    Else they are forked from the agent's zygote, which is forked as the agent is, since the imports of each are most
    of a short job.

    under: a command that becomes the one behind it (``nohup``), so that `Job.process` is the agent.

    Give a `run_dir` in the test's own folder, or change to it: the default lies in the working directory.
    """
    command = [*under, sys.executable, "-m", "mindx_elastic.cli.main", "run", "--nproc-per-node", str(ranks)]
    command += [] if run_dir is None else ["--run-dir", str(run_dir)]
    if script is not None:
        args = (script if "/" in script else JOBS / script, *args)
    env = {**({} if plain else {"MINDX_ZYGOTE": "first"}), **(env or {})}
    job = Job([*command, *options, *map(str, args)], _environment(env), fresh=bool(under))
    try:
        yield job
    finally:
        left = children(job.process.pid)  # its workers lead sessions of their own
        job.end()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def unignore_signals() -> None:
    """Start jobs with the usual signal actions even where the tests themselves run under ``nohup`` or behind ``&``.

    What is ignored here would be ignored in every job. A handler ends with exec: this process goes on ignoring the
    signal, what it starts does not. Main thread only.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda signum, frame: None)


def run_job(
    script: str,
    *args: object,
    ranks: int = 1,
    env: dict[str, str] | None = None,
    code: int = 0,
    fresh: bool = False,
) -> Job:
    """Run a job to its end and insist on its exit code.

    fresh: start it as users do; else several ranks are forked too, if they should end well: see ``jobs/ranks.py``.
    """
    if ranks > 1 and code == 0 and not fresh:
        script, args, ranks = "ranks.py", (ranks, JOBS / script, *args), 1
    with start_job(script, *args, ranks=ranks, env=env, fresh=fresh) as job:
        return job.expect(code)


def events(directory: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The events of a run, oldest first."""
    lines = (directory / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [event for event in found if name is None or event["event"] == name]


@contextmanager
def start_command(*words: object, env: dict[str, str] | None = None) -> Iterator[Job]:
    """Start ``mindx-elastic WORDS``, forked as a job is; ends it on leaving."""
    command = [sys.executable, "-m", "mindx_elastic.cli.main", *map(str, words)]
    job = Job(command, _environment(None) if env is None else env, fresh=False)
    try:
        yield job
    finally:
        job.end()


def run_command(*words: object, code: int = 0, env: dict[str, str] | None = None) -> str:
    """What ``mindx-elastic WORDS`` prints, on both streams."""
    with start_command(*words, env=env) as job:
        return "\n".join(job.expect(code).lines)


def job_status(run_dir: Path) -> dict[str, Any]:
    """What `mindx-elastic status --json` says."""
    return dict(json.loads(run_command("status", run_dir, "--json")))


@contextmanager
def start_code(code: str, *words: object) -> Iterator[tuple[ForkedProcess, IO[str]]]:
    """A process, forked as a job is, that runs ``python -c CODE WORDS``, and its stdout. Its stdin ends with the block,
    and so should it."""
    theirs, mine = os.pipe()
    process = ForkedProcess([sys.executable, "-c", code, *map(str, words)], stdin=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    with process.stdout as output:
        try:
            yield process, output
        finally:
            os.close(mine)
            process.wait()


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(condition: Any, what: str, timeout_s: float = 300.0) -> None:
    """Poll `condition`; for facts that no line announces (a file that another process writes). There is no process here
    to watch, so the limit is one that a machine at ten times its load keeps."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not happen in {timeout_s:g} s")
        time.sleep(0.01)


def unshared_mappings() -> dict[str, int]:
    """This process's mappings of which a child gets no pages, and the KiB of each: a reserve's room is one."""
    found, place, size = dict[str, int](), "", 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            place = key
        elif key == "Size:":
            size = int(values[0])
        elif key == "VmFlags:" and "wf" in values:
            found[place] = size
    return found


def open_files() -> Counter[str]:
    """What this process's descriptors are, for a number says nothing: the listing itself has one."""
    found = Counter[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """The block leaves no file descriptor of this process open. Other tests of the process may have left some to the
    garbage collector or to a thread that is ending; that these close meanwhile is no fault."""
    gc.collect()
    before = open_files()
    yield
    wait_until(lambda: open_files() <= before, "the end of each new descriptor", 60.0)
