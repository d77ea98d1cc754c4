"""The planner's inputs and answers, as plain values: no torch, no file system."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import xxhash

from mindx_elastic.core.fields import Between, Text
from mindx_elastic.core.layout import MAX_RANKS, REPLICATE, Layout
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.errors import UsageError

__all__ = [
    "DYING_KINDS",
    "FileFact",
    "KnownFaults",
    "PartsHeld",
    "RankPlan",
    "Refusal",
    "Rejected",
    "ResumePlan",
    "World",
    "completing",
    "no_file",
    "single_rank_strategy",
]

_Long = Annotated[str, Text(1 << 20)]

DYING_KINDS = ("breakpoint", "ttp", "request_exit", "snapshot")
"""Kinds of files that are written, or made of memory, when a job dies. A failing device may have spoilt them."""


@dataclass(frozen=True)
class PartsHeld:
    """What a file holds of a state that replicas have divided among their files (`core.division`)."""

    division: str
    """The key of the division: parts of different ones, or of states that are not the same, do not fit together."""
    count: int
    """Parts of the whole state."""
    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.parts and max(self.parts) >= self.count:
            raise ValueError("a part of a divided state that does not exist")

    @property
    def lacking(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.count)) - set(self.parts)))


@dataclass(frozen=True)
class FileFact:
    """One checkpoint file whose header is sound."""

    path: _Long
    rank: int
    """Its rank in the world that wrote it."""
    moment: Moment
    world_size: int
    strategy: Strategy
    """What it says of its tensors (`single_rank_strategy` where it says nothing); equal ones share one object."""
    kind: str = "periodic"
    created: float = 0.0
    """Unix seconds."""
    nbytes: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    visible_to: frozenset[int] | None = None
    """The new ranks that can read it; None: all."""
    where: str = ""
    """The disk, or the machine's memory, that has it: nodes may have different files of the same path."""
    base: tuple[int, int] | None = None
    """Attempt and step that the writer's attempt went on from; None: a fresh start, or not known."""
    generation: int = 0
    """The number of the start that its writer came from, among those in its directories; 0: not known."""
    fault_report: Annotated[int, Between(-(1 << 63), 1 << 63)] = 0
    """`KnownFaults.report` at the start of the process that wrote it."""
    replica_digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the tensors that the file assumes other ranks to hold, too; see `start.assumptions`."""
    unmanaged: tuple[_Long, ...] = ()
    """What was known against an exact resume when it was written: state of the program that no file has."""
    held: PartsHeld | None = None
    """Which parts it holds of a divided state; None: it holds all that its strategy says."""
    writers: Annotated[int, Between(0, 1 << 63)] = 0
    """A number that only the ranks of its writer's start have; 0: that job had no archive."""

    @property
    def address(self) -> str:
        """Where it is in the archive, from which it is fetched to `path`; empty: it is there already."""
        return self.where if "://" in self.where else ""

    def seen_by(self, rank: int) -> bool:
        return self.visible_to is None or rank in self.visible_to

    def parts_in(self, other: FileFact) -> frozenset[int]:
        """The parts of the state that this file's replicas have divided which `other` holds, of the same step."""
        if self.held is None or self.world_size != other.world_size:
            return frozenset()
        if other.held is not None:
            fits = (self.held.division, self.held.count) == (other.held.division, other.held.count)
            return frozenset(other.held.parts) if fits else frozenset()
        # A whole file, of a rank that saved alone. It has the same tensors only if it says so.
        is_replica = self.strategy is other.strategy or self.strategy.digest == other.strategy.digest
        return frozenset(range(self.held.count)) if is_replica else frozenset()


def single_rank_strategy(rank: int, world_size: int) -> Strategy:
    """The strategy of a file that says nothing about other ranks: only its own rank holds what is in it."""
    return Strategy(world_size, (TensorSpec("", (), Layout((1,), (REPLICATE,), (rank,))),))


@dataclass(frozen=True)
class KnownFaults:
    """What a fault report says."""

    ranks: frozenset[int] = frozenset()
    """The ranks of the world before."""
    report: int = 0
    """A number for its content; 0: none. Ranks that began when it was there already are on sound devices again."""

    @classmethod
    def of(cls, ranks: Iterable[int], created: float | None) -> KnownFaults:
        """`created`: the report's own time stamp, unix seconds."""
        named = frozenset(ranks)
        text = f"{sorted(named)} {created}"
        return cls(named, xxhash.xxh3_64_intdigest(text.encode()) >> 1 if named else 0)


@dataclass(frozen=True)
class World:
    """The job that is about to start."""

    size: int
    """Number of ranks."""
    strategy: Strategy | None = None
    """The layouts of its tensors. None: as before where the size is as before; in another world replicated tensors stay
    replicated, and sharded ones have no plan."""

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size <= MAX_RANKS:
            raise UsageError(f"a world of {self.size!r} ranks: give a whole number from 1")


