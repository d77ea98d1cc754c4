"""Copies of checkpoint files on other nodes, so that the nodes' own disks suffice when some of them are lost.

A rank's file is copied to its partners (`partners`) once it is durable on its own disk: during the training where that
goes on, within a part of the time that is left where it does not. A copy that fails is logged and never fails a save.
Without copies to make (one node, ``redundancy=1``) there is no thread and no port.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import xxhash

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.config import RankInfo, RedundancySettings
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.fields import read
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.printable import printable
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.errors import CheckpointError, UsageError
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.mirror.nearby import Nearby, receive
from mindx_elastic.mirror.partners import all_partners
from mindx_elastic.mirror.server import Server
from mindx_elastic.mirror.wire import PATIENCE_S, Channel, Endpoint, ask, header_digest, incoming, rank_of
from mindx_elastic.persist.format import open_checkpoint
from mindx_elastic.persist.storage import remove_stale_temps

__all__ = ["EndpointsPart", "Mirror", "NodesPart"]

_FETCH_S = 1500.0  # less than the other ranks wait for this one at the start
_DRAIN_S = 600.0
_FIRST_ANSWER_S = 5.0
_FLUSH_S = 120.0
_QUIET_S = 5.0


class NodesPart(Part):
    """Which ranks are on which nodes, and so which ranks keep copies of whose files."""

    name = "nodes"

    def __init__(self, settings: RedundancySettings, ranks: RankInfo, store_host: str = "") -> None:
        """`store_host`: where the job's store is; copies are received on the address from which that one is reached."""
        self._settings, self._ranks = settings, ranks
        self._host = _own_host(store_host) if ranks.world_size > 1 and settings.copies > 1 else ""
        self._partners: list[int] = []
        self._sources: list[int] = []
        self._is_wanted = False

    def say(self) -> Any:
        return [self._settings.copies, self._settings.node_name(), self._host]

    def merge(self, said: Sequence[Any]) -> Merged:
        copies = [int(each[0]) for each in said]
        other = next((rank for rank, each in enumerate(copies) if each != copies[0]), None)
        if other is not None:
            raise UsageError(
                f"redundancy={copies[0]} on rank 0 and {copies[other]} on rank {other}: give the same number to every "
                "rank (the argument redundancy, or MINDX_REDUNDANCY on every node)"
            )
        nodes = [printable(each[1], 400) for each in said]
        if copies[0] == 1 or len(said) == 1:
            if copies[0] > 1:
                logger.warning("redundancy=%d has no effect with one rank: there is no other node", copies[0])
            return Merged(None)
        num_nodes = len(set(nodes))
        _say_what_is_possible(copies[0], num_nodes)
        if num_nodes == 1:
            return Merged(None)
        partners = all_partners(nodes, copies[0])
        sources: list[list[int]] = [[] for _ in nodes]
        for rank, kept_by in enumerate(partners):
            for partner in kept_by:
                sources[partner].append(rank)
        # On the store's own machine its name may mean the loopback device; the way to another rank then tells.
        outside = next((str(each[2]) for each in said if not _is_loopback(str(each[2]))), "")
        return Merged(outside, [list(pair) for pair in zip(partners, sources, strict=True)])

    def hear(self, answer: Answer) -> None:
        self._is_wanted = answer.common is not None
        if self._is_wanted:
            partners, sources = answer.own
            self._partners, self._sources = [int(each) for each in partners], [int(each) for each in sources]
            if _is_loopback(self._host) and answer.common:
                self._host = _own_host(str(answer.common))

    def open_mirror(
        self,
        roots: Sequence[Path],
        exchange: Exchange,
        events: EventLog,
        trust: Trust | None = None,
        arena: RankArena | None = None,
    ) -> Mirror | None:
        """None where there are no copies to make. Main thread, after the meeting.

        `roots`: the guard's directories, in the same order on every rank. `trust`: whose files may be given away.
        `arena`: this rank's; None: snapshots need no copies.
        """
        if not self._is_wanted:
            return None
        server = _listen(self._ranks, roots, self._sources, self._host, exchange.derive, trust, arena)
        endpoints = EndpointsPart(server, [*self._partners, *self._sources], exchange.derive)
        return Mirror(self._ranks, roots, self._partners, endpoints, server, events, trust, arena)


