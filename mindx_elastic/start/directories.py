"""The checkpoint directories at a start: made, checked, locked, and told to the other ranks.

A problem appears before the training, and not at the stop.

Usually all ranks keep their files in one directory; or each has its own (``ckpt_of_rank/{rank}``). A start must see the
files of all ranks, because one that was killed takes its weights from another one's file. And the ranks of a machine
keep one folder in shared memory, named by a directory, because one of them copies a state that all share. So the ranks
tell each other their directories before anything is looked for (`RankDirectories`). Where they differ, each rank looks
into all that it can see, in the order of the ranks, and the first of them names the folder in memory.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo, SharingSettings
from mindx_elastic.core.events import EVENTS_FILE, logger
from mindx_elastic.core.folders import rank_folder, step_folders_of_rank
from mindx_elastic.core.owners import Owners, Trust, check_place, user_ids
from mindx_elastic.errors import SaveError, UnsafeDirectoryError, UsageError
from mindx_elastic.persist.directory_lock import hold_directory
from mindx_elastic.persist.flatten import flatten
from mindx_elastic.persist.storage import check_free_space, prepare_owned_directory, remove_stale_temps

__all__ = ["RankDirectories", "check_state_and_space", "hold_directories", "prepare_directories"]

_MOST_TOLD = 64
_LONGEST_PATH = 4096


def prepare_directories(
    wanted: Iterable[Path], ranks: RankInfo, sharing: SharingSettings, *, may_be_full: bool = False
) -> tuple[dict[Path, Path], Trust]:
    """Make each given directory. Returns their resolved paths (symbolic links are followed once, here), and the users
    whose files count in them.

    Removes no files: a predecessor, or the training that this process evaluates, may still be writing; see
    `hold_directories`. `may_be_full`: a disk without room is a warning. Raises UsageError, UnsafeDirectoryError or
    SaveError.
    """
    trust = Trust({}, user_ids(sharing.trusted_users), sharing.allow_shared)
    resolved = {}
    for path in dict.fromkeys(wanted):
        directory, owners = prepare_owned_directory(
            path, allow_shared=sharing.allow_shared, trusted=trust.trusted, may_be_full=may_be_full
        )
        resolved[path] = directory
        if directory not in trust.roots:
            trust.roots[directory] = owners
            _say_whose(directory, owners, ranks)
    for directory, owners in trust.roots.items():
        if ranks.world_size > 1:
            _check_rank_folder(directory / f"rank_{ranks.rank}", owners, allow_shared=sharing.allow_shared)
        _set_aside(directory / EVENTS_FILE, owners)
    return resolved, trust


def _say_whose(directory: Path, owners: Owners, ranks: RankInfo) -> None:
    owner = os.stat(directory).st_uid
    if owner in (0, os.geteuid(), owners.seen_as) or ranks.rank != 0:
        return
    logger.warning(
        "%s belongs to user %d, not to this process's user %d: %s",
        directory,
        owner,
        os.geteuid(),
        "checkpoint files of that user count too" if owner in owners.uids else "files of that user are left out",
    )


def _check_rank_folder(folder: Path, owners: Owners, *, allow_shared: bool) -> None:
    """Raise UnsafeDirectoryError if another user owns this rank's folder or the link to it."""
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return
    linked = stat.S_ISLNK(status.st_mode)
    if status.st_uid not in owners.uids:
        what = "is a symbolic link of" if linked else "belongs to"
        raise UnsafeDirectoryError(
            f"{folder} {what} user {status.st_uid}, who could exchange this rank's checkpoints; move it away, or name "
            "that user in trusted_users (MINDX_TRUSTED_USERS)",
            path=folder,
        )
    if not allow_shared:
        check_place(folder)


def _set_aside(path: Path, owners: Owners) -> None:
    """Rename an event log that another user has put there, so that it is neither read nor written to."""
    problem: str | None = "has an owner that cannot be determined"
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            problem = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a regular file"
        else:
            problem = owners.problem(status)
        if problem is None:
            return
        target = path.with_name(f"{path.name}.untrusted-{secrets.token_hex(4)}")
        os.rename(path, target)
        logger.warning("%s %s; it is moved to %s and not used", path, problem, target.name)
    except FileNotFoundError:  # it does not exist, or another rank was faster
        return
    except OSError as error:
        raise UnsafeDirectoryError(
            f"{path} {problem}, and cannot be moved aside ({error.strerror}): remove it, or give another directory",
            path=path,
        ) from error


def hold_directories(
    stack: ExitStack, trust: Trust, ranks: RankInfo, *, grace_s: float, joins: bool = False, job: str = ""
) -> None:
    """Lock the directories for this job until `stack` ends, and remove what dead writers left in this rank's folders.

    Waits for a predecessor. The removal comes after the lock: another process may still be writing. A guard that only
    evaluates must not call this. `joins`, `job`: see `hold_directory`. Raises DirectoryInUseError.
    """
    for directory, owners in sorted(trust.roots.items()):
        lock = hold_directory(directory, ranks, owners, grace_s=grace_s, joins=joins, job=job)
        if lock is not None:
            stack.callback(lock.close)
    for directory in trust.roots:
        own = rank_folder(directory, ranks.rank, ranks.world_size)
        plans = () if ranks.rank else (directory,)  # rank 0 writes strategy and plan there
        for folder in (own, *step_folders_of_rank(directory, ranks.rank), *plans):
            if folder.is_dir():
                remove_stale_temps(folder)


