"""An optimizer of the job: its state is stable; the options of its groups (learning rate) are copied at every boundary,
schedulers change them between two."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.buffer_block import BufferBlock, BufferReader
from mindx_elastic.capture.copying import copy_items, copy_tree, map_containers, map_tensors, tensors_in
from mindx_elastic.capture.dtensors import local_part, with_layout_of
from mindx_elastic.capture.exact_load import exact_loads, keep_objects, restore_types
from mindx_elastic.capture.extra_state import OwnAttributes
from mindx_elastic.capture.names import arrange_groups, optimizers_inside
from mindx_elastic.capture.nested import rebuilt
from mindx_elastic.capture.values import check_objects, named_keys, original_keys, originals
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError, UsageError

__all__ = ["OptimizerComponent", "has_state_of_torch"]

_params_of = itemgetter("params")
_options_of = partial(copy_items, but="params")


def has_state_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is that of torch's optimizers: by numbers of parameters, besides its groups. That of a wrapper
    may have any form."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict or _is_spread(optimizer):
        return True
    if not all(
        isinstance(getattr(optimizer, name, None), kind) for name, kind in (("param_groups", list), ("state", dict))
    ):
        return False
    state = optimizer.state_dict()
    return (
        isinstance(state, dict) and isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)
    )


def _is_spread(optimizer: torch.optim.Optimizer) -> bool:
    """ZeRO: the optimizer inside updates this rank's share of the parameters and has the state of those."""
    # By name: importing it runs torch.jit, which takes a second and is deprecated.
    return any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__)


class _HostState(NamedTuple):
    """What an optimizer's state was at one boundary, as far as the program changes it at once."""

    state: dict[Any, Any]
    """All of it, in new containers: numbers as they were, tensors the live ones."""
    tensors: Sequence[torch.Tensor]
    block: BufferBlock
    """Copies of `tensors`, those in host memory."""


