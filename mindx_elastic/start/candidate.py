"""Judges one step: are all parts of all tensors there, and which new rank reads which file? Pure.

A rank whose world and layouts are as before reads its own file, or a replica's. Everything else is put together from
parts of several files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from mindx_elastic.core.layout import Layout, overlap
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.printable import listed
from mindx_elastic.core.rank_lists import missing_ranks, rank_list
from mindx_elastic.core.strategy import MARKER, LayoutClass, Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.start.assumptions import differing_components
from mindx_elastic.start.facts import FileFact, RankPlan, ResumePlan, World, completing, no_file
from mindx_elastic.start.new_layouts import same_parts, target_of

__all__ = ["Candidate", "Context"]

_SHOWN = 3
_MAX_DIFFERENCES = 12
_NOT_SHARED = (
    "the nodes do not share the directory; put the files on one disk, or start the same ranks on the same nodes"
)


class Context(NamedTuple):
    """The inputs of a plan that are the same for all steps."""

    world: World
    faults: frozenset[int]
    own_states: Mapping[Moment, Collection[int]]


class Candidate:
    """One step that a start may take. `problem` is empty when a start from it works."""

    def __init__(self, moment: Moment, facts: Sequence[FileFact], context: Context) -> None:
        self.moment, self._context = moment, context
        found: dict[int, list[FileFact]] = {}
        for fact in facts:
            found.setdefault(fact.rank, []).append(fact)
        self._files = {rank: tuple(found[rank]) for rank in sorted(found)}
        self._lacking = self._leave_out_fragments()
        sizes = sorted({fact.world_size for fact in facts})
        self.world_size = sizes[0] if len(sizes) == 1 else 0
        """Ranks that wrote it; 0: not clear."""
        self._assignment: _Assignment | None = None
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
        """Some rank takes another rank's file and has no own random numbers or buffers: not exact."""
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
            unmanaged=tuple(
                dict.fromkeys(note for facts in self._files.values() for fact in facts for note in fact.unmanaged)
            ),
            faults=self._context.faults,
        )

    def _judge(self, sizes: Sequence[int]) -> str:
        if not self._files:
            return self._lacking or "none of its files can be used"
        if len(sizes) > 1:
            return f"its files disagree on the world size ({', '.join(map(str, sizes))})"
        if max(self._files) >= self.world_size or min(self._files) < 0:
            return f"a file of rank {max(self._files)} in a world of {self.world_size}"
        try:
            return self._judge_parts()
        except UsageError as error:
            return str(error)

    def _leave_out_fragments(self) -> str:
        """Leave out files of a divided state of which some part is in no file. Returns what is missing, in words."""
        missing: dict[tuple[str, int], set[int]] = {}
        kept: dict[int, tuple[FileFact, ...]] = {}
        for rank, facts in self._files.items():
            whole = []
            for fact in facts:
                reader = rank if fact.visible_to is None else min(fact.visible_to, default=rank)
                if completing(fact, self._files, reader) is not None:
                    whole.append(fact)
                elif fact.held is not None:
                    key = (fact.held.division, fact.held.count)
                    missing.setdefault(key, set(fact.held.lacking)).intersection_update(fact.held.lacking)
            if whole:
                kept[rank] = tuple(whole)
        had, self._files = self._files, kept
        return "; ".join(
            f"of the state that its ranks have divided, {_parts_text(parts, count)} in no usable file "
            f"(files of {rank_list(tuple(had))} are there)"
            for (_, count), parts in missing.items()
        )

    def _judge_parts(self) -> str:
        try:
            self._source = self._merge()
        except UsageError as error:
            return f"its files contradict each other: {error}"
        unknown = missing_ranks(self.world_size, [*self._source.ranks, *self._files])
        if unknown:
            return no_file(unknown)
        missing = self._missing()
        if missing:
            return missing
        world = self._context.world
        self._target = target_of(self._source, world)
        resharded = not same_parts(self._source, self._target)
        # Where each rank has its own file, `load` reports what is not in it.
        is_known = "" not in self._source.by_name and (resharded or len(self._files) < world.size)
        found = _differences(self._source, self._target) if is_known and world.strategy is not None else []
        if found:
            # What a rank without a file had alone (an average on rank 0) went with it: an older step may have it. The
            # layouts do not tell who had it: they say that the ranks hold the same.
            lost = [s for s in self._target.tensors if s.name not in self._source.by_name and not s.is_marker]
            lost = [s for s in lost if not s.parameter and any(rank not in self._files for rank in s.layout.ranks)]
            if len(lost) == len(found) and world.size == self.world_size:
                absent = rank_list([rank for rank in range(self.world_size) if rank not in self._files])
                return f"{listed([spec.name for spec in lost], 1)}: in none of its files, and {absent} left none"
            self.is_other_program = True
            return f"it does not fit the program: {listed(found, _MAX_DIFFERENCES, '; ')}"
        own_states = self._context.own_states.get(self.moment, ())
        self._assignment = _Assignment(self._files, self._source, self._target, self._context.faults, own_states)
        self._assignment.assign(resharded=resharded)
        facts = [fact for facts in self._files.values() for fact in facts]
        differing = differing_components(facts) if resharded else []
        if differing and any(t.layout.splitting and not t.is_marker for t in self._source.tensors):
            return (
                f"{', '.join(differing)} (of stateful=) differs from rank to rank, and its layout is not known: "
                "leave it out, or start the same number of ranks with the same layouts"
            )
        return self._assignment.problem

    def _merge(self) -> Strategy:
        """The strategy that the files give together, in the order of ranks."""
        strategies = {id(fact.strategy): fact.strategy for facts in self._files.values() for fact in facts}
        for strategy in strategies.values():
            if strategy.world_size != self.world_size:
                raise UsageError(f"a strategy for {strategy.world_size} ranks, files of {self.world_size}")
        if len(strategies) == 1:
            return next(iter(strategies.values()))
        return Strategy(self.world_size, tuple(spec for s in strategies.values() for spec in s.tensors))

    def _missing(self) -> str:
        """The parts that no usable file holds, in words; empty: there are none."""
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
        what = listed(names, 1).lstrip(MARKER)
        part = f"part {shard + 1} of {group.layout.num_shards} of {what}" if group.layout.num_shards > 1 else what
        return f"{part}: no usable file of {rank_list(ranks)}, which held it"