class EndpointsPart(Part):
    """Where the ranks' servers listen.

    A rank hears at the start where its partners and its sources are. To fetch a file it may ask for others, until the
    start is over (`close`): the store may be gone when a job dies.
    """

    name = "endpoints"

    def __init__(self, server: Server | None, neighbours: Sequence[int], derive: Callable[[str], str]) -> None:
        """`neighbours`: the partners and the sources of this rank."""
        self._server, self._neighbours, self._derive = server, list(dict.fromkeys(neighbours)), derive
        self._known: dict[int, Endpoint | None] = {}
        self._more: Callable[[Sequence[str]], list[Any]] | None = None

    def say(self) -> Any:
        return None if self._server is None else asdict(self._server.endpoint)

    def merge(self, said: Sequence[Any]) -> Merged:
        for each in said:
            if each is not None:
                read(Endpoint, each)
        return Merged(None, more={f"endpoint/{rank}": each for rank, each in enumerate(said)})

    def hear(self, answer: Answer) -> None:
        self._more = answer.more
        self._ask(self._neighbours)

    def _ask(self, ranks: Sequence[int]) -> None:
        assert self._more is not None
        for rank, said in zip(ranks, self._more([f"endpoint/{rank}" for rank in ranks]), strict=True):
            found = None if said is None else read(Endpoint, said)
            self._known[rank] = None if found is None else replace(found, token=self._derive(found.token))

    def __getitem__(self, rank: int) -> Endpoint | None:
        """Of another rank; None: it keeps and gives no files. Main thread while the start lasts, then any thread."""
        if rank not in self._known and self._more is not None:
            self._ask([rank])
        return self._known.get(rank)

    def close(self) -> None:
        """The start is over: do not ask the store any more. Main thread."""
        self._more = None


def _say_what_is_possible(copies: int, num_nodes: int) -> None:
    if num_nodes == 1:
        logger.warning("redundancy=%d has no effect: all ranks live on one node", copies)
    elif num_nodes < copies:
        logger.warning("redundancy=%d, but there are %d nodes: each file is on all of them", copies, num_nodes)
    else:
        logger.info("each rank's checkpoint files are kept on %d of %d nodes", copies, num_nodes)