class OptimizerComponent:
    """A torch optimizer: its state is stable, the options of its groups are volatile."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer
        self._own = OwnAttributes(is_stable=True)
        # Stock ones have none, and a look at each parameter of a large model is no longer nothing.
        self._has_own = not type(self.optimizer).__module__.startswith("torch.")
        self.is_spread = _is_spread(self.optimizer)
        self.local = _local_of(name, optimizer) if self.is_spread else optimizer
        """The optimizer that has this rank's state: the one inside ZeRO, else itself."""
        self._sizes = self._look_sizes()
        self._built: list[list[str]] | None = None
        self._named: list[list[str]] | None = None
        self._places: Mapping[int, str] = {}
        self._parameters: Mapping[str, torch.Tensor] = {}
        self.keeps_host_state = False
        """Copy at each boundary what its state has in host memory (Adam's `step`), and which tensors it has, where the
        weights are on a device that may lag the program: the program's next update changes that at once."""
        self.groups: list[dict[str, Any]] = []
        """The copied options of the groups."""
        self._host_reader = BufferReader(())
        self._host: _HostState | None = None
        self._is_back = False
        self.added: list[list[torch.Tensor]] = []
        """The groups that `regroup` has made, by their parameters."""
        self.copy()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that it updates, in the order of their numbers in its state."""
        return [p for group in self.local.param_groups for p in group["params"]]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that its state has now."""
        return [t for values in self.local.state.values() for _, t in tensors_in(values)]

    def copy(self) -> None:
        self.groups = [*map(_options_of, self.optimizer.param_groups)]  # as `look`
        if self._has_own:
            self._own.copy()
        if self.keeps_host_state:
            self._host, self._is_back = self._copy_host_state(), False

    def _copy_host_state(self) -> _HostState:
        live = [t for t in self.tensors() if t.is_cpu]
        if len(self._host_reader.tensors) != len(live) or not self._host_reader.fits(live):
            self._host_reader = BufferReader(live)
        state = {key: map_containers(value) for key, value in self.local.state.items()}
        block = self._host_reader.read()
        assert block is not None, "they fit"
        return _HostState(state, live, block)

    def kept(self) -> Any:
        return self.groups, self._host, self._own.seen

    def go_back(self, kept: Any) -> None:
        self.groups, self._host, self._own.seen = kept
        self._is_back = True

    def _look_sizes(self) -> list[int]:
        return [*map(len, map(_params_of, self.optimizer.param_groups))]

    def has_changed(self) -> bool:
        """Whether it has got other groups since `follow`. Every step."""
        return [*map(len, map(_params_of, self.optimizer.param_groups))] != self._sizes

    def set_names(self, names: Mapping[int, str]) -> None:
        """`names`: the places of parameters, by id. With these groups the program begins."""
        self._places, self._built = names, self._named_groups(names)
        self._tell_own()

    def follow(self, names: Mapping[int, str]) -> list[str]:
        """Groups or parameters may have changed: go on with those that there are now. Returns what a start cannot make
        again, in words.

        A group that is new, gone or holds other parameters can be made again where the parameters have names.
        """
        self._places, self._sizes = names, self._look_sizes()
        self._tell_own()
        groups = self._named_groups(names)
        if groups == self._built:
            self._named = None
            return []
        if self.is_spread:
            return ["its parameter groups have changed, and ZeroRedundancyOptimizer spreads them over the ranks"]
        self._named = groups
        known = {place for built in self._built or () for place in built}
        lost = [place for group in groups for place in group if not place]
        if lost and not (self._built is not None and any("" in group for group in self._built)):
            which = [place for place in known if place not in {p for group in groups for p in group}]
            return [f"it holds {len(lost)} parameters that are in no named module (any more){_named_instead(which)}"]
        return []

    def _tell_own(self) -> None:
        if not self._has_own:
            return
        parameters = {self._places.get(id(p)) or f"#{n}": p for n, p in enumerate(self.parameters)}
        self._own.set_owners({"": self.optimizer, **parameters})

    def _named_groups(self, names: Mapping[int, str]) -> list[list[str]]:
        return [[names.get(id(p), "") for p in group["params"]] for group in self.local.param_groups]

    def arrange(
        self, groups: Sequence[Sequence[str]], parameters: Mapping[str, torch.Tensor], saved: Mapping[Any, Any]
    ) -> list[str]:
        """Before `load`: put parameters into the order of the run that wrote the checkpoint. Returns what is to be
        said; see `arrange_groups`."""
        said = arrange_groups(self.name, self.local.param_groups, groups, parameters, saved)
        self._built = self._named_groups(self._places)
        return said

    def regroup(
        self, groups: Sequence[Sequence[str]], parameters: Mapping[str, torch.Tensor], names: Mapping[int, str]
    ) -> None:
        """Before `load`: make the groups that a run had got in mid-run, of these parameters. `names`: their places,
        by id (a pruned one has another)."""
        if missing := [place for group in groups for place in group if place not in parameters]:
            raise MismatchError(
                f"the checkpoint does not fit {self.name}: it updates {listed(missing, 3)}, which this program "
                "does not have"
            )
        wanted = [[parameters[place] for place in group] for group in groups]
        live = self.local.param_groups
        for group, mine in zip(live, wanted, strict=False):
            group["params"][:] = mine
        for mine in wanted[len(live) :]:
            self.added.append(list(mine))
            type(self.local).add_param_group(self.local, {"params": list(mine)})
        del live[len(wanted) :]
        self._parameters, self._places = parameters, names
        self._sizes, self._named = self._look_sizes(), [list(group) for group in groups]
        self._tell_own()

    def look(self) -> list[dict[str, Any]]:
        """The options of the groups as they are now, in the form of `groups`."""
        return [*map(_options_of, self.optimizer.param_groups)]

    def state(self) -> dict[str, Any]:
        host = self._host if self._is_back else None
        optimizer, retired = self._without_retired(None if host is None else host.state)
        state = _with_local_parts(optimizer.state_dict())
        if host is not None:
            views = zip(host.tensors, host.block.views, strict=True)
            copies = {id(live): copy for live, copy in views if copy is not None}
            state = dict(map_tensors(state, lambda t: copies.get(id(t), t)))
        state["class"] = type(self.local).__name__  # ZeRO around AdamW has the state of AdamW
        if sharded := self._sharded_places():
            state["sharded"] = sharded
        if self._named is not None:
            state["names"] = self._named
        if retired:
            state["retired"] = _with_local_parts(retired)
        if self._has_own and (own := self._own.state((*self.tensors(), *self.parameters))):
            state["own"] = named_keys(own, self._places)
        state["param_groups"] = [
            {**copied, "params": live["params"]}
            for copied, live in zip(self.groups, state["param_groups"], strict=True)
        ]
        return state

    def _without_retired(self, older: dict[Any, Any] | None) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """The optimizer as if it had no state for parameters that are in no group any more, and that state by place.
        `older`: its state at an older boundary, which counts.

        `Optimizer.state_dict` fails with it. A parameter may come back to a group; one without a place cannot.
        """
        held = set(map(id, self.parameters))
        state = self.local.state if older is None else older
        if older is None and {id(p) for p in state if isinstance(p, torch.Tensor)} <= held:
            return self.local, {}
        shadow = object.__new__(type(self.local))
        kept = {p: value for p, value in state.items() if not isinstance(p, torch.Tensor) or id(p) in held}
        vars(shadow).update({**vars(self.local), "state": kept})
        retired = {self._places[id(p)]: v for p, v in state.items() if id(p) not in held and id(p) in self._places}
        return shadow, retired

    def _sharded_places(self) -> list[str]:
        """The DTensors of its state with their parameter's layout, as ``3.exp_avg``; `load` restores them so."""
        found: list[str] = []
        for index, parameter in enumerate(self.parameters):
            if isinstance(parameter, DTensor):
                for place, value in tensors_in(self.local.state.get(parameter, {}), str(index)):
                    if isinstance(value, DTensor) and value.shape == parameter.shape:
                        found.append(place)
        return found

    def load_live(self, state: dict[str, Any]) -> None:
        """Put back a boundary of this very optimizer's, from a `state` whose tensors are the live ones: the options of
        the groups."""
        used: set[int] = set()
        for shown, own, saved in zip(
            self.optimizer.param_groups, self.local.param_groups, state["param_groups"], strict=True
        ):
            options = {key: originals(copy_tree(value)) for key, value in saved.items() if key != "params"}
            _load_into(own, options, used)
            own.update(options)
            if shown is not own:
                shown.update(options)
        self.copy()

    def load(self, state: dict[str, Any]) -> None:
        state = dict(state)
        state.pop("names", None)  # see `regroup`
        retired, own = state.pop("retired", {}), state.pop("own", {})
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
        state["param_groups"] = originals(state["param_groups"])
        if not _are_of_tensors(state["state"]):
            state["state"] = self._originals(state["state"])
        groups, values = self.local.param_groups, self.local.state
        before = _tensors_by_place(self.local)
        with exact_loads([self.local, *optimizers_inside(self.local)]):
            self.local.load_state_dict(state)
        keep_objects(self.local, groups, values)
        restore_types(self.local, state)
        for place, values in retired.items():
            if (parameter := self._parameters.get(place)) is not None:
                self.local.state[parameter] = {
                    key: value.to(parameter.device) if isinstance(value, torch.Tensor) and key != "step" else value
                    for key, value in originals(copy_tree(values)).items()
                }
        _keep_tensors(self.local, before)
        if self.is_spread:
            for shown, loaded in zip(self.optimizer.param_groups, self.local.param_groups, strict=True):
                shown.update({key: value for key, value in loaded.items() if key != "params"})
        # The process before has stepped it. Without this, torch warns of a wrong order when a scheduler steps before
        # the first update here (at an epoch's end).
        vars(self.optimizer)["_opt_called"] = True
        if own:
            self._own.load(
                original_keys(own, {self._places[id(p)]: p for p in self.parameters if id(p) in self._places})
            )
        self.copy()

    def _originals(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """What stood-in values were; an object's tensors on the device of its parameter, if they were on a device."""
        parameters = dict(enumerate(self.parameters))
        devices = {key: parameters[key].device if key in parameters else None for key in state}
        return {key: originals(value, self._parameters, devices[key]) for key, value in state.items()}

    def check(self) -> None:
        """Raises UnsupportedStateError for an object in its state that would not come back as it is."""
        state = {index: self.local.state.get(p) for index, p in enumerate(self.parameters)}
        if not _are_of_tensors({key: value for key, value in state.items() if value}):
            check_objects(state, f"{self.name}.state", {self._places.get(id(p), "?"): p for p in self.parameters})

    def _with_layouts(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make DTensors again of what were DTensors."""
        places = set(state.pop("sharded", ()))
        if not places:
            return state
        indices = [i for group in state["param_groups"] for i in group["params"]]
        laid_out = dict(state["state"])
        for index, parameter in zip(indices, self.parameters, strict=True):
            if index in laid_out:
                own = {id(t) for place, t in tensors_in(laid_out[index], str(index)) if place in places}
                layout = partial(_with_layout, like=parameter, only=own)
                laid_out[index] = rebuilt(laid_out[index], layout)
        return {**state, "state": laid_out}


def _local_of(name: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer | None = vars(optimizer).get("optim")
    if found is None:
        raise UsageError(
            f"{name}: a ZeroRedundancyOptimizer with overlap_with_ddp=True has no own state before the "
            "first steps and cannot be guarded; make it with overlap_with_ddp=False"
        )
    return found


def _with_local_parts(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of `state`, its tensors apart: with this rank's part of each DTensor."""
    tables = state.get("state")
    if type(tables) is dict and _are_of_tensors(tables):
        # Of most optimizers, and they are thousands: asked and copied without a call for each.
        copies = dict(zip(tables, map(dict.copy, tables.values()), strict=True))
        rest = map_containers({**state, "state": None})
        return {**rest, "state": copies}
    has_dtensor = any(isinstance(tensor, DTensor) for _, tensor in tensors_in(state))
    return dict(map_containers(map_tensors(state, local_part) if has_dtensor else state))


def _are_of_tensors(tables: dict[Any, Any]) -> bool:
    if {*map(type, tables.values())} != {dict}:
        return False
    return {*map(type, chain.from_iterable(map(dict.values, tables.values())))} == {torch.Tensor}


def _tables(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The state of each parameter by its id, and the groups by their number."""
    for parameter, values in optimizer.state.items():
        if isinstance(values, dict):
            yield ("state", id(parameter)), values
    for number, group in enumerate(optimizer.param_groups):
        yield ("group", number), group


def _tensors_by_place(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    """The tensors in its state and in the options of its groups (a learning rate) as they are now."""
    return {
        place: {key: value for key, value in table.items() if isinstance(value, torch.Tensor)}
        for place, table in _tables(optimizer)
    }


def _keep_tensors(optimizer: torch.optim.Optimizer, before: Mapping[Any, Mapping[str, Any]]) -> None:
    """Put what was loaded into the tensors that were there `before`.

    `Optimizer.load_state_dict` makes new ones. A CUDA graph that was captured with the old ones would go on with them,
    and so would who else holds them. An optimizer that does more than that when it loads has tensors of its own.
    """
    hooks = vars(optimizer).get("_optimizer_load_state_dict_post_hooks")
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or hooks:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    used = {local_part(p).data_ptr() for p in parameters}
    for place, table in _tables(optimizer):
        _load_into(before.get(place, {}), table, used)


@torch.no_grad()
def _load_into(kept: Mapping[str, Any], loaded: dict[str, Any], used: set[int]) -> None:
    """Copy the tensors of `loaded` into those of `kept` where they fit, and have these in `loaded`. `used`: memory that
    is not to be written (the parameters), or has been; there only what is equal is taken over."""
    for key, value in loaded.items():
        there = kept.get(key)
        if not (isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor)) or value is there:
            continue
        own, new = local_part(there), local_part(value)
        if type(there) is not type(value) or there.shape != value.shape:
            continue
        if (own.shape, own.dtype) != (new.shape, new.dtype) or own.is_inference() or own.is_meta or not own.numel():
            continue
        if 0 in own.stride() or own.layout is not torch.strided:
            continue  # its elements may share their memory
        if own.data_ptr() in used:
            if own.numel() == 1 and torch.equal(own.cpu(), new.cpu()):
                loaded[key] = there
            continue
        used.add(own.data_ptr())
        own.copy_(new)
        loaded[key] = there


def _named_instead(places: Sequence[str]) -> str:
    return f"; {listed(sorted(places), 3)} were replaced" if places else ""


def _with_layout(leaf: Any, *, like: torch.Tensor, only: Collection[int]) -> Any:
    return with_layout_of(like, leaf) if id(leaf) in only else leaf
