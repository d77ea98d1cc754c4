"""A member's connection to the table of its job: `TableConnection`; and a worker's to the scheduler.

The member registers, sends heartbeats and is told what becomes of its group. One thread owns the connection; what it is
told comes by itself, so no question waits for a machine that is gone. When the connection ends, the thread connects
again until the job is over: the training goes on meanwhile, and needs the table only to form a group.

A worker is in one group: after a death its process starts over (`worker_end`). Each group has its own store, hosted by
its rank 0. So the scheduler's death takes none.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mindx_elastic.agreement.hosting import host_store
from mindx_elastic.alarm.peers import own_space
from mindx_elastic.cluster import messages
from mindx_elastic.cluster.messages import NODE_ID, Farewell, Group, News, Over, Register
from mindx_elastic.cluster.wire import Line, WireError
from mindx_elastic.config import ClusterSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.pace import Pace, SlowRank
from mindx_elastic.core.printable import printable
from mindx_elastic.core.wakeup import Wakeup
from mindx_elastic.errors import UsageError

__all__ = ["SchedulerConnection", "TableConnection"]

_BEATS = 5  # in the time after which a silent process is dead
_CONNECT_S = 3.0
_MOST_PAUSE_S = 0.4  # a connection that has ended must be there again within `Limits.reconnect_s`
_SHORT_S = 1.0
_PATIENCE_S = 10.0
_MORE_S = 1.0
_STORE_S = 60.0
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # torch's own default
_LONGEST_WHY = 500
_NO_NEWS = News(0, (), "")


class TableConnection:
    """One per member. Subclasses say what they bring, and act on what is heard."""

    forgets = False
    """Whether a table that does not know the member's job has taken the place of the one that does, for good."""

    def __init__(self, host: str, port: int, key: bytes | None, *, node_id: str, heartbeat_s: float) -> None:
        """`heartbeat_s`: until the table says its own."""
        self.host, self.port, self._key, self._asked_for = host, port, key, node_id
        self.changed = threading.Condition()
        """Over what follows, which the connection's thread sets."""
        self.node_id, self.job = node_id, ""
        self.incarnation = secrets.token_hex(16)
        self.group: Group | None = None
        self.news = _NO_NEWS
        self.over: Over | None = None
        """The job is."""
        self.dead = ""
        """Why the others go on without this member."""
        self.refused = ""
        """Why it is not let in."""
        self.down_since: float | None = time.monotonic()
        """Since when nobody answers; None: the table does."""
        self.is_greeted = False
        """Somebody is there, who may be about to answer: over a slow network that takes a while."""
        self.began = self.down_since
        self.closed = threading.Event()
        self.paces: tuple[Pace, ...] = ()
        """Of the member's ranks; another thread sets it."""
        self.slow: tuple[SlowRank, ...] = ()
        """The ranks that the others wait for, of all members."""
        self._facts: dict[str, Any] = {}
        """What the member says of itself (`Register`)."""
        self._is_changed = self._is_stale = self._is_welcome = False
        """It has to say them again; over a new connection; this one is answered."""
        self._is_member = False
        """A table has let it in, once: what becomes of it is of interest to others."""
        self._heartbeat_s, self._said_at = heartbeat_s, 0.0
        self._num_beats = self._num_answers = 0
        self._farewell: Farewell | None = None
        """What is to be said last."""
        self._leaves_at, self._sent = math.inf, threading.Event()
        self._taken_until: float | None = None
        self._socket: socket.socket | None = None
        self._wants = Wakeup()
        """Rings when there is something to say, or this is closed."""
        os.register_at_fork(after_in_child=self._close_copy)
        self._thread = threading.Thread(target=self._run, name="mindx-cluster", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.closed.set()
        self._wants.ring()

    def say(self, **facts: Any) -> None:
        """Fields of `Register` that have changed."""
        with self.changed:
            self._facts.update(facts)
            self._is_changed = True
        self._wants.ring()

    def ask_now(self) -> int:
        """Let a heartbeat be sent at once, with `changed` held; its number, and so that of its answer."""
        self._said_at = -math.inf
        self._wants.ring()
        return self._num_beats + 1

    def begin_anew(self, **facts: Any) -> None:
        """From now on it waits for another group, as another incarnation."""
        with self.changed:
            self._facts.update(facts)
            self.incarnation, self.job, self.group, self.dead = secrets.token_hex(16), "", None, ""
            self._is_stale = True
        self._wants.ring()

    def leave(self, how: messages.How, code: int, why: str, *, timeout_s: float = 1.0) -> bool:
        """Say how this member ends, and close. Waits until the table knows it, but not for long; whether it does."""
        is_told = True
        if self._is_member and not self.closed.is_set():
            self._sent.clear()
            self._farewell = Farewell(how, code & 0xFF, why[:_LONGEST_WHY])
            self._wants.ring()
            is_told = self._sent.wait(timeout_s)
        self.close()
        return is_told

    # --- for subclasses; all in the connection's thread ---

    def has_connected(self, sock: socket.socket) -> None:
        """There is a connection."""

    def hear(self, message: messages.Message) -> None:
        """It was told something, which this object's fields say already. Must not block."""

    def tries_again(self, why: str) -> bool:
        """A connection has ended, or none could be opened."""
        return True

    def give_up(self, error: Exception) -> None:
        """No connection will be opened any more."""
        self.closed.set()

    # --- the connection's thread ---

    @property
    def _patience_s(self) -> float:
        """How long a table that does not answer is waited for. A new one gives this process one heartbeat's time to be
        heard again, so half of it must do to leave the old one's connection."""
        return min(_PATIENCE_S, self._heartbeat_s / 2)

    def _run(self) -> None:
        pause_s = 0.05
        while not self.closed.is_set():
            began = time.monotonic()
            try:
                with self._connect() as self._socket:
                    self._serve(self._socket)
                why = "it has closed the connection"
            except OSError as error:
                why = str(error) or type(error).__name__
            except Exception as error:  # a bug: the training does not depend on this thread, what waits for it does
                self.give_up(error)
                return
            with self.changed:
                if not self._is_welcome and self.down_since is None:
                    self.down_since = time.monotonic()
                self._is_welcome = self.is_greeted = False
                self.changed.notify_all()
            self._leaves_at = math.inf
            if self.closed.is_set() or not self.tries_again(why):
                return
            pause_s = 0.05 if time.monotonic() - began > _SHORT_S else min(_MOST_PAUSE_S, 2 * pause_s)
            self.closed.wait(pause_s)

    def _close_copy(self) -> None:
        """In a forked child: with one that outlives this process the connection would, too."""
        if self._socket is not None:
            self._socket.close()

    def _connect(self) -> socket.socket:
        patience_s = min(_CONNECT_S, self._patience_s)  # the system asks a machine that is away ever more rarely
        sock = socket.create_connection((self.host, self.port), patience_s)
        self.has_connected(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # of a machine that has vanished without a word
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * self._patience_s))
        return sock

    def _serve(self, sock: socket.socket) -> None:
        """One connection, until it ends. Raises OSError and WireError."""
        line = Line(sock, self._key, is_scheduler=False)
        with self.changed:
            self._is_stale = False
            self._say_all(line)
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(self._wants.fd, select.POLLIN)
        now = heard_at = self._said_at = time.monotonic()
        self._num_answers = self._num_beats
        while not self.closed.is_set() and not self._is_stale:
            self._speak(line, now)
            most_s = self._patience_s + (self._heartbeat_s / _BEATS if line.is_open else 0.0)
            ends_at = min(heard_at + most_s, self._leaves_at + self._patience_s)
            ready = dict(poll.poll(1000 * max(0.0, min(ends_at, self._beats_at) - now)))
            now = time.monotonic()
            if ready.pop(self._wants.fd, None):
                self._wants.drain()
            if ready:
                heard_at = now
                if not all(self._obey(message) for message in line.receive()):
                    return
                self.is_greeted = line.is_open
            elif now >= ends_at:
                self._is_welcome = False  # it stands still: it would take another connection, and not answer
                raise TimeoutError("it does not answer")

    @property
    def _beats_at(self) -> float:
        """When it is to be heard again."""
        return self._said_at + self._heartbeat_s / _BEATS if self._farewell is None else math.inf

    def _say_all(self, line: Line) -> None:
        process = messages.Identity(host=socket.gethostname(), pid=os.getpid(), space=own_space())
        self._is_changed = False
        line.send(
            Register(
                process=process,
                node_id=self.node_id,
                incarnation=self.incarnation,
                job=self.job,
                generation=-1 if self.group is None else self.group.generation,
                **self._facts,
            )
        )

    def _speak(self, line: Line, now: float) -> None:
        with self.changed:
            if self._is_changed:
                self._say_all(line)
            beats = now >= self._beats_at
            self._num_beats += beats
        if self.job and self._farewell is not None and self._leaves_at == math.inf:
            # To close at once would not do: what the table has sent meanwhile is unread, and TCP then answers with
            # a reset, by which the farewell can be lost.
            line.send(self._farewell)
            self._leaves_at = now
        if beats:
            line.send(messages.Beat(self.paces))
            self._said_at = now

    def _obey(self, message: messages.Message) -> bool:
        """False: this connection is of no more use. Raises WireError."""
        with self.changed:
            if self._is_stale:
                return False
            goes_on = self._take_in(message)
            self.changed.notify_all()
        self.hear(message)
        return goes_on

    def _take_in(self, message: messages.Message) -> bool:
        match message:
            case messages.Beat():
                self._num_answers += 1
                self.slow = message.slow
            case messages.Welcome():
                self.job, self.node_id, self._heartbeat_s = message.job, message.node_id, message.heartbeat_s
                self.down_since, self._taken_until = None, None
                self._is_welcome = self._is_member = True
            case Group() if self.group is None:
                self.group, self.news = message, _NO_NEWS
            case Group():
                pass  # it comes again with each new connection
            case News():
                self.news = message
            case Over():
                self.over = message
            case messages.Noted():
                self._understood()
                return False
            case messages.Refused() | messages.Dead():
                self._hear_refusal(message)
                return False
            case _:
                raise WireError("it says what a member says")
        return True

    def _understood(self) -> None:
        self.closed.set()
        self._sent.set()

    def _hear_refusal(self, message: messages.Refused | messages.Dead) -> None:
        """Raises WireError where the table is not this job's."""
        why, over = message.why, message.over if isinstance(message, messages.Refused) else None
        is_out = isinstance(message, messages.Dead) or (self.forgets and over is None)
        if self._farewell is not None:
            self._understood()  # it was, or its sender does not count any more
        elif self.group is None and self.job and is_out:
            # It was stopped or cut off while it waited. It has given nothing to the others that they go on from.
            self.incarnation, self.job, self.node_id = secrets.token_hex(16), "", self._asked_for
            logger.warning("%s; it registers again", why)
        elif self.group is None:
            self.refused = "" if self._may_wait(message) else why
            self.over = None if over is None else Over(over, why)
        elif over is not None:
            self.over = Over(over, why)
        elif is_out:
            self.dead = why
        else:
            raise WireError(why)

    def _may_wait(self, refused: messages.Refused | messages.Dead) -> bool:
        """The process that has this one's place may have died a moment ago, unseen: try until its heartbeat has run
        out."""
        now, wait_s = time.monotonic(), getattr(refused, "wait_s", 0.0)
        if wait_s and self._taken_until is None:
            self._taken_until = now + wait_s + _MORE_S
            logger.warning("%s. Waiting up to %.1f s for its heartbeat to run out", refused.why, wait_s)
        return bool(wait_s) and self._taken_until is not None and now < self._taken_until