@dataclass(frozen=True)
class Rejected:
    """A step, or a file, that was not taken."""

    what: _Long
    reason: _Long
    moment: Moment | None = None
    """The step, where it was not a candidate or no longer one."""

    def __str__(self) -> str:
        return f"{self.what} is not used: {self.reason}"


@dataclass(frozen=True)
class RankPlan:
    """What one rank of the new world reads."""

    rank: int
    file: FileFact
    """Everything but the tensors of the strategy comes from here; with `assembled` False these, too."""
    assembled: bool = False
    """Its tensors are put together from parts of several files (`ResumePlan.holders`)."""
    others: tuple[FileFact, ...] = ()
    """The files with the parts that `file` lacks, where the replicas have divided the state."""

    @property
    def donor(self) -> int | None:
        """The rank whose file it takes instead of its own."""
        return None if self.file.rank == self.rank else self.file.rank


@dataclass(frozen=True)
class ResumePlan:
    """What to resume from, as far as headers tell. Pure data; the same on every rank."""

    moment: Moment
    epoch: int
    step_in_epoch: int
    source: Strategy
    """The layouts of the old world."""
    world: World
    ranks: tuple[RankPlan, ...]
    """One for each new rank, in order."""
    files: Mapping[int, tuple[FileFact, ...]]
    """All usable files of the step, by old rank, the one to try first in front."""
    resharded: bool
    """The new ranks hold other parts than the old ones."""
    inexact: tuple[_Long, ...] = ()
    """Why the run will differ from the uninterrupted one, as far as the files and the ranks decide it."""
    unmanaged: tuple[_Long, ...] = ()
    """Why else: what the program keeps to itself, according to the files. It never decides which step is taken."""
    rejected: tuple[Rejected, ...] = ()
    steps_lost: int | None = None
    """Steps of the same attempt that were seen and have to be done again; None: nothing newer was seen."""
    faults: frozenset[int] = frozenset()

    @property
    def step(self) -> int:
        return self.moment[2]

    @property
    def exact(self) -> bool:
        """The run will be the uninterrupted one bit for bit, as far as is known."""
        return not (self.inexact or self.unmanaged)

    def bytes_of(self, share: RankPlan) -> int:
        """About how many bytes `share` reads, from the sizes of the files."""
        if share.assembled:
            return sum(facts[0].nbytes for facts in self.files.values()) // self.world.size
        held = share.file.held
        return share.file.nbytes if held is None else share.file.nbytes * held.count // max(1, len(held.parts))

    def holders(self, layout: Layout, shard: int, reader: int) -> Iterator[FileFact]:
        """The files that hold `shard`, the one to try first for the new rank `reader` in front.

        Its own old rank goes first; the rest are taken in turn, so that no file is read by everybody. Looks at no more
        of `files` than is asked for.
        """
        ranks = [rank for rank in layout.holders[shard] if rank in self.files]
        others = [rank for rank in ranks if rank != reader]
        turn = reader % len(others) if others else 0
        order = [*(each for each in ranks if each == reader), *others[turn:], *others[:turn]]
        for part in (slice(0, 1), slice(1, None)):  # a rank's further files of the step only when there is no other
            for rank in order:
                yield from (
                    fact
                    for fact in self.files[rank][part]
                    if fact.seen_by(reader) and completing(fact, self.files, reader) is not None
                )


@dataclass(frozen=True)
class Refusal:
    """No step of these files can be resumed from."""

    reasons: tuple[Rejected, ...]
    """For each step that was there, the newest in front; then files."""
    found_anything: bool
    other_worlds: tuple[int, ...] = field(default=())
    """World sizes of steps that another number of ranks than the new one wrote."""
    faults: frozenset[int] = frozenset()
    is_other_program: bool = False
    """The newest step is complete, but a program with other parameters wrote it."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.reasons)) or "there is no checkpoint"


def completing(fact: FileFact, files: Mapping[int, Sequence[FileFact]], reader: int) -> tuple[FileFact, ...] | None:
    """The files from which `reader` takes the parts that `fact` lacks; empty: it lacks none. None: some part is in no
    file that the reader can see. `files`: of the same step, by rank."""
    if fact.held is None:
        return ()
    lacking = set(fact.held.lacking)
    found: list[FileFact] = []
    ranks = list(files) if lacking else []
    turn = bisect(ranks, fact.rank)  # the parts are mostly in the next ranks' files, and not all are read from one
    for rank in (*ranks[turn:], *ranks[:turn]):
        for other in files[rank]:
            if other.path != fact.path and other.seen_by(reader) and (has := lacking & fact.parts_in(other)):
                found.append(other)
                lacking -= has
                if not lacking:
                    return tuple(found)
    return None if lacking else tuple(found)


def no_file(ranks: Sequence[int]) -> str:
    """The message for ranks whose files are missing."""
    return f"{rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'} no file of it"
