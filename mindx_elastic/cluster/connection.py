"""A worker's connection to the scheduler: it registers, sends heartbeats, hears of deaths, and connects again.

One thread, ``mindx-cluster``, owns the connection. The training thread waits only for its group (`wait_for_group`), of
which a process has one: after a death it starts over (`worker_end`). When the connection ends, the thread connects
again until the job is over: the training goes on meanwhile, and needs the scheduler only to form a group.

Each group has its own store, hosted by its rank 0. So the scheduler's death takes none.
"""

from __future__ import annotations

import ipaddress
import os
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
from mindx_elastic.cluster.messages import Farewell, Group
from mindx_elastic.cluster.settings import ClusterSettings
from mindx_elastic.cluster.wire import Line, WireError
from mindx_elastic.core.events import logger
from mindx_elastic.errors import UsageError

__all__ = ["SchedulerConnection"]

_BEATS = 5  # in the time after which a silent process is dead
_LOOK_S = 0.1  # for what the program wants to be said
_CONNECT_S = 3.0
_MOST_PAUSE_S = 0.4  # a connection that has ended must be there again within `Limits.reconnect_s`
_SHORT_S = 1.0
_PATIENCE_S = 10.0
_MORE_S = 1.0
_STORE_S = 60.0
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # torch's own default
_LONGEST_WHY = 500


