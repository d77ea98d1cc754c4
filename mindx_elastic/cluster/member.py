"""A worker's connection to the scheduler: it registers, sends heartbeats, hears of deaths, and connects again.

One thread, ``mindx-cluster``, owns the connection. The training thread waits only in `wait_for`. When the connection
ends, the thread connects again until the job is over: the training goes on meanwhile, and needs the scheduler only to
form a group.

What a rejoin in place builds on::

    member.on_death(callback)           # "rank r is dead", in the member's thread
    member.generation                   # of the group that this process is in
    group = member.wait_for(g + 1)      # "I am ready"; returns when every rank has a process again: `group.new`

Each group has a store of its own, hosted by its lowest rank whose process was there before. So no death takes the
store of the group that is to be formed, and the scheduler's death takes none at all.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mindx_elastic.agreement.hosting import host_store
from mindx_elastic.alarm.peers import own_space
from mindx_elastic.cluster.fence import end_predecessor
from mindx_elastic.cluster.records import leave_farewell
from mindx_elastic.cluster.settings import ClusterSettings
from mindx_elastic.cluster.voice import Voice
from mindx_elastic.cluster.wire import MAX_REPLY_BYTES, Line, WireError, count_in, text_in
from mindx_elastic.core.posix import start_ticks
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import UsageError

__all__ = ["Group", "Member", "NoSchedulerError"]

_BEATS = 5  # in the time after which a silent process is dead
_CONNECT_S = 3.0
_ANSWER_S = 10.0
_MOST_PAUSE_S = 1.0
_SAY_AGAIN_S = 60.0
_UNACKNOWLEDGED_MS = 10_000
_MORE_S = 1.0
_STORE_S = 60.0
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # torch's own default
_PIECE = 1 << 16


class NoSchedulerError(Exception):
    """No scheduler forms the group that is waited for; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A formed group, as one of its ranks sees it."""

    generation: int
    attempt: int
    """How often all processes of the job have begun anew."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    """Of the group's store."""
    port: int
    new: tuple[int, ...]
    """Ranks whose processes were not in the group before; all of them in the first one."""


