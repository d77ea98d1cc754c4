"""What checkpoints there are under a directory, judged by their headers and never by their names.

Looked at: the directory itself, ``rank_*/``, the folders of steps (`core.folders`) and the rank folders inside them;
also where such a folder is not finished, because each file in it is whole by itself. Not looked at: ``quarantine/``,
temporary files, anything deeper. A *folder* may be a symbolic link (people put ranks on different disks); a checkpoint
*file* that is one is listed as a problem and never opened: whoever can plant a link must not choose which bytes a job
loads.

A damaged or foreign file is an entry with a `problem`, so that the caller can tell "there is nothing" from
"there is something, and none of it can be used"; the second must never become a silent fresh start.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.core.folders import STEP_FOLDER
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Owners, find_owners
from mindx_elastic.core.posix import read_small
from mindx_elastic.core.printable import printable
from mindx_elastic.core.rank_lists import RankGaps, rank_list
from mindx_elastic.errors import CheckpointError, ForeignCheckpointError, StrPath, UntrustedFileError
from mindx_elastic.persist.format import CheckpointInfo, Header, read_header
from mindx_elastic.persist.storage import LOCK_FILE, TEMP_SUFFIX

__all__ = [
    "KIND_ORDER",
    "Catalog",
    "CatalogEntry",
    "StepSet",
    "find_files",
    "group_steps",
    "looks_ours",
    "preference",
    "rank_of_folder",
    "read_entry",
    "root_of",
    "scan",
]

KIND_ORDER = ("breakpoint", "ttp", "request_exit", "final", "periodic", "manual")
"""Which of several files of one step and rank is taken first. Kinds that are not listed come last."""

_SUFFIX = ".safetensors"
_RANK_FOLDER = re.compile(r"rank_(\d+)")
_OUR_NAME = re.compile(r"(.*-\d+_\d+|.*_breakpoint|.*_final|.*_train|.*\.prev|ttp_rank_\d+.*)\.safetensors", re.DOTALL)
_SNIFF_BYTES = 4096  # our metadata stands at the very beginning
_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True)
class CatalogEntry:
    """One file (or one folder that could not be listed)."""

    path: Path
    """Where it lies, under the scanned directory as it was given."""
    header: Header | None
    """Its header, when that could be read and is sound; the tensors' digests are *not* checked by a scan."""
    problem: str | None
    """Why it cannot be used; None for a good header."""
    foreign: bool
    """A sound file that this package did not write."""
    looks_ours: bool
    """Its name has the shape of our trees (or a folder that may hide such files): worth quarantine and a
    warning."""
    size: int
    """Bytes."""
    mtime: float
    """Unix seconds, from the file system."""
    owner: int | None = None
    """Of a file that another user has put there: who that is. It is named and left where it is."""

    @property
    def info(self) -> CheckpointInfo | None:
        """What the header says about the run and the step; None for an entry with a problem."""
        return None if self.header is None else self.header.info


@dataclass(frozen=True)
class StepSet:
    """Everything that was found for one step of one attempt of one run."""

    run_id: str
    attempt: int
    """Attempts are branches: a later one began at some step of an earlier one, and files of two are never put
    together."""
    step: int
    entries: tuple[CatalogEntry, ...]
    """By rank; of one rank the resumable ones first, then by `KIND_ORDER`, then the newest."""
    world_size: int
    """Of the newest file, should they disagree."""
    complete: bool
    """Every rank has a resumable file of this run, attempt, step and world size. Digests are not checked yet."""
    missing_ranks: Sequence[int]
    """Ranks without a resumable file, ascending; in huge worlds no list of them is made (`RankGaps`)."""
    why_incomplete: str | None
    """One line for a person; None when complete."""
    reasons: tuple[str, ...]
    """Distinct reasons of the files that would be used, in rank order."""
    created: float
    """Unix seconds of the newest file."""
    resumable: bool
    """At least one file may be resumed from."""

    @property
    def moment(self) -> Moment:
        """What all its files have in common."""
        return self.run_id, self.attempt, self.step

    @property
    def best(self) -> dict[int, CatalogEntry]:
        """For each rank that was found the entry to try first."""
        chosen: dict[int, CatalogEntry] = {}
        for entry in self.entries:
            chosen.setdefault(_info(entry).rank, entry)
        return chosen

    def of_rank(self, rank: int) -> tuple[CatalogEntry, ...]:
        """All entries of one rank, the one to try first in front."""
        return tuple(entry for entry in self.entries if _info(entry).rank == rank)

    @property
    def info(self) -> CheckpointInfo:
        """The header facts of the lowest rank's best file."""
        return _info(self.entries[0])


