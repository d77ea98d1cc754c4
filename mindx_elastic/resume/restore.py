"""Chooses what to resume from and loads it.

Every rank looks at the checkpoint files it can see, says over the store which steps it holds a sound file for, and
all take the newest step that everybody has. Each rank then reads and verifies its own file before anybody changes any
state; a damaged one is put in quarantine and the next older step is tried. So a job never starts from a mixture of
steps, and never silently from nothing while checkpoints lie there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.config import RankInfo
from mindx_elastic.errors import CheckpointError, MismatchError, NoUsableCheckpointError, UsageError
from mindx_elastic.events import logger
from mindx_elastic.persist.catalog import CatalogEntry, preference, root_of, scan
from mindx_elastic.persist.format import CheckpointInfo, Moment, read_header
from mindx_elastic.persist.reader import Checkpoint, read_checkpoint
from mindx_elastic.persist.storage import quarantine, quarantined
from mindx_elastic.resume.copies import Copies, Transport
from mindx_elastic.resume.memory_files import OwnState, known_runs, own_rings, own_states, snapshot_entries

__all__ = ["Resumed", "find_and_read"]

_NEAR = 2  # steps; a rank that was killed is at most one behind the others
_START_TIMEOUT_S = 1800.0  # verifying hundreds of GB on a slow disk takes minutes, on one rank longer than on another


@dataclass(frozen=True)
class Resumed:
    """What a rank resumes from."""

    path: Path
    checkpoint: Checkpoint
    rejected: Sequence[str] = ()
    """One line for each newer step or file that could not be used, with the reason."""
    donor: int | None = None
    """The rank whose file this is, where this rank has none of its own."""
    own: OwnState | None = None
    """With a donor: this rank's own small state of the same step, where it was kept in memory."""
    next_attempt: int = 0
    """The same on every rank: above every attempt of the run that any rank has seen, not only above the file's."""


@dataclass
class _View:
    """What one rank sees in the directory."""

    attempt: int = 0
    """As the launcher counts."""
    mine: dict[Moment, list[Path]] = field(default_factory=dict)
    """This rank's files of a step, the one to try first in front."""
    unforeseen: set[Moment] = field(default_factory=set)
    """Boundaries that came out otherwise than their forecasts, as some rank's file says."""
    own: dict[Moment, OwnState] = field(default_factory=dict)
    """This rank's own small state of a step, to go with a donor's file."""
    donors: dict[Moment, list[Path]] = field(default_factory=dict)
    """Other ranks' files of a step that could stand in: the same model, replicated by DDP."""
    entries: list[CatalogEntry] = field(default_factory=list)
    """All files of this world that can be resumed from; not encoded."""
    created: dict[Moment, float] = field(default_factory=dict)
    other_worlds: dict[Moment, int] = field(default_factory=dict)
    """Number of ranks that wrote a step, where it is not ours."""
    attempts: dict[str, int] = field(default_factory=dict)
    """Highest attempt of each run."""
    rejected: list[str] = field(default_factory=list)
    anything: bool = False

    def encode(self) -> str:
        view = {
            "attempt": self.attempt,
            "mine": list(self.mine),
            "own": list(self.own),
            "donors": list(self.donors),
            "created": list(self.created.items()),
            "worlds": list(self.other_worlds.items()),
            "attempts": self.attempts,
            "rejected": self.rejected,
            "anything": self.anything,
        }
        return json.dumps(view)


