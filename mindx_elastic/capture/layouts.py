"""Works out which ranks hold what of this rank's tensors, for its files (``mindx.layout``) and for the planner.

Where a tensor's layout comes from, in this order: a layout given by hand, the tensor's own DTensor, the module's DDP
group. For a tensor with none of these:

* next to DTensors it counts as a replica on all ranks of the largest mesh (norms next to tensor parallel weights, the
  step counters of an optimizer). That is *assumed*: the planner compares the files' digests before it relies on it;
* else, with several ranks, only this rank holds it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.components import (
    AdaptedComponent,
    Component,
    ModuleComponent,
    OptimizerComponent,
    PlainComponent,
)
from mindx_elastic.capture.dtensors import local_part
from mindx_elastic.capture.names import Groups, group_lists, names_in_groups, places_in_states
from mindx_elastic.capture.plain_component import GoesThroughData
from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import REPLICATE, Layout, Placement, parse_placement
from mindx_elastic.core.strategy import MARKER, LaidOut, LayoutRecord, TensorSpec
from mindx_elastic.errors import UnsupportedStateError, UsageError

__all__ = ["Blueprint", "ByHand", "LayoutRecorder", "ParallelSetup", "groups_inside", "named_parameters", "places_of"]

LayoutByHand = Callable[[str, tuple[int, ...]], "LaidOut | None"]
"""(place, shape of the rank's part) -> its layout, where the user has given one."""


class ParallelSetup(NamedTuple):
    """What a rank knows of the job besides its own tensors: its number, its replicas, layouts given by hand."""

    rank: int = 0
    world_size: int = 1
    replicas: Sequence[int] = ()
    """The ranks that DDP keeps equal to this one, itself included."""
    by_hand: LayoutByHand = lambda place, shape: None


class Blueprint(NamedTuple):
    """The parts that a rank's state is put together from when tensors get new layouts, by component."""

    parameters: Mapping[str, Sequence[str]]
    """Names of parameters, by module."""
    volatile: Mapping[str, Sequence[str]]
    """Names of buffers and extra state, by module."""
    optimizers: Mapping[str, Sequence[Sequence[str]]]
    """For each parameter group the places of its parameters in the state (``model.fc.weight``)."""


def named_parameters(components: Mapping[str, Component]) -> dict[str, torch.Tensor]:
    """The parameters by their names, tied ones under each; see `capture.names`."""
    found: dict[str, torch.Tensor] = {}
    for name, c in components.items():
        if isinstance(c, ModuleComponent):
            found |= {f"{name}.{place}": parameter for place, parameter in c.named.items()}
        elif isinstance(c, AdaptedComponent) and isinstance(c.target, torch.Tensor):
            found[name] = c.target
    known = set(map(id, found.values()))
    unnamed: list[torch.Tensor] = []
    for name, c in components.items():
        for group in c.local.param_groups if isinstance(c, OptimizerComponent) else ():
            given = group.get("param_names") or ()
            loose = {f"{name}:{n}": p for n, p in zip(given, group["params"], strict=False) if id(p) not in known}
            found |= loose
            unnamed += [p for p in group["params"] if id(p) not in known and not given]
    if unnamed:
        plain = [
            c for c in components.values() if isinstance(c, PlainComponent) and not isinstance(c, AdaptedComponent)
        ]
        found |= places_in_states({c.name: c.live_state() for c in plain}, unnamed)
    return found


def places_of(components: Mapping[str, Component]) -> dict[int, str]:
    """The place of each parameter, by its id; of a tied one the first."""
    return {id(parameter): name for name, parameter in reversed(named_parameters(components).items())}


def groups_inside(components: Mapping[str, Component]) -> dict[str, list[Groups]]:
    """The parameter groups in what the other components hold, as wrappers around an optimizer do."""
    own = [c for c in components.values() if isinstance(c, OptimizerComponent)]
    others = {id(one) for c in own for one in (c.optimizer, c.local)}
    known = {id(one.param_groups) for c in own for one in (c.optimizer, c.local)}
    plain = {n: c for n, c in components.items() if isinstance(c, PlainComponent)}
    found = {n: group_lists(c.target, others) for n, c in plain.items() if not isinstance(c.target, GoesThroughData)}
    lists = {name: [groups for groups in each if id(groups) not in known] for name, each in found.items()}
    return {name: each for name, each in lists.items() if each}


class LayoutRecorder:
    """Makes the record of one rank. Not thread-safe: call `record` with the update gate held."""

    def __init__(self, components: Mapping[str, Component], setup: ParallelSetup) -> None:
        self.setup = setup
        self._components = components
        self._modules = {n: c for n, c in components.items() if isinstance(c, ModuleComponent)}
        self._optimizers = {n: c for n, c in components.items() if isinstance(c, OptimizerComponent)}
        self._own = _replicated((setup.rank,))
        self._job: Sequence[TensorSpec] = ()
        self._record: LayoutRecord | None = None
        self._num_described = -1

    def record(self) -> LayoutRecord:
        """The record as of now; worked out again only when an optimizer has got state for more parameters."""
        num_states = sum([len(c.local.state) for c in self._optimizers.values()])
        if self._record is None or num_states != self._num_described:
            self._record, self._num_described = self._describe(), num_states
        return self._record

    def forget(self) -> None:
        """Parameters or groups have changed: work the record out again when it is asked for."""
        self._record = None

    def set_job_layouts(self, job: Sequence[TensorSpec]) -> None:
        """Set one tensor of every layout that any rank of the job has.

        A file names them, so that a start notices when the files of the ranks that held them are missing.
        """
        self._job = job
        if self._record is not None:
            self._record = replace(self._record, job=job)

    def blueprint(self) -> Blueprint:
        """What a state for this rank has to be made of."""
        names = places_of(self._components)
        optimizers = {n: names_in_groups(n, c.local.param_groups, names) for n, c in self._optimizers.items()}
        modules = {name: list(c.named) for name, c in self._modules.items()}
        return Blueprint(modules, {name: c.volatile_names for name, c in self._modules.items()}, optimizers)

    @torch.no_grad()
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of this rank's part of every parameter, by place."""
        return {place: tuple(local_part(p).shape) for place, p in self._named_parameters()}

    def markers(self) -> list[TensorSpec]:
        """One for each optimizer that spreads its state over the ranks (ZeRO): this rank's part is in no other file."""
        spread = [name for name, c in self._optimizers.items() if c.is_spread]
        return [TensorSpec(f"{MARKER}{name}.state", (), self._own) for name in spread]

    def _named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module in self._modules.items():
            for place, parameter in module.named.items():
                yield f"{name}.{place}", parameter

    @torch.no_grad()  # without a graph a DTensor's local part costs next to nothing
    def _describe(self) -> LayoutRecord:
        setup, meshes = self.setup, _Meshes([p for _, p in self._named_parameters() if isinstance(p, DTensor)])
        default = _replicated(meshes.widest_ranks or tuple(setup.replicas) or (setup.rank,))
        tensors: dict[str, LaidOut] = {}
        places = places_of(self._components)
        layouts: dict[int, Layout] = {}
        """The layouts of parameters that do not have the default one, by id."""
        for place, parameter in self._named_parameters():
            laid_out = self._of_parameter(place, parameter, meshes)
            if laid_out is not None:
                tensors[place], layouts[id(parameter)] = laid_out, laid_out.layout
            else:
                layouts.pop(id(parameter), None)
        for name, optimizer in self._optimizers.items():
            tensors |= self._of_optimizer(name, optimizer, layouts, places, default, meshes)
        return LayoutRecord(
            rank=setup.rank,
            world_size=setup.world_size,
            default=LaidOut(default, (), bool(meshes.widest_ranks)),
            tensors=tensors,
            job=self._job,
            parameters={
                name: [place for group in names_in_groups(name, c.local.param_groups, places) for place in group]
                for name, c in self._optimizers.items()
            },
            groups={
                name: [names_in_groups(name, groups, places) for groups in lists]
                for name, lists in groups_inside(self._components).items()
            },
            modules=list(self._modules),
            volatile={name: c.volatile_names for name, c in self._modules.items() if c.volatile_names},
        )

    def _of_parameter(self, place: str, parameter: torch.Tensor, meshes: _Meshes) -> LaidOut | None:
        """None: as by default."""
        by_hand = self.setup.by_hand(place, tuple(local_part(parameter).shape))
        if by_hand is not None:
            return by_hand
        return meshes.laid_out(place, parameter) if isinstance(parameter, DTensor) else None

    def _of_optimizer(
        self,
        name: str,
        optimizer: OptimizerComponent,
        layouts: Mapping[int, Layout],
        places: Mapping[int, str],
        default: Layout,
        meshes: _Meshes,
    ) -> dict[str, LaidOut]:
        """The layouts of the tensors of its state that do not have the default one."""
        found: dict[str, LaidOut] = {}
        for index, parameter in enumerate(optimizer.parameters):
            like, known_as = layouts.get(id(parameter)), places.get(id(parameter), "")
            is_default = like is None and not optimizer.is_spread and not isinstance(parameter, DTensor)
            part = () if is_default else tuple(local_part(parameter).shape)
            for key, value in optimizer.local.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor) or (is_default and not isinstance(value, DTensor)):
                    continue
                place = f"{name}.state.{index}.{key}"
                shape = tuple(value.shape)
                if optimizer.is_spread:
                    found[place] = LaidOut(self._own, shape)
                elif isinstance(value, DTensor):
                    found[place] = meshes.laid_out(place, value)
                elif isinstance(parameter, DTensor) and shape and shape == part:
                    found[place] = meshes.laid_out(place, parameter)  # made as zeros_like(p.to_local())
                elif like is not None and self._follows_split(shape, part, parameter, known_as):
                    found[place] = LaidOut(self._own, shape)
                elif like is not None and (not meshes.widest_ranks or like.ranks != default.ranks):
                    # As the parameter. For step counters and the like that is assumed: the digests will show it.
                    alike = shape == tuple(parameter.shape)
                    by_hand = self.setup.by_hand(known_as, shape) if alike else None
                    found[place] = by_hand or LaidOut(_replicated(like.ranks), shape, True)
        return found

    def _follows_split(
        self, shape: tuple[int, ...], part: tuple[int, ...], parameter: torch.Tensor, place: str
    ) -> bool:
        """Whether a state of `shape` has a dimension of the length of `part`, the rank's share of a split parameter.

        Row sums of a split matrix have one (Adafactor). Such a state has no replicas, even where values are equal.
        """
        if shape == part:
            return False
        whole = tuple(parameter.shape)
        if not isinstance(parameter, DTensor):
            by_hand = self.setup.by_hand(place, whole)
            whole = whole if by_hand is None else by_hand.shape
        split = {mine for mine, of_whole in zip(part, whole, strict=True) if mine != of_whole}
        return any(n in split for n in shape)


