"""Lists the checkpoints under a directory, judged by their headers and never by their names.

It looks into the directory itself, ``rank_*/``, the folders of steps (`core.folders`) and the rank folders inside them;
also into unfinished folders of steps, because each file in them is complete by itself. It skips ``quarantine/``,
temporary files, and anything deeper. A *folder* may be a symbolic link (people put ranks on different disks). A
checkpoint *file* that is a link is listed with a problem and never opened: a user who can plant a link must not choose
which bytes a job loads.

A damaged or foreign file is an entry with a `problem`. So the caller can distinguish "there is nothing" from "there are
files, and none of them can be used"; the second must never become a silent fresh start.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mindx_elastic.core.folders import STEP_FOLDER
from mindx_elastic.core.owners import Owners, find_owners
from mindx_elastic.core.posix import read_small
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import CheckpointError, ForeignCheckpointError, StrPath, UntrustedFileError
from mindx_elastic.persist.format import CheckpointInfo, Header, read_header
from mindx_elastic.persist.shared_json import SharedJson
from mindx_elastic.persist.storage import LOCK_FILE, TEMP_SUFFIX

__all__ = [
    "KIND_ORDER",
    "CatalogEntry",
    "find_files",
    "kind_place",
    "looks_ours",
    "preference",
    "rank_of_folder",
    "read_entries",
    "read_entry",
    "root_of",
]

KIND_ORDER = ("breakpoint", "ttp", "request_exit", "final", "periodic", "manual")
"""Which of several files of one step and rank is taken first. Kinds that are not listed come last."""

_SUFFIX = ".safetensors"
_RANK_FOLDER = re.compile(r"rank_(\d+)")
_OUR_NAME = re.compile(
    r"(.*-\d+_\d+|.*_breakpoint|.*_final|.*_train|.*\.prev|.*\.cover|ttp_rank_\d+.*)\.safetensors", re.DOTALL
)
_SNIFF_BYTES = 4096  # our metadata stands at the very beginning


class CatalogEntry(NamedTuple):
    """One file (or one folder that could not be listed)."""

    path: Path
    """Its path, under the scanned directory as it was given."""
    header: Header | None
    """Its header, if that could be read and is sound; a scan does *not* check the tensors' digests."""
    problem: str | None
    """Why it cannot be used; None for a good header."""
    foreign: bool
    """A sound file that this package did not write."""
    looks_ours: bool
    """Its name has the shape of our trees, or it is a folder that may hide such files: worth a quarantine and a
    warning."""
    size: int
    """Bytes."""
    mtime: float
    """Unix seconds, from the file system."""
    owner: int | None = None
    """The user id, if another user has put the file there. The file is reported and stays where it is."""

    @property
    def info(self) -> CheckpointInfo | None:
        """What the header says about the run and the step; None for an entry with a problem."""
        return None if self.header is None else self.header.info


def read_entries(
    directory: StrPath, *, known: Iterable[CatalogEntry] = (), owners: Owners | None = None
) -> tuple[CatalogEntry, ...]:
    """Read the headers of all checkpoint files under `directory` (which may itself be a rank folder).

    known: what an earlier call found. Good files with the same path, size and modification time are taken from it:
    reading a header costs some 10 us a tensor, and a job that prunes after each save lists the same files each time.

    owners: the users whose files are trusted; by default this process's user, root and the directory's owner.

    A directory that does not exist has no entries. A directory that cannot be listed, or a file that cannot be read, is
    an entry with a problem. Files that vanish meanwhile (another rank's retention) are left out. Bad content raises
    nothing. Reads only; any thread; blocks on the disk.
    """
    root = Path(directory)
    owners = find_owners(root) if owners is None else owners
    good = {entry.path: entry for entry in known if entry.header is not None}
    shared = SharedJson()
    found = (read_entry(f, good.get(f), owners, shared) if isinstance(f, Path) else f for f in find_files(root))
    return tuple(entry for entry in found if entry is not None)


def looks_ours(path: StrPath) -> bool:
    """Whether the *name* is one that this package gives to checkpoint files. Does not look at the content."""
    path = Path(path)
    if path.suffix != _SUFFIX:
        return False
    return bool(_RANK_FOLDER.fullmatch(path.parent.name) or _OUR_NAME.fullmatch(path.name))


def rank_of_folder(folder: Path) -> int | None:
    """3 for ``rank_3``; None for any other name."""
    found = _RANK_FOLDER.fullmatch(folder.name)
    return None if found is None else int(found[1])


def root_of(path: Path, rank: int) -> Path:
    """The directory under which a scan finds `path`, a file of `rank`, together with the other ranks' files."""
    folder = path.parent
    if folder.name != f"rank_{rank}":
        return folder
    return folder.parent.parent if STEP_FOLDER.fullmatch(folder.parent.name) else folder.parent


