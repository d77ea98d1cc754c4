"""What each rank reads of a plan: rank 0 encodes it into one answer for each, the rank decodes and reads it.

Rank 0 plans (see `restore`). Each rank receives a few lines that are the same for all, its own share, and nothing of
the others', so that a start moves O(ranks) bytes. A rank that assembles its tensors from parts of many files reads the
rows of all files. Every byte is verified, and files that could not be used are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from mindx_elastic.agreement.gather import Answer, Merged
from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.core.events import logger
from mindx_elastic.core.fields import read
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import CheckpointError, MismatchError, UntrustedFileError
from mindx_elastic.persist.reader import Checkpoint, read_checkpoint
from mindx_elastic.start.facts import FileFact, RankPlan, ResumePlan, World
from mindx_elastic.start.findings import Archive, Place, Transport, to_quarantine
from mindx_elastic.start.inventory import Inventory
from mindx_elastic.start.reshard import Parts, assemble

__all__ = ["Problem", "Share", "ShareReader", "share_in", "tell_shares"]

_SOURCE, _FILES = "source", "files"
_COMMON = ("moment", "epoch", "step_in_epoch", "resharded", "inexact", "unmanaged", "steps_lost")
"""What a plan says to all ranks alike."""


class Share(NamedTuple):
    """What one rank reads."""

    plan: ResumePlan
    """What this rank needs of it: `ranks` is empty, and `files` has its own file, or where it is assembled all."""
    rank: RankPlan
    is_seen: bool
    """The rank can read the file itself; else it fetches it from one of `sources`."""
    sources: Sequence[tuple[int, Place]]
    uses_own_state: bool
    """Whether this rank uses its own small state of the step (see `Inventory.may_use`)."""


# --- rank 0 ---


def tell_shares(plan: ResumePlan, inventory: Inventory) -> Merged:
    """Encode rank 0's answer."""
    has_own = inventory.own_states.get(plan.moment, set())
    own = []
    for share in plan.ranks:
        is_seen = share.rank in inventory.seen_by(share.file)
        sources = [] if is_seen else inventory.sources(share.rank, share.file)
        own.append(
            {
                "file": _row(share.file),
                "assembled": share.assembled,
                "seen": is_seen,
                "sources": [[holder, list(place)] for holder, place in sources],
                "own_state": share.rank in has_own,
                "others": list(map(_row, share.others)),
            }
        )
    common = {name: getattr(plan, name) for name in _COMMON}
    common |= {"old_size": plan.source.world_size, "size": plan.world.size}
    more: dict[str, Any] = {}
    if any(share.assembled for share in plan.ranks):
        rows = [_row(fact) for facts in plan.files.values() for fact in facts]
        more = {_FILES: rows, _SOURCE: plan.source.to_json()}
    return Merged(common, own, more)


def _row(fact: FileFact) -> list[Any]:
    """What a rank has to know of a file that it reads."""
    visible = None if fact.visible_to is None else sorted(fact.visible_to)
    return [fact.rank, fact.path, visible, None if fact.held is None else asdict(fact.held), fact.address]


# --- every rank ---


def share_in(answer: Answer, rank: int, target: Strategy) -> Share:
    """Decode `rank`'s share. `target`: the layouts of its own tensors. Raises ValueError, KeyError or TypeError."""
    common, own = answer.common, answer.own
    old_size = int(common["old_size"])
    assembled = bool(own["assembled"])
    source, rows = Strategy(old_size, ()), [own["file"]]
    if assembled:
        rows, content = answer.more([_FILES, _SOURCE])
        source = Strategy.from_json(content)

    def fact_of(row: Sequence[Any]) -> FileFact:
        old, path, visible, held, address = row
        content = {"rank": old, "path": path, "moment": common["moment"], "world_size": old_size, "held": held}
        readers = None if visible is None else frozenset(map(int, visible))
        found = read(FileFact, content, strategy=source, visible_to=readers, where=str(address))
        if found.rank >= old_size:
            raise ValueError("not a file of a rank")
        return found

    files: dict[int, list[FileFact]] = {}
    for fact in map(fact_of, rows):
        files.setdefault(fact.rank, []).append(fact)
    others = tuple(map(fact_of, own["others"]))
    plan = read(
        ResumePlan,
        {name: common[name] for name in _COMMON},
        source=source,
        world=World(int(common["size"]), target),
        ranks=(),
        files={old: tuple(facts) for old, facts in files.items()},
    )
    return Share(
        plan,
        RankPlan(rank, fact_of(own["file"]), assembled, others),
        bool(own["seen"]),
        [(int(holder), (int(root), str(name))) for holder, (root, name) in own["sources"]],
        bool(own["own_state"]),
    )


# --- reading it ---


Problem = tuple[str, str]
"""The path of a file, and why it could not be used."""


class _UnusableError(Exception):
    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem


class ShareReader:
    """Main thread."""

    def __init__(
        self,
        directories: Sequence[Path],
        rank: int,
        transport: Transport | None,
        trust: Trust,
        arenas: Path | None = None,
        archive: Archive | None = None,
    ) -> None:
        """`arenas`: the job's folder in shared memory. No file outside of it and `directories` is ever touched."""
        self._archive = archive
        self._directories, self._rank, self._arenas = directories, rank, arenas
        self._transport, self._trust = transport, trust
        self.path = Path()
        """The file that was read last."""

    def read(self, share: Share, blueprint: Blueprint) -> tuple[Checkpoint | None, list[Problem]]:
        """Return the rank's state; or None and what could not be read.

        Raises MismatchError when the files are sound and do not fit this program.
        """
        try:
            self._bring(share)
            return (self._assemble(share, blueprint) if share.rank.assembled else self._read_whole(share)), []
        except _UnusableError as error:
            return None, [(str(error.path), error.problem)]

    def _bring(self, share: Share) -> None:
        """Fetch what this rank needs of the archive, whole files, to their places on disk. Raises _UnusableError."""
        wanted = [share.rank.file, *share.rank.others]
        if share.rank.assembled:
            for facts in share.plan.files.values():
                wanted += [fact for fact in facts if fact.seen_by(self._rank)][:1]
        for address, path in dict.fromkeys((fact.address, fact.path) for fact in wanted if fact.address):
            if self._archive is None or (problem := self._outside(Path(path))):
                raise _UnusableError(Path(path), problem if self._archive else "this rank has no archive")
            try:
                if self._archive.fetch(address, Path(path)):
                    logger.info("rank %d has fetched %s from the archive", self._rank, path)
            except (OSError, CheckpointError) as error:
                raise _UnusableError(Path(path), str(error)) from error

    def _read_whole(self, share: Share) -> Checkpoint:
        problems = []
        others = [Path(fact.path) for fact in share.rank.others]
        for path in self._paths(share):
            if isinstance(path, str):
                problems.append(path)
                continue
            try:
                with self._blaming(path, others):
                    checkpoint = read_checkpoint(path, owners=self._trust.of(path), others=others)
                if checkpoint.info.moment == share.plan.moment:
                    self.path = path
                    return checkpoint
                problems.append(f"{path} is of another step by now")
            except _UnusableError as error:
                if error.path != path:  # one of `others`
                    raise
                problems.append(error.problem)
        raise _UnusableError(Path(share.rank.file.path), "; ".join(problems) or "no rank has it")

    def _assemble(self, share: Share, blueprint: Blueprint) -> Checkpoint:
        """Put the state together from parts of files."""
        self.path = Path(share.rank.file.path)
        files = (fact for facts in share.plan.files.values() for fact in facts)
        seen = [Path(fact.path) for fact in files if fact.seen_by(self._rank)]
        with self._blaming(self.path, seen), Parts(share.plan, share.rank, self._trust) as parts:
            return assemble(parts, blueprint)

    def _paths(self, share: Share) -> Iterator[Path | str]:
        """The paths at which this rank can read the file, after fetching a copy if needed; or a str, why it cannot."""
        if share.is_seen:
            yield Path(share.rank.file.path)
            return
        for holder, (root, name) in share.sources:
            if self._transport is None:
                continue
            try:
                path = self._transport.fetch(holder, root, name)
            except (OSError, CheckpointError) as error:
                yield f"{name} cannot be fetched from rank {holder}: {error}"
                continue
            step = share.plan.step
            logger.warning("rank %d takes its file of step %d from rank %d: %s", self._rank, step, holder, path)
            yield path

    def _outside(self, path: Path) -> str:
        """Why a path from another rank's message must not be read here; empty if it may be."""
        places = [*self._directories, *([] if self._arenas is None else [self._arenas])]
        for place in places:
            if path.is_relative_to(place) and ".." not in path.relative_to(place).parts:
                return ""
        return f"{path} is outside of the checkpoint directory and is not touched"

    @contextmanager
    def _blaming(self, path: Path, others: Sequence[Path]) -> Iterator[None]:
        """Raise _UnusableError for the one of these files that cannot be read. A damaged one goes to the quarantine."""
        for each in (path, *others):
            if problem := self._outside(each):
                raise _UnusableError(each, problem)
        try:
            yield
        except (CheckpointError, OSError) as error:
            if isinstance(error, MismatchError) and error.path is None:
                raise  # sound files, another program
            named = getattr(error, "path", None) or getattr(error, "filename", None)
            about = path if named is None else Path(named)
            raise _UnusableError(about if about in others else path, self._problem_of(error, about)) from error

    def _problem_of(self, error: Exception, path: Path) -> str:
        """What is wrong with the file, in words. A damaged one goes to the quarantine."""
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            return f"{path.name} cannot be read: {error}"
        if isinstance(error, (UntrustedFileError, MismatchError)):  # exchanged since it was looked at
            return str(error)
        return to_quarantine(path, str(error), self._directories)
