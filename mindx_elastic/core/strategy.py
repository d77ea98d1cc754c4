"""The parallel strategy of a job: what every tensor is called, how large it is as a whole, and how it is laid out.

Two tensors may have one name when different ranks hold them (pipeline stages that all count from 0, weights that each
rank has for itself): a tensor is known by its name *and* the ranks of its mesh.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from mindx_elastic.core.layout import MAX_RANKS, Layout, Shard
from mindx_elastic.errors import UsageError

__all__ = [
    "MARKER",
    "MAX_TENSOR_DIMS",
    "RECORD_VERSION",
    "LaidOut",
    "LayoutClass",
    "LayoutRecord",
    "Strategy",
    "TensorSpec",
    "global_name",
    "merge_specs",
]

MAX_TENSOR_DIMS = 64
RECORD_VERSION = 2
"""Version of ``mindx.layout``. Records of version 1 are not read."""
MARKER = "@"
"""Begins the name of an entry that stands for a rank's own state and not for a tensor: only its file describes it."""
_MAX_MEMBERSHIPS = 16 * MAX_RANKS
"""Ranks in all layouts of a strategy together: 16,384 ranks may have 256 layouts that all take part in."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the job."""

    name: str
    """``model.layers.0.weight``; of an optimizer ``optimizer.state.model.layers.0.weight.exp_avg``."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    layout: Layout
    dtype: str = ""
    """The safetensors type name ("F32"); empty: not known."""
    parameter: str = ""
    """For an optimizer's tensor: the name of its parameter."""
    assumed: bool = field(default=False, compare=False)
    """Whether it is only assumed that other ranks hold the same: the digests of their files have to confirm it."""
    num_dims: int | None = None
    """How many dimensions it has, where only that is known and not its shape, which is ``()`` then; else None."""

    def __post_init__(self) -> None:
        if self.num_dims is not None and (self.shape or not self.num_dims):
            if len(self.shape) != self.num_dims:
                raise UsageError(f"{self.name} has {self.num_dims} dimensions, but the shape {list(self.shape)}")
            object.__setattr__(self, "num_dims", None)  # the shape says it

    @property
    def is_shape_known(self) -> bool:
        """False for a tensor of a strategy file that has splits and no shapes (MindSpore's)."""
        return bool(self.shape) or (self.num_dims is None and not self.layout.splitting)

    @property
    def is_marker(self) -> bool:
        """See `MARKER`."""
        return self.name.startswith(MARKER)

    @property
    def key(self) -> tuple[str, int]:
        """Its identity: tensors of one name on different ranks are different tensors."""
        return self.name, self.layout.ranks[0]


class LayoutClass(NamedTuple):
    """All tensors with one layout."""

    layout: Layout
    tensors: tuple[TensorSpec, ...]

    @property
    def is_marker(self) -> bool:
        return all(spec.is_marker for spec in self.tensors)

    def check(self) -> None:
        """Raises UsageError when a dimension is split that a tensor does not have."""
        dims = [dim for i in self.layout.splitting if (dim := self.layout.placements[i].dim) is not None]
        highest = max(dims, default=-1)
        for spec in self.tensors:
            if spec.is_shape_known and highest >= len(spec.shape):
                what = f"{spec.name} of shape {list(spec.shape)}"
                raise UsageError(f"{what} is laid out as {self.layout}: it has no dimension {highest}")

    def is_empty(self, shard: int) -> bool:
        """Whether no tensor has an element in `shard`."""
        return not any(not t.is_shape_known or math.prod(t.layout.local_shape(t.shape, shard)) for t in self.tensors)


