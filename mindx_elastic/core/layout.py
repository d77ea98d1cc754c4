"""How one tensor is spread over ranks: a mesh, and for each of its dimensions whether it splits or repeats the tensor.

Pure arithmetic, no torch: the same rules for a live DTensor, a file header, a MindSpore strategy and a layout given by
hand. What each rank holds is computed from the mesh and not stored, so that thousands of ranks cost nothing.

A split follows ``torch.chunk``: pieces of ``ceil(n / parts)``, the last ones shorter or empty. Mesh dimensions split a
tensor from left to right, except for ``_StridedShard``: its split factor is the number of pieces that dimensions to its
right have made *before* it (FSDP2 around tensor parallel), so those go first. A shard is one box of the tensor. On an
uneven dimension torch's own reading of such a placement (left to right, pieces put together again) can differ from what
FSDP2 holds; ours is what FSDP2 holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from mindx_elastic.errors import UsageError

__all__ = [
    "MAX_RANKS",
    "REPLICATE",
    "Box",
    "Interval",
    "Layout",
    "Placement",
    "Shard",
    "overlap",
    "parse_placement",
]

Interval = tuple[int, int]
"""[start, stop) along one dimension."""
Box = tuple[Interval, ...]
"""One interval for each dimension of a tensor; ``()`` for a scalar."""

_SHARD = re.compile(r"(?:s|shard)\((?:dim=)?(\d{1,4})\)", re.IGNORECASE)
_STRIDED = re.compile(
    r"_?(?:s|stridedshard|strided_shard)\((?:dim=)?(\d{1,4}),(?:sf=|split_factor=)?(\d{1,7})\)", re.IGNORECASE
)
MAX_MESH_DIMS = 16
MAX_RANKS = 1 << 18


class Placement(NamedTuple):
    """What one mesh dimension does to a tensor. Without a ``dim`` every rank along it holds the same."""

    dim: int | None = None
    """The tensor's dimension that is split."""
    split_factor: int = 1
    """Of ``_StridedShard``: pieces that mesh dimensions to the right make before this one; 1: plain ``Shard``."""

    def __str__(self) -> str:
        if self.dim is None:
            return "R"
        return f"S({self.dim})" if self.split_factor == 1 else f"_S({self.dim},{self.split_factor})"


REPLICATE = Placement()


def Shard(dim: int, split_factor: int = 1) -> Placement:  # noqa: N802 - torch's name for it
    """The placement that splits dimension `dim`."""
    return Placement(dim, split_factor)


def parse_placement(value: Any) -> Placement:
    """A `Placement`, torch's own placement object, or text: ``R``, ``replicate``, ``S(0)``, ``shard(0)``, ``_S(0,2)``.

    Raises UsageError for anything else: a ``Partial`` sum cannot be saved.
    """
    if isinstance(value, Placement):
        return value
    if isinstance(value, str):
        text = value.replace(" ", "")
        if text.lower().removesuffix("()") in ("r", "replicate"):
            return REPLICATE
        if found := _SHARD.fullmatch(text):
            return Placement(int(found[1]))
        if found := _STRIDED.fullmatch(text):
            return Placement(int(found[1]), int(found[2]))
        raise UsageError(f'placement {value!r} is not known: give "replicate", "shard(dim)" or "_S(dim,split_factor)"')
    kind = type(value).__name__
    if kind == "Replicate":
        return REPLICATE
    if kind in ("Shard", "_StridedShard"):
        return Placement(int(value.dim), int(getattr(value, "split_factor", 1)))
    raise UsageError(f"placement {value!r} cannot be saved: a tensor must be replicated or sharded")


