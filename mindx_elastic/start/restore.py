"""Chooses what to resume from, and reads it.

The ranks meet three times for it (see `agreement.gather`):

1. *disks*: each rank sends a digest of the list of files on its disks, and which memory it sees. Ranks that see the
   same files share the reading of the headers.
2. *plan*: each rank sends its findings. Rank 0 merges them into an inventory, plans, and sends each rank its share.
3. *read*: each rank has read and verified its share, before any state is changed, and sends what it could not use. If
   a file was damaged, it is in quarantine by then, rank 0 plans without it, and the ranks meet here again.

So a job never starts from a mixture of steps, and never silently from nothing while there are checkpoints.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mindx_elastic import errors
from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Answer, Merged, Part, meet
from mindx_elastic.agreement.validation import making_sense
from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.moment import Moment, moment_name
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.printable import printable
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import (
    CheckpointError,
    MindxError,
    MismatchError,
    NoUsableCheckpointError,
    UsageError,
)
from mindx_elastic.memory.boundaries import BoundaryRecord, OwnState
from mindx_elastic.memory.memory_files import own_rings, small_records
from mindx_elastic.persist.catalog import read_entries, root_of
from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.reader import Checkpoint
from mindx_elastic.start.facts import FileFact, KnownFaults, Refusal, ResumePlan, World
from mindx_elastic.start.findings import (
    EVERYTHING,
    Archive,
    Findings,
    Listing,
    Share,
    Transport,
    add_archived,
    list_files,
    put_aside,
    scan,
)
from mindx_elastic.start.inventory import Inventory
from mindx_elastic.start.shares import Problem, ShareReader, share_in, tell_shares
from mindx_elastic.start.unused_state import recorded_saves

__all__ = [
    "Disks",
    "FollowedPart",
    "PlanPart",
    "Resumed",
    "SearchPlaces",
    "Target",
    "places_of",
    "put_strategy",
    "read_strategies",
    "read_together",
    "records_of",
]

_LONGEST_RUN_ID = 1000
_MOST_LINES = 32
_MOST_ATTEMPTS = 10**9
_SHOWN = 8


@dataclass
class Target:
    """The layouts that this start needs."""

    own: Strategy
    """The layouts of this rank's tensors."""
    blueprint: Blueprint
    """The objects of this rank that a state is assembled for."""
    strategy: Strategy | None = None
    """The layouts of all ranks; only rank 0 learns it, when they meet."""


class Resumed(NamedTuple):
    """The checkpoint that a rank resumes from."""

    path: Path
    checkpoint: Checkpoint
    plan: ResumePlan
    """On rank 0 the plan for all ranks, on the others the part for this rank (see `start.shares`)."""
    rejected: Sequence[str] = ()
    """One line for each newer step or file that could not be used, with the reason; a limited number."""
    donor: int | None = None
    """The rank whose file this is, if this rank has no own file."""
    own: OwnState | None = None
    """With a donor: this rank's own small state of the same step, if it was kept in memory."""
    own_records: Sequence[BoundaryRecord] = ()
    """With a donor, and unless `own` is a boundary: what this rank kept of the run up to this step, newest first."""
    donor_records: Sequence[BoundaryRecord] = ()
    """The same of the donor, where this process can read it."""
    is_live: bool = False
    """The state is that of this process's own objects, after a recovery in place."""
    next_attempt: int = 0
    """The same on every rank: above every attempt of the run that any rank has seen, not only above the file's."""


# --- 0: the places ---


@dataclass(frozen=True)
class SearchPlaces:
    """Where a start looks for checkpoints."""

    directories: Sequence[Path]
    resume: str | Path
    """``"auto"``, ``"never"``, or a path: a checkpoint directory, or one file whose step is then taken by all ranks."""
    only: Moment | None = None
    """The one step that may be taken."""
    arenas: Path | None = None
    """The job's folder in shared memory."""
    trust: Trust = field(default_factory=Trust)
    """The users whose files count."""
    own: Sequence[Path] = ()
    """The directories where the job saves, if they are not those where all that counts is looked for."""


