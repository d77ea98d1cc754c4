"""The worker processes of one attempt: how they are waited for, signalled, looked at and ended, and their stacks."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import catches, killed_by, members_of, open_pidfd, read_stat, thread_pidfds
from mindx_elastic.core.status_page import Status, WorkerPhase, page_path, read_page
from mindx_elastic.memory.agent_folder import CONTROL_SIGNAL, STACK_SIGNAL

__all__ = ["Process", "WorkerExit", "Workers", "process_state", "write_stacks"]


_NO_PIDFD_POLL_S = 0.05
_REMAINS_GRACE_S = 2.0  # how long what a worker leaves may take to end by itself
_REMAINS_S = 2.0  # and the kernel to end what was killed


class Process(Protocol):
    """A worker as the agent sees it: `subprocess.Popen`, or one that the zygote has forked."""

    pid: int

    def poll(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """How one worker ended."""

    rank: int
    """Global rank."""
    pid: int
    code: int
    """Exit code; minus the signal's number when a signal ended it."""
    status: Status | None = None
    """The last that its page said; None without a guard."""
    sent: frozenset[int] = field(default_factory=frozenset)
    """Signals that the agent had sent it."""
    urged: bool = False
    """The agent had sent it SIGTERM before anybody else asked for a stop."""
    message: str = ""
    """The exception that the script left in its error file, one line; mostly empty."""


@dataclass
class _Remains:
    """What one ended worker has left in its session."""

    rank: int
    due: float
    """`time.monotonic` from which on it is killed."""
    told: bool = False
    """Nothing need be said (any more): a killed worker leaves its children as a matter of course."""
    members: dict[int, str] = field(default_factory=dict)
    """Process ids and start times."""


