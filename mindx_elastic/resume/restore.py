"""Chooses what to resume from and reads it: the part of a start that asks what there is.

The ranks meet three times for it (see `agreement.gather`):

1. *disks*: each tells what its disks and its machine's memory look like from outside. Ranks that see the same share the
   reading of the headers.
2. *plan*: each tells what it has found. Rank 0 makes an inventory of it, plans, and tells each rank its share.
3. *read*: each has read and verified its share, before any state is changed, and tells what could not be used. Then
   damaged files are in quarantine, rank 0 plans without them, and they meet here again; else all go on.

So a job never starts from a mixture of steps, and never silently from nothing while checkpoints are there.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mindx_elastic import errors
from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Answer, Merged, Part, meet
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
    UntrustedMessageError,
    UsageError,
)
from mindx_elastic.inventory.findings import (
    EVERYTHING,
    Findings,
    Listing,
    Share,
    Transport,
    list_files,
    put_aside,
    scan,
)
from mindx_elastic.inventory.inventory import Inventory
from mindx_elastic.memory.memory_files import OwnState
from mindx_elastic.persist.catalog import root_of
from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.reader import Checkpoint
from mindx_elastic.plan.facts import KnownFaults, Refusal, ResumePlan, World
from mindx_elastic.resume.reader import Problem, ShareReader
from mindx_elastic.resume.shares import Share as RankShare
from mindx_elastic.resume.shares import digest_of, share_in, tell_shares

__all__ = [
    "Disks",
    "Places",
    "PlanPart",
    "Reader",
    "Resumed",
    "Target",
    "places_of",
    "plan_of",
    "put_strategy",
    "read_strategies",
    "read_together",
]

_LONGEST_RUN_ID = 1000
_MOST_LINES = 32
_SHOWN = 8


@dataclass
class Target:
    """What the ranks of this start hold."""

    own: Strategy
    """Of this rank."""
    blueprint: Blueprint
    """Of this rank."""
    strategy: Strategy | None = None
    """Of all ranks; rank 0 learns it when they meet, the others never."""


@dataclass(frozen=True)
class Resumed:
    """What a rank resumes from."""

    path: Path
    checkpoint: Checkpoint
    plan: ResumePlan
    """On rank 0 for all ranks, on the others what concerns them (see `resume.shares`)."""
    rejected: Sequence[str] = ()
    """One line for each newer step or file that could not be used, with the reason; the first ones."""
    donor: int | None = None
    """The rank whose file this is, where this rank has none of its own."""
    own: OwnState | None = None
    """With a donor: this rank's own small state of the same step, where it was kept in memory."""
    only_in_memory: bool = False
    """All files of the step are snapshots."""
    next_attempt: int = 0
    """The same on every rank: above every attempt of the run that any rank has seen, not only above the file's."""


# --- 0: where to look ---


@dataclass(frozen=True)
class Places:
    """Where a start looks."""

    directories: Sequence[Path]
    resume: str | Path
    """``"auto"``, ``"never"``, or a path: a checkpoint directory, or one file whose step is then taken by all ranks."""
    only: Moment | None = None
    """The one step that may be taken."""
    arenas: Path | None = None
    """The job's folder in shared memory."""
    trust: Trust = field(default_factory=Trust)
    """Whose files count."""


def places_of(
    directories: Sequence[Path], resume: str | Path, *, arenas: Path | None = None, trust: Trust | None = None
) -> Places:
    """Raises UsageError for a path that is not there or is a link to a file, CorruptCheckpointError and
    ForeignCheckpointError for a file that is no checkpoint."""
    trust = trust or Trust()
    if resume in ("auto", "never"):
        return Places(directories, resume, None, arenas, trust)
    root, only = _resolve(resume)
    trust.add(root)
    return Places([root], resume, only, arenas, trust)


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
        remedy = "give another checkpoint, or a directory to take the newest step that is sound"
        raise type(error)(f"{what} cannot be resumed from: {reason}; {remedy}", path=path) from error
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror or error}") from error
    return root_of(path, info.rank), info.moment


