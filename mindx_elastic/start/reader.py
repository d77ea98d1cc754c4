"""Reads one rank's share of a plan, verifies every byte, and reports the files that could not be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.core.events import logger
from mindx_elastic.core.owners import Trust
from mindx_elastic.errors import CheckpointError, MismatchError, UntrustedFileError
from mindx_elastic.persist.reader import Checkpoint, read_checkpoint
from mindx_elastic.start.findings import Transport, to_quarantine
from mindx_elastic.start.reshard import Parts, assemble
from mindx_elastic.start.shares import Share

__all__ = ["Problem", "ShareReader"]

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
    ) -> None:
        """`arenas`: the job's folder in shared memory. No file outside of it and `directories` is ever touched."""
        self._directories, self._rank, self._arenas = directories, rank, arenas
        self._transport, self._trust = transport, trust
        self.path = Path()
        """The file that was read last."""

    def read(self, share: Share, blueprint: Blueprint) -> tuple[Checkpoint | None, list[Problem]]:
        """Return the rank's state; or None and what could not be read.

        Raises MismatchError when the files are sound and do not fit this program.
        """
        try:
            return (self._assemble(share, blueprint) if share.rank.assembled else self._read_whole(share)), []
        except _UnusableError as error:
            return None, [(str(error.path), error.problem)]

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
