"""Decides which users' files are trusted: files that other users put into a checkpoint directory are never loaded.

Digests are not signatures, so only the owner of a file distinguishes a job's own checkpoint from one that another user
has copied in. A file counts if its owner is this process's user, root, the owner of the given directory, or one of
``trusted_users``. *This process's user* is read from a file that we create there: on NFS with root squash, or with
mapped ids, it is another number than `os.geteuid` returns.

Rejected: the group (on Kubernetes every pod of a volume shares it); a signature (its key would have to be stored, and
users who can write to the directory can usually read the job's environment from the same place); the owner as `os.stat`
gives it for the path (the file may be exchanged before it is read). Every reader opens the file, checks the descriptor,
and reads from it.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mindx_elastic.core.posix import open_regular
from mindx_elastic.errors import UnsafeDirectoryError, UntrustedFileError, UsageError

__all__ = ["Owners", "Trust", "check_place", "find_owners", "open_trusted", "user_ids"]

_MOST_LINKS = 40
_OVERFLOW_UID = 65534


class Owners(NamedTuple):
    """The users whose files count in one directory."""

    uids: frozenset[int]
    modes_count: bool = True
    """False: a file that we create with mode 644 has another mode there (vfat, some network file systems)."""
    seen_as: int | None = None
    """The user id that the file system gives this process's files, if we made one there; `device`: the file system."""
    device: int | None = None

    def problem(self, status: os.stat_result) -> str | None:
        """Why a file with this status does not count; None: it does."""
        if status.st_uid not in self.uids:
            users = ", ".join(map(str, sorted(self.uids)))
            return (
                f"belongs to user {status.st_uid}, and only files of the users {users} count here; add others with "
                "trusted_users (MINDX_TRUSTED_USERS)"
            )
        if self.modes_count and status.st_mode & stat.S_IWOTH:
            return f"is writable by every user (mode {stat.S_IMODE(status.st_mode):o}); if it is sound, chmod o-w"
        return None

    def check(self, status: os.stat_result, path: Path) -> None:
        """Raises UntrustedFileError."""
        problem = self.problem(status)
        if problem is not None:
            raise UntrustedFileError(f"{path}: {problem}", path=path, uid=status.st_uid)


def find_owners(directory: Path, *, created: os.stat_result | None = None, trusted: Iterable[int] = ()) -> Owners:
    """The users whose files count in `directory`. `created`: status of a file that we just made there, mode 644."""
    uids = {0, os.geteuid(), *trusted}
    if created is not None:
        uids.add(created.st_uid)
    try:
        owner = os.stat(directory).st_uid
    except OSError:
        return Owners(frozenset(uids))
    if not _is_unmapped(owner) and not any(_squatted(directory.absolute(), uids)):
        uids.add(owner)
    if created is None:
        return Owners(frozenset(uids))
    return Owners(frozenset(uids), not created.st_mode & stat.S_IWOTH, created.st_uid, created.st_dev)


def _squatted(directory: Path, uids: set[int]) -> Iterator[Path]:
    """The parts of the path that another user may have made: not ours, in a world-writable folder."""
    for part in (directory, *directory.parents):
        try:
            if (
                part != part.parent
                and os.stat(part.parent).st_mode & stat.S_IWOTH
                and os.lstat(part).st_uid not in uids
            ):
                yield part
        except OSError:
            continue


