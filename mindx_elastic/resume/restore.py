"""Chooses what to resume from and loads it.

Every rank looks at the checkpoint files it can see, says over the store which steps it holds a sound file for, and
all take the newest step that everybody has. Each rank then reads and verifies its own file before anybody changes any
state; a damaged one is put in quarantine and the next older step is tried. So a job never starts from a mixture of
steps, and never silently from nothing while checkpoints lie there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.config import RankInfo
from mindx_elastic.errors import CheckpointError, MismatchError, NoUsableCheckpointError, UsageError
from mindx_elastic.events import logger
from mindx_elastic.persist.catalog import CatalogEntry, scan
from mindx_elastic.persist.reader import Checkpoint, read_checkpoint
from mindx_elastic.persist.storage import QUARANTINE, quarantine

__all__ = ["Resumed", "find_and_read"]

_START_TIMEOUT_S = 1800.0  # verifying hundreds of GB on a slow disk takes minutes, on one rank longer than on another
_Key = tuple[str, int, int]  # run_id, step, attempt: files of two attempts at one step are never put together


@dataclass(frozen=True)
class Resumed:
    """What a rank resumes from."""

    path: Path
    checkpoint: Checkpoint
    rejected: Sequence[str] = ()
    """One line for each newer step that could not be used, with the reason."""
    donor: int | None = None
    """The rank whose file this is, where this rank has none of its own."""


@dataclass
class _View:
    """What one rank sees in the directory."""

    mine: dict[_Key, list[Path]] = field(default_factory=dict)
    """This rank's files of a step, the one to try first in front."""
    donors: dict[_Key, list[Path]] = field(default_factory=dict)
    """Other ranks' files of a step that could stand in: the same model, replicated by DDP."""
    created: dict[_Key, float] = field(default_factory=dict)
    other_worlds: dict[str, int] = field(default_factory=dict)
    rejected: list[str] = field(default_factory=list)
    anything: bool = False

    def encode(self) -> str:
        view = {
            "mine": [[*key, self.created[key]] for key in self.mine],
            "donors": [[*key, self.created[key]] for key in self.donors],
            "worlds": self.other_worlds,
            "rejected": self.rejected,
            "anything": self.anything,
        }
        return json.dumps(view)


def find_and_read(
    directories: Sequence[Path], ranks: RankInfo, exchange: Exchange, *, resume: str | Path
) -> Resumed | None:
    """The checkpoint to resume from, verified and in memory; None for a fresh start. Main thread, all ranks together.

    `resume` is ``"auto"``, ``"never"``, or a path: a checkpoint directory, or one file whose step is then taken by
    all ranks. Raises NoUsableCheckpointError when there are checkpoints and none can be used, MismatchError when they
    were written by another number of ranks, UsageError for a path that is not there.
    """
    if resume == "never":
        return None
    directories, only = _resolve(directories, resume)
    view = _View()
    for directory in directories:
        _look(directory, ranks, only, view)
    rejected = list(view.rejected)
    exchange.publish("view", view.encode())
    views = [json.loads(text) for text in exchange.collect("view", _START_TIMEOUT_S)]
    exact = _common(views, "mine")
    # Only where no step is whole (a rank died, or failed in a step that the others finished): better a replica's
    # state than none. A whole older step is exact and goes first.
    inexact = [key for key in _common(views, "mine", "donors") if key not in exact]
    for round_, key in enumerate([*exact, *inexact]):
        path, checkpoint, problem = _read_one_of(view.mine.get(key) or view.donors[key], directories)
        exchange.publish(f"read{round_}", problem or "")
        problems = [(r, text) for r, text in enumerate(exchange.collect(f"read{round_}", _START_TIMEOUT_S)) if text]
        if checkpoint is not None and not problems:
            for line in (newer := _newer_of_other_worlds(views, key)):
                logger.warning("%s", line)
            donor = None if key in view.mine else checkpoint.info.rank
            return Resumed(path, checkpoint, [*rejected, *newer], donor)
        line = f"step {key[1]} is not used: " + "; ".join(f"rank {r}: {text}" for r, text in problems)
        logger.warning("%s", line)
        rejected.append(line)
    _refuse_if_anything_was_there(directories, ranks, views, rejected, only)
    return None


