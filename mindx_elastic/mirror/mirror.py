"""Copies of checkpoint files on other nodes, so that the nodes' own disks suffice when some of them are lost.

A rank's file is copied to its partners (`partners`) once it is durable on its own disk: beside the training where that
goes on, within a part of the time that is left where it does not. A copy that fails is logged and never fails a save.
Without copies to make (one node, ``redundancy=1``) there is no thread and no port.
"""

from __future__ import annotations

import ipaddress
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.told import making_sense
from mindx_elastic.config import RankInfo, RedundancySettings
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import CheckpointError, UsageError
from mindx_elastic.mirror.partners import count_nodes, partners_of, sources_of
from mindx_elastic.mirror.server import Server
from mindx_elastic.mirror.wire import PATIENCE_S, Channel, Endpoint, Incoming, ask, header_digest, rank_of
from mindx_elastic.persist.format import open_checkpoint
from mindx_elastic.persist.storage import remove_stale_temps

__all__ = ["Mirror", "open_mirror"]

_START_TIMEOUT_S = 600.0
_FETCH_S = 1500.0  # less than the other ranks wait for this one at the start
_DRAIN_S = 600.0
_FIRST_ANSWER_S = 5.0
_FLUSH_S = 120.0
_KNOCK_S = 1.0
_QUIET_S = 5.0


def open_mirror(
    settings: RedundancySettings,
    ranks: RankInfo,
    roots: Sequence[Path],
    exchange: Exchange,
    events: EventLog,
    store_host: str = "",
    *,
    trust: Trust | None = None,
) -> Mirror | None:
    """Start to keep copies; None where there are none to make. Main thread, all ranks together.

    `roots`: the guard's directories, in the same order on every rank. `store_host`: where the job's store is; the
    server listens on the address from which that one is reached. `trust`: whose files may be given away. Raises
    UsageError when the ranks disagree.
    """
    if ranks.world_size == 1:
        if settings.copies > 1:
            logger.warning("redundancy=%d has no effect with one rank: there is no other node", settings.copies)
        return None
    own = {"node": settings.node_name(), "copies": settings.copies, "host": _own_host(store_host)}
    texts = exchange.gather("node", json.dumps(own), _START_TIMEOUT_S)
    with making_sense("the nodes of the ranks"):
        told = [json.loads(text) for text in texts]
        wanted = [int(content["copies"]) for content in told]
        nodes = [printable(content["node"], 400) for content in told]
        hosts = [str(content["host"]) for content in told]
    if len(set(wanted)) > 1:
        other = next(rank for rank, copies in enumerate(wanted) if copies != settings.copies)
        raise UsageError(
            f"redundancy={settings.copies} on rank {ranks.rank} and {wanted[other]} on rank {other}: give the same "
            "number to every rank (the argument redundancy, or MINDX_REDUNDANCY on every node)"
        )
    if settings.copies == 1:
        return None
    _say_what_is_possible(settings.copies, count_nodes(nodes), ranks)
    if count_nodes(nodes) == 1:
        return None
    host = _reachable_host(str(own["host"]), hosts)
    server = _listen(ranks, roots, sources_of(ranks.rank, nodes, settings.copies), host, exchange.derive, trust)
    try:
        texts = exchange.gather("mirror", "" if server is None else server.endpoint.encode(), _START_TIMEOUT_S)
        with making_sense("where the ranks keep copies"):
            told_endpoints = [Endpoint.decode(text) if text else None for text in texts]
    except BaseException:
        if server is not None:
            server.close()
        raise
    endpoints = [None if each is None else replace(each, token=exchange.derive(each.token)) for each in told_endpoints]
    return Mirror(ranks, roots, partners_of(ranks.rank, nodes, settings.copies), endpoints, server, events, trust)


def _say_what_is_possible(copies: int, num_nodes: int, ranks: RankInfo) -> None:
    if ranks.rank != 0:
        return
    if num_nodes == 1:
        logger.warning("redundancy=%d has no effect: all ranks live on one node", copies)
    elif num_nodes < copies:
        logger.warning("redundancy=%d, but there are %d nodes: each file lies on all of them", copies, num_nodes)
    else:
        logger.info("each rank's checkpoint files are kept on %d of %d nodes", copies, num_nodes)


def _listen(
    ranks: RankInfo,
    roots: Sequence[Path],
    sources: Sequence[int],
    host: str,
    derive: Callable[[str], str],
    trust: Trust | None,
) -> Server | None:
    for root in roots:
        for source in sources:
            if (folder := root / f"rank_{source}").is_dir():
                remove_stale_temps(folder)  # of a receiver that was killed
    try:
        return Server(ranks, roots, sources, host, derive=derive, trust=trust)
    except OSError as error:
        # The other ranks wait for an answer; they get one, and their copies fail with a warning.
        logger.warning("rank %d cannot listen on %s (%s): it keeps no copies", ranks.rank, host, error)
        return None