class Member:
    """One per worker process. Methods from any thread, unless they say otherwise."""

    def __init__(self, settings: ClusterSettings, key: bytes | None, voice: Voice) -> None:
        self.settings, self._key, self._voice = settings, key, voice
        self.node_id, self.job = settings.node_id, ""
        self.incarnation = secrets.token_hex(16)
        self.group: Group | None = None
        self.broken = ""
        """Why the group of this generation cannot go on: the death of a rank, the end of the job."""
        self.last_death = ""
        """What the scheduler has said of the last death in a group of this process."""
        self.dead_rank: int | None = None
        """The rank whose death has ended the job, if the scheduler has named one."""
        self.is_over = False
        """The scheduler has ended the job."""
        self._heartbeat_s = settings.heartbeat_s
        self._env = dict(os.environ)
        # As it is now: the program may change its working directory.
        path = settings.recovery_path if settings.recovery else None
        self._folder = None if path is None else path.absolute()
        self._wanted, self._wanted_at = 0, time.monotonic()
        self._lost_at: float | None = time.monotonic()
        """Since when no scheduler serves this process; None: one does."""
        self._lost_why = ""
        self._is_unknown = False
        """The scheduler that is there does not know this process's job."""
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[int], None]] = []
        self._on_end: list[Callable[[str], None]] = []
        self._on_obsolete: list[Callable[[str], None]] = []
        self._deaths: list[int] = []
        self._orders: deque[Mapping[str, Any]] = deque()
        self._sent = threading.Event()
        self._closed = threading.Event()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stores: dict[int, Any] = {}
        self._taken_until: float | None = None
        self._said_at: float | None = None
        self._said_why = ""
        self._thread = threading.Thread(target=self._run, name="mindx-cluster", daemon=True)
        self._began = time.monotonic()

    # --- for the program ---

    def start(self) -> None:
        self._thread.start()

    @property
    def generation(self) -> int:
        """Of the group that this process is in; -1: none yet."""
        return -1 if self.group is None else self.group.generation

    @property
    def deaths(self) -> Sequence[int]:
        """Ranks of this generation that are dead."""
        with self._changed:
            return tuple(self._deaths)

    def on_death(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(rank)`` in the member's thread for each rank of this generation that is or will be dead. It
        must not block."""
        with self._changed:
            self._callbacks.append(callback)
            deaths = list(self._deaths)
        for rank in deaths:
            callback(rank)

    def on_end(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(why)`` in the member's thread when the scheduler ends the job. Before `start`."""
        self._on_end.append(callback)

    def on_obsolete(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(why)`` in the member's thread when the scheduler holds this process for dead: it was stopped
        or cut off for longer than a heartbeat, and the others go on without it. Before `start`."""
        self._on_obsolete.append(callback)

    def store_of(self, group: Group) -> Any:
        """This process's connection to the group's store, a `torch.distributed.TCPStore`; on its host the store itself.
        Main thread. Raises what torch raises where the host is gone."""
        import torch.distributed as dist

        if group.generation not in self._stores:
            connection = dist.TCPStore(
                group.host, group.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S)
            )
            connection.set_timeout(_COLLECTIVE_TIMEOUT)
            self._stores[group.generation] = connection
        return self._stores[group.generation]

    def wait_for(self, generation: int, timeout_s: float | None = None) -> Group:
        """Say that this process is ready for `generation`, and wait for its group. Raises UsageError where the
        scheduler does not admit this process or has ended the job, TimeoutError, and in a process that is in a group
        NoSchedulerError."""
        with self._changed:
            if generation > self._wanted:
                self._wanted, self._wanted_at = generation, time.monotonic()
                self._orders.append({"op": "join", "generation": generation})
                self._wake()
            end = None if timeout_s is None else time.monotonic() + timeout_s
            while self.group is None or self.group.generation < generation:
                if self._error is not None:
                    raise self._error
                if hopeless := self._why_hopeless():
                    raise NoSchedulerError(hopeless)
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"the group of generation {generation} was not formed in {timeout_s:g} s")
                self._changed.wait(left)
            return self.group

    def _why_hopeless(self) -> str:
        """Why a process of a group need not wait for the next one; empty: it may come. A process that is in none gives
        up in its thread."""
        if self.group is None or self._lost_at is None:
            return ""
        if self._is_unknown:
            return self._lost_why
        if time.monotonic() < max(self._lost_at, self._wanted_at) + self.settings.formation_s:
            return ""
        return self._unreachable()

    def _unreachable(self) -> str:
        return (
            f"the scheduler at {self.place} cannot be reached within {self.settings.formation_s:g} s "
            f"(MS_TOPO_TIMEOUT): {self._lost_why}"
        )

    def wait_until_broken(self, timeout_s: float) -> str:
        """Why the group cannot go on, as soon as the scheduler has said so; empty: it has said nothing."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.broken), timeout_s)
            return self.broken

    def leave(self, how: str, code: int, why: str, *, timeout_s: float = 1.0) -> None:
        """Tell the scheduler how this process ends, and close. Waits until the scheduler knows it, but not for long."""
        if self.job and not self._closed.is_set():
            self._sent.clear()
            message = {"op": "bye", "how": how, "code": code & 0xFF, "why": printable(why, 400)[:500]}
            self._orders.append(message)
            self._wake()
            if not self._sent.wait(timeout_s) and how != "away":  # else it comes back, and says so itself
                self._leave_farewell(message)
        self.close()

    def _leave_farewell(self, message: Mapping[str, Any]) -> None:
        """No scheduler answers. One that is started again reads how this process has ended."""
        path = None if self._folder is None else leave_farewell(self._folder, self.incarnation, message)
        if path is None:
            self._voice.warning("the scheduler does not answer: it does not know how this worker has ended")
        else:
            self._voice.warning(
                "the scheduler does not answer; one that is started again reads in %s how this worker has ended", path
            )

    def close(self) -> None:
        self._closed.set()
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._writer, b"!")

    # --- the member's thread ---

    def _run(self) -> None:
        pause_s = 0.05
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                with self._connect() as sock:
                    self._serve(sock)
                why = "it has closed the connection"
            except (OSError, WireError) as error:
                why = str(error) or type(error).__name__
                self._is_unknown = self._is_unknown and isinstance(error, WireError)
            except Exception as error:  # a bug: the training does not depend on this thread, wait_for does
                self._give_up(error)
                return
            if self._closed.is_set() or self._error is not None:
                return
            self._lost_at, self._lost_why = self._lost_at or time.monotonic(), why
            self._say_lost(why)
            if self.group is None and time.monotonic() > self._began + self.settings.formation_s:
                self._give_up(UsageError(self._unreachable()))
                return
            pause_s = 0.05 if time.monotonic() - began > _MOST_PAUSE_S else min(_MOST_PAUSE_S, 2 * pause_s)
            self._closed.wait(pause_s)

    @property
    def is_alone(self) -> bool:
        """No scheduler serves this process."""
        return self._lost_at is not None

    @property
    def place(self) -> str:
        """Where the scheduler is."""
        return f"MS_SCHED_HOST={self.settings.host}, MS_SCHED_PORT={self.settings.port}"

    def _say_lost(self, why: str) -> None:
        now = time.monotonic()
        is_new = self._is_unknown and why != self._said_why  # the scheduler's own word, behind what the system says
        if self._said_at is not None and now < self._said_at + _SAY_AGAIN_S and not is_new:
            return
        if self.group is None:
            if now > self._began + _MORE_S:
                self._said_at = now
                self._voice.info("waiting for the scheduler at %s (%s)", self.place, why)
            return
        self._said_at, self._said_why = now, why
        waits = self._wanted > self.generation
        self._voice.warning(
            "no scheduler for this job at %s (%s); %s, and this worker tries again",
            self.place,
            why,
            "the training waits for it" if waits else "the training goes on",
        )

    def _connect(self) -> socket.socket:
        sock = socket.create_connection((self.settings.host, self.settings.port), _CONNECT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # of a machine that has vanished without a word
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        return sock

    def _serve(self, sock: socket.socket) -> None:
        """One connection, until it ends. Raises OSError and WireError."""
        line = Line(self._key, is_scheduler=False, limit=MAX_REPLY_BYTES)
        sock.settimeout(_ANSWER_S)
        sock.sendall(line.hello())
        while not line.is_open:
            self._feed(sock, line)
        sock.sendall(line.pack(self._registration()))
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(self._reader, select.POLLIN)
        next_beat = 0.0
        while not self._closed.is_set():
            now = time.monotonic()
            if now >= next_beat:
                if self.job:
                    sock.sendall(line.pack({"op": "beat"}))
                next_beat = now + self._heartbeat_s / _BEATS
            for fd, _ in poll.poll(max(0.0, next_beat - now) * 1000):
                if fd == sock.fileno():
                    if not self._feed(sock, line):
                        return
                else:
                    with suppress(OSError):
                        os.read(self._reader, 4096)
            if self.job:
                while self._orders:
                    sock.sendall(line.pack(self._orders[0]))
                    if self._orders[0]["op"] == "bye":
                        self._part(sock)
                        return
                    self._orders.popleft()

    def _part(self, sock: socket.socket) -> None:
        """The scheduler ends the connection when it has understood the farewell. Raises OSError: say it again.

        To close at once would not do: what the scheduler has sent meanwhile is unread, and TCP then answers with a
        reset, by which the farewell can be lost."""
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(_PIECE):
            pass
        self._is_understood()

    def _is_understood(self) -> None:
        self._closed.set()
        self._sent.set()

    def _feed(self, sock: socket.socket, line: Line) -> bool:
        """Read once, and obey. False: this connection is of no more use."""
        data = sock.recv(_PIECE)
        if not data:
            raise ConnectionError("it has closed the connection")
        return all(self._obey(sock, line, message) for message in line.feed(data))

    def _registration(self) -> dict[str, Any]:
        pid = os.getpid()
        return {
            "op": "register",
            "node_id": self.node_id,
            "incarnation": self.incarnation,
            "host": socket.gethostname()[:255],
            "pid": pid,
            "started": start_ticks(pid),
            "space": own_space(),
            "size": self.settings.size,
            "recovery": self.settings.recovery,
            "generation": self.generation,
            "joined": self._wanted,
            "job": self.job,
        }

    def _obey(self, sock: socket.socket, line: Line, message: Mapping[str, Any]) -> bool:
        op = message["op"]
        if op == "welcome":
            self._hear_welcome(message)
        elif op == "taken":
            return self._hear_taken(message)
        elif op in ("refused", "dead"):
            return self._hear_refusal(message)
        elif op == "host":
            generation = count_in(message, "generation")
            port = self._open_store(generation, text_in(message, "address", limit=300))
            sock.sendall(line.pack({"op": "store", "generation": generation, "port": port}))
        elif op == "group":
            self._hear_group(message)
        elif op == "death":
            self._hear_death(message)
        elif op == "fail":
            self.dead_rank = message["rank"] if type(message.get("rank")) is int else None
            self._hear_fail(printable(text_in(message, "why", limit=4000)))
        else:
            raise WireError("it says what is not known")
        return True

    def _hear_welcome(self, message: Mapping[str, Any]) -> None:
        first = not self.job
        self.job, self.node_id = text_in(message, "job", limit=64), text_in(message, "node_id", limit=128)
        heartbeat_s = message.get("heartbeat_s")
        if isinstance(heartbeat_s, (int, float)) and 0.1 <= heartbeat_s <= 86400:
            self._heartbeat_s = float(heartbeat_s)  # the scheduler's counts, where they differ
        if first:
            ended = end_predecessor(message.get("before"), space=own_space(), node_id=self.node_id, env=self._env)
            if ended is not None:
                self._voice.warning(
                    "process %d, which had node id %s before and is silent, is killed: this process takes its place",
                    ended,
                    self.node_id,
                )
            self._voice.info("registered as node id %s; waiting for the other workers", self.node_id)
        elif self._said_at is not None:
            self._voice.info("the scheduler is there again")
        self._said_at, self._taken_until = None, None
        self._lost_at, self._is_unknown, self._said_why = None, False, ""
        self._wake()

    def _hear_taken(self, message: Mapping[str, Any]) -> bool:
        """Another living process has this node id. It may have died a moment ago, unseen: try until its heartbeat has
        run out."""
        wait_s, now = message.get("wait_s"), time.monotonic()
        holder = printable(text_in(message, "by", limit=400))
        if self._taken_until is None:
            limit = float(wait_s) if isinstance(wait_s, (int, float)) and 0 <= wait_s <= 3600 else self._heartbeat_s
            self._taken_until = now + limit + _MORE_S
            self._voice.warning(
                "node id %s is taken by %s; waiting up to %.1f s for its heartbeat to run out",
                self.node_id,
                holder,
                limit,
            )
        if now < self._taken_until:
            return False
        self._give_up(
            UsageError(
                f"MS_NODE_ID={self.node_id} belongs to {holder}, which is alive: a node id has one process. End that "
                "one, or give this one another MS_NODE_ID"
            )
        )
        return False

    def _hear_refusal(self, message: Mapping[str, Any]) -> bool:
        why = printable(text_in(message, "why", limit=4000))
        if self._orders and self._orders[-1]["op"] == "bye":
            self._is_understood()  # it was, or its sender does not count any more
        elif self.group is None and message["op"] == "dead" and self.job:
            # It was stopped or cut off while it waited. It has given nothing to the others that they go on from.
            self.incarnation, self.job, self.node_id = secrets.token_hex(16), "", self.settings.node_id
            self._voice.warning("%s; it registers again", why)
        elif self.group is None:
            self._give_up(UsageError(f"the scheduler at {self.place} does not admit this worker: {why}"))
        elif message["op"] == "dead":
            self._break(why)
            self._closed.set()
            for callback in self._on_obsolete:
                callback(why)
        elif message.get("over") is True:
            self._hear_fail(why)
            self._closed.set()
        else:
            self._is_unknown = message.get("unknown") is True
            raise WireError(why)
        return False

    def _hear_group(self, message: Mapping[str, Any]) -> None:
        generation = count_in(message, "generation")
        if generation <= self.generation:
            return
        size = count_in(message, "size", low=1)
        store, new = message.get("store"), message.get("new")
        store = store if isinstance(store, list) else []
        if len(store) != 2 or not isinstance(new, list):
            raise WireError("it names no store")
        place = {"host": store[0], "port": store[1]}
        group = Group(
            generation=generation,
            attempt=count_in(message, "attempt"),
            rank=count_in(message, "rank", high=size - 1),
            size=size,
            local_rank=count_in(message, "local_rank", high=size - 1),
            local_size=count_in(message, "local_size", low=1, high=size),
            host=text_in(place, "host", limit=300),
            port=count_in(place, "port", low=1, high=65535),
            new=tuple(rank for rank in new if type(rank) is int and 0 <= rank < size),
        )
        with self._changed:
            self.group, self.broken = group, ""
            self._deaths.clear()
            self._stores = {number: each for number, each in self._stores.items() if number >= generation}
            self._changed.notify_all()

    def _open_store(self, generation: int, address: str) -> int:
        """The port of the store of that generation, which this process hosts."""
        if generation not in self._stores:
            self._stores[generation] = host_store(address, timeout=_COLLECTIVE_TIMEOUT)
        return int(self._stores[generation].port)

    def _hear_death(self, message: Mapping[str, Any]) -> None:
        if count_in(message, "generation") != self.generation:
            return
        assert self.group is not None
        rank = count_in(message, "rank", high=self.group.size - 1)
        why = printable(text_in(message, "why", limit=4000))
        with self._changed:
            if rank in self._deaths:
                return
            self._deaths.append(rank)
            callbacks = list(self._callbacks)
        self._voice.warning("%s", why)
        self.last_death = why
        self._break(why)
        for callback in callbacks:
            callback(rank)

    def _hear_fail(self, why: str) -> None:
        self.is_over = True
        if self.group is None:
            self._give_up(UsageError(f"the scheduler has ended the job: {why}"))
            return
        self._voice.error("the scheduler has ended the job: %s", why)
        self._break(why)
        for callback in self._on_end:
            callback(why)

    def _break(self, why: str) -> None:
        with self._changed:
            self.broken = self.broken or why
            self._changed.notify_all()

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._closed.set()
