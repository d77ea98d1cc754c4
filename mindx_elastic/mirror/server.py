"""Keeps copies of other ranks' files, and gives them back: one small server a rank.

Answers only requests with the rank's token. They can store, delete and read checkpoint files of the job, in the rank
folders of the guard's own directories, store snapshots in the job's memory and read them there, and nothing else.
"""

from __future__ import annotations

import hmac
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.fields import read
from mindx_elastic.core.owners import Trust
from mindx_elastic.errors import CheckpointError
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.mirror.nearby import Keeper
from mindx_elastic.mirror.wire import Channel, Endpoint, MirrorRequest, header_digest, incoming, rank_of
from mindx_elastic.persist.format import open_checkpoint, read_header

__all__ = ["Server"]

_FIRST_WORD_S = 10.0
_MAX_CONNECTIONS = 256  # the ranks of a node that has far more of them than ours, and their retries


class Server:
    """Listens from the moment it is made until `close`. `sources`: the ranks whose copies are kept here."""

    def __init__(
        self,
        ranks: RankInfo,
        roots: Sequence[Path],
        sources: Collection[int],
        host: str,
        *,
        patience_s: float = 20.0,
        derive: Callable[[str], str] = str,
        trust: Trust | None = None,
        arena: RankArena | None = None,
    ) -> None:
        """`derive` makes the token of what `endpoint` says. `trust`: whose files count; a stranger's is neither given
        away nor taken for a copy. `arena`: this rank's, beside which snapshots are kept; None: they are not.

        Raises OSError when `host` cannot be listened on.
        """
        self._trust = trust or Trust()
        self._ranks, self._disks, self._sources = ranks, tuple(roots), frozenset(sources)
        self._roots = (*self._disks, *([] if arena is None else [arena.job]))
        self._keeper = None if arena is None else Keeper(arena, ranks.world_size)
        self._patience_s = patience_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.endpoint = Endpoint(host, int(self._listener.getsockname()[1]), secrets.token_hex(16))
        self._token = derive(self.endpoint.token)
        self._changed = threading.Condition()
        self._channels: set[Channel] = set()
        self._present: dict[int, Channel] = {}
        self._receiving = 0
        self._last_received = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="mindx-mirror", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # no descriptor is free: it would fail at once again
                continue
            channel = Channel(sock, deadline=time.monotonic() + _FIRST_WORD_S, patience_s=self._patience_s)
            with self._changed:
                full = self._closed or len(self._channels) >= _MAX_CONNECTIONS
                if not full:
                    self._channels.add(channel)
            if full:
                channel.close()
                continue
            threading.Thread(target=self._serve, args=(channel,), name="mindx-mirror-peer", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        try:
            with channel:
                content = channel.receive()
                if not hmac.compare_digest(str(content.get("token")).encode(), self._token.encode()):
                    logger.debug("a connection without the right token is ended")
                    return
                channel.deadline = float("inf")  # its waits are bounded one by one
                try:
                    request = read(MirrorRequest, content)
                    answers = {"here": self._here, "put": self._put, "keep": self._keep, "get": self._get}
                    answers.get(request.op, self._drop)(channel, request)
                except (CheckpointError, OSError, ValueError) as error:
                    channel.send({"error": f"{type(error).__name__}: {error}"[:500]})
        except OSError as error:
            logger.debug("a connection has ended: %s", error)
        except Exception:
            logger.exception("a request of another rank met an unexpected error")
        finally:
            with self._changed:
                self._channels.discard(channel)
                self._changed.notify_all()

    def _here(self, channel: Channel, request: MirrorRequest) -> None:
        source = self._source(request)
        with self._changed:
            self._present[source] = channel
        channel.send({})
        channel.wait_for_end()
        with self._changed:
            if self._present.get(source) is channel:
                del self._present[source]
            self._changed.notify_all()

    def _put(self, channel: Channel, request: MirrorRequest) -> None:
        path, source = self._path(request, self._disks), self._source(request)
        if self._has(path, request):
            channel.send({"have": True})
            return
        with self._changed:
            self._receiving += 1
        try:
            with incoming(path, request.size, rank=source, world_size=self._ranks.world_size) as receive:
                channel.send({"send": True})
                receive(channel)
        finally:
            with self._changed:
                self._receiving -= 1
                self._last_received = time.monotonic()
                self._changed.notify_all()
        channel.send({})

    def _has(self, path: Path, request: MirrorRequest) -> bool:
        """The very same file is there: sent before, or written by its owner to a disk that the nodes share."""
        with suppress(OSError, CheckpointError), open_checkpoint(path, self._trust.of(path)) as (fd, header):
            return (header.file_size, header_digest(fd, header)) == (request.size, request.header)
        return False

    def _keep(self, channel: Channel, request: MirrorRequest) -> None:
        if self._keeper is None:
            raise OSError("it has no shared memory (MINDX_ARENA_DIR)")
        self._keeper.keep(channel, self._source(request), request.size, request.head, request.header)

    def _get(self, channel: Channel, request: MirrorRequest) -> None:
        path = self._path(request, self._roots)
        # The rank that fetches it writes it as its own file: a file of another user would become one of ours.
        with open_checkpoint(path, self._trust.of(path)) as (fd, header):
            channel.send({"size": header.file_size, "head": header.data_start})
            channel.send_file(fd, header.file_size)

    def _drop(self, channel: Channel, request: MirrorRequest) -> None:
        """Delete a copy of a periodic or final file of the same run, as its owner has done with its own."""
        path, source = self._path(request, self._disks), self._source(request)
        with suppress(FileNotFoundError):
            info = read_header(path).info
            kept = info.kind not in ("periodic", "final")
            if kept or (info.run_id, info.rank) != (request.run_id, source):
                raise OSError(f"{path.name} is not a periodic or final file of rank {source} and this run")
            path.unlink()
        channel.send({})

    def _path(self, request: MirrorRequest, roots: Sequence[Path]) -> Path:
        rank = rank_of(request.name)
        if rank is None or rank >= self._ranks.world_size:
            raise OSError(f"{request.name!r} is not a place for a checkpoint file")
        if not 0 <= request.root < len(roots):
            raise OSError(f"there is no directory {request.root}")
        return roots[request.root] / request.name

    def _source(self, request: MirrorRequest) -> int:
        """The rank that asks. Its files must be kept here, and a path must be its own."""
        if request.rank not in self._sources:
            raise OSError(f"rank {request.rank} has its copies elsewhere")
        if request.name and rank_of(request.name) != request.rank:
            raise OSError(f"{request.name!r} is not a file of rank {request.rank}")
        return request.rank

    def wait_for_sources(self, deadline: float, *, quiet_s: float) -> None:
        """Wait until no source has anything more to send; at most until `deadline`, and not when nothing has come in
        for `quiet_s`."""
        began = time.monotonic()
        with self._changed:
            while not self._is_idle():
                quiet_at = math.inf if self._receiving else max(began, self._last_received) + quiet_s
                left = min(deadline, quiet_at) - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _is_idle(self) -> bool:
        return not self._present and not self._receiving

    def close(self, *, keeps_memory: bool = True) -> None:
        """Break off all transfers, and end all threads. `keeps_memory`: the next start may need the snapshots."""
        with self._changed:
            self._closed = True
            for channel in self._channels:
                channel.abort()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`; a forked child may hold the socket too
        self._listener.close()
        self._thread.join(5.0)
        with self._changed:
            has_ended = self._changed.wait_for(lambda: not self._channels, 5.0)
        if self._keeper is not None and has_ended:
            self._keeper.close(keep=keeps_memory)