class Workers:
    """Main thread only. Waits on pidfds, so that a death is noticed at once, and reaps each worker exactly once."""

    def __init__(
        self,
        processes: Mapping[int, Process],
        pages: Path,
        error_of: Callable[[int, int], str] = lambda rank, code: "",
    ) -> None:
        """processes: by global rank, each the leader of its own session. error_of: what a rank that has ended with this
        code, not 0, has said of it."""
        self.processes = dict(processes)
        self.live = dict(processes)
        self.exits: list[WorkerExit] = []
        """In the order in which they were noticed; of several at once those ended by a signal come first."""
        self._pages = {rank: page_path(pages, rank) for rank in processes}
        self._error_of = error_of
        self._sent: dict[int, set[int]] = {rank: set() for rank in processes}
        self._urged: set[int] = set()
        self._fds: dict[int, int] = {}
        self._threads: dict[int, int] = {}
        """Ranks, by descriptors of threads of theirs: see `look_for_early_signs`."""
        self._dying: list[Process] = []
        """Noticed already, and not gone yet."""
        self._remains: dict[int, _Remains] = {}
        """What ended workers have left, by session, which is the worker's process id."""
        for rank, process in processes.items():
            with suppress(OSError):  # an old kernel or a sandbox; then it is polled
                self._fds[rank] = open_pidfd(process.pid)

    def look_for_early_signs(self) -> None:
        """Now and then: from here on notice a death by a signal when it is certain (see `core.posix.thread_pidfds`),
        and not only when the process has given its memory back. For those whose successor waits for what it needs."""
        for rank in self.live.keys() - set(self._threads.values()):
            self._threads |= dict.fromkeys(thread_pidfds(self.live[rank].pid), rank)

    def wait(self, timeout_s: float, other_fds: Iterable[int] = ()) -> list[WorkerExit]:
        """Sleep until a worker ends, one of `other_fds` is readable or the time is over; the workers that ended."""
        for remains in self._remains.values():
            timeout_s = min(timeout_s, max(0.01, remains.due - time.monotonic()))
        if len(self._fds) < len(self.live):
            timeout_s = min(timeout_s, _NO_PIDFD_POLL_S)
        poll = select.poll()
        for fd in [*other_fds, *(fd for rank, fd in self._fds.items() if rank in self.live), *self._threads]:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(max(0.0, timeout_s) * 1000)
        self._dying = [process for process in self._dying if process.poll() is None]
        dying = self._early_deaths([fd for fd, _ in ready if fd in self._threads])
        ended = [rank for rank in self.live if rank in dying or self._has_ended(rank)]
        self._note_remains(ended, dying)
        found = [end for rank in ended if (end := self._reap(rank, dying.get(rank, 0))) is not None]
        self._end_remains()
        # A killed worker has not died of the others' failure, but they may have died of its.
        found.sort(key=lambda end: (end.code >= 0, end.rank))
        self.exits = [*self.exits, *found]
        return found

    def _early_deaths(self, fds: list[int]) -> dict[int, int]:
        """Rank to signal, of those of which a thread has ended. A thread may also end by itself."""
        found = {}
        for fd in fds:
            rank = self._threads.pop(fd)
            os.close(fd)
            if rank not in found and rank in self.live and (signum := killed_by(self.live[rank].pid)):
                found[rank] = signum
        return found

    def _take_out(self, rank: int) -> Process:
        """Wait for its process no more."""
        for fd in [fd for fd, whose in self._threads.items() if whose == rank]:
            del self._threads[fd]
            os.close(fd)
        if rank in self._fds:
            os.close(self._fds.pop(rank))
        return self.live.pop(rank)

    def _has_ended(self, rank: int) -> bool:
        """Without reaping it."""
        process = self.live[rank]
        try:
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:  # reaped elsewhere; Popen knows, or takes it for 0
            return True

    def _note_remains(self, ended: list[int], dying: Collection[int]) -> None:
        """What is left in the sessions of workers that have ended. They are not reaped yet: until then, and as long as
        anything is left, the number of a session is not used again.

        After a death by a signal it is killed at once. After an exit it has a moment to end by itself:
        multiprocessing's resource tracker and torch's shm manager clean up after the process.
        """
        for rank in ended:
            pid = self.live[rank].pid
            killed = rank in dying or self._was_killed(rank)
            if killed:
                self._kill_group(pid)
            grace_s = 0.0 if killed else _REMAINS_GRACE_S
            self._remains[pid] = _Remains(rank, time.monotonic() + grace_s, told=killed)
        self._look_at_remains(ended_now={self.live[rank].pid for rank in ended})

    def _was_killed(self, rank: int) -> bool:
        with suppress(ChildProcessError):
            done = os.waitid(os.P_PID, self.live[rank].pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            return done is not None and (done.si_code != os.CLD_EXITED or signal.SIGKILL in self._sent[rank])
        return False

    def _look_at_remains(self, ended_now: Collection[int] = ()) -> dict[int, int]:
        """Process id to session of all that is left. Forgets the sessions of which nothing is."""
        found: dict[int, int] = {}
        starts: dict[int, dict[int, str]] = {session: {} for session in self._remains}
        for pid in members_of(self._remains) if self._remains else ():
            stat = None if pid in self._remains else read_stat(pid)
            if stat is not None and stat.state not in ("Z", "X") and stat.session in self._remains:
                starts[stat.session][pid] = stat.started
        for session, members in starts.items():
            remains = self._remains[session]
            # If all members are gone, the number may belong to another session by now.
            is_known = session in ended_now or bool(remains.members.items() & members.items())
            remains.members = members if is_known else {}
            found.update(dict.fromkeys(remains.members, session))
            if not remains.members:
                del self._remains[session]
        return found

    def _end_remains(self, *, wait: bool = False) -> None:
        """SIGKILL for what is left and has had its moment: it would hold devices, ports and memory. What has made
        its own session (a daemon) was meant to live on.

        wait: until nothing is left.
        """
        until = time.monotonic() + _REMAINS_GRACE_S + _REMAINS_S
        while self._remains and (left := self._look_at_remains()):
            now = time.monotonic()
            for remains in self._remains.values():
                if now < remains.due:
                    continue
                if not remains.told:
                    remains.told = True
                    logger.info("rank %d has left processes %s behind; SIGKILL", remains.rank, sorted(remains.members))
                for pid in remains.members:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            if not wait:
                return
            if now > until:
                logger.warning("processes %s survive SIGKILL and may hold their devices", sorted(left))
                return
            time.sleep(0.002)

    def _reap(self, rank: int, signum: int) -> WorkerExit | None:
        """`signum`: what is ending it; 0: it has ended."""
        process = self.live[rank]
        code = process.poll()
        if code is None and signum:
            self._dying.append(process)
            code = -signum
        if code is None:
            return None
        self._take_out(rank)
        status, sent = self.status(rank), frozenset(self._sent[rank])
        said = self._error_of(rank, code) if code else ""
        message = said if code > 0 else ""  # a signal has ended it, and not the exception that it may have spoken of
        urged = rank in self._urged
        return WorkerExit(rank=rank, pid=process.pid, code=code, status=status, sent=sent, urged=urged, message=message)

    def status(self, rank: int) -> Status | None:
        """What the rank's page says now; None: there is no page of this process."""
        status = read_page(self._pages[rank])
        return status if status is not None and status.pid == self.processes[rank].pid else None

    def statuses(self) -> dict[int, Status]:
        """The pages of the live workers that have one."""
        found = {rank: self.status(rank) for rank in self.live}
        return {rank: status for rank, status in found.items() if status is not None}

    def last_statuses(self) -> dict[int, Status]:
        """The last that is known of all workers, dead or alive."""
        dead = {end.rank: end.status for end in self.exits if end.status is not None}
        return {**dead, **self.statuses()}

    def is_guarded(self, rank: int) -> bool:
        """Whether the worker is inside its guard, so that it can save and leave by itself."""
        status = self.status(rank)
        return status is not None and WorkerPhase.STARTING <= status.phase < WorkerPhase.LEFT

    def catches(self, rank: int, signum: int) -> bool:
        """Whether the worker has a handler for the signal."""
        return catches(self.live[rank].pid, signum)

    def replace(self, rank: int, process: Process) -> None:
        """Another process has taken the place of a dead one, whose end does not count any more."""
        self.exits = [end for end in self.exits if end.rank != rank]
        self.processes[rank] = self.live[rank] = process
        self._sent[rank] = set()
        self._urged.discard(rank)
        with suppress(OSError):
            self._fds[rank] = open_pidfd(process.pid)

    def send(self, rank: int, signum: int) -> None:
        """Signal the trainer alone: its loader workers must not get what is meant for it."""
        if rank in self.live:
            status = self.status(rank)
            if signum == signal.SIGTERM and (status is None or status.asked_code <= 0):
                self._urged.add(rank)
            self._sent[rank].add(signum)
            with suppress(ProcessLookupError):
                os.kill(self.live[rank].pid, signum)

    def call(self, rank: int) -> None:
        """There is an order in the agent's folder."""
        self.send(rank, CONTROL_SIGNAL)

    def kill(self, rank: int) -> None:
        """SIGKILL for the worker and everything in its process group."""
        if rank in self.live:
            self._sent[rank].add(signal.SIGKILL)
            self._kill_group(self.live[rank].pid)

    @staticmethod
    def _kill_group(pid: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def give_up(self, rank: int) -> None:
        """Not even SIGKILL ends it: count it as killed and do not wait for it any more."""
        process = self._take_out(rank)
        self.exits.append(WorkerExit(rank=rank, pid=process.pid, code=-signal.SIGKILL))

    def close(self) -> None:
        """When all have ended. Ends what they have left: the next ones want its devices and ports."""
        self._end_remains(wait=True)
        until = time.monotonic() + _REMAINS_S
        while any(process.poll() is None for process in self._dying) and time.monotonic() < until:
            time.sleep(0.002)
        for fd in (*self._fds.values(), *self._threads):
            os.close(fd)
        self._fds.clear()
        self._threads.clear()


def process_state(pid: int) -> str:
    """One letter as in ps (R running, S sleeping, D uninterruptible, T stopped, Z ended); empty when it is gone."""
    found = read_stat(pid)
    return "" if found is None else found.state


_STACKS_S = 1.0
_STATES = {
    "T": "stopped by a signal (SIGSTOP, a debugger): it cannot write its stack",
    "D": "in an uninterruptible wait of the kernel (a disk, a network file system, a device): it may not answer",
    "Z": "ended, not yet reaped",
}


def write_stacks(workers: Workers, statuses: Mapping[int, Status], folder: Path, *, attempt: int) -> list[Path]:
    """Let every guarded worker of a hanging job write its stacks (`faulthandler`, in C) into its own file.

    Waits for them a second at most. Main thread.

    Returns the files; for a process that cannot answer, a file says what the kernel knows of it.
    """
    files: dict[int, Path] = {}
    sizes: dict[int, int] = {}
    for rank, status in statuses.items():
        if not status.entered_ns:
            continue  # perhaps no handler yet: the signal would end it
        path = folder / f"attempt_{attempt}_rank_{rank}.txt"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            state = process_state(status.pid)
            where = _kernel_place(status.pid)
            now = time.strftime("%Y-%m-%d %H:%M:%S %z")
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"--- {now} rank {rank} pid {status.pid} step {status.step}: state {state}{where}\n")
                if state in _STATES:
                    file.write(f"{_STATES[state]}\n")
            files[rank], sizes[rank] = path, path.stat().st_size
            # Without a handler (its file could not be opened, its interpreter is ending) the signal would end it.
            if state != "T" and workers.catches(rank, STACK_SIGNAL):
                workers.send(rank, STACK_SIGNAL)
            else:
                del sizes[rank]
    _wait_for_growth(files, sizes)
    return [files[rank] for rank in sorted(files)]


def _wait_for_growth(files: Mapping[int, Path], sizes: dict[int, int]) -> None:
    end = time.monotonic() + _STACKS_S
    while sizes and time.monotonic() < end:
        time.sleep(0.02)
        for rank, size in list(sizes.items()):
            with suppress(OSError):
                if files[rank].stat().st_size > size:
                    del sizes[rank]


def _kernel_place(pid: int) -> str:
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        if name not in ("", "0"):
            return f", in the kernel's {name}"
    return ""
