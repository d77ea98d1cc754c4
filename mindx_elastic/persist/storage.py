"""Prepares directories, publishes finished checkpoint files under their names, and moves bad files to quarantine.

A file appears under its final name whole or not at all: it is written under a temporary name in the same directory,
flushed, renamed, and the directory is flushed. The writer locks its temporary file while it lives. So the left-overs of
a killed writer differ from a save in progress, on the same machine and over NFS alike. (Rejected: a process id in the
name, which means nothing on another machine.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mindx_elastic.core.events import logger
from mindx_elastic.core.owners import Owners, check_place, find_owners
from mindx_elastic.core.posix import open_regular
from mindx_elastic.errors import SaveError, StrPath, UsageError

__all__ = [
    "LOCK_FILE",
    "QUARANTINE",
    "TEMP_SUFFIX",
    "check_free_space",
    "create_temp",
    "free_space",
    "fsync_dir",
    "keep_as",
    "make_directory_durable",
    "new_file",
    "prepare_owned_directory",
    "publish",
    "publish_copy",
    "quarantine",
    "quarantined",
    "remove_stale_temps",
    "temp_name",
]

TEMP_SUFFIX = ".mindx-tmp"
LOCK_FILE = ".mindx-lock"
"""See `directory_lock`. It is never opened for anything else."""
QUARANTINE = "quarantine"
_NOTE_SUFFIX = ".reason.txt"
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES)
_MOMENTARY = (
    errno.EBUSY,
    errno.EAGAIN,
    errno.EINTR,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ETXTBSY,
    errno.EACCES,
    errno.EPERM,
)
"""Errors of a rename that may be gone at the next try. EACCES and EPERM: a file that another machine has open over
CIFS."""
_PAUSES_S = (0.05, 0.2, 0.5)
_DIRECTORY_MODE = 0o755  # never writable by others, whatever the umask
_FILE_MODE = 0o644


def prepare_owned_directory(
    path: StrPath, *, allow_shared: bool = False, trusted: Iterable[int] = (), may_be_full: bool = False
) -> tuple[Path, Owners]:
    """Make `path` a directory that checkpoints can safely go to. Returns it with links resolved, and its `Owners`.

    A symbolic link to a directory is resolved here, once, so that re-pointing it later does not split a run over two
    places. Missing directories are created, writable by the owner only.

    `trusted`: further users whose files are loaded. Raises UsageError when `path` is a file; UnsafeDirectoryError when
    every user may write to it or could have made it (see `owners.check_place`), unless `allow_shared`; SaveError when
    it cannot be created or written to. `may_be_full`: a disk without room is a warning only. Any thread.
    """
    if not allow_shared:
        check_place(Path(path))
    try:
        directory = Path(path).resolve()
        make_directory_durable(directory)
        status = os.stat(directory)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{path} is a file or below a file; give a directory") from error
    except RuntimeError as error:  # Python < 3.13 for a loop of links
        raise UsageError(f"{path}: {error}; give a directory") from error
    except OSError as error:
        raise SaveError(f"{path}: cannot create the directory: {error.strerror}", path=path) from error
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path} is a file; give a directory")
    if not allow_shared:
        check_place(directory)
    return directory, find_owners(directory, created=_probe(directory, may_be_full=may_be_full), trusted=trusted)


def make_directory_durable(path: StrPath) -> None:
    """Make the directory `path` and its missing parents, and flush the entry of each before the next one is made.

    Call it before a file that is reported durable is written to `path`: otherwise a power cut may remove the directory
    with all that was flushed in it. An existing directory may have been made a moment ago, by another rank or by a
    process that was killed before it could flush; so its parent is flushed too, once in a process. In this order at
    most the innermost directory is unflushed at any time. Raises OSError; its errno is ENOENT where another process has
    removed a directory meanwhile. Any thread; blocks on the disk.
    """
    directory = Path(os.path.abspath(path))
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    _flush_entry(directory)
    for new in reversed(missing):
        try:
            new.mkdir(mode=_DIRECTORY_MODE)
        except FileExistsError:  # another rank was faster, and may not have flushed it yet
            if not new.is_dir():
                raise
        with suppress(PermissionError):  # a folder that may be written to and not read cannot be flushed
            fsync_dir(new.parent)


_flushed: set[tuple[str, int, int]] = set()
"""Directories whose entry in their parent this process has flushed: path, device, inode."""


def _flush_entry(directory: Path) -> None:
    """Make the entry of an existing directory durable."""
    status = os.stat(directory)
    known = str(directory), status.st_dev, status.st_ino
    if known in _flushed:
        return
    with suppress(PermissionError):  # no permission to read the parent: this process has not written to it either
        fsync_dir(directory.parent)
    _flushed.add(known)


def _probe(directory: Path, *, may_be_full: bool) -> os.stat_result:
    """Write a file: permission bits do not show a read-only mount, a quota, or what root may do. Returns the status
    of the file as the file system shows it; on NFS with root squash its owner is another user."""
    try:
        fd, temp = create_temp(directory / "probe")
        try:
            _write_one(fd, directory, may_be_full=may_be_full)
            _try_rename(temp)
            return os.fstat(fd)
        finally:
            temp.unlink(missing_ok=True)
            os.close(fd)
    except SaveError:
        raise
    except OSError as error:
        problem = f"{directory}: cannot write there: {error.strerror}"
        remedy = "check its permissions and free space, or give another directory"
        raise SaveError(f"{problem}; {remedy}", path=directory) from error


def _try_rename(temp: Path) -> None:
    """A file system that keeps objects (a mounted bucket) may have no renames. Raises SaveError."""
    other = temp_name(temp)
    try:
        os.rename(temp, other)
        os.rename(other, temp)
    except OSError as error:
        other.unlink(missing_ok=True)
        if error.errno not in _MOMENTARY:
            problem = (
                f"{temp.parent}: no file can be renamed there ({error.strerror}), so none appears whole or not at all"
            )
            remedy = "give a directory on a disk, and copy it to the bucket from there"
            raise SaveError(f"{problem}; {remedy}", path=temp.parent) from error


def _write_one(fd: int, directory: Path, *, may_be_full: bool) -> None:
    try:
        os.write(fd, b"x")
    except OSError as error:
        if not may_be_full or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        logger.warning("%s: %s; the training goes on, and saves fail until there is room", directory, error.strerror)


def check_free_space(path: StrPath, nbytes: int) -> None:
    """Raise OSError (ENOSPC) with both numbers when the file system of `path` cannot take `nbytes` more."""
    free = free_space(path)
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"No space left on device ({nbytes:,} bytes needed, {free:,} free)", str(path))


def free_space(path: StrPath) -> int:
    """Bytes that this user may still write to the file system of the existing file or directory `path`."""
    status = os.statvfs(path)
    return (status.f_bavail if os.geteuid() else status.f_bfree) * status.f_frsize


def fsync_dir(directory: StrPath) -> None:
    """Make names in `directory` durable. File systems that cannot flush a directory keep them safe by themselves."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def temp_name(final: Path) -> Path:
    """A new name for a file that becomes `final` when it is whole."""
    # Part of the name for people; short, because a legal name plus our ending may be too long for the file system.
    return final.with_name(f".{final.name[:40]}.{secrets.token_hex(6)}{TEMP_SUFFIX}")


