"""Serves a table over the network: `TableServer`; and the process of a dynamic cluster that does nothing else, its
`Scheduler`.

One thread and one selector. Each event goes to the table (pure); what has changed is written to disk where it is to be,
and only then told. The members' own traffic does not pass here: the ranks' collectives go over their own connections,
and the store of their process group is hosted by one of them. So a scheduler that is killed costs the training nothing;
one that is started again reads its table, and the workers connect to it by themselves.

The table is one small JSON file in the folder that MS_RECOVERY_PATH names, replaced whole (`TableFile`). A scheduler
locks ``scheduler.lock`` next to it while it runs, so that two on one disk cannot serve one job. A file of another user
does not count (`core.owners`): with it that user could give a rank to a process of his own.

A death is seen when the member's connection has ended and it does not connect again within `Limits.reconnect_s`, else
when its heartbeat runs out. A stopped process is not dead until then.
"""

from __future__ import annotations

import json
import logging
import secrets
import selectors
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mindx_elastic.alarm.exit_codes import exit_code_of_signal
from mindx_elastic.cluster import messages
from mindx_elastic.cluster.table import Limits, Table
from mindx_elastic.cluster.wire import Line, WireError
from mindx_elastic.config import ClusterSettings, RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.owners import open_trusted
from mindx_elastic.core.posix import answered_by
from mindx_elastic.errors import MindxError, SaveError, UsageError
from mindx_elastic.persist.directory_lock import hold_directory
from mindx_elastic.persist.storage import prepare_owned_directory, remove_stale_temps
from mindx_elastic.platforms.small_files import write_whole

__all__ = ["TABLE_FILE", "Connection", "Scheduler", "TableFile", "TableServer", "is_own_address", "listen"]

TABLE_FILE = "scheduler.json"
_LOCK_FILE = "scheduler.lock"
_MAX_BYTES = 64 << 20
_PASSIVE = socket.AI_PASSIVE
_TURN_S = 0.2
_HELLO_S = 5.0  # for a new connection to say what it is
_FAREWELL_S = 45.0  # for the workers to save and leave a job that is over; their own grace period is 30 s
_MORE_CONNECTIONS = 64
_RETRY_WRITE_S = 5.0
_WARN_AGAIN_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(eq=False)
class Connection:
    line: Line
    peer: str
    """Its address, as this machine sees it."""
    opened_at: float
    incarnation: str = ""
    """Of the process that has registered; empty: none yet."""


def listen(host: str, port: int) -> socket.socket:
    """A socket for connections to an address of this machine, an empty one being all. Raises OSError."""
    problem: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=_PASSIVE):
        try:
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            sock = socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=is_dual)
        except OSError as error:
            problem = error
            continue
        sock.setblocking(False)
        return sock
    raise problem or OSError("no address")


def is_own_address(host: str) -> bool:
    """Whether it is one of this machine. Its own name is, also where the name service does not know it yet."""
    if f"{socket.getfqdn()}.".startswith(f"{host}."):
        return True
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.bind(address)
                return True
    return False