class _Meshes:
    """Layouts of DTensors; those of one mesh with the same placements are worked out once.

    FSDP with tensor parallel: a weight that is not tensor parallel is on the data parallel part of the mesh, once for
    each tensor parallel rank. Its layout is spread out to the whole mesh; that the further ranks hold the same is
    assumed.
    """

    def __init__(self, tensors: Sequence[DTensor]) -> None:
        meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors}
        self._ranks = {number: _ranks_of(mesh) for number, mesh in meshes.items()}
        widest = max(self._ranks, key=lambda number: len(self._ranks[number]), default=None)
        self._widest = None if widest is None else meshes[widest]
        self.widest_ranks: tuple[int, ...] = () if widest is None else self._ranks[widest]
        """The ranks of the largest mesh, in its order; empty without DTensors."""
        self._layouts: dict[tuple[int, tuple[Placement, ...]], tuple[Layout, bool]] = {}
        self._kept = list(meshes.values())  # so that ids stay their own

    def laid_out(self, place: str, tensor: DTensor) -> LaidOut:
        placements = tuple(_placement(place, placement, tensor.ndim) for placement in tensor.placements)
        key = (id(tensor.device_mesh), placements)
        if key not in self._layouts:
            self._kept.append(tensor.device_mesh)
            self._layouts[key] = self._layout(tensor.device_mesh, placements)
        layout, assumed = self._layouts[key]
        return LaidOut(layout, tuple(tensor.shape), assumed)

    def _layout(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[Layout, bool]:
        ranks, names = self._ranks.get(id(mesh)) or _ranks_of(mesh), tuple(mesh.mesh_dim_names or ())
        wide = self._widest
        if wide is not None and len(self.widest_ranks) > len(ranks):
            wide_names = tuple(wide.mesh_dim_names or ())
            if names and set(names) <= set(wide_names) and set(ranks) <= set(self.widest_ranks):
                known = dict(zip(names, placements, strict=True))
                spread = tuple(known.get(name, REPLICATE) for name in wide_names)
                return Layout(tuple(wide.mesh.shape), spread, self.widest_ranks, wide_names), True
        return Layout(tuple(mesh.mesh.shape), placements, ranks, names), False


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


@lru_cache(maxsize=64)
def _replicated(ranks: Sequence[int]) -> Layout:
    """`ranks`: a range or a tuple."""
    return Layout((len(ranks),), (REPLICATE,), sorted(ranks))


def _placement(place: str, placement: Any, ndim: int) -> Placement:
    try:
        found = parse_placement(placement)
    except UsageError:
        problem = f"a DTensor with placement {placement} is a sum that is not done yet; reduce it"
        raise UnsupportedStateError(place, problem) from None
    return found if found.dim is None else Placement(found.dim % ndim, found.split_factor)


class ByHand:
    """The layouts that the user has given: pattern -> `Layout`. All shards of a tensor are equal."""

    def __init__(self, layouts: Mapping[str, Layout], ranks: RankInfo) -> None:
        """Raises UsageError for malformed layouts."""
        self._layouts, self._rank = layouts, ranks.rank
        for pattern, layout in layouts.items():
            if not isinstance(layout, Layout) or not isinstance(pattern, str):
                raise UsageError(f"layouts[{pattern!r}]={layout!r}: give a pattern of names and a Layout")
            if max(layout.ranks) >= ranks.world_size:
                raise UsageError(f"layouts[{pattern!r}] names rank {max(layout.ranks)}; the job has {ranks.world_size}")

    def __call__(self, place: str, shape: tuple[int, ...]) -> LaidOut | None:
        for pattern, layout in self._layouts.items():
            if fnmatch.fnmatchcase(place, pattern) and self._rank in layout:
                return LaidOut(layout, layout.global_shape(shape))
        return None