def _own_host(towards: str) -> str:
    """The address of this machine on the way to the host `towards`; no packet is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(towards or socket.gethostname(), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _reachable_host(own: str, hosts: Sequence[str]) -> str:
    """On the store's own machine its name may mean the loopback device; the way to another rank then tells."""
    others = [host for host in hosts if not _is_loopback(host)]
    return _own_host(others[0]) if _is_loopback(own) and others else own


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Mirror:
    """One per guard, and the `Transport` of a start. Its methods belong to the thread that saves (training, persist or
    watcher thread) unless said otherwise.

    """

    def __init__(
        self,
        ranks: RankInfo,
        roots: Sequence[Path],
        partners: Sequence[int],
        endpoints: Sequence[Endpoint | None],
        server: Server | None,
        events: EventLog,
        trust: Trust | None = None,
    ) -> None:
        self._trust = trust or Trust()
        self.partners = tuple(partners)
        """The ranks that keep this rank's copies."""
        self._ranks, self._roots, self._endpoints = ranks, tuple(roots), tuple(endpoints)
        self._server, self._events = server, events
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._busy = self._settled = self._closed = False
        self._thread: threading.Thread | None = None
        self._failing: set[int] = set()
        self._channels: set[Channel] = set()
        self._presence: list[Channel] = []
        for partner in self.partners:
            self._announce(partner)

    def _announce(self, partner: int) -> None:
        """Tell `partner` that files will come, for as long as the connection lasts."""
        try:
            channel = self._ask(partner, "here", deadline=time.monotonic() + 10.0)
            channel.answer()
        except OSError as error:
            self._fail(partner, error, "is not reached")
        else:
            self._presence.append(channel)

    # --- files to the partners ----------------------------------------------------------------------------------------

    def submit(self, path: Path, step: int) -> None:
        """Copy the durable file `path` to the partners, in the background."""
        if self.locate(path, self._ranks.rank) is not None:
            self._enqueue(lambda: self._copy_to_all(path, step, math.inf))

    def deliver(self, path: Path, step: int, time_left_s: float) -> None:
        """Copy `path` in this thread: it is the last file of this process, which must be gone in `time_left_s` seconds.

        A third of these goes into copying at most, and a third of the rest into waiting for the files of other ranks.
        """
        end = time.monotonic() + min(time_left_s, _DRAIN_S)
        try:
            if self.locate(path, self._ranks.rank) is not None:
                self._copy_to_all(path, step, time.monotonic() + (end - time.monotonic()) / 3)
        except Exception:  # the file itself is durable; nothing here may undo that
            logger.exception("copying to another node met an unexpected error")
        left = end - time.monotonic()
        self._settle(left / 3, quiet_s=left)

    def drop(self, path: Path, run_id: str) -> None:
        """Delete the copies of the periodic file `path`, which this rank has just deleted. In the background."""
        place = self.locate(path, self._ranks.rank)
        if place is not None:
            self._enqueue(lambda: self._drop(*place, run_id))

    def _copy_to_all(self, path: Path, step: int, deadline: float) -> None:
        for number, partner in enumerate(self.partners):
            share = (deadline - time.monotonic()) / (len(self.partners) - number)
            began = time.monotonic()
            more: dict[str, Any] = {"path": str(path), "partner": partner}
            try:
                nbytes, outcome = self._put(partner, path, began + share)
            except FileNotFoundError:
                return  # retention was faster
            except (OSError, CheckpointError) as error:
                if self._closed:
                    return
                self._fail(partner, error, f"has no copy of {path.name}")
                self._events.emit("mirror", step=step, outcome=f"failed: {error}", **more)
                continue
            self._failing.discard(partner)
            took = time.monotonic() - began
            self._events.emit("mirror", step=step, nbytes=nbytes, duration_s=took, outcome=outcome, **more)

    def _put(self, partner: int, path: Path, deadline: float) -> tuple[int, str]:
        place = self.locate(path, self._ranks.rank)
        assert place is not None
        with open_checkpoint(path, self._trust.of(path)) as (fd, header):
            size, digest = header.file_size, header_digest(fd, header)
            fields = {"root": place[0], "name": place[1], "size": size, "header": digest}
            with self._asked(partner, "put", deadline, **fields) as channel:
                channel.patience_s = _FIRST_ANSWER_S  # a partner that is frozen must not cost a dying process its time
                if channel.answer().get("have"):
                    return size, "was there"
                channel.patience_s = PATIENCE_S
                channel.send_file(fd, size)
                channel.patience_s = _FLUSH_S
                channel.answer()
                return size, "copied"

    def _drop(self, root: int, name: str, run_id: str) -> None:
        for partner in self.partners:
            try:
                with self._asked(partner, "drop", math.inf, root=root, name=name, run_id=run_id) as channel:
                    channel.answer()
            except OSError as error:
                logger.debug("rank %d has not deleted its copy of %s: %s", partner, name, error)

    def _fail(self, partner: int, error: Exception, what: str) -> None:
        """Log it, once until a copy succeeds again."""
        if partner in self._failing:
            return
        self._failing.add(partner)
        endpoint = self._endpoints[partner]
        where = "" if endpoint is None else f" at {endpoint.host}:{endpoint.port}"
        logger.warning("rank %d%s %s: %s; this rank's own files are not affected", partner, where, what, error)

    # --- files from the others ----------------------------------------------------------------------------------------

    def locate(self, path: Path, rank: int) -> tuple[int, str] | None:
        """Number of the directory and relative path of a file of `rank`; None for one that can have no copies."""
        for index, root in enumerate(self._roots):
            if path.is_relative_to(root):
                name = path.relative_to(root).as_posix()
                if rank_of(name) == rank:
                    return index, name
        return None

    def fetch(self, holder: int, root: int, name: str) -> Path:
        """Get a file of this rank from rank `holder`, to its own place. Raises OSError or CheckpointError.

        Main thread, at the start. The holder's server answers in a thread of its own.
        """
        if not 0 <= root < len(self._roots) or rank_of(name) != self._ranks.rank:
            raise OSError(f"{name!r} is no place for a file of rank {self._ranks.rank}")
        path = self._roots[root] / name
        with (
            self._asked(holder, "get", time.monotonic() + _FETCH_S, root=root, name=name) as channel,
            Incoming(path, channel.answer().get("size")) as incoming,
        ):
            incoming.receive(channel, rank=self._ranks.rank, world_size=self._ranks.world_size)
        return path

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self, timeout_s: float | None) -> None:
        """No more files will come; wait for what is still to be copied, from here and to here.

        `timeout_s`: when the process has to leave; None: it may take its time.
        """
        if self._settled:
            return
        end = time.monotonic() + (_DRAIN_S if timeout_s is None else timeout_s / 3)
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._busy, max(0.0, end - time.monotonic()))
        self._settle(max(0.0, end - time.monotonic()), quiet_s=_QUIET_S)

    def _settle(self, timeout_s: float, *, quiet_s: float) -> None:
        """The partners hear that nothing more comes from here; the files that still come here are waited for."""
        if self._settled:
            return
        self._settled = True
        for channel in self._presence:
            channel.close()
        if self._server is not None:
            deadline = time.monotonic() + timeout_s
            self._server.wait_for_sources(deadline, quiet_s=quiet_s, is_alive=self._is_alive)

    def _is_alive(self, rank: int) -> bool:
        try:
            with self._ask(rank, "knock", deadline=time.monotonic() + _KNOCK_S) as channel:
                channel.answer()
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Break off all copies under way. Main thread."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            for channel in self._channels:
                channel.abort()
            self._changed.notify_all()
        self._settle(0.0, quiet_s=0.0)
        if self._thread is not None:
            self._thread.join(5.0)
        if self._server is not None:
            self._server.close()

    # --- connections and the thread -----------------------------------------------------------------------------------

    def _ask(self, rank: int, op: str, *, deadline: float, **fields: Any) -> Channel:
        endpoint = self._endpoints[rank]
        if endpoint is None:
            raise ConnectionError("it has no server")
        return ask(endpoint, self._ranks.rank, op, deadline=deadline, **fields)

    @contextmanager
    def _asked(self, rank: int, op: str, deadline: float, **fields: Any) -> Iterator[Channel]:
        """The connection of a request, which `close` breaks off."""
        with self._ask(rank, op, deadline=deadline, **fields) as channel:
            with self._changed:
                self._channels.add(channel)
                closed = self._closed
            try:
                if closed:
                    raise ConnectionError("the guard is being left")
                yield channel
            finally:
                with self._changed:
                    self._channels.discard(channel)

    def _enqueue(self, job: Callable[[], None]) -> None:
        with self._changed:
            if self._closed or self._settled:
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mindx-mirror-send", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job, self._busy = self._jobs.popleft(), True
            try:
                job()
            except Exception:
                logger.exception("copying to another node met an unexpected error")