@dataclass(frozen=True)
class Layout:
    """How a tensor is spread over `ranks`, which fill the mesh row by row.

    ::

        Layout((2, 2), ("replicate", "shard(0)"))            # dp = 2, tp = 2: rows split over tp
        Layout((2,), ("shard(1)",), ranks=(4, 6))            # on two ranks of a larger job

    Raises UsageError when the parts contradict each other.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    """One for each dimension of the mesh; also as text or torch's own objects."""
    ranks: Sequence[int] = ()
    """Empty: 0, 1, ... A range or a tuple."""
    mesh_dim_names: tuple[str, ...] = field(default=(), compare=False)
    """For people."""
    split_orders: Mapping[int, Sequence[int]] = field(init=False, compare=False, repr=False)
    """For each dimension of the tensor that is split the mesh dimensions that do it, in the order in which they do."""

    def __post_init__(self) -> None:
        shape = tuple(self.mesh_shape)
        if not 1 <= len(shape) <= MAX_MESH_DIMS or not all(type(n) is int and n > 0 for n in shape):
            raise UsageError(f"mesh shape {shape!r:.80}: give 1 to {MAX_MESH_DIMS} whole numbers above 0")
        placements = tuple(map(parse_placement, self.placements))
        if len(placements) != len(shape):
            raise UsageError(f"{len(placements)} placements for a mesh of {len(shape)} dimensions")
        for placement in placements:
            if placement.split_factor < 1 or (placement.dim is not None and placement.dim < 0):
                raise UsageError(f"placement {placement}: dimensions count from 0, split factors from 1")
        size = math.prod(shape)
        if size > MAX_RANKS:
            raise UsageError(f"mesh shape {shape!r:.80} has {size} ranks; {MAX_RANKS} at most")
        ranks: Sequence[int] = self.ranks if isinstance(self.ranks, range) else tuple(self.ranks)
        if not ranks:
            ranks = range(size)
        distinct = len(ranks) if isinstance(ranks, range) else len(set(ranks))
        if len(ranks) != size or distinct != size:
            raise UsageError(f"mesh shape {shape} needs {size} different ranks, not {len(ranks)} ({str(ranks)[:80]})")
        if (min(ranks[0], ranks[-1]) if isinstance(ranks, range) else min(ranks)) < 0:
            raise UsageError("a negative rank in a mesh: ranks count from 0")
        ranks = _as_range(ranks)
        for name, value in (("mesh_shape", shape), ("placements", placements), ("ranks", ranks)):
            object.__setattr__(self, name, value)
        names = tuple(map(str, self.mesh_dim_names))
        if names and len(names) != len(shape):
            raise UsageError(f"{len(names)} names for a mesh of {len(shape)} dimensions")
        object.__setattr__(self, "mesh_dim_names", names)
        object.__setattr__(self, "split_orders", self._split_orders())

    # --- who holds what ---

    @cached_property
    def _place_of(self) -> Mapping[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks if isinstance(self.ranks, range) else rank in self._place_of

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def highest_rank(self) -> int:
        return self.ranks[-1] if isinstance(self.ranks, range) else max(self.ranks)

    @cached_property
    def splitting(self) -> tuple[int, ...]:
        """Mesh dimensions that split the tensor."""
        return tuple(i for i, p in enumerate(self.placements) if p.dim is not None and self.mesh_shape[i] > 1)

    @property
    def num_shards(self) -> int:
        return math.prod(self.mesh_shape[i] for i in self.splitting)

    @cached_property
    def shard_ids(self) -> Sequence[int]:
        """The number of the shard that each of `ranks` holds, in their order; equal numbers are replicas."""
        ids = [0]
        for i, size in enumerate(self.mesh_shape):  # outer dimensions first: the inner ones repeat for each of them
            if i in self.splitting:
                ids = [base * size + k for base in ids for k in range(size)]
            else:
                ids = [base for base in ids for _ in range(size)]
        return ids

    @cached_property
    def holders(self) -> Sequence[Sequence[int]]:
        """For each shard the ranks that hold it, ascending."""
        groups: list[list[int]] = [[] for _ in range(self.num_shards)]
        for rank, shard in zip(self.ranks, self.shard_ids, strict=True):
            groups[shard].append(rank)
        return [sorted(group) for group in groups]

    def shard_of(self, rank: int) -> int:
        """Raises KeyError for a rank that is not in the mesh."""
        place = (
            rank - self.ranks.start if isinstance(self.ranks, range) and rank in self.ranks else self._place_of[rank]
        )
        return self.shard_ids[place]

    # --- which part of a tensor a shard is ---

    def box(self, shape: Sequence[int], shard: int) -> Box:
        """The part of a tensor of global `shape` that `shard` is; perhaps an empty one.

        Raises UsageError when the layout splits a dimension that the tensor does not have.
        """
        if max(self.split_orders, default=-1) >= len(shape):
            raise UsageError(f"{self} splits a dimension that a tensor of shape {list(shape)} does not have")
        coordinate, found = self._coordinate(shard), []
        for dim, size in enumerate(shape):
            start, stop = 0, int(size)
            for mesh_dim in self.split_orders.get(dim, ()):
                first, last = _chunk(stop - start, coordinate[mesh_dim], self.mesh_shape[mesh_dim])
                start, stop = start + first, start + last
            found.append((start, stop))
        return tuple(found)

    def local_shape(self, shape: Sequence[int], shard: int) -> tuple[int, ...]:
        """Shape of what a rank with `shard` holds."""
        return tuple(stop - start for start, stop in self.box(shape, shard))

    def global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The whole tensor's, where all shards are of equal size."""
        shape = list(local_shape)
        for i in self.splitting:
            dim = self.placements[i].dim
            assert dim is not None
            if dim >= len(shape):
                raise UsageError(f"{self} splits dimension {dim} of a tensor of shape {list(shape)}")
            shape[dim] *= self.mesh_shape[i]
        return tuple(shape)

    def _coordinate(self, shard: int) -> dict[int, int]:
        if not 0 <= shard < self.num_shards:
            raise UsageError(f"{self} has no shard {shard}")
        found = {}
        for i in reversed(self.splitting):
            shard, found[i] = divmod(shard, self.mesh_shape[i])
        return found

    def _split_orders(self) -> Mapping[int, Sequence[int]]:
        """Raises UsageError for a ``_StridedShard`` without the splits that it speaks of."""
        orders: dict[int, list[int]] = {}
        for i in reversed(self.splitting):
            dim, factor = self.placements[i].dim, self.placements[i].split_factor
            assert dim is not None
            order, before, made = orders.setdefault(dim, []), 0, 1
            while made < factor and before < len(order):
                made *= self.mesh_shape[order[before]]
                before += 1
            if made != factor:
                raise UsageError(f"{self}: no other splits of dimension {dim} make {factor} pieces first")
            order.insert(before, i)
        return orders

    # --- text ---

    def __str__(self) -> str:
        names = self.mesh_dim_names or tuple(f"m{i}" for i in range(len(self.mesh_shape)))
        dims = ", ".join(f"{n}={s}:{p}" for n, s, p in zip(names, self.mesh_shape, self.placements, strict=False))
        return f"[{dims}]"

    def to_json(self) -> dict[str, Any]:
        """JSON-able; `from_json` is the way back."""
        consecutive = isinstance(self.ranks, range) and self.ranks.step == 1
        ranks = [[self.ranks[0], len(self.ranks)]] if consecutive else list(self.ranks)
        found = {"mesh": list(self.mesh_shape), "placements": [str(p) for p in self.placements], "ranks": ranks}
        return {**found, "names": list(self.mesh_dim_names)} if self.mesh_dim_names else found

    @classmethod
    def from_json(cls, content: Any) -> Layout:
        """Raises UsageError for anything that `to_json` does not give."""
        try:
            ranks = content["ranks"]
            if len(ranks) == 1 and isinstance(ranks[0], list):
                first, count = ranks[0]
                ranks = range(first, first + count)
            if not all(type(rank) is int for rank in (ranks[:1] if isinstance(ranks, range) else ranks)) or not ranks:
                raise UsageError(f"layout with ranks {ranks!r:.80}")
            return cls(tuple(content["mesh"]), tuple(content["placements"]), ranks, tuple(content.get("names", ())))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise UsageError(f"malformed layout {str(content)[:80]}: {error!r}") from None


def _as_range(ranks: Sequence[int]) -> Sequence[int]:
    """Equal layouts compare equal, however their ranks were given."""
    if isinstance(ranks, range):
        return range(ranks[0], ranks[-1] + 1) if ranks.step == 1 or len(ranks) == 1 else tuple(ranks)
    consecutive = range(ranks[0], ranks[0] + len(ranks))
    return consecutive if tuple(consecutive) == tuple(ranks) else tuple(ranks)


def _chunk(length: int, part: int, parts: int) -> Interval:
    """As ``torch.chunk``, with empty pieces at the end."""
    size = -(-length // parts)
    return min(part * size, length), min((part + 1) * size, length)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor have in common; None: nothing."""
    found = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        low, high = max(a, c), min(b, d)
        if low >= high:
            return None
        found.append((low, high))
    return tuple(found)
