"""The scheduler's process: admits the workers, hears their heartbeats, tells of deaths. It runs no training.

One thread and one selector. Each event goes to the `Table` (pure); what has changed is written to disk (`TableFile`),
and only then told. The group's own traffic does not pass here: the workers' collectives go over their own connections,
and the store of their process group is hosted by one of them. So a scheduler that is killed costs the training nothing;
one that is started again reads its table, and the workers connect to it by themselves.

A death is seen when the process's connection has ended and it does not connect again within a second, else when its
heartbeat runs out. A stopped process is not dead until then.
"""

from __future__ import annotations

import secrets
import selectors
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from mindx_elastic.alarm.exit_codes import exit_code_of_signal
from mindx_elastic.cluster import messages
from mindx_elastic.cluster.messages import Farewell, Register
from mindx_elastic.cluster.settings import ClusterSettings
from mindx_elastic.cluster.table import Table
from mindx_elastic.cluster.table_file import TableFile
from mindx_elastic.cluster.wire import Line, WireError
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import answered_by
from mindx_elastic.errors import SaveError, UsageError

__all__ = ["Scheduler"]

_TURN_S = 0.2
_HELLO_S = 5.0  # for a new connection to say what it is
_FAREWELL_S = 45.0  # for the workers to save and leave a job that is over; their own grace period is 30 s
_MORE_CONNECTIONS = 64
_RETRY_WRITE_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(eq=False)
class _Connection:
    line: Line
    peer: str
    """Its address, as this machine sees it."""
    opened_at: float
    incarnation: str = ""
    """Of the process that has registered; empty: none yet."""