def places_of(
    directories: Sequence[Path], resume: str | Path, *, arenas: Path | None = None, trust: Trust | None = None
) -> SearchPlaces:
    """Where a start with this `resume` argument looks.

    Raises UsageError for a path that does not exist or is a link to a file, CorruptCheckpointError and
    ForeignCheckpointError for a file that is not a checkpoint.
    """
    trust = trust or Trust()
    if resume in ("auto", "never"):
        return SearchPlaces(directories, resume, None, arenas, trust, () if resume == "auto" else directories)
    root, only = _resolve(resume)
    trust.add(root)
    return SearchPlaces([root], resume, only, arenas, trust, directories)


def _resolve(resume: str | Path) -> tuple[Path, Moment | None]:
    if not isinstance(resume, (str, os.PathLike)) or resume == "":
        raise UsageError(f'resume={resume!r}: give "auto", "never" or a path')
    path = Path(resume)
    what = f"resume={str(resume)!r}"
    if path.is_dir():
        return path, None
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
        reason = str(error).removeprefix(printable(f"{path}: "))
        remedy = (
            "give another checkpoint, or a directory to take the newest step that is sound; weights of another program "
            "are loaded before the guard is entered (docs/porting.md)"
        )
        raise type(error)(f"{what} cannot be resumed from: {reason}; {remedy}", path=path) from error
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror or error}") from error
    return root_of(path, info.rank), info.moment


# --- 1: which ranks see the same files ---


class Disks(Part):
    """Finds the ranks that see the same disks and the same memory, and divides the reading of headers among them."""

    name = "disks"

    def __init__(self, places: SearchPlaces) -> None:
        """Call it when the directories of all ranks are locked: who wrote there before has come to its end. In memory
        a rank may still be at work then, up to the meeting."""
        self.places = places
        never = places.resume == "never"
        self._listing = Listing((), {}) if never else list_files(places.directories, places.arenas)
        self._share: Share = EVERYTHING
        self._memory_share: Share = EVERYTHING

    def say(self) -> Any:
        return [self._listing.disk, self._listing.machine]

    def merge(self, said: Sequence[Any]) -> Merged:
        shares = [_shares([str(each[column]) for each in said]) for column in (0, 1)]
        return Merged(None, [list(pair) for pair in zip(*shares, strict=True)])

    def hear(self, answer: Answer) -> None:
        (number, count), (memory_number, memory_count) = answer.own
        self._share, self._memory_share = (int(number), int(count)), (int(memory_number), int(memory_count))

    def look(self, ranks: RankInfo, transport: Transport | None = None) -> Findings:
        """Read this rank's share of the headers, after the meeting; move damaged files to quarantine. `transport`:
        fetches copies of this rank's files from other ranks."""
        found = scan(
            self._listing,
            trust=self.places.trust,
            rank=ranks.rank,
            only=self.places.only,
            share=self._share,
            memory_share=self._memory_share,
            transport=transport,
            attempt=ranks.attempt,
        )
        put_aside(found, self._listing)
        return found


def _shares(views: Sequence[str]) -> list[tuple[int, int]]:
    """For each rank its number among the ranks with the same view, and the number of these ranks."""
    sizes: dict[str, int] = {}
    numbers = []
    for view in views:
        numbers.append(sizes.get(view, 0))
        sizes[view] = numbers[-1] + 1
    return [(number, sizes[view]) for number, view in zip(numbers, views, strict=True)]


# --- strategies in the store, each once ---


def put_strategy(exchange: Exchange, strategy: Strategy) -> list[str]:
    """Write a strategy to the store in pieces; equal ones of several ranks are written once. Returns their digests.

    Tensors that only one rank holds are a separate piece: with an optimizer that is sharded over ranks (ZeRO) all
    strategies differ, but most of each is common.
    """
    single = [spec for spec in strategy.tensors if spec.layout.size == 1]
    common = [spec for spec in strategy.tensors if spec.layout.size > 1]
    pieces = [strategy]
    if single and common:
        pieces = [Strategy(strategy.world_size, tuple(specs)) for specs in (common, single)]
    exchange.put_once({piece.digest: piece.text for piece in pieces})
    return [piece.digest for piece in pieces]