class _Views:
    """What all ranks see; the same on every rank, and so is everything that is derived from it."""

    def __init__(self, texts: Sequence[str]) -> None:
        views = [json.loads(text) for text in texts]
        self.mine = [{_moment(key) for key in view["mine"]} for view in views]
        self.own = [{_moment(key) for key in view["own"]} for view in views]
        self.donors = [{_moment(key) for key in view["donors"]} for view in views]
        self._launched = max(int(view["attempt"]) for view in views)
        self.worlds = {_moment(key): int(size) for view in views for key, size in view["worlds"]}
        self.rejected = list(dict.fromkeys(line for view in views for line in view["rejected"]))
        self.anything = any(view["anything"] for view in views)
        self._attempts = [view["attempts"] for view in views]
        self._activity: dict[str, float] = {}  # of each run: when its newest file was written
        for view in views:
            for (run, _, _), created in view["created"]:
                self._activity[run] = max(created, self._activity.get(run, created))

    def order(self, moment: Moment) -> tuple[float, str, int, int]:
        """Sort key: what is taken first is in front, as in `Catalog.steps`.

        A later attempt began at a step that was chosen then, so its steps go before higher ones of an earlier attempt.
        """
        run, attempt, step = moment
        return -self._activity.get(run, 0.0), run, -attempt, -step

    def candidates(self) -> list[Moment]:
        """The steps that every rank can go on from, the one to try first in front: the newest.

        A step for which some rank has only another's file, and none of its own random numbers, is not exact; an exact
        one that is at most `_NEAR` steps older goes before it.
        """
        ranks = range(len(self.mine))
        held = set.intersection(*(self.mine[r] | self.donors[r] for r in ranks))
        exact = {m for m in held if all(m in self.mine[r] or m in self.own[r] for r in ranks)}
        found: list[Moment] = []
        for moment in sorted(held, key=self.order):
            if moment in found:
                continue
            if moment not in exact:
                run, attempt, step = moment
                near = [(run, attempt, step - back) for back in range(1, _NEAR + 1)]
                found += [m for m in near if m in exact and m not in found][:1]
            found.append(moment)
        return found

    def next_attempt(self, run: str) -> int:
        return max(self._launched, 1 + max(int(attempts.get(run, 0)) for attempts in self._attempts))

    def skipped(self, taken: Moment, tried: Collection[Moment]) -> list[str]:
        """A line for each run and attempt whose newest step goes before the one `taken` and could not even be tried."""
        everything = set().union(*self.mine, *self.donors, self.worlds)
        before = [m for m in everything if self.order(m) < self.order(taken) and m not in tried]
        newest: dict[tuple[str, int], Moment] = {}
        for moment in sorted(before, key=self.order):
            newest.setdefault(moment[:2], moment)
        return [f"{_name(moment)} is not used: {self._why_not_common(moment)}" for moment in newest.values()]

    def why_nothing_is_common(self) -> str:
        held = set().union(*self.mine)
        if not held:
            return "they are in quarantine, or not meant for resuming"
        moment = min(held, key=self.order)
        return f"{_name(moment)}: {self._why_not_common(moment)}"

    def _why_not_common(self, moment: Moment) -> str:
        if moment in self.worlds:
            return f"written by {self.worlds[moment]} ranks"
        absent = [str(rank) for rank, mine in enumerate(self.mine) if moment not in mine]
        return (
            f"rank{'s' * (len(absent) > 1)} {', '.join(absent)} {'has' if len(absent) == 1 else 'have'} no file of it"
        )


def find_and_read(
    directories: Sequence[Path],
    ranks: RankInfo,
    exchange: Exchange,
    *,
    resume: str | Path,
    arenas: Path | None = None,
    transport: Transport | None = None,
) -> Resumed | None:
    """The checkpoint to resume from, verified; None for a fresh start. Main thread, all ranks together.

    `arenas`: the job's folder in shared memory. `transport`: fetches what only other ranks hold of this rank's files.
    `resume`: ``"auto"``, ``"never"``, or a path: a checkpoint directory, or one file whose step is then taken by all
    ranks. Raises NoUsableCheckpointError when there are checkpoints and none
    can be used, MismatchError when they were written by another number of ranks, UsageError for a path that is not
    there or is a link to a file, CorruptCheckpointError and ForeignCheckpointError for a file that is no checkpoint.
    """
    if resume == "never":
        return None
    directories, only = _resolve(directories, resume)
    view = _View(attempt=ranks.attempt)
    exchange.publish("adopted", "1")  # every rank has made its arena readable
    exchange.collect("adopted", _START_TIMEOUT_S)
    for directory in directories:
        _look(directory, ranks, only, view)
    if arenas is not None:
        _look_at_snapshots(arenas, ranks, only, view, directories)
    for ring in own_rings([*directories], arenas, ranks.rank):
        _look_at_ring(ring, view)
    exchange.publish("view", view.encode())
    views = _Views(exchange.collect("view", _START_TIMEOUT_S))
    copies = Copies(transport, ranks.rank)
    views.mine = copies.share(view.entries, views.mine, views.order, exchange)
    rejected: list[str] = []
    candidates = views.candidates()
    for round_, key in enumerate(candidates):
        path, checkpoint, problem = _read_one_of(_paths(key, view, copies), key, directories)
        exchange.publish(f"read{round_}", problem or "")
        problems = [(r, text) for r, text in enumerate(exchange.collect(f"read{round_}", _START_TIMEOUT_S)) if text]
        if path is not None and checkpoint is not None and not problems:
            skipped = views.skipped(key, candidates[:round_])
            _warn(ranks, skipped)
            donor = None if checkpoint.info.rank == ranks.rank else checkpoint.info.rank
            own = None if donor is None else view.own.get(key)
            lines = [*views.rejected, *rejected, *skipped]
            return Resumed(path, checkpoint, lines, donor, own, views.next_attempt(key[0]))
        rejected.append(f"{_name(key)} is not used: " + "; ".join(f"rank {r}: {text}" for r, text in problems))
        _warn(ranks, rejected[-1:])
    if only is not None and not views.worlds:
        _refuse_path(resume, directories[0], only, rejected)
    _refuse_if_anything_was_there(directories[0], ranks, views, rejected)
    return None


