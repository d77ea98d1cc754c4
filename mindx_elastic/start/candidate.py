"""Judges one step: are all parts of all tensors there, and which new rank reads which file? Pure.

A rank whose world and layouts are as before reads its own file, or a replica's. Everything else is put together from
parts of several files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from mindx_elastic.core.layout import Layout
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.printable import listed
from mindx_elastic.core.rank_lists import missing_ranks, rank_list
from mindx_elastic.core.strategy import MARKER, LayoutClass, Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.start.assumptions import differing_components
from mindx_elastic.start.facts import FileFact, RankPlan, ResumePlan, World, completing, no_file

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
        """Of each old rank, ascending, those of the step, the one to try first in front."""
        sizes = sorted({fact.world_size for fact in facts})
        self.world_size = sizes[0] if len(sizes) == 1 else 0
        """Ranks that wrote it; 0: not clear."""
        self.problem = ""
        self.inexact: Sequence[str] = ()
        """Why a run that goes on from here is not bit for bit the uninterrupted one."""
        self.is_other_program = False
        """The step is complete, but a program with other parameters wrote it."""
        self.lacks_rank_state = False
        """Some rank takes another rank's file and has no own random numbers or buffers: not exact."""
        self._shares: list[RankPlan] = []
        """One for each new rank."""
        self._sees_all: dict[frozenset[int], bool] = {}
        self._ranks_with: dict[str, list[int]] = {}
        try:
            self._leave_out_fragments()
            self._order = list(self._files)
            self._judge(sizes)
        except UsageError as error:  # also of a layout that does not fit its tensor
            another = self.world_size not in (0, context.world.size)
            self.problem = f"written by {self.world_size} ranks: {error}" if another else str(error)

    def plan(self) -> ResumePlan:
        """How a start from it works, if `problem` is empty."""
        first = self._shares[0].file
        return ResumePlan(
            moment=self.moment,
            epoch=first.epoch,
            step_in_epoch=first.step_in_epoch,
            source=self._source,
            world=replace(self._context.world, strategy=self._target),
            ranks=tuple(self._shares),
            files=self._files,
            resharded=self._resharded,
            inexact=tuple(self.inexact),
            unmanaged=tuple(
                dict.fromkeys(note for facts in self._files.values() for fact in facts for note in fact.unmanaged)
            ),
            faults=self._context.faults,
        )

    # --- is all there? ---

    def _leave_out_fragments(self) -> None:
        """Leave out files of a divided state of which some part is in no file. Raises UsageError where none is left."""
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
        if not kept:
            lacking = [
                f"of the state that its ranks have divided, {_parts_text(parts, count)} in no usable file "
                f"(files of {rank_list(tuple(had))} are there)"
                for (_, count), parts in missing.items()
            ]
            raise UsageError("; ".join(lacking) or "none of its files can be used")

    def _judge(self, sizes: Sequence[int]) -> None:
        """Raises UsageError with what stands against a start from it."""
        if len(sizes) > 1:
            raise UsageError(f"its files disagree on the world size ({', '.join(map(str, sizes))})")
        if max(self._files) >= self.world_size or min(self._files) < 0:
            raise UsageError(f"a file of rank {max(self._files)} in a world of {self.world_size}")
        self._source = self._merge()
        if unknown := missing_ranks(self.world_size, [*self._source.ranks, *self._files]):
            raise UsageError(no_file(unknown))
        if missing := self._missing():
            raise UsageError(missing)
        self._target = _target_of(self._source, self._context.world)
        self._resharded = not _same_parts(self._source, self._target)
        if self._resharded:
            self._check_layouts()
            self._assign_new_parts()
        else:
            self._check_objects()
            self._assign_same_parts()

    def _check_objects(self) -> None:
        """Raises UsageError for an object that went with the ranks without a file: those of older versions do not say
        which ranks alone hold it."""
        absent = [rank for rank in range(self.world_size) if rank not in self._files]
        if not absent or "" in self._source.by_name:
            return
        there = {spec.name.partition(".")[0] for spec in self._source.tensors}
        own = [spec for spec in self._target.tensors if not spec.is_marker and not spec.parameter]
        if lost := [spec.name for spec in own if spec.name.partition(".")[0] not in there]:
            raise UsageError(f"{listed(lost, 1)}: in none of its files, and {rank_list(absent)} left none")

    def _check_layouts(self) -> None:
        """Raises UsageError where the files do not fit the program (of files that are read whole, `load` tells it), and
        where it is not known how tensors become those of other layouts."""
        if "" in self._source.by_name:
            raise UsageError(
                "its files do not say how their tensors are spread over the ranks, and the new world is another"
            )
        if self._context.world.strategy is not None and (found := _differences(self._source, self._target)):
            self.is_other_program = True
            raise UsageError(f"it does not fit the program: {listed(found, _MAX_DIFFERENCES, '; ')}")
        if problem := _ambiguous(self._source, self._target):
            raise UsageError(problem)
        differing = differing_components(fact for facts in self._files.values() for fact in facts)
        if differing and any(t.layout.splitting and not t.is_marker for t in self._source.tensors):
            raise UsageError(
                f"{', '.join(differing)} (of stateful=) differs from rank to rank, and its layout is not known: "
                "leave it out, or start the same number of ranks with the same layouts"
            )

    def _merge(self) -> Strategy:
        """The strategy that the files give together, in the order of ranks."""
        strategies = {id(fact.strategy): fact.strategy for facts in self._files.values() for fact in facts}
        for strategy in strategies.values():
            if strategy.world_size != self.world_size:
                raise UsageError(
                    f"its files contradict each other: a strategy for {strategy.world_size} ranks, files of "
                    f"{self.world_size}"
                )
        if len(strategies) == 1:
            return next(iter(strategies.values()))
        try:
            return Strategy(self.world_size, tuple(spec for s in strategies.values() for spec in s.tensors))
        except UsageError as error:
            raise UsageError(f"its files contradict each other: {error}") from None

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

    # --- who reads what? ---

    def _assign_same_parts(self) -> None:
        own_states = self._context.own_states.get(self.moment, ())
        groups: dict[int, tuple[int, ...]] = {}
        turns: dict[tuple[int, ...], int] = {}
        borrowing: list[str] = []
        for rank in range(self._source.world_size):
            own = self._file(rank, rank)
            if own is not None:
                self._shares.append(self._whole(rank, own))
                continue
            groups = groups or {r: group for group in self._source.replica_groups() for r in group}
            group = groups.get(rank, (rank,))
            alone = _held_besides(self._source, rank)
            first = sorted(group, key=lambda r: (r in self._context.faults, r))
            able = [(_held_besides(self._source, r), file) for r in first if (file := self._file(r, rank)) is not None]
            donors = [file for theirs, file in able if theirs == alone] or [f for theirs, f in able if theirs > alone]
            if donors:
                turn = turns[group] = turns.get(group, -1) + 1
                self._shares.append(self._whole(rank, donors[turn % len(donors)]))
            else:
                self._assemble(rank)
            if rank not in own_states:
                donor = self._shares[-1].file.rank
                borrowing.append(f"rank {rank} takes rank {donor}'s file and has no own random numbers")
        self.lacks_rank_state = bool(borrowing)
        more = [f"and {len(borrowing) - _SHOWN} ranks more"] if len(borrowing) > _SHOWN else []
        self.inexact = borrowing[:_SHOWN] + more

    def _assign_new_parts(self) -> None:
        old, new = self._source.world_size, self._target.world_size
        # DDP to DDP: every file is whole, and any of them will do.
        whole = not any(group.layout.splitting for group in (*self._source.classes, *self._target.classes))
        whole &= all(group.layout.size == old or group.is_marker for group in self._source.classes)
        whole &= all(group.layout.size == new for group in self._target.classes)  # and all ranks want the same
        for rank in range(new):
            self._assemble(rank, whole=whole)
        if new != old:
            become = "ranks become" if old > 1 else "rank becomes"
            self.inexact = [f"{old} {become} {new}: sums are taken in another order, and random numbers start over"]
        else:
            self.inexact = ["tensors are laid out otherwise than before: sums are taken in another order"]

    def _assemble(self, rank: int, *, whole: bool = False) -> None:
        """Let `rank` put its tensors together from several files (`whole`: take any one). Raises UsageError where it
        does not see all of them: which of them it needs is not worked out."""
        if not whole and not self._is_all_visible and not self._sees_everything(rank):
            raise UsageError(f"rank {rank} cannot see files with all parts of the tensors: {_NOT_SHARED}")
        # What is not put together comes from one file: the one of the old rank of the same number, else in turn, so
        # that the load is spread; of ranks that held the same tensors, since the options of an optimizer may differ
        # between pipeline stages.
        same_tensors = self._ranks_with_same_tensors(rank)
        base = self._file(rank, rank) if rank in same_tensors else None
        for order in (same_tensors, self._order):
            for turn in range(len(order)):
                base = base or self._file(order[(rank + turn) % len(order)], rank)
                if base is not None:
                    self._shares.append(replace(self._whole(rank, base), assembled=not whole))
                    return
        raise UsageError(f"rank {rank} cannot see any file of it: {_NOT_SHARED}")

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
    def _is_all_visible(self) -> bool:
        return all(fact.visible_to is None for facts in self._files.values() for fact in facts[:1])

    def _sees_everything(self, rank: int) -> bool:
        """Whether `rank` can read all parts of all tensors; worked out once for all ranks that see the same files."""
        visible = frozenset(old for old in self._order if self._file(old, rank) is not None)
        if visible not in self._sees_all:
            self._sees_all[visible] = all(
                group.is_empty(shard) or not visible.isdisjoint(ranks)
                for group in self._source.classes
                for shard, ranks in enumerate(group.layout.holders)
            )
        return self._sees_all[visible]