def read_strategies(exchange: Exchange, world_sizes: Sequence[int], pieces: Sequence[Sequence[str]]) -> list[Strategy]:
    """Rank 0: read the strategies of all ranks, each by its world size and the digests of its pieces. Equal ones are
    one object."""
    digests = list(dict.fromkeys(digest for each in pieces for digest in each))
    texts = exchange.read_pieces(digests)
    parsed = {digest: Strategy.from_json(json.loads(text)) for digest, text in texts.items()}
    made: dict[tuple[int, tuple[str, ...]], Strategy] = {}
    found = []
    for size, each in zip(world_sizes, pieces, strict=True):
        key = (size, tuple(each))
        if key not in made:
            made[key] = Strategy(size, tuple(spec for digest in each for spec in parsed[digest].tensors))
        found.append(made[key])
    return found


# --- 2 and 3: the plan, and whether it could be read ---


class FollowedPart(Part):
    """Where the state of each rank comes from: its answer every rank then follows, perhaps in several rounds."""

    name = "plan"
    run_id = ""
    attempt = 0
    goes_on = False
    """Whether the ranks have to meet again, to tell what they have read."""
    resumed: Resumed | None = None

    @abstractmethod
    def follow(self) -> None:
        """Do what the answer asks for. Changes no state of the program."""