# --- 1: who sees the same ---


class Disks(Part):
    """Which ranks see the same disks and the same memory, and which share of the headers each of them reads."""

    name = "disks"

    def __init__(self, places: Places) -> None:
        """Call it when the arena is made: from the meeting on the others may look at it."""
        self._places = places
        self.listing = Listing((), {}) if places.resume == "never" else list_files(places.directories, places.arenas)
        self.share: Share = EVERYTHING
        self.memory_share: Share = EVERYTHING

    def say(self) -> Any:
        return [self.listing.disk, self.listing.machine]

    def merge(self, said: Sequence[Any]) -> Merged:
        shares = [_shares([str(each[column]) for each in said]) for column in (0, 1)]
        return Merged(None, [list(pair) for pair in zip(*shares, strict=True)])

    def hear(self, answer: Answer) -> None:
        (number, count), (memory_number, memory_count) = answer.own
        self.share, self.memory_share = (int(number), int(count)), (int(memory_number), int(memory_count))

    def look(self, ranks: RankInfo, transport: Transport | None = None) -> Findings:
        """Read this rank's share of the headers, after the meeting; damaged files go to the quarantine. `transport`:
        fetches what only other ranks hold of this rank's files."""
        found = scan(
            self.listing,
            trust=self._places.trust,
            rank=ranks.rank,
            only=self._places.only,
            share=self.share,
            memory_share=self.memory_share,
            transport=transport,
            attempt=ranks.attempt,
        )
        put_aside(found)
        return found


def _shares(views: Sequence[str]) -> list[tuple[int, int]]:
    """For each rank its number among those with the same view, and how many they are."""
    sizes: dict[str, int] = {}
    numbers = []
    for view in views:
        numbers.append(sizes.get(view, 0))
        sizes[view] = numbers[-1] + 1
    return [(number, sizes[view]) for number, view in zip(numbers, views, strict=True)]


# --- strategies, each once ---


def put_strategy(exchange: Exchange, strategy: Strategy) -> list[str]:
    """Write a strategy to the store in pieces; equal ones of several ranks are written once. Returns their digests.

    What only one rank holds stands apart: with an optimizer that is spread over ranks (ZeRO) all strategies differ, and
    most of each is common.
    """
    single = [spec for spec in strategy.tensors if spec.layout.size == 1]
    common = [spec for spec in strategy.tensors if spec.layout.size > 1]
    pieces = [strategy]
    if single and common:
        pieces = [Strategy(strategy.world_size, tuple(specs)) for specs in (common, single)]
    exchange.put_once({piece.digest: piece.text for piece in pieces})
    return [piece.digest for piece in pieces]


def read_strategies(exchange: Exchange, world_sizes: Sequence[int], pieces: Sequence[Sequence[str]]) -> list[Strategy]:
    """Rank 0: what all ranks have put, each as (world size, digests of its pieces). Equal ones are one object."""
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


class Reader(Protocol):
    """What reads a rank's share; `ShareReader`."""

    path: Path
    """The file that was taken last."""

    def read(self, share: RankShare, blueprint: Blueprint | None) -> tuple[Checkpoint | None, list[Problem]]: ...