@dataclass(frozen=True)
class Catalog:
    """The result of a scan. `steps`: the run with the newest file first, inside a run the last attempt first (it began
    at a step that somebody chose, so its steps supersede higher ones of an earlier attempt), in it the highest step."""

    directory: Path
    entries: tuple[CatalogEntry, ...]
    steps: tuple[StepSet, ...]
    rank: int | None = None
    """Set when only one rank's files were looked at; `StepSet.complete` then speaks of that rank alone."""

    @property
    def problems(self) -> tuple[CatalogEntry, ...]:
        """Entries that cannot be used."""
        return tuple(entry for entry in self.entries if entry.problem is not None)

    def newest_complete(self, run_id: str | None = None) -> StepSet | None:
        """The first complete step, of any run or of `run_id`."""
        return next((s for s in self.steps if s.complete and run_id in (None, s.run_id)), None)


def scan(
    directory: StrPath, *, rank: int | None = None, known: Catalog | None = None, owners: Owners | None = None
) -> Catalog:
    """Read the headers of all checkpoint files under `directory` (which may itself be a rank folder).

    rank: look only at the directory itself and that rank's folders, and keep only that rank's files;
    completeness is then judged for this rank alone. For jobs whose nodes do not share a disk, and to spare a
    shared one.

    known: an earlier catalog; good files whose path, size and modification time are still the same are taken from it.
    Reading a header costs some 10 us a tensor, and a job that prunes after each save looks at the same files again
    and again.

    owners: whose files count; as a rule this process's user, root and the directory's owner.

    A directory that does not exist is an empty catalog; one that cannot be listed, or any file that cannot be
    read, is an entry with a problem. Files that vanish meanwhile (another rank's retention) are left out.
    Nothing is raised for bad content. Reads only; any thread; blocks on the disk.
    """
    root = Path(directory)
    owners = find_owners(root) if owners is None else owners
    good = {entry.path: entry for entry in known.entries if entry.header is not None} if known is not None else {}
    entries = [
        entry
        for entry in _walk(root, rank, good, owners)
        if rank is None or entry.info is None or entry.info.rank == rank
    ]
    return Catalog(root, tuple(entries), group_steps(entries, rank=rank), rank)


def looks_ours(path: StrPath) -> bool:
    """Whether the *name* is one that this package gives to checkpoint files. Says nothing about the
    content."""
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


