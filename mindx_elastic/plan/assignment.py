"""Who reads what of one step, all of whose parts are there. Pure.

A rank whose world and layouts are as before reads its own file, or a replica's. Everything else is put together from
parts of several files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mindx_elastic.core.layout import Layout, overlap
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.plan.facts import FileFact, RankPlan
from mindx_elastic.plan.targets import bytes_by_rank, same_parts

__all__ = ["Assignment", "differences"]

_SHOWN = 3
_NOT_SHARED = (
    "the nodes do not share the directory; put the files on one disk, or start the same ranks on the same nodes"
)


class Assignment:
    """`problem` is empty when every rank of `target` gets what it needs."""

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
        self._everywhere = all(fact.visible_to is None for facts in files.values() for fact in facts[:1])
        self._states: dict[str, list[TensorSpec]] = {}
        for spec in source.tensors:
            if spec.parameter and spec.name not in target.by_name:
                self._states.setdefault(spec.parameter, []).append(spec)
        self._sees_all: dict[frozenset[int], bool] = {}
        self._ranks_with: dict[str, list[int]] = {}
        self.shares: list[RankPlan] = []
        """One for each new rank."""
        self.inexact: list[str] = []
        self.lacks_rank_state = False
        self.resharded = source.world_size != target.world_size or not same_parts(source, target)
        self.problem = self._other_parts() if self.resharded else self._same_parts()
        if not self.problem:
            sizes = bytes_by_rank(target if self.resharded else source, source)
            self.shares = [replace(each, nbytes=sizes.get(each.rank, 0)) for each in self.shares]

    @classmethod
    def of_own_files(cls, source: Strategy, shares: Sequence[RankPlan]) -> Assignment:
        """Each rank has its own file: nothing is left to decide."""
        found = cls.__new__(cls)
        sizes = bytes_by_rank(source, source)
        found.shares = [replace(each, nbytes=sizes.get(each.rank, 0)) for each in shares]
        found.inexact, found.lacks_rank_state, found.resharded, found.problem = [], False, False, ""
        return found

    def _same_parts(self) -> str:
        mates: dict[int, tuple[int, ...]] = {}
        needy: dict[tuple[int, ...], int] = {}
        borrowing: list[str] = []
        for rank in range(self._source.world_size):
            own = self._file(rank, rank)
            if own is not None:
                self.shares.append(RankPlan(rank, own))
                continue
            mates = mates or {r: group for group in self._source.replica_groups() for r in group}
            group = mates.get(rank, (rank,))
            healthy_first = sorted(group, key=lambda r: (r in self._faults, r))
            donors = [file for r in healthy_first if (file := self._file(r, rank)) is not None]
            if donors:
                turn = needy[group] = needy.get(group, -1) + 1
                self.shares.append(RankPlan(rank, donors[turn % len(donors)]))
            elif problem := self._assemble(rank):
                return problem
            if rank not in self._own_states:
                donor = self.shares[-1].file.rank
                borrowing.append(f"rank {rank} takes rank {donor}'s file and has no random numbers of its own")
        self.lacks_rank_state = bool(borrowing)
        self.inexact += borrowing[:_SHOWN] + (
            [f"and {len(borrowing) - _SHOWN} ranks more"] if len(borrowing) > _SHOWN else []
        )
        return ""

    def _other_parts(self) -> str:
        old, new = self._source.world_size, self._target.world_size
        if "" in self._source.by_name:
            return "its files do not say how their tensors are spread over the ranks, and the new world is another"
        problem = _ambiguous(self._source, self._target)
        if problem:
            return problem
        unknown = next((t for t in self._source.tensors if t.layout.splitting and not t.is_shape_known), None)
        if unknown is not None:
            return f"the shape of {unknown.name} is not known, so nobody knows where its parts lie"
        # DDP to DDP: every file is whole, and any of them will do.
        whole = not any(group.layout.splitting for group in (*self._source.classes, *self._target.classes))
        whole &= all(group.layout.size == old for group in self._source.classes)
        whole &= all(group.layout.size == new for group in self._target.classes)  # and everybody wants the same
        for rank in range(new):
            problem = self._assemble(rank, whole=whole)
            if problem:
                return problem
        if new != old:
            become = "ranks become" if old > 1 else "rank becomes"
            self.inexact.append(f"{old} {become} {new}: sums are taken in another order, and random numbers begin anew")
        else:
            self.inexact.append("tensors are laid out otherwise than before: sums are taken in another order")
        return ""

    def _assemble(self, rank: int, *, whole: bool = False) -> str:
        """Let `rank` put its tensors together from several files (`whole`: take any one); the problem, or nothing."""
        if not whole and not self._everywhere and not self._sees_everything(rank):
            for layout, shard in self._needed(rank):
                if not any(self._file(old, rank) for old in layout.holders[shard]):
                    return f"rank {rank} cannot see a file of {rank_list(layout.holders[shard])}: {_NOT_SHARED}"
        # The old rank of the same number, else in turn, so that no file is everybody's; of those that held the same
        # tensors (options of an optimizer differ from pipeline stage to stage).
        same_tensors = self._ranks_with_same_tensors(rank)
        base = self._file(rank, rank) if rank in same_tensors else None
        for order in (same_tensors, self._order):
            for turn in range(len(order)):
                base = base or self._file(order[(rank + turn) % len(order)], rank)
                if base is not None:
                    self.shares.append(RankPlan(rank, base, assembled=not whole))
                    return ""
        return f"rank {rank} cannot see any file of it: {_NOT_SHARED}"

    def _ranks_with_same_tensors(self, rank: int) -> Sequence[int]:
        """The old ranks with a file that held something of what new rank `rank` holds; all, if nothing tells."""
        groups = (group for group in self._target.classes if rank in group.layout)
        name = next((group.tensors[0].name for group in groups if not group.tensors[0].is_marker), "")
        specs = self._source.by_name.get(name, ())
        if not specs or len(specs[0].layout.ranks) == self._source.world_size:
            return self._order
        if name not in self._ranks_with:  # the same for all ranks of a pipeline stage
            self._ranks_with[name] = [old for old in self._order if any(old in spec.layout for spec in specs)]
        return self._ranks_with[name] or self._order

    def _file(self, old: int, reader: int) -> FileFact | None:
        return next((fact for fact in self._files.get(old, ()) if fact.seen_by(reader)), None)

    # --- on disks that are not shared ---

    def _sees_everything(self, rank: int) -> bool:
        """Whether `rank` can read every part of everything; worked out once for all ranks that see the same files."""
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
        mine = wanted.layout.boxes(wanted.shape, shard)
        # What optimizers keep of it, where the new world does not say itself how that is laid out.
        related = [spec, *self._states.get(spec.name, ())]
        found = []
        for each in related:
            for part in range(each.layout.num_shards):
                theirs = each.layout.boxes(each.shape, part)
                alike = each.shape == wanted.shape
                if theirs and mine and (not alike or any(overlap(a, b) is not None for a in theirs for b in mine)):
                    found.append((each.layout, part))
        return found


def differences(source: Strategy, target: Strategy) -> list[str]:
    """Parameters that the old program and the new one do not have in common, or not in the same size."""
    found = []
    parameters = [spec for spec in target.tensors if not spec.is_marker and not spec.parameter]
    for spec in parameters:
        known = source.by_name.get(spec.name)
        if not known:
            found.append(f"{spec.name} is missing there")
        elif all(each.is_shape_known and each.shape != spec.shape for each in known):
            found.append(f"{spec.name} has shape {list(known[0].shape)} there and {list(spec.shape)} here")
    components = {spec.name.partition(".")[0] for spec in parameters}
    for spec in source.tensors:
        if spec.name.partition(".")[0] in components and spec.name not in target.by_name and not spec.parameter:
            found.append(f"{spec.name} is only there")
    return found


def _ambiguous(source: Strategy, target: Strategy) -> str:
    """Tensors of one name on different ranks cannot be told apart once ranks move."""
    moved = source.world_size != target.world_size
    for spec in source.tensors:
        if spec.parameter in target.by_name and len(source.by_name[spec.name]) > 1:
            return f"{spec.name} differs from rank to rank, and nothing says how it is spread"
    for name, wanted in target.by_name.items():
        specs = source.by_name.get(name, ())
        if wanted[0].is_marker or max(len(specs), len(wanted)) < 2 or not specs:
            continue
        if moved or any(all(spec.layout != each.layout for each in specs) for spec in wanted):
            ranks = ", ".join(str(spec.layout.ranks[0]) for spec in (*specs, *wanted)[:4])
            return (
                f"different tensors are called {name} (on ranks {ranks}, ...): each rank has its own, and nothing says "
                "how they become those of another world; describe them with Guard(layouts=...)"
            )
    return ""