class TableServer:
    """One selector over all connections. One thread."""

    def __init__(
        self, table: Table, listener: socket.socket, key: bytes | None, records: TableFile | None = None
    ) -> None:
        """It owns the listener. `records`: where the table is written to."""
        self.table, self._listener, self._key, self._records = table, listener, key, records
        self._write_again_at = self._warn_again_at = 0.0
        self._level = logging.DEBUG if table.of_agents else logging.INFO
        self.connections: dict[Connection, None] = {}
        """A set in the order in which they came: what is simulated goes the same way again."""
        self._members: dict[str, Connection] = {}
        """Those that have registered, by incarnation."""
        self._listened_at = self._looks_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def turn(self) -> None:
        """Wait a moment for events, and handle them."""
        events = self._selector.select(_TURN_S)
        now = time.monotonic()
        self.table.forgive(now - self._listened_at - _TURN_S)
        self._listened_at = now
        for key, _ in events:
            if not isinstance(key.data, Connection):
                self._accept(now)
            elif key.data in self.connections:
                self._serve(key.data, now)
        is_time = now >= self._looks_at
        if is_time:  # not with each message: it costs as much as there are members
            self._looks_at = now + _TURN_S
            self.table.tick(now)
        self.deliver()
        for connection in list(self.connections) if is_time else ():
            connection.line.flush()
            if connection.line.is_done or not (connection.incarnation or now < connection.opened_at + _HELLO_S):
                self.close_connection(connection)

    def _accept(self, now: float) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return
        if len(self.connections) >= 2 * self.table.size + _MORE_CONNECTIONS:
            sock.close()
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(Line(sock, self._key, is_scheduler=True), str(address[0]), now)
        self.connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: Connection, now: float) -> None:
        try:
            for message in connection.line.receive():
                self._obey(connection, message, now)
        except OSError as error:
            if isinstance(error, WireError) and now >= self._warn_again_at:
                self._warn_again_at = now + _WARN_AGAIN_S  # it connects again and again
                logger.warning("a connection from %s is closed: %s", connection.peer, error)
            self.close_connection(connection)
            self.table.lose(connection.incarnation, now)

    def _obey(self, connection: Connection, message: messages.Message, now: float) -> None:
        """What a member says. Raises WireError."""
        name = connection.incarnation
        match message:
            case messages.Register():
                self._register(connection, message, now)
            case messages.Beat() | messages.Farewell() if name and not self.table.hear(name, now):
                # It was taken for dead meanwhile, or is refused and has not heard of it yet.
                if not any(incarnation == name for incarnation, _ in self.table.outbox):
                    self.table.outbox.append((name, messages.Dead("this process is held for dead")))
            case messages.Beat() if name:
                self.deliver()  # who is answered has heard all that was said before
                self.send(connection, messages.Beat(slow=self.table.slow(name, message.paces, now)))
            case messages.Farewell() if name:
                said = f"{message.how} ({message.why})" if message.why else message.how
                logger.log(self._level, "%s leaves: %s", self.table.find(name), said)
                self.table.leave(name, message, now)
            case _:
                raise WireError("it asks for what is not known")

    def _register(self, connection: Connection, who: messages.Register, now: float) -> None:
        before, generation = self.table.find(who.incarnation), self.table.generation
        other = self._members.get(who.incarnation)
        if other is not None and other is not connection:
            self.close_connection(other)
        self._members.pop(connection.incarnation, None)
        connection.incarnation = who.incarnation
        self._members[who.incarnation] = connection
        self.table.register(who, now)
        place = self.table.find(who.incarnation)
        if place is not None and before is None:
            logger.log(self._level, "%s is there; %d of %d", place, self.table.places.num_living, self.table.size)
        if self.table.group is not None and self.table.generation > generation:
            logger.log(
                self._level,
                "the group is formed: %d ranks, generation %d; its store is at %s:%d",
                self.table.size,
                self.table.generation,
                *self.table.group.store,
            )

    def deliver(self) -> None:
        """Write the table, then tell what is to be told: a member must know nothing that a server which is started
        again does not know."""
        table = self.table
        while table.notes:
            logger.warning("%s; %d of %d are there", table.notes.pop(0), table.places.num_living, table.size)
        if self._write() and table.outbox:
            outbox, table.outbox = table.outbox, []
            for incarnation, message in outbox:
                if (connection := self._members.get(incarnation)) is not None:  # else when it connects again
                    self.send(connection, message)

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

    def send(self, connection: Connection, message: messages.Message) -> None:
        is_last = isinstance(message, messages.Refused | messages.Dead | messages.Noted)
        connection.line.send(message, is_last=is_last)

    def close_connection(self, connection: Connection) -> None:
        if connection in self.connections:
            del self.connections[connection]
            if self._members.get(connection.incarnation) is connection:
                del self._members[connection.incarnation]
            self._selector.unregister(connection.line.socket)
            connection.line.socket.close()

    def close_all(self) -> None:
        for connection in list(self.connections):
            self.close_connection(connection)
        self._selector.close()
        self._listener.close()