def _is_unmapped(uid: int) -> bool:
    """Whether it is the number that a user namespace gives to all users without one, who cannot be distinguished."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        overflow = _OVERFLOW_UID
    if uid != overflow:
        return False
    try:
        ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return not any(first <= uid < first + count for first, _, count in ranges)


def user_ids(users: Iterable[int | str]) -> frozenset[int]:
    """The ids of users that are given by number or name. Raises UsageError for a name that the system does not know."""
    if isinstance(users, (str, int)):
        raise UsageError(f"trusted_users={users!r}: give a list of users, by number or name")
    return frozenset(_user_id(user) for user in users)


def _user_id(user: int | str) -> int:
    if isinstance(user, str):
        name = user.strip()
        try:
            return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
        except KeyError:
            raise UsageError(f"trusted_users: this machine knows no user {name!r}; give the number") from None
    if isinstance(user, bool) or not isinstance(user, int) or user < 0:
        raise UsageError(f"trusted_users: {user!r} is neither the number nor the name of a user")
    return user


@dataclass
class Trust:
    """The users whose files count, for all directories of a job."""

    roots: dict[Path, Owners] = field(default_factory=dict)
    """Owners by resolved directory; a path that is not below one of them is judged by its own folder."""
    trusted: frozenset[int] = frozenset()
    allow_shared: bool = False

    def of(self, path: Path) -> Owners:
        """The owners for a file, or for a directory that holds files."""
        for root, owners in self.roots.items():
            if path.is_relative_to(root):
                return owners
        return self._of_folder(path if path.is_dir() else path.parent)

    def add(self, directory: Path) -> None:
        """Add a directory that is only read. Raises UnsafeDirectoryError, unless shared directories are allowed."""
        if not self.allow_shared:
            check_place(directory)
        self.roots.setdefault(directory, self._of_folder(directory))

    def _of_folder(self, folder: Path) -> Owners:
        found = find_owners(folder, trusted=self.trusted)
        try:
            device = os.stat(folder).st_dev
        except OSError:
            return found
        # We have made no file there. On the same file system our files have the same user id.
        alike = [owners for owners in self.roots.values() if owners.device == device and owners.seen_as is not None]
        seen_as = {owners.seen_as for owners in alike if owners.seen_as is not None}
        return found._replace(uids=found.uids | seen_as, modes_count=all(owners.modes_count for owners in alike))


def check_place(path: Path) -> None:
    """Raise UnsafeDirectoryError where users who are not trusted can replace `path`.

    They can if the directory is world-writable, if one on the way to it is and has no sticky bit, or if another user
    owns a name in a world-writable one. Parts that do not exist yet are skipped.
    """
    ours = {0, os.geteuid()}
    try:
        for parent, entry in _way_to(path):
            folder = os.stat(parent)
            if not folder.st_mode & stat.S_IWOTH:
                continue
            if not folder.st_mode & stat.S_ISVTX:
                why = f"others may write to {parent} (mode {_mode(folder)}), its folder, and exchange it"
                raise _unsafe(path, why, parent)
            status = os.lstat(entry)
            if status.st_uid not in ours:
                why = f"{entry} belongs to user {status.st_uid} and is in {parent}, where others may write"
                raise _unsafe(path, f"{why}: that user could have made it", None)
        status = os.stat(path)
    except UnsafeDirectoryError:
        raise
    except OSError:
        return  # it does not exist yet, or is a loop: making or opening it will tell
    if status.st_mode & stat.S_IWOTH:
        raise _unsafe(
            path, f"others may write to it (mode {_mode(status)}): any of them could have put a checkpoint there", path
        )


def _unsafe(path: Path, problem: str, loose: Path | None) -> UnsafeDirectoryError:
    remedy = "give a directory of your own"
    remedy += "" if loose is None else f", chmod o-w {loose}"
    return UnsafeDirectoryError(
        f"{path}: {problem}; {remedy}, or accept it with allow_shared_directory=True "
        "(MINDX_ALLOW_SHARED_DIRECTORY=1); files of other users are left out all the same",
        path=path,
    )


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):o}"


def _way_to(path: Path) -> Iterator[tuple[Path, Path]]:
    """Each (folder, name in it) that the system looks up on the way to `path`, links included. Raises OSError."""
    current, todo = Path("/"), list(reversed(path.absolute().parts[1:]))
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            current = current.parent
            continue
        entry = current / part
        yield current, entry
        if not entry.is_symlink():
            current = entry
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, "too many symbolic links", str(path))
        target = Path(os.readlink(entry))
        if target.is_absolute():
            current, target = Path("/"), target.relative_to("/")
        todo += reversed(target.parts)


def open_trusted(path: Path, owners: Owners | None) -> int:
    """Open the regular file `path` for reading, if its owner is trusted (None: anybody is), which is read from the
    descriptor. Raises OSError, UntrustedFileError."""
    fd = open_regular(path)
    try:
        if owners is not None:
            owners.check(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd
