"""Executes a plan: each rank reads its share of it, all ranks learn what could not be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.told import making_sense
from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.core.events import logger
from mindx_elastic.core.owners import Trust
from mindx_elastic.errors import CheckpointError, MismatchError, UntrustedFileError
from mindx_elastic.inventory.views import START_TIMEOUT_S, Sights, Transport, key_of
from mindx_elastic.persist.format import open_checkpoint
from mindx_elastic.persist.reader import Checkpoint, read_checkpoint, verify_file
from mindx_elastic.persist.storage import quarantine
from mindx_elastic.plan.facts import FileFact, ResumePlan
from mindx_elastic.resume.reshard import assemble

__all__ = ["PlanReader"]


class PlanReader:
    """Main thread, all ranks together."""

    def __init__(
        self,
        directories: Sequence[Path],
        rank: int,
        exchange: Exchange,
        sights: Sights,
        transport: Transport | None,
        trust: Trust,
        arenas: Path | None = None,
    ) -> None:
        """`arenas`: the job's folder in shared memory. No file outside of it and `directories` is ever touched."""
        self._trust = trust
        self._directories, self._rank, self._exchange = directories, rank, exchange
        self._sights, self._transport, self._arenas = sights, transport, arenas
        self._verified: set[tuple[object, ...]] = set()
        self.path = Path()
        """The file that this rank has taken last."""

    def read(self, plan: ResumePlan, blueprint: Blueprint | None) -> Checkpoint | None:
        """This rank's state, with every byte verified; None when some rank could not read its share.

        `Sights` knows then what to do without, and a new plan has to be made. Raises MismatchError on all ranks when
        the files are sound and do not fit the program of one of them.
        """
        if any(share.assembled for share in plan.ranks) and self._agree(plan, self._verify_share(plan)):
            return None
        checkpoint, bad = self._read_own(plan, blueprint)
        return None if self._agree(plan, bad) else checkpoint

    def _agree(self, plan: ResumePlan, bad: dict[tuple[int, int], str]) -> bool:
        """Tell the others what could not be read: (old rank, number among its files) -> problem. True: something."""
        problems = json.dumps([[old, number, text] for (old, number), text in bad.items()])
        texts = self._exchange.gather("read", problems, START_TIMEOUT_S)
        with making_sense("what the ranks could not read"):
            found = [json.loads(text) for text in texts]
            for rank, each in enumerate(found):
                for old, number, text in each:
                    self._sights.forget(rank, plan.files[old][int(number)], str(text))
            return any(found)

    # --- reading whole files ---

    def _read_own(
        self, plan: ResumePlan, blueprint: Blueprint | None
    ) -> tuple[Checkpoint | None, dict[tuple[int, int], str]]:
        share = plan.ranks[self._rank]
        fact = share.file
        place = (fact.rank, plan.files[fact.rank].index(fact))
        if share.assembled:
            return self._assemble(plan, blueprint, place)
        problems = []
        for path in self._paths(fact):
            if isinstance(path, str):
                problems.append(path)
                continue
            checkpoint, problem = self._read_file(path)
            if checkpoint is not None and checkpoint.info.moment != plan.moment:
                checkpoint, problem = None, f"{path} is of another step by now"
            if checkpoint is not None:
                self.path = path
                return checkpoint, {}
            problems.append(problem)
        return None, {place: "; ".join(problems)}

    def _paths(self, fact: FileFact) -> Iterator[Path | str]:
        """Where the file is for this rank, fetched if need be, or why it cannot be had."""
        if self._sights.sees(self._rank, fact):
            yield Path(fact.path)
            return
        for holder, (root, name) in self._sights.sources(self._rank, fact):
            assert self._transport is not None
            try:
                path = self._transport.fetch(holder, root, name)
            except (OSError, CheckpointError) as error:
                yield f"{name} cannot be had from rank {holder}: {error}"
                continue
            step = fact.moment[2]
            logger.warning("rank %d takes its file of step %d from rank %d: %s", self._rank, step, holder, path)
            yield path

    def _outside(self, path: Path) -> str:
        """Why a path that some rank has told must not be read here; empty where it may be."""
        places = [*self._directories, *([] if self._arenas is None else [self._arenas])]
        for place in places:
            if path.is_relative_to(place) and ".." not in path.relative_to(place).parts:
                return ""
        return f"{path} lies outside of the checkpoint directory and is not touched"

    def _read_file(self, path: Path) -> tuple[Checkpoint | None, str]:
        if problem := self._outside(path):
            return None, problem
        try:
            return read_checkpoint(path, verify=True, owners=self._trust.of(path)), ""
        except UntrustedFileError as error:  # exchanged since it was looked at
            return None, str(error)
        except CheckpointError as error:
            return None, self._put_aside(path, str(error))
        except OSError as error:
            return None, f"{path.name} cannot be read: {error}"

    def _put_aside(self, path: Path, problem: str) -> str:
        """A damaged file goes to quarantine; returns what is to be said about it."""
        try:
            root = next((d for d in self._directories if path.is_relative_to(d)), None)
            if root is None:  # in memory, which is no place to keep it
                path.unlink(missing_ok=True)
                return f"{path} is damaged: {problem}"
            target = quarantine(path, problem, root)
            return f"{path.name} is damaged and now in {target.parent.relative_to(root)}/: {problem}"
        except OSError as error:
            return f"{path.name} is damaged ({problem}) and could not be moved aside ({error})"

    # --- putting parts together ---

    def _verify_share(self, plan: ResumePlan) -> dict[tuple[int, int], str]:
        """Check the digests of some of the files; the ranks share the work, each file is read whole by one of them."""
        bad = {}
        turn, used = 0, plan.used_paths()
        for old, facts in plan.files.items():
            for number, fact in enumerate(facts):
                if fact.path not in used:
                    continue
                readers = sorted(fact.visible_to) if fact.visible_to is not None else range(len(plan.ranks))
                readers = [rank for rank in readers if self._sights.sees(rank, fact)]
                mine = bool(readers) and readers[turn % len(readers)] == self._rank
                turn += 1
                if mine and key_of(fact) not in self._verified:
                    problem = self._verify(Path(fact.path))
                    if problem:
                        bad[old, number] = problem
                    self._verified.add(key_of(fact))
        return bad

    def _verify(self, path: Path) -> str:
        if problem := self._outside(path):
            return problem
        try:
            owners = self._trust.of(path)
            with open_checkpoint(path):  # a file that cannot be opened at the moment is not damaged
                problems = verify_file(path, owners)
        except UntrustedFileError as error:
            return str(error)
        except CheckpointError as error:
            problems = [str(error)]
        except OSError as error:
            return f"{path.name} cannot be read: {error}"
        return self._put_aside(path, problems[0]) if problems else ""

    def _assemble(
        self, plan: ResumePlan, blueprint: Blueprint | None, place: tuple[int, int]
    ) -> tuple[Checkpoint | None, dict[tuple[int, int], str]]:
        if blueprint is None:
            raise MismatchError("the state has to be put together from parts, and nothing says what of")
        self.path = Path(plan.ranks[self._rank].file.path)
        try:
            return assemble(plan, self._rank, blueprint, self._trust), {}
        except MismatchError:
            raise  # sound files, another program
        except (CheckpointError, OSError) as error:
            path = getattr(error, "path", None) or getattr(error, "filename", None)
            found = [
                (old, number)
                for old, facts in plan.files.items()
                for number, fact in enumerate(facts)
                if path is not None and Path(fact.path) == Path(path)
            ]
            return None, {(found or [place])[0]: str(error)}
