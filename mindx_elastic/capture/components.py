"""Splits the state of each object of the job into a stable and a volatile part, and puts it back.

A component has three methods: `copy` its volatile part at a boundary (training thread, every step, microseconds),
`state` = live stable part + that copy (any thread, holding the update gate), and `load` (at the start).

* a module: parameters are stable and read in place; buffers (BatchNorm changes them in forward) and extra state are
  copied
* an optimizer: its state is stable; the options of its groups (learning rate) are copied, schedulers change them
  between
* everything else with ``state_dict``: copied whole
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.buffer_block import BufferBlock, view_of
from mindx_elastic.capture.copying import copy_items, copy_tree, map_tensors
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError, UsageError

__all__ = [
    "Component",
    "ModuleComponent",
    "OptimizerComponent",
    "PlainComponent",
    "Stateful",
    "component_for",
    "unwrap_module",
    "unwrap_optimizer",
]


@runtime_checkable
class Stateful(Protocol):
    """Anything that can give its state and take it back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class Component(Protocol):
    """One object of the job; see the module."""

    def copy(self) -> None: ...
    def state(self) -> Any: ...
    def load(self, state: Any) -> None: ...


def unwrap_module(module: nn.Module) -> nn.Module:
    """The user's own module inside DDP and `torch.compile` wrappers, so that names do not depend on them."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper that holds it as ``_wrapped_optimizer``: a checkpoint with the wrapper and one
    without fit each other."""
    while isinstance(inner := getattr(optimizer, "_wrapped_optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _with_layout_of(template: Any, part: torch.Tensor) -> torch.Tensor:
    """`part` as the local part of a DTensor laid out like `template`, where that is a DTensor; else unchanged."""
    if not isinstance(template, DTensor):
        return part
    return DTensor.from_local(
        part.to(template.device),
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


class ModuleComponent:
    """A module: parameters are stable, buffers and extra state volatile. `name` is used in errors."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = unwrap_module(module)
        _reshard(self.module)
        named = dict(self.module.named_parameters(remove_duplicate=False))
        self._sharded = named if any(isinstance(p, DTensor) for p in named.values()) else {}
        self._described: object = None
        self._description = ""
        self._find_slots()
        self.copy()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def _find_slots(self) -> None:
        # Slots are (dict, key), not tensors: a forward that assigns `self.buf = new` replaces the object.
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._slot_names: list[str] = []
        self._extras: list[tuple[str, nn.Module]] = []
        self._tables = [child._buffers for child in self.module.modules()]
        self._num_buffers = sum(map(len, self._tables))
        seen: set[int] = set()
        for prefix, child in self.module.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for key in child._buffers:
                if key not in child._non_persistent_buffers_set:
                    self._slots.append((child._buffers, key))
                    self._slot_names.append(dot + key)
            if type(child).get_extra_state is not nn.Module.get_extra_state and id(child) not in seen:
                seen.add(id(child))
                self._extras.append((f"{dot}_extra_state", child))
        self._copies: list[torch.Tensor | None] = []
        self._block = self._ahead = BufferBlock(())
        self._live: list[torch.Tensor | None] = []
        self._shapes: list[torch.Size | None] = []
        self._dense = False

    def copy(self) -> None:
        if sum(map(len, self._tables)) != self._num_buffers:
            self._find_slots()  # a buffer was registered or deleted since
        if self._slots or not self._dense:
            self._copy_live()
        self._extra_copies = self.look() if self._extras else {}

    @torch.no_grad()
    def _copy_live(self) -> None:
        live = [slots[key] for slots, key in self._slots]
        if self._dense and all(map(is_, live, self._live)) and [t.shape for t in live] == self._shapes:
            torch._foreach_copy_(self._copies, live)  # type: ignore[arg-type]
        else:  # the first time, or a buffer was replaced or resized: foreach would broadcast another shape silently
            self._block = BufferBlock(live)
            self._copies = self._block.views
            self._live, self._dense = live, None not in live
            self._shapes = [None if t is None else t.shape for t in live]

    @torch.no_grad()
    def copy_ahead(self) -> bool:
        """Copy the buffers as they are in mid-step, beside the boundary's copies; False when they were replaced."""
        live = [slots[key] for slots, key in self._slots]
        if not self._dense or not all(map(is_, live, self._live)) or [t.shape for t in live] != self._shapes:
            return False
        if self._ahead.slices != self._block.slices:
            self._ahead = BufferBlock(live)
        elif live:
            torch._foreach_copy_(self._ahead.views, live)  # type: ignore[arg-type]
        return True

    def forecast_came_true(self) -> bool:
        """At a boundary: whether its buffers are as `copy_ahead` copied them."""
        return self._ahead.slices == self._block.slices and torch.equal(self._ahead.flat, self._block.flat)

    @torch.no_grad()
    def copy_buffers(self, block: BufferBlock | None) -> BufferBlock:
        """A copy of the saved buffers as they are now; into `block`, an earlier one, where that fits."""
        live = [slots[key] for slots, key in self._slots]
        if block is None or not self._dense or block.slices != self._block.slices or not live:
            return BufferBlock(live)
        if [t.shape for t in live if t is not None] != [t.shape for t in block.views if t is not None]:
            return BufferBlock(live)
        torch._foreach_copy_(block.views, live)  # type: ignore[arg-type]
        return block

    def has_buffers(self, block: BufferBlock) -> bool:
        """Whether the boundary's copies are those of `block`, which `copy_buffers` has made."""
        if block.slices != self._block.slices or not torch.equal(block.flat, self._block.flat):
            return False
        views = zip(block.views, self._block.views, block.slices, strict=True)
        outside = ((one, other) for one, other, place in views if place is None)
        return all(
            one is other or (one is not None and other is not None and torch.equal(one, other))
            for one, other in outside
        )

    @torch.no_grad()
    def look(self) -> dict[str, Any]:
        """Extra state as it is now, in the form of `extras`."""
        return {name: copy_tree(child.get_extra_state()) for name, child in self._extras}

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The saved buffers themselves, by name."""
        found = zip(self._slot_names, self._slots, strict=True)
        return [(name, t) for name, (slots, key) in found if (t := slots.get(key)) is not None]

    def buffers(self, *, ahead: bool = False) -> dict[str, Any]:
        """The copied buffers as one block: names, slices (JSON) and bytes. Those outside of the block are left out."""
        block = self._ahead if ahead else self._block
        if self._described is not block.slices:
            named = [[n, p] for n, p in zip(self._slot_names, block.slices, strict=True) if p is not None]
            self._described, self._description = block.slices, json.dumps(named)
        return {"places": self._description, "flat": block.flat}

    def with_buffers(self, state: dict[str, Any], buffers: dict[str, Any], extras: dict[str, Any]) -> dict[str, Any]:
        """`state` of another rank with this rank's own buffers and extra state."""
        own = {name: view_of(buffers["flat"], place) for name, place in json.loads(buffers["places"])}
        return {name: own.get(name, extras.get(name, value)) for name, value in state.items()}

    @property
    def extras(self) -> dict[str, Any]:
        """The copied extra state, by name."""
        return self._extra_copies

    def state(self) -> dict[str, Any]:
        # FSDP2 swaps a module's parameters during forward, and its `state_dict` hooks would reshard them while the
        # training thread uses them: sharded parameters are taken from the references of the start.
        state: dict[str, Any] = dict(self._sharded or self.module.state_dict())
        copies = {n: c for n, c in zip(self._slot_names, self._copies, strict=True) if c is not None}
        if self._sharded:
            state.update(copies)
        for name in state:
            state[name] = copies.get(name, self._extra_copies.get(name, state[name]))
        return {name: _local_part(t) if isinstance(t, torch.Tensor) else t for name, t in state.items()}

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """Parameters by name, tied ones under each; sharded ones as they were at the start (see `state`)."""
        return self._sharded or dict(self.module.named_parameters(remove_duplicate=False))

    @property
    def is_sharded(self) -> bool:
        """Whether some parameter is a DTensor."""
        return bool(self._sharded)

    @property
    def volatile_names(self) -> list[str]:
        """The part of its state that is not parameters: saved buffers and extra state."""
        return [*self._slot_names, *(name for name, _ in self._extras)]

    def load(self, state: dict[str, Any]) -> None:
        live = dict(self.module.state_dict())
        problems = _differences({n: _local_part(t) if torch.is_tensor(t) else t for n, t in live.items()}, state)
        if problems:
            shown = listed(problems, 12, "; ")
            raise MismatchError(
                f"the checkpoint does not fit {self.name}: {shown}. Use the model that wrote it, or start anew with "
                'resume="never" in another directory'
            )
        self.module.load_state_dict({name: _with_layout_of(live[name], saved) for name, saved in state.items()})
        self._find_slots()
        self.copy()


def _reshard(module: nn.Module) -> None:
    """Shard again what FSDP2 has left whole: its root, after a forward without a backward (an evaluation)."""
    for child in module.modules():
        if any(c.__name__ == "FSDPModule" for c in type(child).__mro__):  # importing it takes long
            child.reshard()  # type: ignore[operator]


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    found = [f"{name} is missing in the checkpoint" for name in ours if name not in theirs]
    found += [f"{name} is only in the checkpoint" for name in theirs if name not in ours]
    for name, mine in ours.items():
        other = theirs.get(name)
        if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
            if mine.shape != other.shape:
                found.append(f"{name} has shape {list(other.shape)} there and {list(mine.shape)} here")
            elif mine.dtype != other.dtype:
                found.append(f"{name} is {other.dtype} there and {mine.dtype} here")
    return found


class OptimizerComponent:
    """A torch optimizer: its state is stable, the options of its groups are volatile."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self.optimizer = unwrap_optimizer(optimizer)
        # ZeRO: the optimizer inside updates this rank's share of the parameters and has the state of those.
        # By name: importing it runs torch.jit, which takes a second and is deprecated.
        self.is_spread = any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(self.optimizer).__mro__)
        self.copy()

    @property
    def local(self) -> torch.optim.Optimizer:
        """The optimizer that has this rank's state: the one inside ZeRO, else itself."""
        if not self.is_spread:
            return self.optimizer
        found: torch.optim.Optimizer | None = vars(self.optimizer).get("optim")
        if found is None:
            raise UsageError(
                f"{self.name}: a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state of its own before the "
                "first steps and cannot be guarded; make it with overlap_with_ddp=False"
            )
        return found

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that it updates, in the order of their numbers in its state."""
        return [p for group in self.local.param_groups for p in group["params"]]

    def copy(self) -> None:
        self._groups = self.look()

    def look(self) -> list[dict[str, Any]]:
        """The options of the groups as they are now, in the form of `groups`."""
        return [copy_items(group, but="params") for group in self.optimizer.param_groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The copied options of the groups."""
        return self._groups

    def state(self) -> dict[str, Any]:
        state = dict(map_tensors(self.local.state_dict(), _local_part))
        state["class"] = type(self.local).__name__  # ZeRO around AdamW has the state of AdamW
        if sharded := self._sharded_places():
            state["sharded"] = sharded
        state["param_groups"] = [
            {**copied, "params": live["params"]}
            for copied, live in zip(self._groups, state["param_groups"], strict=True)
        ]
        return state

    def _sharded_places(self) -> list[str]:
        """The DTensors of its state with their parameter's layout, as ``3.exp_avg``; `load` restores them so."""
        found: list[str] = []
        for index, parameter in enumerate(self.parameters):
            if isinstance(parameter, DTensor):
                for place, value in _tensors_in(self.local.state.get(parameter, {}), str(index)):
                    if isinstance(value, DTensor) and value.shape == parameter.shape:
                        found.append(place)
        return found

    def load(self, state: dict[str, Any]) -> None:
        state = dict(state)
        there, here = state.pop("class", None), type(self.local).__name__
        if there not in (None, here):
            raise MismatchError(f"the checkpoint does not fit {self.name}: it was written by {there}, this is {here}")
        ours = [len(group["params"]) for group in self.local.param_groups]
        theirs = [len(group["params"]) for group in state["param_groups"]]
        if ours != theirs:
            raise MismatchError(
                f"the checkpoint does not fit {self.name}: it has parameter groups of {theirs} parameters, "
                f"this optimizer has {ours}"
            )
        state = self._with_layouts(state)
        self.local.load_state_dict(state)
        self._undo_casts(state)
        if self.is_spread:
            for shown, loaded in zip(self.optimizer.param_groups, self.local.param_groups, strict=True):
                shown.update({key: value for key, value in loaded.items() if key != "params"})
        # The process before has stepped it. Without this, torch warns of a wrong order when a scheduler steps before
        # the first update here (at an epoch's end).
        vars(self.optimizer)["_opt_called"] = True
        self.copy()

    def _with_layouts(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make DTensors again of what were DTensors."""
        places = set(state.pop("sharded", ()))
        if not places:
            return state
        indices = [i for group in state["param_groups"] for i in group["params"]]
        laid_out = dict(state["state"])
        for index, parameter in zip(indices, self.parameters, strict=True):
            if index in laid_out:
                laid_out[index] = _laid_out(laid_out[index], str(index), places, parameter)
        return {**state, "state": laid_out}

    def _undo_casts(self, state: dict[str, Any]) -> None:
        """Undo the casts of `Optimizer.load_state_dict` to the parameter's dtype, in which fp32 moments lose bits."""
        parameters = self.parameters
        indices = [i for group in state["param_groups"] for i in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            saved = state["state"].get(index, {})
            loaded = self.local.state.get(parameter, {})
            for key, value in saved.items():
                if key in loaded:
                    loaded[key] = _with_dtypes_of(value, loaded[key])


def _tensors_in(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors_in(item, f"{place}.{number}")


def _laid_out(value: Any, place: str, places: set[str], like: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return _with_layout_of(like, value) if place in places else value
    if type(value) is dict:
        return {key: _laid_out(item, f"{place}.{key}", places, like) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_laid_out(item, f"{place}.{n}", places, like) for n, item in enumerate(value))
    return value


def _with_dtypes_of(saved: Any, loaded: Any) -> Any:
    """`loaded`, with its tensors of another type than in `saved` replaced."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device, copy=True)
    if type(saved) is not type(loaded):
        return loaded
    if type(saved) in (list, tuple):
        return type(saved)(_with_dtypes_of(s, t) for s, t in zip(saved, loaded, strict=True))
    if type(saved) is dict:
        return {key: _with_dtypes_of(saved[key], value) for key, value in loaded.items()}
    return loaded


class PlainComponent:
    """Any object with ``state_dict`` and ``load_state_dict``; the whole state is copied at every boundary."""

    def __init__(self, name: str, target: Stateful) -> None:
        self.name = name
        self.target = target
        self.copy()

    def copy(self) -> None:
        self._copy = self.look()

    def look(self) -> Any:
        """The state as it is now."""
        return copy_tree(self.target.state_dict())

    def state(self) -> Any:
        return self._copy

    def load(self, state: Any) -> None:
        self.target.load_state_dict(copy_tree(state))
        self.copy()


def component_for(name: str, target: object) -> Component:
    """The component for `target`. Raises UsageError when it has no ``state_dict``."""
    if isinstance(target, nn.Module):
        return ModuleComponent(name, target)
    if isinstance(target, torch.optim.Optimizer):
        return OptimizerComponent(name, target)
    if isinstance(target, Stateful):
        return PlainComponent(name, target)
    remedy = "give it both methods, or leave it out"
    if isinstance(target, torch.utils.data.DataLoader):
        remedy = "make it resumable with mindx_elastic.data.from_loader(loader), or leave it out"
    raise UsageError(
        f"{name} is a {type(target).__name__} without state_dict() and load_state_dict(); its state could not be "
        f"resumed: {remedy}"
    )