class PlanPart(FollowedPart):
    """The rank's findings, and later what it could not read of its share; the answer is rank 0's plan."""

    only_decodes = False

    def __init__(
        self,
        exchange: Exchange,
        ranks: RankInfo,
        disks: Disks,
        target: Target,
        *,
        transport: Transport | None = None,
        archive: Archive | None = None,
        faults: KnownFaults | None = None,
    ) -> None:
        """Scans this rank's share of disks and memory. `target`: where rank 0 does not learn the strategy of all, a
        start can only use files of the same world size, or that hold whole tensors. `faults`: from the platform's
        report; rank 0's counts."""
        places = disks.places
        self._exchange, self._ranks, self._places = exchange, ranks, places
        self.reader = ShareReader(places.directories, ranks.rank, transport, places.trust, places.arenas, archive)
        self._target, self._faults = target, faults
        self._findings = disks.look(ranks, transport)
        self._archive = archive
        if archive is not None:
            add_archived(self._findings, archive, counts=places.resume == "auto")
        strategies = self._findings.strategies
        self._pieces = [[d, s.world_size, put_strategy(exchange, s)] for d, s in strategies.items()]
        self._problems: list[Problem] | None = None
        """None: this rank has not read its share yet."""
        self._answer: Answer | None = None
        self.generation = 0
        """The generation of this start, see `FileFact.generation`."""
        # Of rank 0:
        self._inventory = Inventory()
        self._plan: ResumePlan | None = None
        self._lines: list[str] = []
        self._told_lines: set[str] = set()

    def say(self) -> Any:
        if self._problems is not None:
            return self._problems
        return {
            "findings": self._findings.encode(),
            "strategies": self._pieces,
        }

    # --- rank 0 ---

    def merge(self, said: Sequence[Any]) -> Merged:
        if self._plan is None:
            return self._first_plan(said)
        with making_sense("what the ranks could not read"):
            problems = [
                (rank, self._file_at(str(path), rank), str(text))
                for rank, each in enumerate(said)
                for path, text in each
            ]
        for rank, fact, text in problems:
            self._inventory.forget(rank, fact, text)
        if problems:
            return self._choose()
        for line in self._lines:
            if line not in self._told_lines:  # else logged by the rank that moved the file to quarantine
                logger.warning("%s", line)
        return Merged({"go": True})

    def _file_at(self, path: str, rank: int) -> FileFact:
        """The file of the plan that `rank` sees there, or fetches. Raises ValueError."""
        assert self._plan is not None
        found = [fact for facts in self._plan.files.values() for fact in facts if fact.path == path]
        seen = [fact for fact in found if rank in self._inventory.seen_by(fact)]
        if not found:
            raise ValueError(f"{path:.200} is in no plan")
        return (seen or found)[0]

    def _first_plan(self, said: Sequence[Any]) -> Merged:
        with making_sense("what the ranks have found"):
            rows = [row for each in said for row in each["strategies"]]
            strategies = read_strategies(self._exchange, [int(size) for _, size, _ in rows], [p for _, _, p in rows])
            by_digest = {str(row[0]): strategy for row, strategy in zip(rows, strategies, strict=True)}
            self._inventory = Inventory.merge([Findings.decode(each["findings"], by_digest) for each in said])
        rejected = self._inventory.rejected
        if self._inventory.odd:
            rejected = [each for each in rejected if each.moment is None]
        self._told_lines = set(self._inventory.lines(rejected))
        if why := self._inventory.unread_archive:
            logger.warning("%s: this attempt uploads nothing, because its steps could be taken for others'", why)
        return self._choose()

    def _choose(self) -> Merged:
        """Rank 0's next answer: the shares of a plan, a fresh start, or the error that all ranks raise."""
        inventory = self._inventory
        world = World(self._ranks.world_size, self._target.strategy)
        plan = inventory.plan(world, self._faults)
        if isinstance(plan, Refusal):
            lines = inventory.lines(plan.reasons)
            error = self._refusal(plan, lines)
            if error is not None:
                return Merged({"error": [type(error).__name__, str(error)]})
            return self._fresh(lines)
        self._plan = plan
        lines = self._lines = inventory.lines(plan.rejected)
        run_id = plan.moment[0]
        answer = tell_shares(plan, inventory)
        common = {
            "plan": answer.common,
            "run_id": run_id,
            "attempt": inventory.next_attempt(run_id),
            "generation": self._next_generation(),
            "lines": lines[:_MOST_LINES],
            "unread": bool(inventory.unread_archive),
        }
        return Merged(common, answer.own, answer.more)

    def _fresh(self, lines: Sequence[str]) -> Merged:
        inventory = self._inventory
        if inventory.anything and self._places.resume != "never":
            logger.warning(
                "the job starts over: it was cut off in its very first save, and no step of it was ever complete, so "
                "nothing that was saved is lost (%s). Its files stay where they are",
                "; ".join(lines[:_SHOWN]),
            )
        elif lines:  # in memory only
            logger.warning("the job starts over; what it left in memory is not used: %s", "; ".join(lines[:_SHOWN]))
        run_id = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
        attempt = max(inventory.launched, self._ranks.attempt)
        number = self._next_generation()
        return Merged({"run_id": run_id, "attempt": attempt, "generation": number})

    def _next_generation(self) -> int:
        places = self._places
        known = [entry.info for each in places.own for entry in read_entries(each, owners=places.trust.of(each))]
        seen = [self._inventory.generation, *(info.generation for info in known if info is not None)]
        return 1 + max((*seen, *(fact.generation for fact in self._inventory.facts)), default=0)

    def _refusal(self, plan: Refusal, lines: Sequence[str]) -> MindxError | None:
        """The error of this start; None: start over."""
        places, inventory = self._places, self._inventory
        directory = places.directories[0]
        if inventory.unread_archive and places.only is None:
            return NoUsableCheckpointError(
                f"{inventory.unread_archive}, and {directory} has none to go on from: look at network and credentials, "
                "or leave the archive out"
            )
        if plan.is_other_program:
            return MismatchError(
                f"the checkpoint in {directory} does not fit: {'; '.join(lines[:_SHOWN])}. Use the model that wrote "
                'it, or start over with resume="never" in another directory'
            )
        if places.only is not None and not plan.other_worlds:
            why = "; ".join(lines) or "not every rank has a sound file of it"
            return NoUsableCheckpointError(
                f"resume={str(places.resume)!r}: {moment_name(places.only)} cannot be resumed: {why}; give another "
                "checkpoint, or a directory to take the newest step that is sound"
            )
        if (
            places.resume == "auto"
            and inventory.anything
            and inventory.was_never_complete(recorded_saves(places.directories, places.trust))
        ):
            return None
        remedy = 'to start over pass resume="never" (nothing is deleted), or choose another directory'
        reasons = "; ".join(lines[:_SHOWN])
        if plan.other_worlds:
            sizes = ", ".join(map(str, plan.other_worlds))
            return MismatchError(
                f"the checkpoints in {directory} were written by {sizes} ranks and cannot be spread over the "
                f"{self._ranks.world_size} of this job: {reasons}; start it with {plan.other_worlds[-1]} ranks, or "
                f"{remedy}"
            )
        if not inventory.anything:
            return None
        reasons = reasons or "they are in quarantine, or not meant for resuming"
        return NoUsableCheckpointError(
            f"{directory} holds checkpoint files and none can be resumed from: {reasons}; {remedy}"
        )

    # --- every rank ---

    def hear(self, answer: Answer) -> None:
        common: Mapping[str, Any] = answer.common
        if "error" in common:
            name, text = common["error"]
            kind = getattr(errors, str(name)) if name in errors.__all__ else CheckpointError
            raise kind(str(text), path=self._places.directories[0])
        if common.get("unread") and self._archive is not None:
            self._archive.leave()
        self.goes_on = "plan" in common
        self._answer = answer if self.goes_on else None
        if common.get("go"):
            return
        self.run_id = printable(str(common["run_id"]), _LONGEST_RUN_ID)
        self.attempt = int(common["attempt"])
        self.generation = int(common["generation"])
        if not 0 <= self.attempt <= _MOST_ATTEMPTS:
            raise ValueError(f"attempt {self.attempt}")

    def follow(self) -> None:
        """Read this rank's share of the plan. Changes no state of the program."""
        answer = self._answer
        if answer is None:
            return
        with making_sense("the answer to 'plan'"):
            share = share_in(answer._replace(common=answer.common["plan"]), self._ranks.rank, self._target.own)
            lines = [str(line) for line in answer.common["lines"]]
        checkpoint, self._problems = self.reader.read(share, self._target.blueprint)
        self.resumed = None
        if checkpoint is None:
            return
        plan = share.plan if self._plan is None else self._plan
        donor = share.rank.donor
        own = None
        if donor is not None and not plan.resharded and share.uses_own_state:
            own = self._findings.own.get(self._ranks.rank, {}).get(plan.moment)
        found = Resumed(self.reader.path, checkpoint, plan, lines, donor, own)
        if donor is not None and not plan.resharded:
            places = self._places
            mine, theirs = (own_rings(places.directories, places.arenas, each) for each in (self._ranks.rank, donor))
            found = records_of(found, mine, theirs, places.trust)
        self.resumed = found._replace(next_attempt=self.attempt)


def records_of(found: Resumed, mine: Sequence[Path], theirs: Sequence[Path], trust: Trust) -> Resumed:
    """`found` of a donor, with what both ranks have kept of their small states of its run up to its step, in these
    rings. They are not needed where this rank's own state of the step is whole."""
    if found.own is not None and found.own.is_whole:
        return found
    info = found.checkpoint.info
    moment = info.moment
    # The file is of a rank that has passed the boundary, or has weights that this rank may have otherwise.
    confirmed = moment if info.coordinates.get("foreseen") == 1 else None

    def read(rings: Sequence[Path]) -> list[BoundaryRecord]:
        records = [each for ring in rings for each in small_records(ring, trust.of(ring), confirmed=confirmed)]
        return [each for each in records if each.moment[0] == moment[0] and each.moment <= moment]

    return found._replace(own_records=read(mine), donor_records=read(theirs))


def read_together(exchange: Exchange, plan: FollowedPart) -> Resumed | None:
    """Meet until every rank has read its share of one plan; None for a fresh start. Main thread, all ranks together,
    after the meeting in which `plan` was made."""
    plan.follow()
    while plan.goes_on:
        meet(exchange, "read", [plan])
        plan.follow()
    return plan.resumed
