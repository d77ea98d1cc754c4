"""What a checkpoint file says of its tensors: which of them are parts of larger ones, and which ranks hold the same.

The record (``mindx.layout``, see docs/format.md) is plain JSON that the planner turns into a strategy. Sources, in this
order: a layout given by hand, the tensor's own DTensor, the module's DDP group. A tensor that none of these speaks of:

* beside DTensors it is taken for a replica on all ranks of the largest mesh (norms beside tensor parallel weights, the
  step counters of an optimizer). That is *assumed*; who plans compares the files' digests before relying on it;
* else, with several ranks, it is this rank's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.components import Component, ModuleComponent, OptimizerComponent
from mindx_elastic.errors import UnsupportedStateError

__all__ = ["RECORD_VERSION", "Blueprint", "LayoutRecorder", "ParallelSetup"]

RECORD_VERSION = 2

LayoutByHand = Callable[[str, tuple[int, ...]], "tuple[dict[str, Any], tuple[int, ...]] | None"]
"""(place, shape of the rank's part) -> (layout as JSON, shape of the whole), for what the user describes by hand."""


@dataclass(frozen=True)
class ParallelSetup:
    """What a rank knows of the job beside its own tensors: its number, its replicas, layouts given by hand."""

    rank: int = 0
    world_size: int = 1
    replicas: Sequence[int] = ()
    """The ranks that DDP keeps equal to this one, itself included."""
    ignored_by_ddp: frozenset[str] = frozenset()
    """Places of parameters that DDP has been told to ignore: each rank has its own."""
    by_hand: LayoutByHand = lambda place, shape: None


@dataclass(frozen=True)
class Blueprint:
    """The parts of a rank's state that have to be put together when tensors are laid out anew, by component."""

    parameters: Mapping[str, Sequence[str]]
    """Of modules: names of parameters."""
    volatile: Mapping[str, Sequence[str]]
    """Of modules: names of buffers and extra state."""
    optimizers: Mapping[str, Sequence[Sequence[str]]]
    """For each parameter group the places of its parameters in the state (``model.fc.weight``)."""


class LayoutRecorder:
    """Makes the record of one rank. Not thread-safe; whoever holds the update gate calls `record`."""

    def __init__(self, components: Mapping[str, Component], setup: ParallelSetup) -> None:
        self.setup = setup
        self._modules = {n: c for n, c in components.items() if isinstance(c, ModuleComponent)}
        self._optimizers = {n: c for n, c in components.items() if isinstance(c, OptimizerComponent)}
        self._job: Sequence[tuple[str, dict[str, Any], tuple[int, ...]]] = ()
        self._record: dict[str, Any] = {}
        self._num_described = -1
        self._place_of: dict[int, str] = {}
        """Of parameters, by id."""

    def record(self) -> dict[str, Any]:
        """The record as of now; worked out anew only when an optimizer has got state for more parameters."""
        num_states = sum(len(c.local.state) for c in self._optimizers.values())
        if num_states != self._num_described:
            self._record, self._num_described = self._describe(), num_states
        return self._record

    def set_job_layouts(self, job: Sequence[tuple[str, dict[str, Any], tuple[int, ...]]]) -> None:
        """For each way in which some tensor of the job is laid out, on whichever ranks: the name of one, the layout,
        its whole shape. A file says so much of what other ranks hold, so that the loss of theirs is noticed."""
        self._job, self._num_described = job, -1

    def blueprint(self) -> Blueprint:
        """What a state for this rank has to be made of."""
        names: dict[int, str] = {}
        for place, parameter in self._named_parameters():
            names.setdefault(id(parameter), place)
        optimizers = {}
        for name, c in self._optimizers.items():
            numbers = iter(range(len(c.parameters)))
            optimizers[name] = [
                [names.get(id(p), f"{name}.{number}") for p, number in zip(group["params"], numbers, strict=False)]
                for group in c.local.param_groups
            ]
        modules = {name: list(c.named) for name, c in self._modules.items()}
        return Blueprint(modules, {name: c.volatile_names for name, c in self._modules.items()}, optimizers)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of this rank's part of every parameter, by place."""
        return {place: tuple(_local(p).shape) for place, p in self._named_parameters()}

    def markers(self) -> dict[str, dict[str, Any]]:
        """Layouts of state that is no parameter's and that only this rank has: optimizers that are spread (ZeRO)."""
        return {f"@{name}.state": _repeated([self.setup.rank]) for name, c in self._optimizers.items() if c.is_spread}

    def _named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        for name, module in self._modules.items():
            for place, parameter in module.named.items():
                yield f"{name}.{place}", parameter

    def _describe(self) -> dict[str, Any]:
        setup, table = self.setup, _Table()
        widest = _widest([p for _, p in self._named_parameters() if isinstance(p, DTensor)])
        default = self._default(widest)
        named: dict[str, list[Any]] = {}
        names: dict[int, str] = {}
        layouts: dict[int, dict[str, Any]] = {}
        for place, parameter in self._named_parameters():
            names.setdefault(id(parameter), place)
            layout, shape, is_assumed = self._of_parameter(place, parameter, widest)
            layouts[id(parameter)] = layout or default
            if layout is not None:
                named[place] = [table.number(layout, is_assumed), list(shape)]
        self._place_of = names
        for name, optimizer in self._optimizers.items():
            for place, (layout, shape, is_assumed) in self._of_optimizer(
                name, optimizer, layouts, default, widest
            ).items():
                named[place] = [table.number(layout, is_assumed), list(shape)]
        standard = table.number(default, widest is not None)
        job = [[name, table.number(layout), list(shape)] for name, layout, shape in self._job]
        return {
            "version": RECORD_VERSION,
            "rank": setup.rank,
            "world_size": setup.world_size,
            "layouts": table.layouts,
            "default": standard,
            "assumed": table.assumed,
            "tensors": named,
            "job": job,
            "parameters": {
                name: [names.get(id(p), f"{name}.{i}") for i, p in enumerate(c.parameters)]
                for name, c in self._optimizers.items()
            },
            "modules": list(self._modules),
            "volatile": {name: c.volatile_names for name, c in self._modules.items() if c.volatile_names},
        }

    def _default(self, widest: DTensor | None) -> dict[str, Any]:
        if widest is not None:
            return _repeated(_ranks_of(widest))
        return _repeated(list(self.setup.replicas) or [self.setup.rank])

    def _of_parameter(
        self, place: str, parameter: torch.Tensor, widest: DTensor | None
    ) -> tuple[dict[str, Any] | None, tuple[int, ...], bool]:
        """Layout (None: the default), shape of the whole, and whether it is only assumed."""
        given = self.setup.by_hand(place, tuple(_local(parameter).shape))
        if given is not None:
            return *given, False
        if place in self.setup.ignored_by_ddp:
            return _repeated([self.setup.rank]), tuple(parameter.shape), False
        if isinstance(parameter, DTensor):
            layout, is_assumed = _layout_of(place, parameter, widest)
            return layout, tuple(parameter.shape), is_assumed
        return None, tuple(parameter.shape), False

    def _of_optimizer(
        self,
        name: str,
        optimizer: OptimizerComponent,
        layouts: Mapping[int, dict[str, Any]],
        default: dict[str, Any],
        widest: DTensor | None,
    ) -> dict[str, tuple[dict[str, Any], tuple[int, ...], bool]]:
        """Of the tensors of its state that are not laid out as by default."""
        found: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {}
        for index, parameter in enumerate(optimizer.parameters):
            like = layouts.get(id(parameter), default)
            for key, value in optimizer.local.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                place = f"{name}.state.{index}.{key}"
                if optimizer.is_spread:
                    found[place] = (_repeated([self.setup.rank]), tuple(value.shape), False)
                elif isinstance(value, DTensor):
                    layout, is_assumed = _layout_of(place, value, widest)
                    found[place] = (layout, tuple(value.shape), is_assumed)
                elif isinstance(parameter, DTensor) and value.shape == _local(parameter).shape and value.ndim:
                    layout, is_assumed = _layout_of(place, parameter, widest)  # made as zeros_like(p.to_local())
                    found[place] = (layout, tuple(parameter.shape), is_assumed)
                elif like is not default and _follows_split(
                    tuple(value.shape), parameter, self._whole_shape(parameter)
                ):
                    found[place] = (_repeated([self.setup.rank]), tuple(value.shape), False)
                elif like is not default and (widest is None or like["ranks"] != default["ranks"]):
                    # As the parameter; or step counters and the like, of which digests will tell.
                    given = self._like(parameter, tuple(value.shape)) if value.shape == parameter.shape else None
                    repeated = (_repeated(_expand(like["ranks"])), tuple(value.shape), True)
                    found[place] = repeated if given is None else (*given, False)
        return found

    def _whole_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        if isinstance(parameter, DTensor):
            return tuple(parameter.shape)
        given = self._like(parameter, tuple(parameter.shape))
        return tuple(parameter.shape) if given is None else given[1]

    def _like(self, parameter: torch.Tensor, shape: tuple[int, ...]) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Layout and whole shape of a tensor of the size of `parameter`, where that was described by hand."""
        return self.setup.by_hand(self._place_of.get(id(parameter), ""), shape)


class _Table:
    """Layouts, each once; one that is only assumed apart from the same one that is known."""

    def __init__(self) -> None:
        self.layouts: list[dict[str, Any]] = []
        self.assumed: list[int] = []
        self._numbers: dict[tuple[str, bool], int] = {}

    def number(self, layout: dict[str, Any], is_assumed: bool = False) -> int:
        key = (repr(layout), is_assumed)
        if key not in self._numbers:
            self._numbers[key] = len(self.layouts)
            self.layouts.append(layout)
            self.assumed += [self._numbers[key]] if is_assumed else []
        return self._numbers[key]


def _follows_split(shape: tuple[int, ...], parameter: torch.Tensor, whole: tuple[int, ...]) -> bool:
    """Whether a state of another shape than its parameter has a dimension of the length of the rank's part, as the row
    sums of a split matrix have (Adafactor). It is no replica then, even where its values happen to be equal."""
    if shape == tuple(_local(parameter).shape):
        return False
    parts = {mine for mine, all_of_it in zip(_local(parameter).shape, whole, strict=True) if mine != all_of_it}
    return any(n in parts for n in shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _ranks_of(tensor: DTensor) -> list[int]:
    found: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return found


def _repeated(ranks: Sequence[int]) -> dict[str, Any]:
    return {"mesh": [len(ranks)], "placements": ["R"], "ranks": _runs(sorted(ranks))}


def _runs(ranks: list[int]) -> list[Any]:
    """As `Layout.to_json` writes them: consecutive ones as one pair."""
    consecutive = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return [[ranks[0], len(ranks)]] if consecutive else ranks


def _expand(ranks: list[Any]) -> list[int]:
    if len(ranks) == 1 and isinstance(ranks[0], list):
        return list(range(ranks[0][0], ranks[0][0] + ranks[0][1]))
    return list(ranks)


def _widest(tensors: Sequence[DTensor]) -> DTensor | None:
    return max(tensors, key=lambda tensor: tensor.device_mesh.mesh.numel(), default=None)


def _layout_of(place: str, tensor: DTensor, widest: DTensor | None) -> tuple[dict[str, Any], bool]:
    """The layout as JSON, and whether that it is repeated along further mesh dimensions is only assumed.

    FSDP beside tensor parallel: a weight that is not tensor parallel lies on the data parallel part of the mesh, once
    for each tensor parallel rank.
    """
    mesh = tensor.device_mesh
    names = tuple(mesh.mesh_dim_names or ())
    placements = [_text(place, placement, tensor.ndim) for placement in tensor.placements]
    if widest is not None and widest.device_mesh.mesh.numel() > mesh.mesh.numel():
        wide = widest.device_mesh
        wide_names = tuple(wide.mesh_dim_names or ())
        if names and set(names) <= set(wide_names) and set(_ranks_of(tensor)) <= set(_ranks_of(widest)):
            known = dict(zip(names, placements, strict=True))
            texts = [known.get(name, "R") for name in wide_names]
            return _json(list(wide.mesh.shape), texts, _ranks_of(widest), wide_names), True
    return _json(list(mesh.mesh.shape), placements, _ranks_of(tensor), names), False


def _json(mesh: list[int], placements: list[str], ranks: list[int], names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"mesh": mesh, "placements": placements, "ranks": _runs(ranks)}
    return {**found, "names": list(names)} if names else found


def _text(place: str, placement: Any, ndim: int) -> str:
    kind = type(placement).__name__
    if kind == "Replicate":
        return "R"
    if kind == "Shard":
        return f"S({placement.dim % ndim})"
    if kind == "_StridedShard":
        return f"_S({placement.dim % ndim},{int(placement.split_factor)})"
    raise UnsupportedStateError(place, f"a DTensor with placement {placement} is a sum that is not done yet; reduce it")