def _moment(key: Sequence[Any]) -> Moment:
    run, attempt, step = key
    return str(run), int(attempt), int(step)


def _name(moment: Moment) -> str:
    run, attempt, step = moment
    return f"run {run}{f' attempt {attempt}' if attempt else ''} step {step}"


def _warn(ranks: RankInfo, lines: Sequence[str]) -> None:
    for line in lines:
        if ranks.rank == 0:  # all ranks come to the same lines
            logger.warning("%s", line)


def _resolve(directories: Sequence[Path], resume: str | Path) -> tuple[Sequence[Path], Moment | None]:
    if resume == "auto":
        return directories, None
    if not isinstance(resume, (str, os.PathLike)) or resume == "":
        raise UsageError(f'resume={resume!r}: give "auto", "never" or a path')
    path = Path(resume)
    what = f"resume={str(resume)!r}"
    if path.is_dir():
        return [path], None
    if path.is_symlink():
        raise UsageError(
            f"{what} is a symbolic link, and checkpoint files are never followed: give the file itself, "
            f"{os.path.realpath(path)}, or its directory"
        )
    if not path.is_file():
        raise UsageError(f'{what} is neither "auto" nor "never", nor a checkpoint directory or file that exists')
    try:
        info = read_header(path).info
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path}: ")
        remedy = "give another checkpoint, or a directory to take the newest step that is sound"
        raise type(error)(f"{what} cannot be resumed from: {reason}; {remedy}", path=path) from error
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror or error}") from error
    return [root_of(path, info.rank)], info.moment


def _look(directory: Path, ranks: RankInfo, only: Moment | None, view: _View) -> None:
    """Add what this rank sees in `directory` to `view`."""
    view.anything |= bool(quarantined(directory))
    if not directory.is_dir():
        return
    usable: list[CatalogEntry] = []
    for entry in scan(directory).entries:
        # Somebody else's file under a name of its own (pretrained weights) is none of our business.
        view.anything |= entry.info is not None or entry.looks_ours or not entry.foreign
        if (info := entry.info) is None:
            _report_bad(entry, directory, ranks, view)
            continue
        if only in (None, info.moment):
            usable.append(entry)
        else:
            _count_attempt(info, view)
    _sort_in(usable, ranks, view)


def _count_attempt(info: CheckpointInfo, view: _View) -> None:
    view.attempts[info.run_id] = max(info.attempt, view.attempts.get(info.run_id, 0))


def _sort_in(entries: Sequence[CatalogEntry], ranks: RankInfo, view: _View) -> None:
    """Good entries: this rank's own, other ranks' that may stand in, other worlds'."""
    for entry in sorted(entries, key=preference):
        info = entry.info
        assert info is not None
        _count_attempt(info, view)
        if not info.resumable:
            continue
        if info.coordinates.get("foreseen") == 0:
            view.unforeseen.add(info.moment)
        # The age of a run is that of its newest file on any rank that somebody can see.
        view.created[info.moment] = max(info.created, view.created.get(info.moment, info.created))
        if info.world_size != ranks.world_size:
            view.other_worlds[info.moment] = info.world_size
            continue
        view.entries.append(entry)
        if info.rank == ranks.rank:
            view.mine.setdefault(info.moment, []).append(entry.path)
        elif info.coordinates.get("replicas") == info.world_size:
            view.donors.setdefault(info.moment, []).append(entry.path)