def create_temp(final: Path) -> tuple[int, Path]:
    """A new, locked, empty file next to `final`, open for reading and writing. Closing the descriptor ends the lock."""
    while True:
        temp = temp_name(final)
        fd = open_regular(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, _FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                os.close(fd)
                raise
        if os.fstat(fd).st_nlink:
            return fd, temp
        os.close(fd)  # a cleaner took it for a left-over between its creation and the lock


@contextmanager
def new_file(final: Path, name_it: Callable[[Path, Path], object] | None = None) -> Iterator[tuple[int, Path]]:
    """A temporary file next to `final`. When the block ends well it is flushed and gets its name, durably, by `name_it`
    (`publish`); when not, it is deleted. Raises OSError."""
    fd, temp = create_temp(final)
    try:
        yield fd, temp
        os.fsync(fd)
        (name_it or publish)(temp, final)
        fsync_dir(final.parent)
    finally:
        temp.unlink(missing_ok=True)  # it does not exist any more when all went well
        os.close(fd)


def remove_stale_temps(directory: StrPath) -> list[Path]:
    """Delete the temporary files that killed writers have left in `directory`; returns them.

    Files whose writer is alive, files that cannot be opened, and everything on a file system without locks stay.
    """
    removed = []
    with os.scandir(directory) as found:
        entries = list(found)
    for entry in entries:
        if not entry.name.endswith(TEMP_SUFFIX) or not entry.is_file(follow_symlinks=False):
            continue
        path = Path(entry.path)
        try:
            fd = open_regular(path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path)
        except OSError:
            continue
        finally:
            os.close(fd)
    return removed


def keep_as(path: Path, second: Path) -> None:
    """Make the file `path` appear under the name `second` too, durably, replacing what was there, before `path` is
    replaced: a power cut may leave the later one of two new names, and not the earlier one. A move could lose both
    names in one, so it is for file systems without hard links only."""
    try:
        _link_over(path, second)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        publish(path, second)  # until the new file is there, the old one has its second name only
    fsync_dir(second.parent)


def publish(temp: Path, final: Path) -> None:
    """Give the finished file `temp` its final name in one step. The caller flushes the directory.

    A network or user-space file system may refuse that for a moment (another process has the name open), so it is tried
    again, for 0.75 s. Raises OSError.
    """
    for pause_s in _PAUSES_S:
        try:
            os.rename(temp, final)
        except OSError as error:
            if error.errno not in _MOMENTARY:
                raise
            time.sleep(pause_s)
        else:
            return
    os.rename(temp, final)


def publish_copy(source: Path, final: Path) -> None:
    """Put the bytes of the finished file `source` under a further name: a hard link where possible, else a copy."""
    try:
        _link_over(source, final)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        with (
            new_file(final) as (fd, _),
            open(source, "rb") as reader,
            open(fd, "wb", closefd=False) as writer,
        ):
            shutil.copyfileobj(reader, writer, 8 << 20)


def _link_over(source: Path, target: Path) -> None:
    """A hard link that replaces `target`: `os.link` refuses an existing one, and deleting it first would open a gap."""
    temp = temp_name(target)
    os.link(source, temp, follow_symlinks=False)
    try:
        publish(temp, target)
    finally:
        # rename() of two links to one file does nothing at all, and leaves the source
        temp.unlink(missing_ok=True)


def quarantine(path: StrPath, reason: str, root: StrPath) -> Path:
    """Move a bad file out of the way to ``root/quarantine/<relative name>[.n]``, with a ``.reason.txt`` next to it.

    Nothing is ever overwritten and no link is followed. Returns the new place. Raises FileNotFoundError when the file
    has gone (another rank was faster), another OSError when it cannot be moved. Any thread, any number of processes.
    """
    path = Path(path)
    try:
        return _move_aside(path, reason, Path(root), os.rename)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return _move_aside(path, reason, path.parent, publish)  # a rank folder on another disk keeps its own quarantine


def quarantined(root: StrPath) -> list[Path]:
    """The files in the quarantine of the directory `root` and in those of its rank folders, without the notes."""
    root = Path(root)
    folders = [root / QUARANTINE, *sorted(root.glob(f"rank_*/{QUARANTINE}"))]
    there = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    return [path for path in there if not path.name.endswith(_NOTE_SUFFIX)]


def _move_aside(path: Path, reason: str, root: Path, move: Callable[[Path, Path], object]) -> Path:
    relative = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    base = root / QUARANTINE / relative
    os.lstat(path)
    make_directory_durable(base.parent)
    number = 0
    while True:
        target = base if number == 0 else base.with_name(f"{base.name}.{number}")
        note = target.with_name(target.name + _NOTE_SUFFIX)
        number += 1
        try:
            fd = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        except FileExistsError:
            continue
        with open(fd, "w", encoding="utf-8", errors="replace") as file:
            file.write(f"{path}\n{reason}\n")
        if os.path.lexists(target):  # a file without a note has this name; take the next one
            note.unlink()
            continue
        try:
            move(path, target)  # the note, created exclusively, reserves the name
        except OSError:
            note.unlink(missing_ok=True)
            raise
        fsync_dir(target.parent)
        fsync_dir(path.parent)
        return target