def read_entry(path: Path, known: CatalogEntry | None = None, owners: Owners | None = None) -> CatalogEntry | None:
    """Judge one file by its header. None: it has vanished, or nothing about it suggests a checkpoint.

    known: a good entry of the same path; handed back when the file has not changed since. owners: whose files count; as
    a rule this process's user, root and the folder's owner.
    """
    owners = find_owners(path.parent) if owners is None else owners
    try:
        status = os.lstat(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return None
        return _bad(path, f"cannot be looked at: {error.strerror}", None)
    named = path.suffix == _SUFFIX
    if stat.S_ISLNK(status.st_mode):
        # The target's bytes are not looked at even to find out whether the link matters; its name must do.
        return _bad(path, "is a symbolic link; checkpoint files are never followed", status) if named else None
    if not stat.S_ISREG(status.st_mode):
        what = _FILE_TYPES.get(stat.S_IFMT(status.st_mode), "not a regular file")
        return _bad(path, f"is {what}, not a file", status) if named else None
    unchanged = known is not None and (known.size, known.mtime) == (status.st_size, status.st_mtime)
    if unchanged and owners.problem(status) is None:
        return known
    try:
        if not named and not _sniff(path):
            return None
        header = read_header(path, owners)
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


def group_steps(entries: Iterable[CatalogEntry], *, rank: int | None = None) -> tuple[StepSet, ...]:
    """Sort good entries into steps; see `Catalog.steps` for the order and `scan` for `rank`. Pure."""
    groups: dict[Moment, list[CatalogEntry]] = {}
    for entry in entries:
        if entry.info is not None:
            groups.setdefault(entry.info.moment, []).append(entry)
    steps = [_step_set(group, rank) for group in groups.values()]
    activity: dict[str, float] = {}
    for step_set in steps:
        activity[step_set.run_id] = max(activity.get(step_set.run_id, step_set.created), step_set.created)
    steps.sort(key=lambda s: (-activity[s.run_id], s.run_id, -s.attempt, -s.step))
    return tuple(steps)


def _step_set(group: Sequence[CatalogEntry], rank: int | None) -> StepSet:
    entries = tuple(sorted(group, key=preference))
    infos = [_info(entry) for entry in entries]
    newest = max(infos, key=lambda info: info.created)
    there = {info.rank for info in infos if info.resumable}
    missing: Sequence[int] = RankGaps(newest.world_size, there)
    if rank is not None:
        missing = () if rank in there else (rank,)
    why = _why_incomplete(infos, missing, newest.world_size)
    used: dict[int, str] = {}
    for info in infos:
        used.setdefault(info.rank, info.reason)
    return StepSet(
        run_id=newest.run_id,
        attempt=newest.attempt,
        step=newest.step,
        entries=entries,
        world_size=newest.world_size,
        complete=why is None,
        missing_ranks=missing,
        why_incomplete=why,
        reasons=tuple(dict.fromkeys(used.values())),
        created=newest.created,
        resumable=bool(there),
    )


def _why_incomplete(infos: Sequence[CheckpointInfo], missing: Sequence[int], world_size: int) -> str | None:
    sizes = sorted({info.world_size for info in infos})
    if len(sizes) > 1:
        # Shares of two worlds do not add up to one state, even when each rank number is there once.
        return f"files disagree on the world size ({', '.join(map(str, sizes))})"
    useless = sorted({info.rank for info in infos if info.rank in missing})
    absent: Sequence[int] = missing
    if useless:
        ruled_out = {info.rank for info in infos}
        absent = RankGaps(world_size, ruled_out) if isinstance(missing, RankGaps) else ()
    parts = [f"{rank_list(absent)} of {world_size} missing"] if absent else []
    parts += [f"{rank_list(useless)} saved a state that cannot be resumed from"] if useless else []
    return "; ".join(parts) or None


def preference(entry: CatalogEntry) -> tuple[int, bool, int, float, str]:
    """Sort key of the good entries of one step: by rank, of one rank the one to try first in front."""
    info = _info(entry)
    kind = KIND_ORDER.index(info.kind) if info.kind in KIND_ORDER else len(KIND_ORDER)
    return info.rank, not info.resumable, kind, -info.created, str(entry.path)


def _info(entry: CatalogEntry) -> CheckpointInfo:
    assert entry.header is not None  # only good entries are grouped
    return entry.header.info


def _walk(root: Path, rank: int | None, good: Mapping[Path, CatalogEntry], owners: Owners) -> Iterator[CatalogEntry]:
    for found in find_files(root, rank=rank):
        entry = read_entry(found, good.get(found), owners) if isinstance(found, Path) else found
        if entry is not None:
            yield entry


def find_files(root: Path, *, rank: int | None = None) -> Iterator[Path | CatalogEntry]:
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
            if _is_our_folder(path, root, rank):
                folders.append(path)
            elif not (name.endswith(TEMP_SUFFIX) or name == LOCK_FILE or _RANK_FOLDER.fullmatch(name)):
                yield path


def _is_our_folder(path: Path, root: Path, rank: int | None) -> bool:
    """Whether to go down into `path`: rank folders in the root and in folders of steps, folders of steps in the
    root."""
    in_rank = _RANK_FOLDER.fullmatch(path.name)
    if in_rank is None:
        return path.parent == root and STEP_FOLDER.fullmatch(path.name) is not None
    if rank is not None and int(in_rank[1]) != rank:
        return False
    return path.parent == root or STEP_FOLDER.fullmatch(path.parent.name) is not None


def _unlisted(folder: Path, error: OSError, *, is_root: bool) -> CatalogEntry | None:
    if isinstance(error, FileNotFoundError) and not os.path.islink(folder):
        return None  # no such directory yet, or it has vanished meanwhile
    if isinstance(error, NotADirectoryError) and not is_root:
        return read_entry(folder)  # only called like a folder
    # It may hide any number of checkpoints (a disk that is not mounted, lost permissions): looks_ours, so
    # that nobody takes it for an empty directory and starts afresh.
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
        foreign = True  # somebody's pretrained weights, for example
    except (CheckpointError, OSError):
        pass
    return _bad(path, _text(error, path), status, foreign=foreign, owner=error.uid)


def _text(error: CheckpointError, path: Path) -> str:
    # The entry already names the file; a table with the path twice a row cannot be read.
    return str(error).removeprefix(printable(f"{path}: "))