def _parts_text(parts: Collection[int], count: int) -> str:
    if not parts:
        return f"some of {count} parts are"  # no rank can see all of them
    numbers = listed([str(part + 1) for part in sorted(parts)], 8)
    return f"part{'s' if len(parts) > 1 else ''} {numbers} of {count} {'are' if len(parts) > 1 else 'is'}"


class _Assignment:
    """Which file each new rank reads. `problem` is empty when every rank of `target` gets what it needs."""

    def __init__(
        self,
        files: Mapping[int, Sequence[FileFact]],
        source: Strategy,
        target: Strategy,
        faults: frozenset[int],
        own_states: Collection[int],
    ) -> None:
        """files: of each old rank those of the step, the one to try first in front, ranks ascending."""
        self._files, self._source, self._target = files, source, target
        self._faults, self._own_states = faults, own_states
        self._order = list(files)
        self._sees_all: dict[frozenset[int], bool] = {}
        self._ranks_with: dict[str, list[int]] = {}
        self.shares: list[RankPlan] = []
        """One for each new rank."""
        self.inexact: list[str] = []
        self.lacks_rank_state = False
        self.resharded = False
        self.problem = ""

    def assign(self, *, resharded: bool) -> None:
        """Find the files for each rank. Raises UsageError when a layout does not fit its tensor."""
        self.resharded = resharded
        self.problem = self._assign_new_parts() if resharded else self._assign_same_parts()

    def _assign_same_parts(self) -> str:
        groups: dict[int, tuple[int, ...]] = {}
        turns: dict[tuple[int, ...], int] = {}
        borrowing: list[str] = []
        for rank in range(self._source.world_size):
            own = self._file(rank, rank)
            if own is not None:
                self.shares.append(self._whole(rank, own))
                continue
            groups = groups or {r: group for group in self._source.replica_groups() for r in group}
            group = groups.get(rank, (rank,))
            healthy_first = sorted(group, key=lambda r: (r in self._faults, r))
            donors = [file for r in healthy_first if (file := self._file(r, rank)) is not None]
            if donors:
                turn = turns[group] = turns.get(group, -1) + 1
                self.shares.append(self._whole(rank, donors[turn % len(donors)]))
            elif problem := self._assemble(rank):
                return problem
            if rank not in self._own_states:
                donor = self.shares[-1].file.rank
                borrowing.append(f"rank {rank} takes rank {donor}'s file and has no own random numbers")
        self.lacks_rank_state = bool(borrowing)
        self.inexact += borrowing[:_SHOWN] + (
            [f"and {len(borrowing) - _SHOWN} ranks more"] if len(borrowing) > _SHOWN else []
        )
        return ""

    def _assign_new_parts(self) -> str:
        old, new = self._source.world_size, self._target.world_size
        if "" in self._source.by_name:
            return "its files do not say how their tensors are spread over the ranks, and the new world is another"
        problem = _ambiguous(self._source, self._target)
        if problem:
            return problem
        # DDP to DDP: every file is whole, and any of them will do.
        whole = not any(group.layout.splitting for group in (*self._source.classes, *self._target.classes))
        whole &= all(group.layout.size == old for group in self._source.classes)
        whole &= all(group.layout.size == new for group in self._target.classes)  # and all ranks want the same
        for rank in range(new):
            problem = self._assemble(rank, whole=whole)
            if problem:
                return problem
        if new != old:
            become = "ranks become" if old > 1 else "rank becomes"
            self.inexact.append(f"{old} {become} {new}: sums are taken in another order, and random numbers start over")
        else:
            self.inexact.append("tensors are laid out otherwise than before: sums are taken in another order")
        return ""

    def _assemble(self, rank: int, *, whole: bool = False) -> str:
        """Let `rank` put its tensors together from several files (`whole`: take any one). Returns the problem."""
        if not whole and not self._is_all_visible and not self._sees_everything(rank):
            for layout, shard in self._needed(rank):
                if not any(self._file(old, rank) for old in layout.holders[shard]):
                    return f"rank {rank} cannot see a file of {rank_list(layout.holders[shard])}: {_NOT_SHARED}"
        # What is not put together comes from one file: the one of the old rank of the same number, else in turn, so
        # that the load is spread; of ranks that held the same tensors, since the options of an optimizer may differ
        # between pipeline stages.
        same_tensors = self._ranks_with_same_tensors(rank)
        base = self._file(rank, rank) if rank in same_tensors else None
        for order in (same_tensors, self._order):
            for turn in range(len(order)):
                base = base or self._file(order[(rank + turn) % len(order)], rank)
                if base is not None:
                    self.shares.append(replace(self._whole(rank, base), assembled=not whole))
                    return ""
        return f"rank {rank} cannot see any file of it: {_NOT_SHARED}"

    def _ranks_with_same_tensors(self, rank: int) -> Sequence[int]:
        """The old ranks with a file that held some tensor of new rank `rank`; all of them where that is not known."""
        groups = (group for group in self._target.classes if rank in group.layout)
        name = next((group.tensors[0].name for group in groups if not group.tensors[0].is_marker), "")
        specs = self._source.by_name.get(name, ())
        if not specs or len(specs[0].layout.ranks) == self._source.world_size:
            return self._order
        if name not in self._ranks_with:  # the same for all ranks of a pipeline stage
            self._ranks_with[name] = [old for old in self._order if any(old in spec.layout for spec in specs)]
        return self._ranks_with[name] or self._order

    def _file(self, old: int, reader: int) -> FileFact | None:
        return next((fact for fact in self._files.get(old, ()) if self._can_read(fact, reader)), None)

    def _can_read(self, fact: FileFact, reader: int) -> bool:
        return fact.seen_by(reader) and (fact.held is None or completing(fact, self._files, reader) is not None)

    def _whole(self, rank: int, file: FileFact) -> RankPlan:
        """`rank` reads `file`, and what it lacks of a divided state from others."""
        return RankPlan(rank, file, others=completing(file, self._files, rank) or ())

    @cached_property
    def _states(self) -> Mapping[str, list[TensorSpec]]:
        """Parameter -> what optimizers keep of it, where the new world does not say how that is laid out."""
        found: dict[str, list[TensorSpec]] = {}
        for spec in self._source.tensors:
            if spec.parameter and spec.name not in self._target.by_name:
                found.setdefault(spec.parameter, []).append(spec)
        return found

    # --- on disks that are not shared ---

    @cached_property
    def _is_all_visible(self) -> bool:
        return all(fact.visible_to is None for facts in self._files.values() for fact in facts[:1])

    def _sees_everything(self, rank: int) -> bool:
        """Whether `rank` can read all parts of all tensors; worked out once for all ranks that see the same files."""
        visible = frozenset(old for old in self._order if self._file(old, rank) is not None)
        if visible not in self._sees_all:
            self._sees_all[visible] = all(
                not visible.isdisjoint(ranks) for group in self._source.classes for ranks in group.layout.holders
            )
        return self._sees_all[visible]

    def _needed(self, rank: int) -> list[tuple[Layout, int]]:
        """The parts of the old world that new rank `rank` needs some element of: layout and number of the shard."""
        found: dict[tuple[Layout, int], None] = {}
        for group in self._target.classes:
            if rank in group.layout:
                shard = group.layout.shard_of(rank)
                for spec in group.tensors:
                    for each in self._overlapping(spec, shard):
                        found[each] = None
        return list(found)

    def _overlapping(self, wanted: TensorSpec, shard: int) -> list[tuple[Layout, int]]:
        specs = self._source.by_name.get(wanted.name, ())
        if wanted.is_marker or not specs:
            return []
        spec = next((each for each in specs if each.layout == wanted.layout), specs[0])
        mine = wanted.layout.box(wanted.shape, shard)
        related = [spec, *self._states.get(spec.name, ())]
        found = []
        for each in related:
            for part in range(each.layout.num_shards):
                theirs = each.layout.box(each.shape, part)
                common = overlap(mine, theirs if each.shape == wanted.shape else mine)
                if common is not None and overlap(theirs, theirs) is not None:
                    found.append((each.layout, part))
        return found