def _parts_text(parts: Collection[int], count: int) -> str:
    if not parts:
        return f"some of {count} parts are"  # no rank can see all of them
    numbers = listed([str(part + 1) for part in sorted(parts)], 8)
    return f"part{'s' if len(parts) > 1 else ''} {numbers} of {count} {'are' if len(parts) > 1 else 'is'}"


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


# --- the layouts of a new world, as far as they follow from the old one's, and how the two compare ---


def _target_of(source: Strategy, world: World) -> Strategy:
    """The new world's strategy: as given, as before, or as `source` where every rank of a mesh of one dimension does
    the same. Raises UsageError when it has to be given."""
    if world.strategy is not None:
        if world.strategy.world_size != world.size:
            raise UsageError(f"the new strategy is for {world.strategy.world_size} ranks, the world has {world.size}")
        return world.strategy
    if world.size == source.world_size:
        return source
    # ZeRO: an optimizer redistributes its state by itself, whatever the number of ranks.
    groups = [group for group in source.classes if not all(spec.parameter or spec.is_marker for spec in group.tensors)]
    layouts = {group.layout: _redistributed(group, source.world_size, world.size) for group in groups}
    kept = (spec for spec in source.tensors if not spec.is_marker)
    specs = (replace(spec, layout=layouts[spec.layout]) for spec in kept if spec.layout in layouts)
    return Strategy(world.size, tuple(specs))


