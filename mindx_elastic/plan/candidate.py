"""One step, judged: is every part of every tensor there, and who would read what? Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mindx_elastic.core.moment import Moment
from mindx_elastic.core.rank_lists import RankGaps, rank_list
from mindx_elastic.core.strategy import LayoutClass, Strategy
from mindx_elastic.errors import UsageError
from mindx_elastic.plan.assignment import Assignment, differences
from mindx_elastic.plan.assumptions import differing_components
from mindx_elastic.plan.facts import FileFact, RankPlan, ResumePlan, World, no_file
from mindx_elastic.plan.targets import same_part, target_of

__all__ = ["Candidate", "Context"]

_SHOWN = 3
_MOST = 12


@dataclass(frozen=True)
class Context:
    """What is the same for all steps."""

    world: World
    faults: frozenset[int]
    own_states: Mapping[Moment, Collection[int]]
    recorded: Mapping[Moment, Strategy]


class Candidate:
    """`problem` is empty when a start from this step works."""

    def __init__(self, moment: Moment, facts: Sequence[FileFact], context: Context) -> None:
        self.moment, self._context = moment, context
        found: dict[int, list[FileFact]] = {}
        for fact in facts:
            found.setdefault(fact.rank, []).append(fact)
        self._files = {rank: tuple(found[rank]) for rank in sorted(found)}
        sizes = sorted({fact.world_size for fact in facts})
        self.world_size = sizes[0] if len(sizes) == 1 else 0
        """Ranks that wrote it; 0: not clear."""
        self._assignment: Assignment | None = None
        self.is_other_program = False
        """The step is complete, but a program with other parameters wrote it."""
        self.problem = self._judge(sizes)
        if self.problem and self.world_size not in (0, context.world.size):
            self.problem = f"written by {self.world_size} ranks: {self.problem}"

    @property
    def inexact(self) -> Sequence[str]:
        """Why a run that goes on from here is not bit for bit the uninterrupted one."""
        return () if self._assignment is None else self._assignment.inexact

    @property
    def lacks_rank_state(self) -> bool:
        """Some rank takes another rank's file and has no random numbers or buffers of its own: not exact."""
        return self._assignment is not None and self._assignment.lacks_rank_state

    def plan(self) -> ResumePlan:
        assert self._assignment is not None
        first = self._assignment.shares[0].file
        return ResumePlan(
            moment=self.moment,
            epoch=first.epoch,
            step_in_epoch=first.step_in_epoch,
            source=self._source,
            world=replace(self._context.world, strategy=self._target),
            ranks=tuple(self._assignment.shares),
            files=self._files,
            resharded=self._assignment.resharded,
            inexact=tuple(self._assignment.inexact),
            faults=self._context.faults,
        )

    def _judge(self, sizes: Sequence[int]) -> str:
        if not self._files:
            return "none of its files can be used"
        if len(sizes) > 1:
            return f"its files disagree on the world size ({', '.join(map(str, sizes))})"
        if max(self._files) >= self.world_size or min(self._files) < 0:
            return f"a file of rank {max(self._files)} in a world of {self.world_size}"
        own = self._own_files()
        if own:
            return ""
        return self._judge_parts()

    def _own_files(self) -> bool:
        """The simplest plan: the same world, each rank has its own file, and wants nothing else than what is in it.

        What the files only assume of each other does not matter then.
        """
        world = self._context.world
        if world.size != self.world_size:
            return False
        try:
            self._source = self._merge()
        except UsageError:
            return False  # said below
        shares = []
        fitting: dict[tuple[int, int], bool] = {}
        for rank in range(world.size):
            file = next((fact for fact in self._files.get(rank, ()) if fact.seen_by(rank)), None)
            if file is None or not self._fits(file.strategy, rank, fitting):
                return False
            shares.append(RankPlan(rank, file))
        self._target = world.strategy or self._source
        self._assignment = Assignment.of_own_files(self._source, shares)
        return True

    def _fits(self, own: Strategy, rank: int, known: dict[tuple[int, int], bool]) -> bool:
        """Whether all that `rank` wants is in its own file, in the same parts. What no file has is for `load` to say.

        known: earlier answers, by strategy and layout of the new world.
        """
        target = self._context.world.strategy
        for number, group in enumerate(target.classes if target is not None else ()):
            key = (id(own), number)
            if rank in group.layout and key not in known:
                known[key] = all(
                    same_part(own, spec, rank) if spec.name in own.by_name else spec.name not in self._source.by_name
                    for spec in group.tensors
                )
            if rank in group.layout and not known[key]:
                return False
        return True

    def _judge_parts(self) -> str:
        try:
            self._source = self._merge()
        except UsageError as error:
            return f"its files contradict each other: {error}"
        unknown = RankGaps(self.world_size, [*self._source.ranks, *self._files])
        if unknown:
            return no_file(unknown)
        missing = self._missing()
        if missing:
            return missing
        try:
            self._target = target_of(self._source, self._context.world)
        except UsageError as error:
            return str(error)
        misfits = [] if self._target is self._source or "" in self._source.by_name else self._differences()
        if misfits:
            self.is_other_program = True
            more = f"; and {len(misfits) - _MOST} more" if len(misfits) > _MOST else ""
            return f"it does not fit the program: {'; '.join(misfits[:_MOST])}{more}"
        return self._assign()

    def _assign(self) -> str:
        own_states = self._context.own_states.get(self.moment, ())
        try:
            self._assignment = Assignment(self._files, self._source, self._target, self._context.faults, own_states)
        except UsageError as error:
            return str(error)
        facts = [fact for facts in self._files.values() for fact in facts]
        differing = differing_components(facts) if self._assignment.resharded else []
        if differing and any(group.layout.splitting for group in self._source.classes):
            return (
                f"{', '.join(differing)} (of stateful=) differs from rank to rank, and nothing says how it is spread: "
                "leave it out, or start the same number of ranks with the same layouts"
            )
        return self._assignment.problem

    def _differences(self) -> list[str]:
        return differences(self._source, self._target) if self._context.world.strategy is not None else []

    def _merge(self) -> Strategy:
        """What the files say together, in the order of ranks."""
        recorded = self._context.recorded.get(self.moment)
        told = [fact.strategy for facts in self._files.values() for fact in facts]
        strategies = {id(each): each for each in ([recorded, *told] if recorded is not None else told)}
        for strategy in strategies.values():
            if strategy.world_size != self.world_size:
                raise UsageError(f"a strategy for {strategy.world_size} ranks, files of {self.world_size}")
        if len(strategies) == 1:
            return next(iter(strategies.values()))
        return Strategy(self.world_size, tuple(spec for s in strategies.values() for spec in s.tensors))

    def _missing(self) -> str:
        """The parts that no usable file holds, in words."""
        lines: list[str] = []
        for group in self._source.classes:
            lines += [self._missing_text(group, shard) for shard in self._holes(group)]
            if len(lines) > _SHOWN:
                break
        return "; ".join([*lines[:_SHOWN], *(["and more"] if len(lines) > _SHOWN else [])])

    def _holes(self, group: LayoutClass) -> list[int]:
        found: list[int] = []
        for shard, ranks in enumerate(group.layout.holders):
            if not any(rank in self._files for rank in ranks) and not group.is_empty(shard):
                found.append(shard)
                if len(found) > _SHOWN:
                    break
        return found

    def _missing_text(self, group: LayoutClass, shard: int) -> str:
        names = [spec.name for spec in group.tensors if spec.name]
        ranks = group.layout.holders[shard]
        if not names:
            return no_file(ranks)
        what = names[0].lstrip("@") + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        part = f"part {shard + 1} of {group.layout.num_shards} of {what}" if group.layout.num_shards > 1 else what
        return f"{part}: no usable file of {rank_list(ranks)}, which held it"