def _look_at_snapshots(
    arenas: Path, ranks: RankInfo, only: Moment | None, view: _View, directories: Sequence[Path]
) -> None:
    """Add the snapshots in shared memory that belong to runs which the directories know."""
    entries = snapshot_entries(arenas, known_runs(directories))
    _sort_in([entry for entry in entries if only in (None, entry.info and entry.info.moment)], ranks, view)


def _look_at_ring(ring: Path, view: _View) -> None:
    for moment, own in own_states(ring).items():
        run, attempt, _ = moment
        if run in view.attempts:
            view.attempts[run] = max(attempt, view.attempts[run])
            if not (own.forecast and moment in view.unforeseen):
                view.own.setdefault(moment, own)


def _report_bad(entry: CatalogEntry, directory: Path, ranks: RankInfo, view: _View) -> None:
    """A file without a usable header: quarantine it when it stands where a checkpoint of ours should."""
    owner = _owner(entry.path, directory)
    if entry.foreign and not entry.looks_ours:
        logger.info("%s is not a checkpoint of this package and is left alone", entry.path)
        return
    # Every rank that sees the file says the same, so that in the end it is one line; only its owner logs it.
    view.rejected.append(f"{entry.path}: {entry.problem}")
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


def _paths(key: Moment, view: _View, copies: Copies) -> Iterator[Path | str]:
    """The files to try for a step, or why there is none: one's own, copies of it on other nodes, another rank's."""
    yield from view.mine.get(key, ())
    yield from copies.fetch(key)
    if key not in view.mine:
        yield from view.donors.get(key, ())


def _read_one_of(
    paths: Iterable[Path | str], key: Moment, directories: Sequence[Path]
) -> tuple[Path | None, Checkpoint | None, str | None]:
    """The first sound file of several with the same step, or why there is none."""
    problems = []
    for path in paths:
        checkpoint, problem = (None, path) if isinstance(path, str) else _read(path, directories)
        if checkpoint is not None and checkpoint.info.moment != key:
            checkpoint, problem = None, f"{path} is of another step by now"
        if checkpoint is not None and isinstance(path, Path):
            return path, checkpoint, None
        problems.append(str(problem))
    return None, None, "; ".join(problems)


def _read(path: Path, directories: Sequence[Path]) -> tuple[Checkpoint | None, str | None]:
    try:
        return read_checkpoint(path, verify=True), None
    except CheckpointError as error:
        try:
            root = next((d for d in directories if path.is_relative_to(d)), None)
            if root is None:  # in memory, which is no place to keep it
                path.unlink(missing_ok=True)
                return None, f"{path} is damaged: {error}"
            target = quarantine(path, str(error), root)
            return None, f"{path.name} is damaged and now in {target.parent.name}/: {error}"
        except OSError as move_error:
            return None, f"{path.name} is damaged ({error}) and could not be moved aside ({move_error})"
    except OSError as error:
        return None, f"{path.name} cannot be read: {error}"


def _refuse_path(resume: str | Path, directory: Path, only: Moment, rejected: Sequence[str]) -> None:
    why = "; ".join(rejected) or "not every rank has a sound file of it"
    raise NoUsableCheckpointError(
        f"resume={str(resume)!r}: {_name(only)} cannot be resumed: {why}; give another checkpoint, or a directory to "
        "take the newest step that is sound",
        path=directory,
    )


def _refuse_if_anything_was_there(directory: Path, ranks: RankInfo, views: _Views, rejected: Sequence[str]) -> None:
    remedy = 'to start anew pass resume="never" (nothing is deleted), or choose another directory'
    if views.worlds:
        sizes = sorted(set(views.worlds.values()))
        raise MismatchError(
            f"the checkpoints in {directory} were written by {', '.join(map(str, sizes))} ranks, this job has "
            f"{ranks.world_size}; resharding does not exist yet: start it with {sizes[-1]} ranks, or {remedy}",
            path=directory,
        )
    if not views.anything:
        if any(views.mine) and not rejected:  # in memory only
            _warn(ranks, [f"the job begins anew; what it left in memory is not used: {views.why_nothing_is_common()}"])
        return
    reasons = [*views.rejected, *rejected] or [views.why_nothing_is_common()]
    raise NoUsableCheckpointError(
        f"{directory} holds checkpoint files and none can be resumed from: {'; '.join(reasons[:8])}; {remedy}",
        path=directory,
    )