def _resolve(directories: Sequence[Path], resume: str | Path) -> tuple[Sequence[Path], _Key | None]:
    if resume == "auto":
        return directories, None
    if not isinstance(resume, (str, os.PathLike)) or resume == "":
        raise UsageError(f'resume={resume!r}: give "auto", "never" or a path')
    path = Path(resume)
    if path.is_dir():
        return [path], None
    if not path.is_file() or path.is_symlink():
        raise UsageError(
            f'resume={str(resume)!r} is neither "auto" nor "never", nor a checkpoint directory or file that exists'
        )
    from mindx_elastic.persist.format import read_header

    info = read_header(path).info
    parent = path.parent
    key = (info.run_id, info.step, info.attempt)
    return [parent.parent if parent.name == f"rank_{info.rank}" else parent], key


def _look(directory: Path, ranks: RankInfo, only: _Key | None, view: _View) -> None:
    """Add what this rank sees in `directory` to `view`."""
    view.anything |= _has_files(directory / QUARANTINE)
    if not directory.is_dir():
        return
    catalog = scan(directory)
    found: dict[_Key, list[CatalogEntry]] = {}
    donors: dict[_Key, list[CatalogEntry]] = {}
    for entry in catalog.entries:
        # Somebody else's file under a name of its own (pretrained weights) is none of our business.
        view.anything |= entry.header is not None or entry.looks_ours or not entry.foreign
        if entry.header is None:
            _report_bad(entry, directory, ranks, view)
            continue
        info = entry.header.info
        key = (info.run_id, info.step, info.attempt)
        if not info.resumable or (only is not None and key != only):
            continue
        if info.world_size != ranks.world_size:
            view.other_worlds[str(info.step)] = info.world_size
            continue
        if info.rank == ranks.rank:
            found.setdefault(key, []).append(entry)
        elif info.coordinates.get("replicas") == info.world_size:
            donors.setdefault(key, []).append(entry)
    for key, entries in found.items():
        view.mine.setdefault(key, []).extend(e.path for e in sorted(entries, key=_preferred, reverse=True))
    for key, entries in donors.items():
        view.donors.setdefault(key, []).extend(e.path for e in sorted(entries, key=_rank))
    # The age of a run is that of its newest file on any rank that we can see, the order is the same everywhere after
    # the exchange has taken the maximum.
    for key in {**found, **donors}:
        newest = max(e.header.info.created for e in catalog.entries if e.header and _key(e) == key)
        view.created[key] = max(newest, view.created.get(key, 0.0))


def _key(entry: CatalogEntry) -> _Key | None:
    if entry.header is None:
        return None
    info = entry.header.info
    return info.run_id, info.step, info.attempt


def _rank(entry: CatalogEntry) -> int:
    assert entry.header is not None
    return entry.header.info.rank


def _preferred(entry: CatalogEntry) -> tuple[int, float]:
    assert entry.header is not None
    info = entry.header.info
    return (("periodic", "request_exit", "breakpoint").index(info.kind) if info.kind in _KINDS else -1, info.created)


_KINDS = ("periodic", "request_exit", "breakpoint")


def _report_bad(entry: CatalogEntry, directory: Path, ranks: RankInfo, view: _View) -> None:
    """A file without a usable header: quarantine it when it stands where a checkpoint of ours should."""
    owner = _owner(entry.path, directory)
    if entry.foreign and not entry.looks_ours:
        logger.info("%s is not a checkpoint of this package and is left alone", entry.path)
        return
    view.rejected.append(f"{entry.path.name}: {entry.problem}")
    if (owner if owner is not None and owner < ranks.world_size else 0) != ranks.rank:
        return
    if entry.looks_ours and not entry.path.is_dir():
        try:
            target = quarantine(entry.path, entry.problem or "unreadable", directory)
            logger.warning("%s is put aside in %s: %s", entry.path, target, entry.problem)
            return
        except OSError as error:
            logger.warning("%s cannot be moved to the quarantine (%s)", entry.path, error)
    logger.warning("%s is not used: %s", entry.path, entry.problem)