class PlanPart(Part):
    """What this rank has found, then what of its share it could not read; rank 0's plan comes back."""

    name = "plan"

    def __init__(
        self,
        exchange: Exchange,
        ranks: RankInfo,
        places: Places,
        findings: Findings,
        reader: Reader,
        *,
        target: Target | None = None,
        faults: KnownFaults | None = None,
    ) -> None:
        """`findings`: of this rank. `target`: how this start lays its tensors out; without it only what was written by
        as many ranks, or is whole in each file, can be read. `faults`: what the platform's report says; rank 0's
        counts."""
        self._exchange, self._ranks, self._places = exchange, ranks, places
        self._findings, self._reader = findings, reader
        self._target, self._faults = target, faults
        self._pieces = {digest: put_strategy(exchange, s) for digest, s in self._findings.strategies.items()}
        self._sizes = {digest: s.world_size for digest, s in self._findings.strategies.items()}
        self._problems: list[Problem] | None = None
        """None: nothing has been read yet."""
        self._heard = ""
        self.resumed: Resumed | None = None
        self.run_id, self.attempt = "", 0
        # Of rank 0:
        self._inventory = Inventory()
        self._plan: ResumePlan | None = None
        self._verified: set[str] = set()
        self._sent: list[str] = []
        self._lines: list[str] = []
        self._told_lines: set[str] = set()

    @property
    def findings(self) -> Findings:
        """Of this rank."""
        return self._findings

    def say(self) -> Any:
        if self._problems is not None:
            return {"heard": self._heard, "problems": self._problems}
        return {
            "findings": self._findings.encode(),
            "strategies": [[digest, self._sizes[digest], pieces] for digest, pieces in self._pieces.items()],
        }

    # --- rank 0 ---

    def merge(self, said: Sequence[Any]) -> Merged:
        if self._plan is None:
            return self._first_plan(said)
        for rank, each in enumerate(said):
            if each["heard"] != self._sent[rank]:
                raise UntrustedMessageError(
                    f"rank {rank} has not heard the plan that rank 0 has sent: either another program writes to the "
                    "store of the process group, or the ranks run different versions"
                )
        if not any(each["problems"] for each in said):
            for line in self._lines:
                if line not in self._told_lines:  # by the file's owner, when it was put aside
                    logger.warning("%s", line)
            return Merged({"go": True})
        files = self._plan.files
        for rank, each in enumerate(said):
            for old, number, text in each["problems"]:
                self._inventory.forget(rank, files[int(old)][int(number)], str(text))
        return self._choose()

    def _first_plan(self, said: Sequence[Any]) -> Merged:
        rows = [row for each in said for row in each["strategies"]]
        strategies = read_strategies(self._exchange, [int(size) for _, size, _ in rows], [p for _, _, p in rows])
        by_digest = {str(row[0]): strategy for row, strategy in zip(rows, strategies, strict=True)}
        self._inventory = Inventory.merge([Findings.decode(each["findings"], by_digest) for each in said])
        return self._choose()

    def _choose(self) -> Merged:
        """Rank 0's next answer: the shares of a plan, a fresh start, or the error that all ranks raise."""
        inventory, places = self._inventory, self._places
        world = World(self._ranks.world_size, None if self._target is None else self._target.strategy)
        plan = inventory.plan(world, self._faults, only=places.only)
        if isinstance(plan, Refusal):
            lines = inventory.lines(None, plan.reasons)
            error = self._refusal(plan, lines)
            if error is not None:
                return Merged({"error": [type(error).__name__, str(error)]})
            return self._fresh(lines)
        self._plan = plan
        self._told_lines = {f"{one.what}: {one.reason}" for one in inventory.rejected}
        lines = self._lines = inventory.lines(plan.moment, plan.rejected)
        run_id = plan.moment[0]
        answer = tell_shares(plan, inventory, self._verified)
        common = {
            "plan": answer.common,
            "run_id": run_id,
            "attempt": inventory.next_attempt(run_id),
            "lines": lines[:_MOST_LINES],
            "only_in_memory": all(fact.kind == "snapshot" for facts in plan.files.values() for fact in facts),
        }
        assert answer.own is not None
        first = digest_of(common)
        self._sent = [f"{first}/{digest_of(own)}" for own in answer.own]
        return Merged(common, answer.own, answer.more)

    def _fresh(self, lines: Sequence[str]) -> Merged:
        inventory = self._inventory
        begins_anew = inventory.anything and self._places.resume != "never"
        if begins_anew:
            logger.warning(
                "the job begins anew: it was cut off in its very first save, and no step of it was ever whole, so "
                "nothing that was saved is lost (%s). Its files stay where they are",
                "; ".join(lines[:_SHOWN]),
            )
        elif lines:  # in memory only
            logger.warning("the job begins anew; what it left in memory is not used: %s", "; ".join(lines[:_SHOWN]))
        run_id = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
        attempt = max(inventory.launched, self._ranks.attempt)
        return Merged({"fresh": True, "run_id": run_id, "attempt": attempt, "keep_notes": begins_anew})

    def _refusal(self, plan: Refusal, lines: Sequence[str]) -> MindxError | None:
        """Why there is no start; None: begin anew."""
        places, inventory = self._places, self._inventory
        directory = places.directories[0]
        if plan.is_other_program:
            return MismatchError(
                f"the checkpoint in {directory} does not fit: {'; '.join(lines[:_SHOWN])}. Use the model that wrote "
                'it, or start anew with resume="never" in another directory'
            )
        if places.only is not None and not plan.other_worlds:
            why = "; ".join(lines) or "not every rank has a sound file of it"
            return NoUsableCheckpointError(
                f"resume={str(places.resume)!r}: {moment_name(places.only)} cannot be resumed: {why}; give another "
                "checkpoint, or a directory to take the newest step that is sound"
            )
        if places.resume == "auto" and inventory.anything and inventory.was_never_complete:
            return None
        remedy = 'to start anew pass resume="never" (nothing is deleted), or choose another directory'
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
        self._problems = []
        if common.get("go"):
            self._is_agreed = True
            return
        self.run_id = printable(str(common["run_id"]), _LONGEST_RUN_ID)
        self.attempt = int(common["attempt"])
        if self.attempt < 0:
            raise ValueError("an attempt below 0")
        if common.get("fresh"):
            for note in self._findings.notes if common["keep_notes"] else ():
                note.touch()  # it will be needed as long as these files are there
            return
        self._heard = f"{digest_of(common)}/{digest_of(answer.own)}"
        self._read(answer)

    @property
    def goes_on(self) -> bool:
        """Whether the ranks have to meet (again) to tell how the reading went."""
        return self._heard != "" and not self._is_agreed

    _is_agreed = False

    def _read(self, answer: Answer) -> None:
        own_strategy = None if self._target is None else self._target.own
        share = share_in(
            Answer(answer.common["plan"], answer.own, answer.digest, answer.more), self._ranks.rank, own_strategy
        )
        checkpoint, self._problems = self._reader.read(share, None if self._target is None else self._target.blueprint)
        self.resumed = None
        if checkpoint is None:
            return
        plan = share.plan if self._plan is None else self._plan
        donor = share.rank.donor
        own = None
        if donor is not None and not plan.resharded and share.uses_own_state:
            own = self._findings.own.get(self._ranks.rank, {}).get(plan.moment)
        lines = [str(line) for line in answer.common["lines"]]
        self.resumed = Resumed(
            self._reader.path, checkpoint, plan, lines, donor, own, bool(answer.common["only_in_memory"]), self.attempt
        )


def plan_of(
    exchange: Exchange,
    ranks: RankInfo,
    places: Places,
    disks: Disks,
    *,
    transport: Transport | None = None,
    target: Target | None = None,
    faults: KnownFaults | None = None,
) -> PlanPart:
    """What this rank has to say of its disks and memory; see `PlanPart`."""
    reader = ShareReader(places.directories, ranks.rank, transport, places.trust, places.arenas)
    return PlanPart(exchange, ranks, places, disks.look(ranks, transport), reader, target=target, faults=faults)


def read_together(exchange: Exchange, plan: PlanPart) -> Resumed | None:
    """Meet until every rank has read its share of one plan; None for a fresh start. Main thread, all ranks together,
    after the meeting in which `plan` was made."""
    while plan.goes_on:
        meet(exchange, "read", [plan])
    return plan.resumed
