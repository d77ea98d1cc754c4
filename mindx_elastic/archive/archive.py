"""Uploads this rank's checkpoint files behind the training, and fetches files of all ranks at a start.

An archive is a folder of any file system that fsspec knows. No rank waits for another one: each uploads its own files,
and the planner finds out of which steps all parts are there, as it does on disk (`names`: the objects). The training
never waits for it, and what goes wrong is told once and fails no save.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.archive.names import MARKER, ArchivedName, folder_of, run_folder
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.core.ready_thread import ReadyThread, ThreadTask
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, UsageError
from mindx_elastic.persist.catalog import CatalogEntry, looks_ours
from mindx_elastic.persist.format import CheckpointInfo, Header, header_of, open_checkpoint, read_header
from mindx_elastic.persist.writer import copied_file
from mindx_elastic.start.findings import ArchivedFile

__all__ = ["Archive", "ArchivePart"]

_T = TypeVar("_T")
_ANSWER_S = 60.0
"""Longest wait of a start for one answer."""
_DRAIN_S = 600.0
_PAUSES_S = (1.0, 4.0)
_TOO_LATE = "retention was faster"
_PIECE_BYTES = 16 << 20
_NUM_READERS = 4
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci"}
"""They have no folders that must be made."""
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"max_concurrency": 2}, "s3a": {"max_concurrency": 2}}
"""Else each upload of a rank takes ten pieces of 50 MB of memory."""


class ArchivePart(Part):
    """All ranks use one archive, and know a number that no other start has: files of two jobs that both go on from one
    step, a zombie and its successor, are never put together."""

    name = "archive"

    def __init__(self, url: str) -> None:
        self._url = url
        self.writers = 0

    def say(self) -> Any:
        return self._url

    def merge(self, said: Sequence[Any]) -> Merged:
        for rank, url in enumerate(said):
            if url != self._url:
                raise UsageError(
                    f"archive={self._url!r} on rank 0 and {printable(url, 100)!r} on rank {rank}: give the same to "
                    "every rank (the argument archive, or MINDX_ARCHIVE on every node)"
                )
        return Merged(secrets.randbits(60) | 1)

    def hear(self, answer: Answer) -> None:
        self.writers = int(answer.common)


class _BrokenOffError(Exception):
    pass


class Archive:
    """One per guard. `submit`, `deliver`, `drop` and `finish` belong to the thread that saves, `look` and `fetch` to
    the main thread at the start."""

    def __init__(
        self,
        url: str,
        ranks: RankInfo,
        roots: Sequence[Path],
        events: EventLog | None = None,
        trust: Trust | None = None,
    ) -> None:
        """Raises UsageError for a URL that no installed library serves."""
        _check(url)
        self.url, self._ranks, self._roots = url, ranks, tuple(roots)
        self._events, self._trust = events, trust or Trust()
        self.part = ArchivePart(url)
        self._sender = ReadyThread("mindx-archive")
        self._readers = [ReadyThread(f"mindx-archive-read-{number}") for number in range(_NUM_READERS)]
        self._fs: Any = None
        self._base = ""
        self._unread = False
        self._hurried = self._is_slow = self._is_settled = False
        self._failing: set[bool] = set()
        """Whether uploads (True), deletions (False) fail."""
        self._closed = threading.Event()
        self._newest = -1
        self._left: dict[Path, int] = {}
        """What of the newest step is still to be uploaded."""
        self._stride = 1
        """One of as many steps is uploaded: 1, 2, 4... Whoever has a larger one leaves out what others upload, and has
        nothing that they leave out: so there are steps of all ranks, whatever the speed of each."""
        self._waiting: set[int] = set()
        """Steps to upload whose turn has not come."""
        self._due, self._due_at, self._took_s = -1, 0.0, 0.0
        """The newest step to upload, when it came, and how long the last upload took."""
        self._doomed: dict[tuple[Moment, str], None] = {}
        """What may go once the archive has a newer step of all ranks."""

    # --- files to the archive -----------------------------------------------------------------------------------------

    def submit(self, path: Path, step: int) -> ThreadTask[None] | None:
        """Upload the durable file `path`, in the background."""
        if self._unread or self._closed.is_set() or self._place(path) is None:
            return None
        if step > self._newest:
            self._left.clear()
        self._newest = max(self._newest, step)
        if step == self._newest:
            self._left[path] = step
        self._keep_up(step)
        return self._sender.submit(lambda: self._upload(path, step))

    def _is_chosen(self, step: int) -> bool:
        """Whether it is one of those to upload: by its number alone, so that all ranks choose alike."""
        return xxhash.xxh3_64_intdigest(str(step).encode()) % self._stride == 0

    def _keep_up(self, step: int) -> None:
        """A file of `step` is to be uploaded: leave out more steps where uploads are slower than the saves, and fewer
        where they would be twice as fast."""
        if not self._is_chosen(step):
            return
        now = time.monotonic()
        if self._waiting - {step}:
            if True not in self._failing:
                self._stride *= 2
                if not self._is_slow:
                    self._is_slow = True
                    logger.warning(
                        "%s: uploads take longer than the time between two saves. Steps are left out, the same on all "
                        "ranks, but for the last one; save less often to have all",
                        self.url,
                    )
        elif step > self._due and self._stride > 1 and 4 * self._took_s < now - self._due_at:
            self._stride //= 2
        if step > self._due:
            self._due, self._due_at = step, now
        self._waiting.add(step)

    def deliver(self, path: Path, step: int, time_left_s: float) -> None:
        """Upload `path`, the last file of this process, before all that waits; half of the time may go into it here.
        What is under way then goes on until `finish`."""
        self._hurried = True
        task = self.submit(path, step)
        if task is not None:
            task.done.wait(max(0.0, min(time_left_s / 2, _DRAIN_S)))

    def drop(self, moment: Moment, digest: str) -> None:
        """This rank has deleted that file of its own from the disk: delete it here as well, in the background, as soon
        as a newer step of all ranks is here."""
        if not (self._unread or self._closed.is_set()):
            self._doomed[moment, digest] = None
            self._sender.submit(lambda: self._guarded(self._prune, "old files are not deleted", uploads=False))

    def finish(self, timeout_s: float | None) -> None:
        """No more files will come: wait for those under way. `timeout_s`: until the process has to be gone; None: it
        may take its time."""
        if self._is_settled:
            return
        self._is_settled, self._hurried = True, self._hurried or timeout_s is not None
        left_s = _DRAIN_S if timeout_s is None else timeout_s - max(1.0, timeout_s / 10)
        if self._left and left_s > 0:
            self._sender.submit(self._upload_rest).done.wait(left_s)
        if self._left:
            logger.warning(
                "step %d of rank %d is not in %s: %s. It is on this machine's disk; a start here goes on from it and "
                "uploads it, a start elsewhere has an older step",
                *(self._newest, self._ranks.rank, self.url),
                "it could not be uploaded" if True in self._failing else "the time was up",
            )

    def close(self) -> None:
        """Break off what is under way. Main thread."""
        self._closed.set()
        for thread in (self._sender, *self._readers):
            thread.close(0.5)

    def _upload_rest(self) -> None:
        """The newest step may have been left out, or have failed."""
        self._hurried = True
        for path, step in list(self._left.items()):
            self._upload(path, step)

    def _upload(self, path: Path, step: int) -> None:
        self._waiting.discard(step)
        if step < self._newest if self._hurried else not self._is_chosen(step):
            return
        began = time.monotonic()
        failed: list[Exception] = []
        was_failing = True in self._failing
        outcome = self._guarded(
            lambda: self._tried(lambda: self._put(path, failed), PermissionError), f"step {step} is not there"
        )
        if outcome is None:
            return
        self._left.pop(path, None)
        if outcome[1] == _TOO_LATE and was_failing:
            self._failing.add(True)  # that was told, and nothing was uploaded
        self._took_s = time.monotonic() - began
        if self._events is not None and not self._closed.is_set():
            nbytes, text = outcome
            took = self._took_s
            self._events.emit("archive", step=step, nbytes=nbytes, duration_s=took, outcome=text, path=str(path))
        self._guarded(self._prune, "old files are not deleted", uploads=False)

    def _guarded(self, work: Callable[[], _T], what: str, *, uploads: bool = True) -> _T | None:
        """Tell what goes wrong, once until it works again; the disk has all files."""
        try:
            done = work()
        except _BrokenOffError:
            return None
        except Exception as error:  # each library has its own
            if not (uploads in self._failing or self._closed.is_set()):
                logger.warning(
                    "%s: %s (%s). The files on disk are not affected, and later steps are tried again; look at network "
                    "and credentials",
                    *(self.url, what, _words(error)),
                )
            self._failing.add(uploads)
            return None
        self._failing.discard(uploads)
        return done

    def _tried(self, work: Callable[[], _T], final: type[Exception]) -> _T:
        """Again after a pause where it fails. `final`: what no pause mends."""
        for pause_s in _PAUSES_S:
            try:
                return work()
            except (_BrokenOffError, final):
                raise
            except Exception as error:
                logger.debug("%s: %s", self.url, error)
                if self._hurried:
                    break
                if self._closed.wait(pause_s):
                    raise
        return work()

    def _put(self, path: Path, failed: list[Exception]) -> tuple[int, str]:
        """`failed`: why the last try came to nothing."""
        place = self._place(path)
        assert place is not None
        try:
            with open_checkpoint(path, self._trust.of(path)) as (fd, header):
                try:
                    return self._put_file(fd, header, place)
                except Exception as error:
                    failed[:] = [error]
                    raise
        except FileNotFoundError:
            if failed:  # it is deleted by now, but that is not why it is not there
                raise failed[0] from None
            if not os.path.exists(path):
                return 0, _TOO_LATE
            raise

    def _put_file(self, fd: int, header: Header, place: tuple[int, str]) -> tuple[int, str]:
        info, (root, file) = header.info, place
        if info.rank != self._ranks.rank and info.world_size == self._ranks.world_size:
            return 0, "another rank's"
        size, fs = header.file_size, self._opened()
        there = [name for name in self._finished(folder_of(info.moment)) if name.digest == header.digest]
        if any(name.rank == info.rank for name in there):
            return size, "was there"
        name = ArchivedName(
            *(info.run_id, info.attempt, info.step, self.part.writers, info.rank, info.world_size, root),
            *(header.digest, file),
        )
        target = posixpath.join(self._base, name.path)
        if not _OBJECT_STORES.intersection([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol):
            fs.makedirs(posixpath.dirname(target), exist_ok=True)
        # The descriptor: the file's name may get another file meanwhile.
        fs.put_file(f"/proc/self/fd/{fd}", target, callback=_callback(lambda: self._look_up(info.step)))
        fs.invalidate_cache()
        found = fs.size(target)
        if found != size:
            raise OSError(f"{found} bytes have arrived of {size}")
        fs.pipe_file(target + MARKER, os.pread(fd, header.data_start, 0))
        return size, "uploaded"

    def _look_up(self, step: int) -> None:
        if self._closed.is_set() or (self._hurried and step < self._newest):
            raise _BrokenOffError

    def _prune(self) -> None:
        for moment, digest in list(self._doomed):
            names = self._finished(run_folder(moment[0]))
            groups: dict[tuple[Moment, int], set[tuple[int, int]]] = {}
            for each in names:
                groups.setdefault((each.moment, each.writers), set()).add((each.rank, each.world_size))
            whole = [m for (m, _), ranks in groups.items() if len(ranks) == max(size for _, size in ranks)]
            if not any(each > moment for each in whole):
                continue
            for name in names:
                if (name.moment, name.digest, name.rank) == (moment, digest, self._ranks.rank):
                    target = posixpath.join(self._base, name.path)
                    self._fs.rm_file(target + MARKER)  # first: from here on it does not count
                    self._fs.rm(posixpath.join(self._base, name.folder), recursive=True)
            del self._doomed[moment, digest]

    def _place(self, path: Path) -> tuple[int, str] | None:
        for index, root in enumerate(self._roots):
            if path.is_relative_to(root):
                return index, path.relative_to(root).as_posix()
        return None

    # --- files from the archive ---------------------------------------------------------------------------------------

    def look(self) -> list[ArchivedFile]:
        """The files of this rank's share, by their headers, at the places where `fetch` puts them. Raises OSError."""
        rank, size = self._ranks.rank, self._ranks.world_size

        def is_mine(name: ArchivedName) -> bool:
            return xxhash.xxh3_64_intdigest(name.path.encode()) % size == rank

        def header_of_file(name: ArchivedName) -> bytes | None:
            try:
                return self._getter(posixpath.join(self._base, name.path) + MARKER)()
            except FileNotFoundError:
                return None  # a job that is about to end has deleted it since

        try:
            names = [name for name in self._asked(lambda: self._finished("", tells=rank == 0)) if is_mine(name)]
            raw = zip(names, self._read([partial(header_of_file, name) for name in names]), strict=True)
            return [found for name, text in raw if text is not None and (found := self._judged(name, text))]
        except Exception as error:
            raise OSError(
                f"the archive {self.url} cannot be read ({_words(error)}), so it is not known which steps it has"
            ) from error

    def leave(self) -> None:
        """Upload nothing: some rank could not read what is there."""
        self._unread = True

    def _judged(self, name: ArchivedName, raw: bytes) -> ArchivedFile | None:
        if name.root >= len(self._roots):
            return None
        path, address = self._roots[name.root] / name.file, f"{self.url.rstrip('/')}/{name.path}"
        try:
            header = header_of(raw, path)
            info = header.info
            if (info.moment, info.rank, header.digest) != (name.moment, name.rank, name.digest):
                raise CorruptCheckpointError("its name is another file's")
        except CheckpointError as error:
            logger.warning("%s does not count: its header is damaged (%s)", address, error)
            return None
        entry = CatalogEntry(path, header, None, False, looks_ours(path), header.file_size, info.created)
        return ArchivedFile(address, entry)

    def fetch(self, address: str, path: Path) -> bool:
        """Get the file of which `look` has told this address, to `path`, whole; False: it is there. Raises OSError or
        CheckpointError."""
        prefix = f"{self.url.rstrip('/')}/"
        name = ArchivedName.parse(address.removeprefix(prefix)) if address.startswith(prefix) else None
        if name is None or not path.as_posix().endswith(f"/{name.file}"):
            raise OSError(f"{address} is not in the archive {self.url}")
        if path.is_file():
            with suppress(CheckpointError):  # `copied_file` puts it aside
                if read_header(path, self._trust.of(path)).digest == name.digest:
                    return False
        target = posixpath.join(self._base, name.path)

        def look(temp: Path) -> CheckpointInfo:
            header = read_header(temp)
            if header.digest != name.digest:
                raise CorruptCheckpointError(f"{address} has another content than its name says", path=path)
            return header.info

        try:
            size = int(self._asked(lambda: self._fs.size(target)))
            with copied_file(path, size, look) as blocks:
                starts = range(0, size, _PIECE_BYTES)
                for piece in self._read([self._getter(target, at, min(size, at + _PIECE_BYTES)) for at in starts]):
                    blocks.put(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        except CheckpointError as error:
            raise CorruptCheckpointError(f"{address} is damaged: {error}", path=path) from error
        except Exception as error:
            raise OSError(f"{address} cannot be fetched ({_words(error)})") from error
        return True

    def _getter(self, path: str, start: int | None = None, end: int | None = None) -> Callable[[], bytes]:
        def get() -> bytes:
            data: bytes = self._tried(lambda: self._fs.cat_file(path, start=start, end=end), FileNotFoundError)
            if start is not None and end is not None and len(data) != end - start:
                raise OSError(f"{len(data)} bytes instead of {end - start}")
            return data

        return get

    def _read(self, getters: Sequence[Callable[[], _T]]) -> Iterator[_T]:
        """The answers in their order; a few are asked for at a time."""
        tasks: list[ThreadTask[_T]] = []
        for number in range(len(getters)):
            for ahead in range(len(tasks), min(len(getters), number + 2 * _NUM_READERS)):
                tasks.append(self._readers[ahead % _NUM_READERS].submit(getters[ahead]))
            yield tasks[number].wait(_ANSWER_S)
            tasks[number].result.clear()

    def _asked(self, work: Callable[[], _T]) -> _T:
        def ask() -> _T:
            self._opened()
            return work()

        return self._readers[0].call(ask, _ANSWER_S)

    # --- the file system ----------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        """The threads of the archive only: some libraries ask the network for credentials here."""
        if self._fs is None:
            from fsspec.core import url_to_fs

            fs, self._base = url_to_fs(self.url, **_OPTIONS.get(self.url.partition("://")[0], {}))
            self._fs = fs
        return self._fs

    def _finished(self, folder: str, *, tells: bool = False) -> list[ArchivedName]:
        """The files in a folder of the archive that are whole."""
        fs = self._opened()
        fs.invalidate_cache()  # it keeps what it has listed
        base = self._base.rstrip("/")
        try:
            found = {path.removeprefix(f"{base}/") for path in fs.find(posixpath.join(base, folder))}
        except FileNotFoundError:
            return []
        names = {path: name for path in found if (name := ArchivedName.parse(path)) is not None}
        whole = [name for path, name in sorted(names.items()) if path + MARKER in found]
        if tells and names and not whole:
            logger.warning("%s has %d files, and none was uploaded to its end: they do not count", self.url, len(names))
        if tells and len(runs := sorted({name.run_id for name in whole})) > 1:
            logger.warning(
                "%s has files of %d runs (%s): a start with an empty directory goes on from the newest step, whichever "
                "run it is of. Give each job an archive of its own",
                *(self.url, len(runs), listed([printable(run, 60) for run in runs], 2)),
            )
        return whole


def _callback(check: Callable[[], None]) -> Any:
    """Fsspec calls it between two pieces; what it raises ends the upload."""
    from fsspec.callbacks import Callback

    class Check(Callback):  # type: ignore[misc]
        def call(self, *args: Any, **kwargs: Any) -> None:
            check()

    return Check()


def _check(url: str) -> None:
    """Raise UsageError for what cannot be an archive."""
    scheme, sign, rest = url.partition("://")
    if not (scheme and sign and rest):
        raise UsageError(f"archive={url!r}: give a URL: s3://bucket/folder, gs://..., az://..., file:///folder")
    if ":" in rest.partition("@")[0] and "@" in rest:
        raise UsageError("archive: leave the password out of the URL; the environment has places for credentials")
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"archive={url!r}: {_words(error)}; pip install 'mindx_elastic[archive]', or the library that serves "
            f"{scheme}:// (s3fs, gcsfs, adlfs)"
        ) from error


def _words(error: BaseException) -> str:
    return printable(f"{type(error).__name__}: {error}", 150)