def _owner(path: Path, directory: Path) -> int | None:
    name = path.parent.name
    if path.parent != directory and name.startswith("rank_") and name[5:].isdigit():
        return int(name[5:])
    return None


def _common(views: Sequence[dict[str, Any]], *sources: str) -> list[_Key]:
    """The steps that every rank holds in `sources`: the most recently active run first, its newest step first."""
    newest_of_run: dict[str, float] = {}
    common: set[_Key] | None = None
    for view in views:
        held = [entry for source in sources for entry in view[source]]
        keys = {(run, step, attempt) for run, step, attempt, _ in held}
        common = keys if common is None else common & keys
        for run, _, _, created in held:
            newest_of_run[run] = max(created, newest_of_run.get(run, 0.0))
    return sorted(common or (), key=lambda key: (newest_of_run[key[0]], *key), reverse=True)


def _newer_of_other_worlds(views: Sequence[dict[str, Any]], key: _Key) -> list[str]:
    newer = {int(step): size for view in views for step, size in view["worlds"].items() if int(step) > key[1]}
    return [f"step {step} is not used: written by {size} ranks" for step, size in sorted(newer.items())]


def _read_one_of(paths: Sequence[Path], directories: Sequence[Path]) -> tuple[Path, Checkpoint | None, str | None]:
    """The first sound file of several with the same step, or why there is none."""
    problems = []
    for path in paths:
        checkpoint, problem = _read(path, directories)
        if checkpoint is not None:
            return path, checkpoint, None
        problems.append(str(problem))
    return paths[0], None, "; ".join(problems)


def _read(path: Path, directories: Sequence[Path]) -> tuple[Checkpoint | None, str | None]:
    try:
        return read_checkpoint(path, verify=True), None
    except CheckpointError as error:
        try:
            root = next(d for d in directories if path.is_relative_to(d))
            target = quarantine(path, str(error), root)
            return None, f"{path.name} is damaged and now in {target.parent.name}/: {error}"
        except OSError as move_error:
            return None, f"{path.name} is damaged ({error}) and could not be moved aside ({move_error})"
    except OSError as error:
        return None, f"{path.name} cannot be read: {error}"


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_file() for path in folder.rglob("*.safetensors*"))


def _refuse_if_anything_was_there(
    directories: Sequence[Path],
    ranks: RankInfo,
    views: Sequence[dict[str, Any]],
    rejected: Sequence[str],
    only: _Key | None,
) -> None:
    directory = directories[0]
    remedy = 'to start anew pass resume="never" (nothing is deleted), or choose another directory'
    worlds = {step: size for view in views for step, size in view["worlds"].items()}
    if worlds:
        sizes = sorted(set(worlds.values()))
        raise MismatchError(
            f"the checkpoints in {directory} were written by {', '.join(map(str, sizes))} ranks, this job has "
            f"{ranks.world_size}; resharding does not exist yet: start it with {sizes[-1]} ranks, or {remedy}",
            path=directory,
        )
    if only is not None:
        raise NoUsableCheckpointError(
            f"step {only[1]} of run {only[0]} cannot be resumed: not every rank has a sound file of it", path=directory
        )
    if not any(view["anything"] for view in views):
        return
    everybody = [line for view in views for line in view["rejected"]]
    reasons = list(dict.fromkeys([*rejected, *everybody])) or [_incomplete(views)]
    raise NoUsableCheckpointError(
        f"{directory} holds checkpoint files and none can be resumed from: {'; '.join(reasons[:8])}; {remedy}",
        path=directory,
    )


def _incomplete(views: Sequence[dict[str, Any]]) -> str:
    held: dict[int, list[int]] = {}
    for rank, view in enumerate(views):
        for _, step, _, _ in view["mine"]:
            held.setdefault(step, []).append(rank)
    if not held:
        return "they are in quarantine, or not meant for resuming"
    step = max(held)
    absent = sorted(set(range(len(views))) - set(held[step]))
    return f"step {step} lacks the file of rank {', '.join(map(str, absent))}"