def _differences(source: Strategy, target: Strategy) -> list[str]:
    """Parameters that only one of the old and the new program has, or that have another shape."""
    found = []
    parameters = [spec for spec in target.tensors if not spec.is_marker and not spec.parameter]
    for spec in parameters:
        known = source.by_name.get(spec.name)
        if not known:
            found.append(f"{spec.name} is missing there")
        elif all(each.shape != spec.shape for each in known):
            found.append(f"{spec.name} has shape {list(known[0].shape)} there and {list(spec.shape)} here")
    components = {spec.name.partition(".")[0] for spec in parameters}
    for spec in source.tensors:
        if spec.name.partition(".")[0] in components and spec.name not in target.by_name and not spec.parameter:
            found.append(f"{spec.name} is only there")
    return found


def _ambiguous(source: Strategy, target: Strategy) -> str:
    """Why tensors of one name on different ranks cannot be told apart in the new world; empty: they can."""
    moved = source.world_size != target.world_size
    for spec in source.tensors:
        if spec.parameter in target.by_name and len(source.by_name[spec.name]) > 1:
            return f"{spec.name} differs from rank to rank, and its layout is not known"
    for name, wanted in target.by_name.items():
        specs = source.by_name.get(name, ())
        if wanted[0].is_marker or max(len(specs), len(wanted)) < 2 or not specs:
            continue
        if moved or any(all(spec.layout != each.layout for each in specs) for spec in wanted):
            ranks = ", ".join(str(spec.layout.ranks[0]) for spec in (*specs, *wanted)[:4])
            return (
                f"different tensors are called {name} (on ranks {ranks}, ...): each rank has its own, and how they "
                "become those of another world is not known; describe them with Guard(layouts=...)"
            )
    return ""