class SchedulerConnection:
    """One per worker process. Methods from any thread, unless they say otherwise."""

    def __init__(self, settings: ClusterSettings, key: bytes | None) -> None:
        self.settings, self._key = settings, key
        self.node_id, self.job = settings.node_id, ""
        self.incarnation = secrets.token_hex(16)
        self.group: Group | None = None
        self.broken = ""
        """Why the group cannot go on: the death of a rank, the end of the job."""
        self.hear: Callable[[messages.Death | messages.Fail | messages.Dead], None] | None = None
        """Acts on that: the death of another rank, the end of the job, or that the scheduler holds this process for
        dead. Called in the connection's thread; must not block."""
        self.is_over = False
        """The scheduler has ended the job."""
        self._heartbeat_s = settings.limits.heartbeat_s
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._farewell: Farewell | None = None
        """What is to be said last."""
        self._socket: socket.socket | None = None
        os.register_at_fork(after_in_child=self._close_copy)
        self._sent = threading.Event()
        self._closed = threading.Event()
        self._own_store: Any = None
        """For the group in which this process is rank 0."""
        self._store_at: tuple[str, int] | None = None
        """Its address and port, once it is there."""
        self._taken_until: float | None = None
        self._has_said = False
        """That there is no scheduler."""
        self._thread = threading.Thread(target=self._run, name="mindx-cluster", daemon=True)
        self._began = time.monotonic()

    # --- for the program ---

    def start(self) -> None:
        self._thread.start()

    def wait_for_group(self) -> Group:
        """Wait until all workers are there. Raises UsageError where the scheduler does not admit this process, has
        ended the job, or is not there."""
        with self._changed:
            self._changed.wait_for(lambda: self.group is not None or self._error is not None)
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
        with self._changed:
            self._changed.wait_for(lambda: bool(self.broken), timeout_s)
            return self.broken

    def leave(self, how: messages.How, code: int, why: str, *, timeout_s: float = 1.0) -> None:
        """Tell the scheduler how this process ends, and close. Waits until the scheduler knows it, but not for long."""
        if self.job and not self._closed.is_set():
            self._sent.clear()
            self._farewell = Farewell(how, code & 0xFF, why[:_LONGEST_WHY])
            if not self._sent.wait(timeout_s) and how != "away":  # else it comes back, and says so itself
                logger.warning("the scheduler does not answer: it does not know how this worker has ended")
        self.close()

    def close(self) -> None:
        self._closed.set()

    # --- the connection's thread ---

    def _run(self) -> None:
        pause_s = 0.05
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                with self._connect() as self._socket:
                    self._serve(self._socket)
                why = "it has closed the connection"
            except OSError as error:
                why = str(error) or type(error).__name__
            except Exception as error:  # a bug: the training does not depend on this thread, wait_for does
                self._give_up(error)
                return
            if self._closed.is_set() or self._error is not None:
                return
            self._say_lost(why)
            if self.group is None and time.monotonic() > self._began + self.settings.limits.formation_s:
                within = f"within {self.settings.limits.formation_s:g} s (MS_TOPO_TIMEOUT)"
                self._give_up(UsageError(f"the scheduler at {self._place} cannot be reached {within}: {why}"))
                return
            pause_s = 0.05 if time.monotonic() - began > _SHORT_S else min(_MOST_PAUSE_S, 2 * pause_s)
            self._closed.wait(pause_s)

    @property
    def _place(self) -> str:
        """Where the scheduler is."""
        return f"MS_SCHED_HOST={self.settings.host}, MS_SCHED_PORT={self.settings.port}"

    def _say_lost(self, why: str) -> None:
        if self._has_said or (self.group is None and time.monotonic() < self._began + _MORE_S):
            return
        self._has_said = True
        if self.group is None:
            logger.info("waiting for the scheduler at %s (%s)", self._place, why)
            return
        text = "no scheduler for this job at %s (%s); the training goes on, and this worker tries again"
        logger.warning(text, self._place, why)

    def _close_copy(self) -> None:
        """In a forked child: with a loader's worker that outlives this process the connection would, too."""
        if self._socket is not None:
            self._socket.close()

    def _connect(self) -> socket.socket:
        patience_s = min(_CONNECT_S, self._patience_s)  # the system asks a machine that is away ever more rarely
        sock = socket.create_connection((self.settings.host, self.settings.port), patience_s)
        if self._store_at is None:  # where that takes too long for the scheduler, it is there for the next connection
            self._open_store(sock.getsockname()[0])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # of a machine that has vanished without a word
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * self._patience_s))
        return sock

    @property
    def _patience_s(self) -> float:
        """How long a scheduler that does not answer is waited for. A new one gives this process one heartbeat's time to
        be heard again, so half of it must do to leave the old one's connection."""
        return min(_PATIENCE_S, self._heartbeat_s / 2)

    def _serve(self, sock: socket.socket) -> None:
        """One connection, until it ends. Raises OSError and WireError."""
        line = Line(sock, self._key, is_scheduler=False)
        line.send(self._registration())
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        now = said_at = time.monotonic()
        answer_by, leaves = now + self._patience_s, False
        while not self._closed.is_set():
            if self.job and self._farewell is not None and not leaves:
                # To close at once would not do: what the scheduler has sent meanwhile is unread, and TCP then answers
                # with a reset, by which the farewell can be lost.
                line.send(self._farewell)
                answer_by, leaves = now + self._patience_s, True
            elif not leaves and now >= said_at + self._heartbeat_s / _BEATS:
                line.send(messages.Beat())
                said_at = now
            if poll.poll(_LOOK_S * 1000) and not all(self._obey(message) for message in line.receive()):
                return
            now = time.monotonic()
            if now > answer_by and (leaves or not line.is_open):
                raise TimeoutError("it does not answer")

    def _is_understood(self) -> None:
        self._closed.set()
        self._sent.set()

    def _open_store(self, address: str) -> None:
        """`address`: of this machine, as the way to the scheduler begins."""
        own = self.settings.host if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
        self._own_store = host_store(own, timeout=_COLLECTIVE_TIMEOUT)
        self._store_at = own, int(self._own_store.port)

    def _registration(self) -> messages.Register:
        assert self._store_at is not None
        return messages.Register(
            process=messages.Identity(host=socket.gethostname(), pid=os.getpid(), space=own_space()),
            node_id=self.node_id,
            incarnation=self.incarnation,
            size=self.settings.size,
            recovery=self.settings.recovery,
            store=self._store_at,
            job=self.job,
        )

    def _obey(self, message: messages.Message) -> bool:
        """False: this connection is of no more use."""
        match message:
            case messages.Welcome():
                self._hear_welcome(message)
            case messages.Noted():
                self._is_understood()
                return False
            case messages.Refused() | messages.Dead():
                self._hear_refusal(message)
                return False
            case Group():
                self._hear_group(message)
            case messages.Death():
                if self.group is not None:  # else of the group before this process
                    logger.warning("%s", message.why)
                    self._break(message)
            case messages.Fail():
                self._hear_fail(message)
            case _:
                raise WireError("it says what a worker says")
        return True

    def _hear_welcome(self, message: messages.Welcome) -> None:
        is_first = not self.job
        self.job, self.node_id, self._heartbeat_s = message.job, message.node_id, message.heartbeat_s
        if is_first:
            logger.info("registered as node id %s; waiting for the other workers", self.node_id)
        elif self._has_said:
            logger.info("the scheduler is there again")
        self._has_said, self._taken_until = False, None

    def _hear_refusal(self, message: messages.Refused | messages.Dead) -> None:
        """Raises WireError where the scheduler is not this job's."""
        why = message.why
        if self._farewell is not None:
            self._is_understood()  # it was, or its sender does not count any more
        elif isinstance(message, messages.Refused) and self._may_wait(message):
            pass  # and try again
        elif self.group is None and isinstance(message, messages.Dead) and self.job:
            # It was stopped or cut off while it waited. It has given nothing to the others that they go on from.
            self.incarnation, self.job, self.node_id = secrets.token_hex(16), "", self.settings.node_id
            logger.warning("%s; it registers again", why)
        elif self.group is None:
            self._give_up(UsageError(f"the scheduler at {self._place} does not admit this worker: {why}"))
        elif isinstance(message, messages.Dead):
            self._closed.set()
            self._break(message)
        elif message.is_over:
            self._hear_fail(messages.Fail(why))
            self._closed.set()
        else:
            raise WireError(why)

    def _may_wait(self, refused: messages.Refused) -> bool:
        """The process that has this one's place may have died a moment ago, unseen: try until its heartbeat has run
        out."""
        now, wait_s = time.monotonic(), refused.wait_s
        if wait_s and self._taken_until is None:
            self._taken_until = now + wait_s + _MORE_S
            logger.warning("%s. Waiting up to %.1f s for its heartbeat to run out", refused.why, wait_s)
        return bool(wait_s) and self._taken_until is not None and now < self._taken_until

    def _hear_group(self, group: Group) -> None:
        with self._changed:
            self.group = self.group or group  # it comes again with each new connection
            self._changed.notify_all()

    def _hear_fail(self, message: messages.Fail) -> None:
        self.is_over = True
        if self.group is None:
            self._give_up(UsageError(f"the scheduler has ended the job: {message.why}"))
            return
        logger.error("the scheduler has ended the job: %s", message.why)
        self._break(message)

    def _break(self, message: messages.Death | messages.Fail | messages.Dead) -> None:
        with self._changed:
            self.broken = self.broken or message.why
            self._changed.notify_all()
        if self.hear is not None:
            self.hear(message)

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._closed.set()