def read_entry(
    path: Path,
    known: CatalogEntry | None = None,
    owners: Owners | None = None,
    shared: SharedJson | None = None,
) -> CatalogEntry | None:
    """Judge one file by its header. None: it has vanished, or does not look like a checkpoint.

    known: a good entry of the same path; returned when the file has not changed since. owners: the users whose files
    are trusted; by default this process's user, root and the folder's owner. shared: what the headers of one scan have
    in common.
    """
    owners = find_owners(path.parent) if owners is None else owners
    try:
        status = os.lstat(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return None
        return _bad(path, f"cannot be looked at: {error.strerror}", None)
    named, is_file = path.suffix == _SUFFIX, stat.S_ISREG(status.st_mode)
    if not (named or is_file):  # a link's target is not opened, not even to find out whether it is a checkpoint
        return None
    unchanged = known is not None and (known.size, known.mtime) == (status.st_size, status.st_mtime)
    if unchanged and is_file and owners.problem(status) is None:
        return known
    try:
        if not named and not _sniff(path):
            return None
        header = read_header(path, owners, shared)
    except FileNotFoundError:
        return None
    except UntrustedFileError as error:
        return _strangers(path, error, status)
    except ForeignCheckpointError as error:
        return _bad(path, _text(error, path), status, foreign=True)
    except CheckpointError as error:
        return _bad(path, _text(error, path), status)
    except OSError as error:
        owner = None if owners.problem(status) is None else status.st_uid
        return _bad(path, f"cannot be read: {error.strerror or error}", status, owner=owner)
    return CatalogEntry(path, header, None, False, looks_ours(path), header.file_size, status.st_mtime)


def preference(entry: CatalogEntry) -> tuple[int, bool, bool, int, float, str]:
    """Sort key of the good entries of one step: by rank, and within a rank in the order in which to try them. A file
    with a part of a divided state comes after whole ones."""
    info = entry.info
    assert info is not None  # only good entries are grouped
    is_part = entry.header is not None and entry.header.held is not None
    return info.rank, not info.resumable, is_part, kind_place(info.kind), -info.created, str(entry.path)


def kind_place(kind: str) -> int:
    """The place of a kind of files in `KIND_ORDER`."""
    return KIND_ORDER.index(kind) if kind in KIND_ORDER else len(KIND_ORDER)


def find_files(root: Path) -> Iterator[Path | CatalogEntry]:
    """The files that a scan of `root` looks at, in its order, unread; folders that cannot be listed as entries."""
    folders = [root]
    while folders:
        folder = folders.pop(0)
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            entry = _unlisted(folder, error, is_root=folder == root)
            if entry is not None:
                yield entry
            continue
        for name in names:
            path = folder / name
            if _is_our_folder(path, root):
                folders.append(path)
            elif not (name.endswith(TEMP_SUFFIX) or name == LOCK_FILE or _RANK_FOLDER.fullmatch(name)):
                yield path


def _is_our_folder(path: Path, root: Path) -> bool:
    """Whether to go down into `path`: rank folders in the root and in folders of steps, folders of steps in the
    root."""
    if _RANK_FOLDER.fullmatch(path.name) is None:
        return path.parent == root and STEP_FOLDER.fullmatch(path.name) is not None
    return path.parent == root or STEP_FOLDER.fullmatch(path.parent.name) is not None


def _unlisted(folder: Path, error: OSError, *, is_root: bool) -> CatalogEntry | None:
    if isinstance(error, FileNotFoundError) and not os.path.islink(folder):
        return None  # no such directory yet, or it has vanished meanwhile
    if isinstance(error, NotADirectoryError) and not is_root:
        return read_entry(folder)  # a file with the name of a folder
    # It may hide any number of checkpoints (a disk that is not mounted, lost permissions): looks_ours, so
    # that a start does not take it for an empty directory and begin afresh.
    return CatalogEntry(folder, None, f"folder cannot be listed: {error.strerror}", False, True, 0, 0.0)


def _sniff(path: Path) -> bool:
    """Whether a file without our suffix starts like one of ours; spares a full parse of logs and the like."""
    return b"mindx.schema" in read_small(path, _SNIFF_BYTES)


def _bad(
    path: Path, problem: str, status: os.stat_result | None, *, foreign: bool = False, owner: int | None = None
) -> CatalogEntry:
    size, mtime = (0, 0.0) if status is None else (status.st_size, status.st_mtime)
    return CatalogEntry(path, None, problem, foreign, looks_ours(path), size, mtime, owner)


def _strangers(path: Path, error: UntrustedFileError, status: os.stat_result) -> CatalogEntry:
    foreign = False
    try:
        read_header(path)
    except ForeignCheckpointError:
        foreign = True  # another user's pretrained weights, for example
    except (CheckpointError, OSError):
        pass
    return _bad(path, _text(error, path), status, foreign=foreign, owner=error.uid)


def _text(error: CheckpointError, path: Path) -> str:
    # The entry already names the file; the path twice in a row would make a table unreadable.
    return str(error).removeprefix(printable(f"{path}: "))