class TableFile:
    """Of one scheduler. One thread."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, and lock it. Raises UsageError where another scheduler runs in it, or it cannot be used."""
        try:
            self.folder, self._owners = prepare_owned_directory(folder, allow_shared=False)
            self._lock = hold_directory(
                self.folder, RankInfo(), self._owners, grace_s=0.0, file=_LOCK_FILE, other="another scheduler"
            )
        except (MindxError, OSError) as error:
            raise UsageError(f"environment variable MS_RECOVERY_PATH: {error}") from error
        self.path = self.folder / TABLE_FILE
        remove_stale_temps(self.folder)

    def read(self) -> dict[str, Any] | None:
        """The table that was written last; None: there is none. Raises UsageError for a file that does not count."""
        try:
            with open(open_trusted(self.path, self._owners), "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except (MindxError, OSError) as error:
            raise UsageError(f"{self.path}: the scheduler's table cannot be read: {error}") from error
        try:
            content = json.loads(data) if len(data) <= _MAX_BYTES else None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise self.damaged("no JSON object")
        return content

    def damaged(self, why: str) -> UsageError:
        """The error for a table that makes no sense."""
        return UsageError(
            f"{self.path}: not the table of a scheduler ({why}). Move it away to form the cluster again, when the "
            "workers of the old one have ended (kill -TERM: they save); checkpoints are not touched by that"
        )

    def write(self, content: dict[str, Any]) -> None:
        """Replace the table. Raises SaveError."""
        write_whole(self.path, json.dumps(content, indent=1).encode())

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


class Scheduler(TableServer):
    """One per process. Main thread."""

    def __init__(self, settings: ClusterSettings, key: bytes | None) -> None:
        """Listen, and read the table of a predecessor. Raises UsageError."""
        self._settings, self._signal = settings, 0
        with ExitStack() as stack:
            records = None
            if settings.recovery:
                assert settings.recovery_path is not None
                records = TableFile(settings.recovery_path)
                stack.callback(records.close)
            table = _open_table(settings, records)
            listener = self._listen()
            stack.callback(listener.close)
            super().__init__(table, listener, key, records)
            self._stack = stack.pop_all()

    def _listen(self) -> socket.socket:
        host, port = self._settings.host, self._settings.port
        try:
            return listen(host, port)
        except socket.gaierror as error:
            raise UsageError(f"MS_SCHED_HOST={host} is not an address: {error}") from None
        except OSError as error:
            raise UsageError(
                f"the scheduler cannot listen on MS_SCHED_HOST={host}, MS_SCHED_PORT={port}: "
                f"{error.strerror or error}; give an address of this machine and a free port"
            ) from None

    # --- life ---

    def run(self) -> int:
        """Serve until the job is over; returns the exit code that tells how it has ended."""
        with self._stack, answered_by(self._note_signal, _SIGNALS):
            logger.info(
                "the scheduler waits on %s:%d for %d workers", self._settings.host, self._settings.port, self.table.size
            )
            while self.table.outcome is None and not self._signal:
                self.turn()
            return self._conclude()

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
                self.deliver()
                return exit_code_of_signal(self._signal)
            self.table.fail(f"the scheduler was ended by {name}")
            outcome = self.table.outcome
            assert outcome is not None
        if outcome.why:
            logger.error("the job has ended: %s", outcome.why)
        else:
            logger.info("the job has ended: all %d workers have finished", self.table.size)
        self.deliver()
        end = time.monotonic() + _FAREWELL_S
        self.turn()  # a worker may connect again, to say once more how it ends
        while (self.table.changed or self.connections) and time.monotonic() < end:
            self.turn()
        return exit_code_of_signal(self._signal) if self._signal else outcome.code

    def _note_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signum


def _open_table(settings: ClusterSettings, records: TableFile | None) -> Table:
    """A new one, or a predecessor's. Raises UsageError."""
    limits = Limits(heartbeat_s=settings.heartbeat_s, formation_s=settings.formation_s)
    now = time.monotonic()
    content = None if records is None else records.read()
    if content is not None and records is not None:
        try:
            table = Table.from_json(content, recovery=settings.recovery, limits=limits, now=now)
        except ValueError as error:
            raise records.damaged(str(error)) from None
        if table.outcome is None:
            if table.size != settings.size:
                raise UsageError(
                    f"MS_WORKER_NUM={settings.size}, but the job in {records.path} has {table.size} workers; give that "
                    "number, or another MS_RECOVERY_PATH for another job"
                )
            logger.info(
                "the cluster's table is recovered from %s: %d of %d places had a process, generation %d",
                records.path,
                table.places.num_living,
                table.size,
                table.generation,
            )
            return table
    return Table(settings.size, job=secrets.token_hex(16), recovery=settings.recovery, limits=limits, now=now)