@dataclass(frozen=True)
class Strategy:
    """Raises UsageError for a rank outside of the world, and for a tensor that is described twice, and differently."""

    world_size: int
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if type(self.world_size) is not int or not 1 <= self.world_size <= MAX_RANKS:
            raise UsageError(f"a strategy for {self.world_size!r} ranks")
        object.__setattr__(self, "tensors", tuple(merge_specs(self.tensors)))
        for group in self.classes:
            group.check()
            if group.layout.highest_rank >= self.world_size:
                raise UsageError(
                    f"{group.tensors[0].name} is on rank {group.layout.highest_rank}, but the strategy has "
                    f"{self.world_size} ranks"
                )

    @cached_property
    def classes(self) -> tuple[LayoutClass, ...]:
        """The tensors by layout, in order of first appearance."""
        groups: dict[Layout, list[TensorSpec]] = {}
        for spec in self.tensors:
            groups.setdefault(spec.layout, []).append(spec)
        return tuple(LayoutClass(layout, tuple(specs)) for layout, specs in groups.items())

    @cached_property
    def by_name(self) -> Mapping[str, tuple[TensorSpec, ...]]:
        found: dict[str, list[TensorSpec]] = {}
        for spec in self.tensors:
            found.setdefault(spec.name, []).append(spec)
        return {name: tuple(specs) for name, specs in found.items()}

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks that hold something."""
        return frozenset(rank for group in self.classes for rank in group.layout.ranks)

    def replica_groups(self) -> list[tuple[int, ...]]:
        """The ranks that hold the same parts of everything; ascending, and so are the ranks in each. What markers say
        that some of them hold besides does not count."""
        layouts = [group.layout for group in self.classes if not group.is_marker or group.layout.splitting]
        if layouts and all(layout.ranks == layouts[0].ranks and not layout.splitting for layout in layouts):
            return [tuple(sorted(layouts[0].ranks))]  # DDP: worlds of any size at once
        parts: dict[int, list[tuple[int, int]]] = {}
        for number, layout in enumerate(layouts):
            for rank, shard in zip(layout.ranks, layout.shard_ids, strict=True):
                parts.setdefault(rank, []).append((number, shard))
        groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in sorted(parts):
            groups.setdefault(tuple(parts[rank]), []).append(rank)
        return [tuple(group) for group in groups.values()]

    # --- JSON ---

    @cached_property
    def text(self) -> str:
        """`to_json` as compact text; the same for equal strategies."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """The digest of `text`."""
        return xxhash.xxh3_128_hexdigest(self.text.encode())

    def to_json(self) -> dict[str, Any]:
        """JSON-able; `from_json` is the way back."""
        numbers = {group.layout: number for number, group in enumerate(self.classes)}
        tensors = [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "layout": numbers[spec.layout],
                **({"dtype": spec.dtype} if spec.dtype else {}),
                **({"parameter": spec.parameter} if spec.parameter else {}),
                **({"assumed": True} if spec.assumed else {}),
                **({} if spec.num_dims is None else {"num_dims": spec.num_dims}),
            }
            for spec in self.tensors
        ]
        layouts = [group.layout.to_json() for group in self.classes]
        return {"version": 1, "world_size": self.world_size, "layouts": layouts, "tensors": tensors}

    @classmethod
    def from_json(cls, content: Any) -> Strategy:
        """Raises UsageError for anything that `to_json` does not give."""
        try:
            layouts = _layouts(content["layouts"])
            specs = [
                TensorSpec(
                    _text(each["name"]),
                    _shape(each["shape"]),
                    layouts[_index(each["layout"], len(layouts))],
                    _text(each.get("dtype", "")),
                    _text(each.get("parameter", "")),
                    each.get("assumed", False) is True,
                    None if each.get("num_dims") is None else _index(each["num_dims"], MAX_TENSOR_DIMS + 1),
                )
                for each in content["tensors"]
            ]
            return cls(content["world_size"], tuple(specs))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
            raise UsageError(f"malformed strategy: {error!r:.200}") from None


def merge_specs(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Each tensor once. Raises UsageError where two descriptions of one tensor contradict each other, or where tensors
    of one name are on ranks that overlap."""
    found: dict[str, dict[Layout, TensorSpec]] = {}
    for spec in specs:
        known = found.setdefault(spec.name, {})
        other = known.get(spec.layout)
        if other is None:
            known[spec.layout] = spec
        elif other is not spec:
            known[spec.layout] = _merged(other, spec)
    for name, known in found.items():
        if len(known) > 1 and name.startswith(MARKER):
            together = _one_marker(name, known)
            known.clear()
            known[together.layout] = together
        elif len(known) > 1:
            _check_apart(name, known.values())
    return [spec for known in found.values() for spec in known.values()]


