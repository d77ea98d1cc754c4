"""An optimizer of the job: its state is stable; the options of its groups (learning rate) are copied at every boundary,
schedulers change them between two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.copying import copy_items, map_tensors
from mindx_elastic.capture.dtensors import local_part, with_layout_of
from mindx_elastic.errors import MismatchError, UsageError

__all__ = ["OptimizerComponent", "unwrap_optimizer"]


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper that holds it as ``_wrapped_optimizer``: a checkpoint with the wrapper and one
    without fit each other."""
    while isinstance(inner := getattr(optimizer, "_wrapped_optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


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
        state = dict(map_tensors(self.local.state_dict(), local_part))
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
        with _in_place(self.local):
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


@contextmanager
def _in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have ``optimizer.load_state_dict`` fill the groups and the state that it has, in place of making new ones.

    Others may have them, too: an optimizer around this one or inside of it (SAM, Lookahead), a program that sets the
    learning rate of a group that it has kept.
    """
    groups, state = optimizer.param_groups, optimizer.state

    def take(new: dict[str, Any]) -> None:
        loaded = dict(new)
        given = loaded.get("param_groups")
        if isinstance(given, list) and len(given) == len(groups) and given is not groups:
            for old, fresh in zip(groups, [dict(group) for group in given], strict=True):
                old.clear()
                old.update(fresh)
            loaded["param_groups"] = groups
        values = loaded.get("state")
        if isinstance(values, dict) and isinstance(state, dict) and values is not state:
            state.clear()
            state.update(values)
            loaded["state"] = state
        type(optimizer).__setstate__(optimizer, loaded)

    vars(optimizer)["__setstate__"] = take  # what `Optimizer.load_state_dict` ends with
    try:
        yield
    finally:
        vars(optimizer).pop("__setstate__", None)


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
        return with_layout_of(like, value) if place in places else value
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