def _redistributed(group: LayoutClass, old: int, new: int) -> Layout:
    layout, name = group.layout, group.tensors[0].name or "the state"
    if layout.size != old or (layout.splitting and len(layout.mesh_shape) > 1):
        raise UsageError(
            f"{name} is laid out as {layout}, so its layout over {new} ranks must be given: start the job, whose own "
            "layouts then count"
        )
    return replace(layout, mesh_shape=(new,), placements=layout.placements[:1], ranks=range(new), mesh_dim_names=())


def _same_parts(source: Strategy, target: Strategy) -> bool:
    """Whether each rank of `target` holds what the same rank of `source` did.

    Optimizers have no state before their first step, so only what `target` names is compared.
    """
    if source is target:
        return True
    if source.world_size != target.world_size:
        return False
    return all(
        any(_alike(each, spec) for each in source.by_name[spec.name]) or _held_alone(source.by_name[spec.name], spec)
        for spec in target.tensors
        if spec.name in source.by_name and not spec.is_marker
    )


def _held_besides(strategy: Strategy, rank: int) -> frozenset[int]:
    """The classes, by number, of what only some ranks hold, `rank` among them, though by its layout others do."""
    markers = ((n, g.layout) for n, g in enumerate(strategy.classes) if g.is_marker and not g.layout.splitting)
    return frozenset(number for number, layout in markers if rank in layout)


def _held_alone(old: Sequence[TensorSpec], new: TensorSpec) -> bool:
    """Whether each rank of `new` had its part for itself (see `assumptions`): the whole was its own part."""
    alone = {each.layout.ranks[0]: each.shape for each in old if each.layout.size == 1}
    return all(
        alone.get(rank) == new.layout.local_shape(new.shape, new.layout.shard_of(rank)) for rank in new.layout.ranks
    )


def _alike(old: TensorSpec, new: TensorSpec) -> bool:
    return old.shape == new.shape and (old.layout == new.layout or _equal_boxes(old, new))


def _equal_boxes(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether two layouts of one shape mean the same, though they are spelled differently (a mesh of one dimension, or
    of two)."""
    a, b = one.layout, other.layout
    if sorted(a.ranks) != sorted(b.ranks):
        return False
    if not a.splitting and not b.splitting:
        return True
    return all(a.box(one.shape, a.shard_of(rank)) == b.box(one.shape, b.shard_of(rank)) for rank in a.ranks)