def _one_marker(name: str, layouts: Iterable[Layout]) -> TensorSpec:
    """One marker that is split over all ranks that have one: a marker of each rank apart says the same, and a list of
    all ranks in every file is long."""
    ranks = sorted({rank for layout in layouts for rank in layout.ranks})
    return TensorSpec(name, (len(ranks),), Layout((len(ranks),), (Shard(0),), tuple(ranks)))


def _merged(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    if not one.is_shape_known:
        one = _with_shape_of(one, other)
    elif not other.is_shape_known:
        other = _with_shape_of(other, one)
    if one.shape != other.shape or (one.dtype and other.dtype and one.dtype != other.dtype):
        raise UsageError(
            f"contradictory descriptions of {one.name}: {one.dtype} {list(one.shape)} and {other.dtype} "
            f"{list(other.shape)}, both laid out as {one.layout}"
        )
    return replace(
        one,
        dtype=one.dtype or other.dtype,
        parameter=one.parameter or other.parameter,
        assumed=one.assumed or other.assumed,
    )


def _with_shape_of(spec: TensorSpec, other: TensorSpec) -> TensorSpec:
    """`spec`, whose shape is not known, with what `other` knows of it. Raises UsageError."""
    if other.is_shape_known:
        return replace(spec, shape=other.shape)
    known = {dims for dims in (spec.num_dims, other.num_dims) if dims is not None}
    if len(known) > 1:
        raise UsageError(f"contradictory descriptions of {spec.name}: {spec.num_dims} and {other.num_dims} dimensions")
    return replace(spec, num_dims=next(iter(known), None))


def _check_apart(name: str, specs: Iterable[TensorSpec]) -> None:
    holder: dict[int, TensorSpec] = {}
    for spec in specs:
        for rank in spec.layout.ranks:
            other = holder.setdefault(rank, spec)
            if other is not spec:
                raise UsageError(
                    f"contradictory descriptions of {name}: shape {list(other.shape)} laid out as {other.layout}, and "
                    f"shape {list(spec.shape)} as {spec.layout}, both on rank {rank}"
                )


# --- what a checkpoint file says of its own tensors ---


class LaidOut(NamedTuple):
    """How one tensor of a file is laid out."""

    layout: Layout
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    assumed: bool = False
    """See `TensorSpec.assumed`."""


@dataclass(frozen=True)
class LayoutRecord:
    """Which ranks hold what, as one rank's file records it: ``mindx.layout``, see docs/reference.md."""

    rank: int
    world_size: int
    default: LaidOut | None
    """The layout of all tensors that are not in `tensors`; its shape does not count: they are whole. None: nothing is
    known."""
    tensors: Mapping[str, LaidOut] = field(default_factory=dict)
    """Layouts by place in the file's tree."""
    job: Sequence[TensorSpec] = ()
    """One tensor of every layout that any rank of the job has."""
    parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Optimizer -> the places of its parameters, in the order of their numbers in its state."""
    groups: Mapping[str, Sequence[Sequence[Sequence[str]]]] = field(default_factory=dict)
    """Object that holds optimizers -> the places of the parameters in each group of each of them."""
    modules: Sequence[str] = ()
    """The components that are modules."""
    volatile: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Module -> its buffers and extra state, which have no layout."""

    @cached_property
    def json(self) -> dict[str, Any]:
        """JSON-able, for the header; `from_json` is the way back."""
        layouts: list[dict[str, Any]] = []
        assumed: list[int] = []
        numbers: dict[tuple[Layout, tuple[str, ...], bool], int] = {}
        by_id: dict[tuple[int, bool], int] = {}  # most tensors share a few objects, and a layout's hash takes its time

        def number_of(layout: Layout, is_assumed: bool) -> int:
            number = by_id.get((id(layout), is_assumed))
            if number is None:
                key = (layout, layout.mesh_dim_names, is_assumed)
                number = by_id[id(layout), is_assumed] = numbers.setdefault(key, len(layouts))
                if number == len(layouts):
                    layouts.append(layout.to_json())
                    assumed.extend([number] if is_assumed else [])
            return number

        named = {
            place: [number_of(layout, is_assumed), list(shape)]
            for place, (layout, shape, is_assumed) in self.tensors.items()
        }
        default = None if self.default is None else number_of(self.default.layout, self.default.assumed)
        return {
            "version": RECORD_VERSION,
            "rank": self.rank,
            "world_size": self.world_size,
            "layouts": layouts,
            "default": default,
            "assumed": assumed,
            "tensors": named,
            "job": [[spec.name, number_of(spec.layout, False), list(spec.shape)] for spec in self.job],
            "parameters": dict(self.parameters),
            **({"groups": dict(self.groups)} if self.groups else {}),
            "modules": list(self.modules),
            "volatile": dict(self.volatile),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LayoutRecord:
        """Raises UsageError for a malformed record."""
        try:
            layouts = _layouts(record["layouts"])
            assumed = {_index(number, len(layouts)) for number in record.get("assumed", ())}

            def laid_out(number: Any, shape: Any) -> LaidOut:
                return LaidOut(layouts[_index(number, len(layouts))], _shape(shape), number in assumed)

            default = record.get("default")
            return cls(
                rank=_index(record["rank"], 1 << 31),
                world_size=_index(record["world_size"], 1 << 31),
                default=None if default is None else laid_out(default, ()),
                tensors={place: laid_out(*each) for place, each in record.get("tensors", {}).items()},
                job=[
                    TensorSpec(_text(name), _shape(shape), layouts[_index(number, len(layouts))])
                    for name, number, shape in record.get("job", ())
                ],
                parameters=record.get("parameters", {}),
                groups=record.get("groups", {}),
                modules=record.get("modules", ()),
                volatile=record.get("volatile", {}),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
            raise UsageError(f"malformed layout record: {error!r:.200}") from None

    def strategy(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Strategy:
        """The strategy as this file knows it.

        tensors: of the file: place in its tree -> (dtype, shape). Raises UsageError where they do not have the shapes
        that the record promises.
        """
        try:
            specs = []
            for place, (dtype, local) in tensors.items():
                name, parameter = global_name(place, self.parameters)
                found = self.tensors.get(place) or (self.default and self.default._replace(shape=local))
                if found is None:
                    continue
                layout, whole, assumed = found
                if self.rank not in layout or layout.local_shape(whole, layout.shard_of(self.rank)) != tuple(local):
                    problem = f"has shape {list(local)}, which is not rank {self.rank}'s part of {list(whole)}"
                    raise UsageError(f"{place} {problem}")
                specs.append(TensorSpec(name, whole, layout, dtype, parameter, assumed))
            return Strategy(self.world_size, (*specs, *self.job))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
            raise UsageError(f"malformed layout record: {error!r:.200}") from None


def _layouts(content: Iterable[Any]) -> list[Layout]:
    """Raises UsageError before they take more memory than any job of `MAX_RANKS` ranks needs."""
    found: list[Layout] = []
    memberships = 0
    for each in content:
        found.append(Layout.from_json(each))
        memberships += found[-1].size
        if memberships > _MAX_MEMBERSHIPS:
            raise UsageError(f"layouts of more than {_MAX_MEMBERSHIPS} ranks in all")
    return found


def global_name(place: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """The global name of a place in a file's tree: ``optimizer.state.3.exp_avg`` with the parameter's name for 3; and
    that name."""
    for component, names in parameters.items():
        prefix = f"{component}.state."
        number, dot, key = place.removeprefix(prefix).partition(".")
        if place.startswith(prefix) and dot and number.isascii() and number.isdigit() and int(number) < len(names):
            parameter = _text(names[int(number)])
            return f"{prefix}{parameter}.{key}", parameter
    return place, ""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{value!r:.80} where a text should be")
    return value


def _index(value: Any, end: int) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise UsageError(f"{value!r:.80} where a number from 0 to {end - 1} should be")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) > MAX_TENSOR_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    ):
        raise UsageError(f"{value!r:.80} where a shape should be")
    return tuple(value)