def _listen(
    ranks: RankInfo,
    roots: Sequence[Path],
    sources: Sequence[int],
    host: str,
    derive: Callable[[str], str],
    trust: Trust | None,
    arena: RankArena | None,
) -> Server | None:
    for root in roots:
        for source in sources:
            if (folder := root / f"rank_{source}").is_dir():
                remove_stale_temps(folder)  # of a receiver that was killed
    try:
        return Server(ranks, roots, sources, host, derive=derive, trust=trust, arena=arena)
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Mirror:
    """One per guard, and the `Transport` of a start. Its methods belong to the thread that saves (training, persist or
    watcher thread) unless said otherwise."""

    def __init__(
        self,
        ranks: RankInfo,
        roots: Sequence[Path],
        partners: Sequence[int],
        endpoints: EndpointsPart,
        server: Server | None,
        events: EventLog,
        trust: Trust | None = None,
        arena: RankArena | None = None,
    ) -> None:
        self._trust, self._arena = trust or Trust(), arena
        self.partners = tuple(partners)
        """The ranks that keep this rank's copies."""
        self._ranks, self._roots, self.endpoints = ranks, tuple(roots), endpoints
        self._server, self._events = server, events
        self._sender = ReadyThread("mindx-mirror-send")
        self._settled = self._closed = False
        self._lock = threading.Lock()  # over `_channels`
        self._failing: set[int] = set()
        self._channels: set[Channel] = set()
        self._presence: list[Channel] = []
        self.nearby = None if arena is None else Nearby(arena, self.partners, self._request_keeping, self._warn)
        """Copies this rank's snapshots; None: they need no copies."""

    def greet(self) -> None:
        """Tell the partners that files will come. Main thread, when the ranks have told each other their endpoints."""
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
        if self._own_place(path) is not None:
            self._enqueue(lambda: self._copy_to_all(path, step, math.inf))

    def deliver(self, path: Path, step: int, time_left_s: float) -> None:
        """Copy `path` in this thread: it is the last file of this process, which must be gone in `time_left_s` seconds.

        A third of these goes into copying at most, and a third of the rest into waiting for the files of other ranks.
        """
        end = time.monotonic() + min(time_left_s, _DRAIN_S)
        if self._own_place(path) is not None:
            self._do(lambda: self._copy_to_all(path, step, time.monotonic() + (end - time.monotonic()) / 3))
        left = end - time.monotonic()
        self._settle(left / 3, quiet_s=left)

    def drop(self, path: Path, run_id: str) -> None:
        """Delete the copies of the periodic file `path`, which this rank has just deleted. In the background."""
        place = self._own_place(path)
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
        place = self._own_place(path)
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
        if partner not in self._failing:
            self._failing.add(partner)
            self._warn(partner, error, what)

    def _warn(self, partner: int, error: Exception, what: str) -> None:
        if self._closed:
            return  # what is under way is broken off
        endpoint = self.endpoints[partner]
        where = "" if endpoint is None else f" at {endpoint.host}:{endpoint.port}"
        logger.warning("rank %d%s %s: %s; this rank's own files are not affected", partner, where, what, error)

    @contextmanager
    def _request_keeping(self, partner: int, size: int, header: bytes) -> Iterator[Channel]:
        digest = xxhash.xxh3_128_hexdigest(header)
        with self._asked(partner, "keep", math.inf, size=size, head=len(header), header=digest) as channel:
            channel.patience_s = _FIRST_ANSWER_S
            yield channel

    # --- files from the others ----------------------------------------------------------------------------------------

    def _own_place(self, path: Path) -> tuple[int, str] | None:
        """`locate` for a file of this rank on its disk."""
        place = self.locate(path, self._ranks.rank)
        return place if place is not None and place[0] < len(self._roots) else None

    def locate(self, path: Path, rank: int) -> tuple[int, str] | None:
        """Number of the directory and relative path of a file of `rank`; None for one that can have no copies. The
        job's memory has the number behind those of the directories."""
        for index, root in enumerate((*self._roots, *([] if self._arena is None else [self._arena.job]))):
            if path.is_relative_to(root):
                name = path.relative_to(root).as_posix()
                if rank_of(name) == rank:
                    return index, name
        return None

    def fetch(self, holder: int, root: int, name: str) -> Path:
        """Get a file of this rank from rank `holder`, to its own place. Raises OSError or CheckpointError.

        Main thread, at the start. The holder's server answers in a separate thread.
        """
        rank = self._ranks.rank
        if root == len(self._roots) and self._arena is not None and rank_of(name) == rank:
            return self._fetch_snapshot(self._arena, holder, root, name)
        if not 0 <= root < len(self._roots) or rank_of(name) != rank:
            raise OSError(f"{name!r} is not a place for a file of rank {rank}")
        path = self._roots[root] / name
        with (
            self._asked(holder, "get", time.monotonic() + _FETCH_S, root=root, name=name) as channel,
            incoming(path, channel.answer().get("size"), rank=rank, world_size=self._ranks.world_size) as receive,
        ):
            receive(channel)
        return path

    def _fetch_snapshot(self, arena: RankArena, holder: int, root: int, name: str) -> Path:
        """Into the rank's own arena. Training has not begun: no other thread is at it."""
        ranks = self._ranks
        with self._asked(holder, "get", time.monotonic() + _FETCH_S, root=root, name=name) as channel:
            answer = channel.answer()
            size, head = answer.get("size"), answer.get("head")
            slot = arena.slots[receive(channel, arena, size, head, ranks.rank, ranks.world_size)]
        slot.close()  # a reader that finds damage takes the file away
        return slot.path

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self, timeout_s: float | None) -> None:
        """No more files will come; wait for what is still to be copied, from here and to here.

        `timeout_s`: when the process has to leave; None: it may take its time.
        """
        if self._settled:
            return
        end = time.monotonic() + (_DRAIN_S if timeout_s is None else timeout_s / 3)
        if self._sender.busy:
            with suppress(TimeoutError):
                self._sender.call(lambda: None, end - time.monotonic())
        self._settle(max(0.0, end - time.monotonic()), quiet_s=_QUIET_S)

    def _settle(self, timeout_s: float, *, quiet_s: float) -> None:
        """The partners hear that nothing more comes from here; the files that still come here are waited for."""
        if self._settled:
            return
        self._settled = True
        for channel in self._presence:
            channel.close()
        if self._server is not None:
            self._server.wait_for_sources(time.monotonic() + timeout_s, quiet_s=quiet_s)

    def close(self, *, keeps_memory: bool = True) -> None:
        """Break off all copies under way. `keeps_memory`: the next start may need the snapshots that are kept here.
        Main thread."""
        with self._lock:
            self._closed = True
            for channel in self._channels:
                channel.abort()
        self._settle(0.0, quiet_s=0.0)
        self._sender.close(5.0)
        if self.nearby is not None:
            self.nearby.close()
        if self._server is not None:
            self._server.close(keeps_memory=keeps_memory)

    # --- connections and the thread -----------------------------------------------------------------------------------

    def _ask(self, rank: int, op: str, *, deadline: float, **fields: Any) -> Channel:
        endpoint = self.endpoints[rank]
        if endpoint is None:
            raise ConnectionError("it has no server")
        return ask(endpoint, self._ranks.rank, op, deadline=deadline, **fields)

    @contextmanager
    def _asked(self, rank: int, op: str, deadline: float, **fields: Any) -> Iterator[Channel]:
        """The connection of a request, which `close` breaks off."""
        with self._ask(rank, op, deadline=deadline, **fields) as channel:
            with self._lock:
                self._channels.add(channel)
                closed = self._closed
            try:
                if closed:
                    raise ConnectionError("the guard is being left")
                yield channel
            finally:
                with self._lock:
                    self._channels.discard(channel)

    def _enqueue(self, work: Callable[[], None]) -> None:
        if not self._closed and not self._settled:
            self._sender.submit(lambda: self._do(work))

    def _do(self, work: Callable[[], None]) -> None:
        """The files themselves are durable: no error of `work` may undo that."""
        try:
            if not self._closed:
                work()
        except Exception:
            logger.exception("copying to another node met an unexpected error")