class SchedulerConnection(TableConnection):
    """One per worker process. Methods from any thread, unless they say otherwise."""

    def __init__(self, settings: ClusterSettings, key: bytes | None) -> None:
        """Raises UsageError for a name that cannot be a worker's."""
        name = settings.node_id
        if name == "sched" or (name and not re.fullmatch(NODE_ID, name)):
            raise UsageError(
                f"MS_NODE_ID={printable(name, 40)!r}: give each worker its own name, or none; not sched, and up to 128 "
                "letters, digits and ._:@- that begin with a letter or digit"
            )
        super().__init__(settings.host, settings.port, key, node_id=name, heartbeat_s=settings.heartbeat_s)
        self.settings = settings
        self._facts = {"size": settings.size, "recovery": settings.recovery}
        self.broken = ""
        """Why the group cannot go on: the death of a rank, the end of the job."""
        self.on_break: Callable[[News | Over | messages.Dead], None] | None = None
        """Acts on that: the death of another rank, the end of the job, or that the scheduler holds this process for
        dead. Called in the connection's thread; must not block."""
        self._error: Exception | None = None
        self._own_store: Any = None
        """For the group in which this process is rank 0."""
        self._has_said = False
        """That there is no scheduler."""

    # --- for the program ---

    def wait_for_group(self) -> Group:
        """Wait until all workers are there. Raises UsageError where the scheduler does not admit this process, has
        ended the job, or is not there."""
        with self.changed:
            self.changed.wait_for(lambda: self.group is not None or self._error is not None)
        if self.group is None:
            assert self._error is not None
            raise self._error
        return self.group

    def store_of(self, group: Group) -> Any:
        """This process's connection to the group's store, a `torch.distributed.TCPStore`; on its host the store itself.
        Main thread, once. Raises what torch raises where the host is gone."""
        import torch.distributed as dist

        if group.rank == 0:
            return self._own_store
        self._own_store = None
        store = dist.TCPStore(
            group.host, group.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S)
        )
        store.set_timeout(_COLLECTIVE_TIMEOUT)
        return store

    def wait_until_broken(self, timeout_s: float) -> str:
        """Why the group cannot go on, as soon as the scheduler has said so; empty: it has said nothing."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.broken), timeout_s)
            return self.broken

    def leave(self, how: messages.How, code: int, why: str, *, timeout_s: float = 1.0) -> bool:
        is_told = super().leave(how, code, why, timeout_s=timeout_s)
        if not is_told and how != "away":  # else it comes back, and says so itself
            logger.warning("the scheduler does not answer: it does not know how this worker has ended")
        return is_told

    # --- the connection's thread ---

    @property
    def _place(self) -> str:
        """Where the scheduler is."""
        return f"MS_SCHED_HOST={self.settings.host}, MS_SCHED_PORT={self.settings.port}"

    def has_connected(self, sock: socket.socket) -> None:
        if self._own_store is None and "store" not in self._facts:
            # Where that takes too long for the scheduler, it is there for the next connection.
            address = sock.getsockname()[0]  # of this machine, as the way to the scheduler begins
            own = self.settings.host if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
            self._own_store = host_store(own, timeout=_COLLECTIVE_TIMEOUT)
            self._facts["store"] = own, int(self._own_store.port)

    def tries_again(self, why: str) -> bool:
        if self._error is not None:
            return False
        waited_s = time.monotonic() - self.began
        if self.group is None and waited_s > self.settings.formation_s:
            within = f"within {self.settings.formation_s:g} s (MS_TOPO_TIMEOUT)"
            self.give_up(UsageError(f"the scheduler at {self._place} cannot be reached {within}: {why}"))
            return False
        if not self._has_said and self.group is not None:
            text = "no scheduler for this job at %s (%s); the training goes on, and this worker tries again"
            logger.warning(text, self._place, why)
        elif not self._has_said and waited_s >= _MORE_S:
            logger.info("waiting for the scheduler at %s (%s)", self._place, why)
        self._has_said = self._has_said or self.group is not None or waited_s >= _MORE_S
        return True

    def hear(self, message: messages.Message) -> None:
        if self.refused:
            self.give_up(UsageError(f"the scheduler at {self._place} does not admit this worker: {self.refused}"))
        elif isinstance(message, messages.Welcome):
            if self._has_said and self.group is not None:
                logger.info("the scheduler is there again")
            elif self.group is None:
                logger.info("registered as node id %s; waiting for the other workers", self.node_id)
            self._has_said = False
        elif isinstance(message, Over | messages.Refused) and self.over is not None:
            if self.group is None:
                self.give_up(UsageError(f"the scheduler has ended the job: {self.over.why}"))
                return
            logger.error("the scheduler has ended the job: %s", self.over.why)
            self._break(self.over)
            if isinstance(message, messages.Refused):
                self.closed.set()
        elif isinstance(message, messages.Dead) and self.dead:
            self.closed.set()
            self._break(message)
        elif isinstance(message, News) and message.missing and self.group is not None:  # else of one before it
            logger.warning("%s", message.why)
            self._break(message)

    def _break(self, message: News | Over | messages.Dead) -> None:
        with self.changed:
            self.broken = self.broken or message.why
            self.changed.notify_all()
        if self.on_break is not None:
            self.on_break(message)

    def give_up(self, error: Exception) -> None:
        with self.changed:
            self._error = error
            self.changed.notify_all()
        super().give_up(error)