def check_state_and_space(collector: Collector, directories: Sequence[Path], *, may_be_full: bool) -> None:
    """Raise UnsupportedStateError for a state that a checkpoint cannot hold, SaveError for a disk without room for one,
    which is a warning where it `may_be_full`.

    The optimizer's state does not exist yet at a fresh start, so this checks the least space that a save will need.
    """
    least = sum(tensor.nbytes for tensor in flatten(collector.state())[1].values())
    for directory in directories:
        try:
            check_free_space(directory, least)
        except OSError as error:
            problem = f"{directory}: not enough room for one checkpoint: {error.strerror}"
            if may_be_full:
                logger.warning("%s; the training goes on, and saves fail until there is room", problem)
                continue
            raise SaveError(f"{problem}; make room, or give another directory", path=directory) from error


class RankDirectories(Part):
    """The meeting's topic; after it, what this rank looks into."""

    name = "directories"

    def __init__(self, own: Sequence[Path], trust: Trust, ranks: RankInfo, *, apart: bool) -> None:
        """`own`: this rank's directories, resolved and made. `trust` learns the others'. `apart`: each node has a disk
        of its own, and the ranks send each other copies of their files."""
        self._own, self._trust, self._ranks, self._apart = list(own), trust, ranks, apart
        self.all: list[Path] = list(own)
        """The directories with files of this job that this process can see."""

    @property
    def home(self) -> Path:
        """The one that names the folder in shared memory, the same for all ranks of this machine."""
        return self.all[0]

    def say(self) -> Any:
        ranks, node = self._ranks, os.environ.get("GROUP_RANK", "")
        words = [str(ranks.rank), str(ranks.local_rank), node, socket.gethostname().partition(".")[0]]
        return [self._apart, [[str(path), os.stat(path).st_ino] for path in self._own], words]

    def merge(self, said: Sequence[Any]) -> Merged:
        paths = [[str(path) for path, _ in places] for _, places, _ in said]
        if any(apart for apart, _, _ in said) or all(each == paths[0] for each in paths):
            return Merged(None)  # also where each node has its own disk under that path
        _refuse_names_by_chance(paths, [list(map(str, words)) for _, _, words in said])
        found = {(str(path), int(number)): None for _, places, _ in said for path, number in places[:_MOST_TOLD]}
        return Merged([list(each) for each in found])

    def hear(self, answer: Answer) -> None:
        if answer.common is None:
            return
        found = []
        for text, number in answer.common:
            if not isinstance(text, str) or len(text) > _LONGEST_PATH or type(number) is not int:
                raise ValueError("no directory")
            path = Path(text)
            if path in self._own:
                found.append(path)
            elif path.is_absolute() and ".." not in path.parts and _is(path, number):
                self._trust.add(path)
                found.append(path)
        self.all = list(dict.fromkeys(found)) or self._own


def _refuse_names_by_chance(paths: Sequence[Sequence[str]], words: Sequence[Sequence[str]]) -> None:
    """Raise UsageError for a rank whose directories are not rank 0's with its own number (`words`: rank, local rank,
    node or host) in the place of rank 0's: the next start would give them other names, and look for nothing there."""
    for rank, (own, of_rank) in enumerate(zip(paths, words, strict=True)):
        pairs = list(zip(paths[0], own, strict=False))
        if not any(all(_differ_by(*pair, *both) for pair in pairs) for both in zip(words[0], of_rank, strict=True)):
            first, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise UsageError(
                f"the directories differ: rank 0 saves in {first}, rank {rank} in {other}. Give one directory, or its "
                "name with the rank's number; a name with the time is to be made once: in the command line, or on rank "
                "0 with torch.distributed.broadcast_object_list"
            )


def _differ_by(first: str, other: str, word: str, other_word: str) -> bool:
    """Whether `other` is `first` with `other_word` in some places of `word`; numbers may have leading zeros."""
    ones, others = _pieces(first, word), _pieces(other, other_word)
    same = (a == b or (_bare(a), _bare(b)) == (word, other_word) for a, b in zip(ones, others, strict=False))
    return len(ones) == len(others) and all(same)


def _pieces(text: str, word: str) -> list[str]:
    return re.findall(rf"{re.escape(word)}(?!\d)|\d+|.", text) if word else [text]


def _bare(text: str) -> str:
    return str(int(text)) if text.isdecimal() else text


def _is(path: Path, number: int) -> bool:
    """Whether this machine sees that very directory, and not another one of the same name on its own disk."""
    try:
        return path.is_dir() and not path.is_symlink() and os.stat(path).st_ino == number
    except OSError:
        return False
