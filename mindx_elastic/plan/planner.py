"""(files, faults, own states, new world) -> a resume plan, or a refusal with its reasons. Pure: same inputs, same plan.

The newest step wins for which every part of every tensor is in some usable file of that step and attempt. Steps are
never mixed; kinds of files (breakpoint, TTP, from memory, periodic) are. A file of a rank that the fault report names
is usable unless it was written while the job was dying in the last attempt: what a sickening device says then is not
trusted, what it wrote while it was well is.

Cost: linear in ranks times layouts (few) plus tensors. What a shard consists of is worked out only where it is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindx_elastic.errors import UsageError
from mindx_elastic.plan.facts import (
    DYING_KINDS,
    FileFact,
    Moment,
    RankPlan,
    Refusal,
    Rejected,
    ResumePlan,
    World,
    moment_name,
    rank_list,
)
from mindx_elastic.plan.strategy import LayoutClass, Strategy
from mindx_elastic.plan.targets import bytes_by_rank, same_parts, target_of

__all__ = ["order_of_moments", "plan_resume"]

NEAR = 2
"""Steps: an exact step at most so much older goes before one that is not. A rank that was killed is at most one behind.
"""
_SHOWN = 3


def plan_resume(
    files: Iterable[FileFact],
    world: World,
    *,
    faults: Collection[int] = (),
    own_states: Mapping[Moment, Collection[int]] | None = None,
    recorded: Mapping[Moment, Strategy] | None = None,
    rejected: Sequence[Rejected] = (),
    only: Moment | None = None,
) -> ResumePlan | Refusal:
    """Choose what to resume from.

    files: usable ones; of a rank's several files of a step the one to try first in front. faults: old ranks.
    own_states: for each step the ranks whose small state of it (random numbers, buffers) lies in memory, so that
    another rank's file of a replica makes them whole. recorded: strategies known from elsewhere than the files.
    rejected: files that were sorted out before, for the record. only: the one step that may be taken.
    """
    everything = list(files)
    usable, distrusted = _sort_out(everything, frozenset(faults))
    by_moment: dict[Moment, list[FileFact]] = {}
    for fact in usable:
        by_moment.setdefault(fact.moment, []).append(fact)
    context = _Context(world, frozenset(faults), own_states or {}, recorded or {})
    reasons: list[Rejected] = []
    considered: dict[Moment, _Candidate] = {}
    moments = [m for m in order_of_moments(everything) if only in (None, m)]
    for moment in moments:
        candidate = considered[moment] = _Candidate(moment, by_moment.get(moment, []), context)
        if candidate.problem:
            reasons.append(Rejected(moment_name(moment), _why(candidate, distrusted.get(moment)), moment))
            continue
        chosen = candidate
        if candidate.lonely:  # not exact, and a step just before may be
            older = [(moment[0], moment[1], moment[2] - back) for back in range(1, NEAR + 1)]
            near = [_Candidate(m, by_moment[m], context) for m in older if m in by_moment and only in (None, m)]
            chosen = next((each for each in near if not each.problem and not each.lonely), candidate)
        if chosen is not candidate:
            reasons.append(Rejected(moment_name(moment), f"it would not be exact: {candidate.inexact[0]}", moment))
        newest = max(m[2] for m in moments if m[:2] == moment[:2])
        lost = newest - chosen.moment[2] if newest > chosen.moment[2] else None
        plan = chosen.plan()
        return replace(plan, rejected=(*reasons, *rejected), steps_lost=lost)
    worlds = tuple(sorted({c.world_size for c in considered.values()} - {0, world.size}))
    return Refusal((*reasons, *rejected), bool(everything), worlds, frozenset(faults))


def order_of_moments(files: Iterable[FileFact]) -> list[Moment]:
    """All steps, the one to try first in front: the run with the newest file; in it the last attempt (it began at a
    step that was chosen then, so its steps go before higher ones of an earlier attempt); in it the highest step."""
    activity: dict[str, float] = {}
    moments: set[Moment] = set()
    for fact in files:
        run = fact.moment[0]
        activity[run] = max(fact.created, activity.get(run, fact.created))
        moments.add(fact.moment)
    return sorted(moments, key=lambda m: (-activity[m[0]], m[0], -m[1], -m[2]))


def _sort_out(files: Sequence[FileFact], faults: frozenset[int]) -> tuple[list[FileFact], dict[Moment, set[int]]]:
    """Files that may be used; and of each step the faulty ranks whose dying words are not believed."""
    last: dict[str, int] = {}
    for fact in files:
        run, attempt, _ = fact.moment
        last[run] = max(attempt, last.get(run, attempt))
    usable: list[FileFact] = []
    distrusted: dict[Moment, set[int]] = {}
    for fact in files:
        run, attempt, _ = fact.moment
        if fact.rank in faults and fact.kind in DYING_KINDS and attempt == last[run]:
            distrusted.setdefault(fact.moment, set()).add(fact.rank)
        else:
            usable.append(fact)
    return usable, distrusted


def _why(candidate: _Candidate, distrusted: Collection[int] | None) -> str:
    if not distrusted:
        return candidate.problem
    note = f"the fault report names {rank_list(tuple(distrusted))}, whose dying saves are not used"
    return f"{candidate.problem} ({note})"


@dataclass(frozen=True)
class _Context:
    """What is the same for all steps."""

    world: World
    faults: frozenset[int]
    own_states: Mapping[Moment, Collection[int]]
    recorded: Mapping[Moment, Strategy]


class _Candidate:
    """One step, judged. `problem` is empty when a start from it works."""

    def __init__(self, moment: Moment, facts: Sequence[FileFact], context: _Context) -> None:
        self.moment, self.context = moment, context
        self.files: dict[int, list[FileFact]] = {}
        for fact in facts:
            self.files.setdefault(fact.rank, []).append(fact)
        self.world_size = facts[0].world_size if facts else 0
        self.inexact: list[str] = []
        self.lonely = False
        """Not exact only because ranks have to take another's file and have nothing of their own."""
        self.rank_plans: list[RankPlan] = []
        self.problem = self._judge()
        if self.problem and self.world_size not in (0, context.world.size):
            self.problem = f"written by {self.world_size} ranks: {self.problem}"

    def _judge(self) -> str:
        if not self.files:
            return "none of its files can be used"
        sizes = sorted({fact.world_size for facts in self.files.values() for fact in facts})
        if len(sizes) > 1:
            return f"its files disagree on the world size ({', '.join(map(str, sizes))})"
        try:
            self.source = self._merge()
        except UsageError as error:
            return f"its files contradict each other: {error}"
        unknown = [rank for rank in range(self.world_size) if rank not in self.source.ranks]
        if unknown:
            return _no_file(unknown)
        missing = self._missing()
        if missing:
            return missing
        return self._assign()

    def _merge(self) -> Strategy:
        strategies: dict[int, Strategy] = {}
        if self.moment in self.context.recorded:
            strategy = self.context.recorded[self.moment]
            if strategy.world_size != self.world_size:
                raise UsageError(f"the strategy is for {strategy.world_size} ranks, the files are of {self.world_size}")
            strategies[id(strategy)] = strategy
        for facts in self.files.values():
            for fact in facts:
                strategies.setdefault(id(fact.strategy), fact.strategy)
        if len(strategies) == 1:
            return next(iter(strategies.values()))
        return Strategy(self.world_size, tuple(spec for s in strategies.values() for spec in s.tensors))

    # --- is everything there? ---

    def _missing(self) -> str:
        """The parts that no usable file holds, in words."""
        lines: list[str] = []
        for group in self.source.classes:
            lines += [self._missing_text(group, shard) for shard in self._holes(group)]
            if len(lines) > _SHOWN:
                break
        return "; ".join([*lines[:_SHOWN], *(["and more"] if len(lines) > _SHOWN else [])])

    def _holes(self, group: LayoutClass) -> list[int]:
        found: list[int] = []
        for shard, ranks in enumerate(group.layout.holders):
            if not any(rank in self.files for rank in ranks) and not group.is_empty(shard):
                found.append(shard)
                if len(found) > _SHOWN:
                    break
        return found

    def _missing_text(self, group: LayoutClass, shard: int) -> str:
        names = [spec.name for spec in group.tensors if spec.name]
        ranks = group.layout.holders[shard]
        if not names:
            return _no_file(ranks)
        what = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        part = f"part {shard + 1} of {group.layout.num_shards} of {what}" if group.layout.num_shards > 1 else what
        return f"{part}: no usable file of {rank_list(ranks)}, which held it"

    # --- who reads what ---

    def _assign(self) -> str:
        world = self.context.world
        try:
            self.target = target_of(self.source, world)
        except UsageError as error:
            return str(error)
        self.resharded = world.size != self.world_size or not same_parts(self.source, self.target)
        problem = self._assign_other_parts() if self.resharded else self._assign_same_parts()
        if not problem:
            sizes = bytes_by_rank(self.target if self.resharded else self.source, self.source)
            self.rank_plans = [replace(each, nbytes=sizes.get(each.rank, 0)) for each in self.rank_plans]
        return problem

    def _assign_same_parts(self) -> str:
        mates: dict[int, tuple[int, ...]] = {}
        lonely: list[str] = []
        needy: dict[tuple[int, ...], int] = {}
        own_states = self.context.own_states.get(self.moment, ())
        for rank in range(self.world_size):
            own = self._file(rank, rank)
            if own is not None:
                self.rank_plans.append(RankPlan(rank, own))
                continue
            mates = mates or {r: group for group in self.source.replica_groups() for r in group}
            group = mates[rank]
            healthy_first = sorted(group, key=lambda r: (r in self.context.faults, r))
            donors = [f for r in healthy_first if (f := self._file(r, rank)) is not None]
            if donors:
                turn = needy[group] = needy.get(group, -1) + 1
                self.rank_plans.append(RankPlan(rank, donors[turn % len(donors)]))
            else:
                problem = self._assemble(rank)
                if problem:
                    return problem
            if rank not in own_states:
                lonely.append(
                    f"rank {rank} takes rank {self.rank_plans[-1].file.rank}'s file and has no random numbers "
                    "of its own"
                )
        self.lonely = bool(lonely)
        self.inexact += lonely[:_SHOWN] + ([f"and {len(lonely) - _SHOWN} ranks more"] if len(lonely) > _SHOWN else [])
        return ""

    def _assign_other_parts(self) -> str:
        world = self.context.world
        if "" in self.source.by_name:
            return "its files do not say how their tensors are spread over the ranks, and the new world is another"
        ambiguous = _ambiguous(self.source, self.target)
        if ambiguous:
            return ambiguous
        # DDP to DDP: every file is whole, and any of them will do.
        whole = not any(group.layout.splitting for group in (*self.source.classes, *self.target.classes))
        whole &= all(group.layout.size == self.world_size for group in self.source.classes)
        for rank in range(world.size):
            problem = self._assemble(rank, whole=whole)
            if problem:
                return problem
        if world.size != self.world_size:
            self.inexact.append(
                f"{self.world_size} ranks become {world.size}: sums are taken in another order, and "
                "random numbers begin anew"
            )
        else:
            self.inexact.append("tensors are laid out otherwise than before: sums are taken in another order")
        return ""

    def _assemble(self, rank: int, *, whole: bool = False) -> str:
        """Let `rank` put its tensors together from several files (`whole`: take any one); the problem, or nothing."""
        if not whole and any(fact.visible_to is not None for facts in self.files.values() for fact in facts):
            for group in self.source.classes:
                for shard, ranks in enumerate(group.layout.holders):
                    if not any(self._file(old, rank) for old in ranks) and not group.is_empty(shard):
                        return (
                            f"rank {rank} cannot see a file of {rank_list(ranks)}: the nodes do not share the "
                            "directory; put the files on one disk, or start with the same ranks on the same nodes"
                        )
        # The old rank of the same number, else in turn, so that no file is everybody's.
        order = sorted(self.files)
        start = rank % len(order)
        for old in [rank, *order[start:], *order[:start]]:
            base = self._file(old, rank)
            if base is not None:
                self.rank_plans.append(RankPlan(rank, base, assembled=not whole))
                return ""
        return f"rank {rank} cannot see any file of it"

    def _file(self, old: int, reader: int) -> FileFact | None:
        return next((fact for fact in self.files.get(old, ()) if fact.seen_by(reader)), None)

    def plan(self) -> ResumePlan:
        first = self.rank_plans[0].file
        return ResumePlan(
            moment=self.moment,
            epoch=first.epoch,
            step_in_epoch=first.step_in_epoch,
            source=self.source,
            world=replace(self.context.world, strategy=self.target),
            ranks=tuple(self.rank_plans),
            files={rank: tuple(facts) for rank, facts in sorted(self.files.items())},
            resharded=self.resharded,
            inexact=tuple(self.inexact),
            faults=self.context.faults,
        )


def _no_file(ranks: Sequence[int]) -> str:
    return f"{rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'} no file of it"


def _ambiguous(source: Strategy, target: Strategy) -> str:
    """Tensors of one name on different ranks cannot be told apart once ranks move."""
    moved = source.world_size != target.world_size
    for name, specs in source.by_name.items():
        if len(specs) < 2 or name not in target.by_name:
            continue
        wanted = target.by_name[name]
        if moved or any(all(spec.layout != each.layout for each in specs) for spec in wanted):
            ranks = ", ".join(str(spec.layout.ranks[0]) for spec in specs[:4])
            return (
                f"{len(specs)} different tensors are called {name} (on ranks {ranks}, ...): each rank has its own, and "
                "nothing says how they become those of another world"
            )
    return ""