class Scheduler:
    """One per process. Main thread."""

    def __init__(self, settings: ClusterSettings, key: bytes | None) -> None:
        """Listen, and read the table of a predecessor. Raises UsageError."""
        self._settings, self._key = settings, key
        self._stack = ExitStack()
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._signal = 0
        self._listened_at = self._looks_at = time.monotonic()
        self._write_again_at = 0.0
        self._records: TableFile | None = None
        with ExitStack() as stack:
            if settings.recovery:
                assert settings.recovery_path is not None
                self._records = TableFile(settings.recovery_path)
                stack.callback(self._records.close)
            self.table = self._open_table()
            self._listener = self._listen()
            stack.callback(self._listener.close)
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            self._stack = stack.pop_all()

    def _open_table(self) -> Table:
        settings, now = self._settings, time.monotonic()
        content = None if self._records is None else self._records.read()
        if content is not None and self._records is not None:
            try:
                table = Table.from_json(content, recovery=settings.recovery, limits=settings.limits, now=now)
            except ValueError as error:
                raise self._records.damaged(str(error)) from None
            if table.outcome is None:
                if table.size != settings.size:
                    raise UsageError(
                        f"MS_WORKER_NUM={settings.size}, but the job in {self._records.path} has {table.size} workers; "
                        "give that number, or another MS_RECOVERY_PATH for another job"
                    )
                logger.info(
                    "the cluster's table is recovered from %s: %d of %d places had a process, generation %d",
                    self._records.path,
                    len(table.living()),
                    table.size,
                    table.generation,
                )
                return table
        return Table(
            settings.size,
            job=secrets.token_hex(16),
            recovery=settings.recovery,
            limits=settings.limits,
            now=now,
        )

    def _listen(self) -> socket.socket:
        host, port = self._settings.host, self._settings.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(f"MS_SCHED_HOST={host} is not an address: {error}") from None
        problem: OSError | None = None
        for family, _, _, _, address in found:
            try:
                is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
                sock = socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=is_dual)
            except OSError as error:
                problem = error
                continue
            sock.setblocking(False)
            return sock
        raise UsageError(
            f"the scheduler cannot listen on MS_SCHED_HOST={host}, MS_SCHED_PORT={port}: "
            f"{problem.strerror if problem else 'no address'}; give an address of this machine and a free port"
        )

    # --- life ---

    def run(self) -> int:
        """Serve until the job is over; returns the exit code that tells how it has ended."""
        with self._stack, answered_by(self._note_signal, _SIGNALS):
            logger.info(
                "the scheduler waits on %s:%d for %d workers", self._settings.host, self._settings.port, self.table.size
            )
            while self.table.outcome is None and not self._signal:
                self._turn()
            return self._conclude()

    def _turn(self) -> None:
        """Wait a moment for events, and handle them."""
        events = self._selector.select(_TURN_S)
        now = time.monotonic()
        self.table.forgive(now - self._listened_at - _TURN_S)
        self._listened_at = now
        for key, _ in events:
            self._handle(key, now)
        is_time = now >= self._looks_at
        if is_time:  # not with each message: it costs as much as there are workers
            self._looks_at = now + _TURN_S
            self.table.tick(now)
        self._deliver()
        for connection in list(self._connections) if is_time else ():
            connection.line.flush()
            if connection.line.is_done or not (connection.incarnation or now < connection.opened_at + _HELLO_S):
                self._close(connection)

    def _conclude(self) -> int:
        """The job is over, or this process was told to end."""
        outcome = self.table.outcome
        if outcome is None:
            name = signal.Signals(self._signal).name
            if self._settings.recovery:
                logger.warning(
                    "%s: the scheduler ends, and the workers go on without it; start it again with the same variables "
                    "and MS_NODE_ID=sched",
                    name,
                )
                self._deliver()
                return exit_code_of_signal(self._signal)
            self.table.fail(f"the scheduler was ended by {name}")
            outcome = self.table.outcome
            assert outcome is not None
        if outcome.why:
            logger.error("the job has ended: %s", outcome.why)
        else:
            logger.info("the job has ended: all %d workers have finished", self.table.size)
        self._deliver()
        end = time.monotonic() + _FAREWELL_S
        self._turn()  # a worker may connect again, to say once more how it ends
        while (self.table.changed or self._connections) and time.monotonic() < end:
            self._turn()
        return exit_code_of_signal(self._signal) if self._signal else outcome.code

    def _note_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signum

    # --- events ---

    def _handle(self, key: selectors.SelectorKey, now: float) -> None:
        if isinstance(key.data, _Connection):
            if key.data in self._connections:
                self._serve(key.data, now)
        else:
            self._accept(now)

    def _accept(self, now: float) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= 2 * self.table.size + _MORE_CONNECTIONS:
            sock.close()
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(Line(sock, self._key, is_scheduler=True), str(address[0]), now)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection, now: float) -> None:
        try:
            for message in connection.line.receive():
                self._obey(connection, message, now)
        except OSError as error:
            if isinstance(error, WireError):
                logger.warning("a connection from %s is closed: %s", connection.peer, error)
            self._close(connection)
            self.table.lose(connection.incarnation, now)

    def _obey(self, connection: _Connection, message: messages.Message, now: float) -> None:
        """Raises WireError."""
        name = connection.incarnation
        match message:
            case Register() if not name:
                self._register(connection, message, now)
            case messages.Beat() | Farewell() if not self.table.hear(name, now):
                # It was taken for dead meanwhile, or is refused and has not heard of it yet.
                if not any(incarnation == name for incarnation, _ in self.table.outbox):
                    self._send(connection, messages.Dead("the scheduler holds this process for dead"))
            case messages.Beat():
                pass
            case Farewell():
                said = f"{message.how} ({message.why})" if message.why else message.how
                logger.info("%s leaves: %s", self.table.find(name), said)
                self.table.leave(name, message, now)
            case _:
                raise WireError("it asks for what is not known")

    def _register(self, connection: _Connection, who: Register, now: float) -> None:
        before, generation = self.table.find(who.incarnation), self.table.generation
        for other in [c for c in self._connections if c.incarnation == who.incarnation]:
            self._close(other)
        connection.incarnation = who.incarnation
        self.table.register(who, now)
        place = self.table.find(who.incarnation)
        if place is not None and before is None:
            logger.info("%s is there; %d of %d", place, len(self.table.living()), self.table.size)
        if self.table.group is not None and self.table.generation > generation:
            logger.info(
                "the group is formed: %d ranks, generation %d; its store is at %s:%d",
                self.table.size,
                self.table.generation,
                *self.table.group.store,
            )

    # --- telling ---

    def _deliver(self) -> None:
        """Write the table, then tell what is to be told: a process must know nothing that a scheduler which is started
        again does not know."""
        while self.table.notes:
            note = self.table.notes.pop(0)
            logger.warning("%s; %d of %d are there", note, len(self.table.living()), self.table.size)
        if self._write() and self.table.outbox:
            connections = {connection.incarnation: connection for connection in self._connections}
            while self.table.outbox:
                incarnation, message = self.table.outbox.pop(0)
                if (connection := connections.get(incarnation)) is not None:  # else when it connects again
                    self._send(connection, message)

    def _send(self, connection: _Connection, message: messages.Message) -> None:
        is_last = isinstance(message, messages.Refused | messages.Dead | messages.Noted)
        connection.line.send(message, is_last=is_last)

    def _close(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.line.socket)
            connection.line.socket.close()

    def _write(self) -> bool:
        """Whether all that has changed is on disk."""
        if not self.table.changed or self._records is None:
            self.table.changed = False
            return True
        now = time.monotonic()
        if now < self._write_again_at:
            return False
        try:
            self._records.write(self.table.to_json())
        except SaveError as error:
            logger.error(
                "%s. Nothing that has changed is told to the workers before it can be: none is admitted, no group is "
                "formed. The training goes on; it is tried again every %g s",
                error,
                _RETRY_WRITE_S,
            )
            self._write_again_at = now + _RETRY_WRITE_S
            return False
        self.table.changed, self._write_again_at = False, 0.0
        return True
