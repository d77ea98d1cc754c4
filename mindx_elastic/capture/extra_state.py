"""State that no `state_dict` has, as values at places: at a boundary it is copied where it has changed.

* `Flags`, of a module: `training` of each submodule, `requires_grad` of each parameter, and whether it has a gradient
* `ExtraTensors`, of a module: buffers with ``persistent=False``, and the products of `torch.nn.utils.prune`
* `OwnAttributes`: what objects of libraries keep in plain attributes

Frozen batch norm, gradual unfreezing and an evaluation that does not restore the mode are states of the training. All
flags are read at close boundaries (`close_looks`), and where the mode of the module itself has changed; names come in
when a file is written. A save in the middle of a step that finds others than at the last look cannot tell whether they
changed before the boundary or after it, and says so.

After ``zero_grad(set_to_none=False)`` a parameter that the next step leaves out has a gradient of zeros, with which an
optimizer updates it (momentum, weight decay); without one it would not. So which gradients there are is a flag, too. It
is not told: after the boundary gradients come and go. A program that takes them away (``set_to_none=True``) may do that
behind the boundary, where a resume does not come: once that was seen, none are kept.

Buffers are state where a training changes them or makes them at random: small ones are kept, large ones (a mask, a
table) once they have changed.

A pruned parameter ``weight`` is ``weight_orig`` (the same object) and a buffer ``weight_mask``, and each forward sets
the plain tensor ``weight`` to their product. The next pruning ranks by that tensor, which is older than the last
update. Masks put on or taken off in mid-run rename a parameter, and a start does the same (`prune_as`).

Attributes are those of an optimizer (a wealth, a count, a generator), of its parameters (``p.hess``), of a module that
was named by itself (the place in a memory bank, the sums of a metric). Most are settings, and the program's own lines
set those. So an attribute is state once it has changed since the guard was made; a run that goes on takes over what the
run before has found.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from mindx_elastic.capture.copying import tensors_in
from mindx_elastic.capture.dtensors import filled, local_part, with_layout_of
from mindx_elastic.capture.generators import GENERATORS
from mindx_elastic.capture.structure import buffers_of
from mindx_elastic.capture.values import GENERATOR, MARK, put_back, snapshot
from mindx_elastic.core.looks import attributes_of, table_of
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError

__all__ = [
    "ExtraTensors",
    "Flags",
    "OwnAttributes",
    "TensorCopy",
    "original_names",
    "prune_as",
    "pruned_in",
    "set_by_torch",
    "sums_of",
]

_SMALL, _LARGE = 1 << 12, 1 << 20
"""Bytes: compared in about a microsecond; too much to keep what every start builds again."""
_FIRST = 10
_WITH_ADDRESS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Subclasses may have no own memory."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NUMBERS = (bool, int, float, type(None), torch.dtype)
_MOST_ITEMS, _DEEPEST = 4096, 3
_training, _requires_grad = itemgetter("training"), attrgetter("requires_grad")
_Key = tuple[str, str]  # the place of an owner, and the attribute's name


class Flags:
    """The flags of one module and everything below it. `parameters`: by name, tied ones under each."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, torch.Tensor], wrappers: Iterable[nn.Module]
    ) -> None:
        """`wrappers`: modules around it that are no part of the names (DDP, `torch.compile`); they follow its mode."""
        self._module, self._wrappers = module, list(wrappers)
        self.seen: list[bool] = []
        """As of the boundary that counts, as far as it has been looked at. Never changed in place."""
        self._gradients: set[int] = set()  # the parameters with one, by id
        self._takes_gradients = False  # the program has taken one away that was here at an earlier look
        self.follow(parameters)

    def follow(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Read those of the modules that there are now, and of `parameters`."""
        self._names = dict(self._module.named_modules())
        self._modules = list(self._names.values())
        self._attributes = [_attributes(child) for child in self._modules]
        self.root = self._attributes[0]
        """Where the mode of the whole module is: ``root["training"]`` is the first of `seen`, if it has not changed."""
        self._parameters = parameters
        self._tensors = list({id(p): p for p in parameters.values()}.values())
        self.copy()

    def copy(self) -> None:
        """Read them as they are now."""
        self.seen = [*map(_training, self._attributes), *map(_requires_grad, self._tensors)]  # `look`, without a call
        before, self._gradients = self._gradients, set[int]()
        for t in self._tensors:
            if not t.is_leaf or not t.requires_grad:
                continue
            if (gradient := t.grad) is None:
                self._takes_gradients = self._takes_gradients or id(t) in before
            elif not gradient.is_sparse:
                self._gradients.add(id(t))

    def look(self) -> list[bool]:
        """As they are now, in the form of `seen`."""
        return [*map(_training, self._attributes), *map(_requires_grad, self._tensors)]

    def put_back(self, seen: list[bool]) -> None:
        """Set them as `look` has given them."""
        values = iter(seen)
        for module in self._modules:
            _set_training(module, next(values))
        for tensor in self._tensors:
            _set_requires_grad(tensor, next(values))
        self._lead_wrappers()

    def state(self) -> dict[str, Any]:
        """The copied ones, by name: all of them, because a file may hold a part of the model. A frozen parameter that
        an update outside of `torch.no_grad` has made part of a graph requires gradients, and as a leaf it could not be
        updated so again: it is frozen still."""
        training = dict(zip(self._names, self.seen, strict=False))
        trainable = {id(t): flag for t, flag in zip(self._tensors, self.seen[len(self._modules) :], strict=True)}
        named = {name: trainable[id(p)] and p.is_leaf for name, p in self._parameters.items()}
        kept = set[int]() if self._takes_gradients else self._gradients
        return {
            "training": [name for name, flag in training.items() if flag],
            "eval": [name for name, flag in training.items() if not flag],
            "trainable": [name for name, flag in named.items() if flag],
            "frozen": [name for name, flag in named.items() if not flag],
            "gradients": [name for name, p in self._parameters.items() if named[name] and id(p) in kept],
        }

    def load(self, state: Mapping[str, Any]) -> dict[str, list[str]]:
        """Set what `state` has. Names that this module lacks are passed over. Returns what was changed, by list."""
        changed: dict[str, list[str]] = {}
        for key, wanted in (("training", True), ("eval", False)):
            for name in state.get(key, ()):
                if (module := self._names.get(name)) is not None and _set_training(module, wanted):
                    changed.setdefault(key, []).append(name)
        for key, wanted in (("trainable", True), ("frozen", False)):
            for name in state.get(key, ()):
                if (tensor := self._parameters.get(name)) is not None and _set_requires_grad(tensor, wanted):
                    changed.setdefault(key, []).append(name)
        if (kept := state.get("gradients")) is not None:  # not in files of older versions
            _set_gradients({name: p for name, p in self._parameters.items() if p.requires_grad and p.is_leaf}, kept)
        self._lead_wrappers()
        self._gradients = set()  # what is gone now, the load has taken
        self.copy()
        return changed

    def _lead_wrappers(self) -> None:
        for wrapper in self._wrappers:
            _set_training(wrapper, self._module.training)


class _Property:
    """A flag of a module that does not keep the flag in its dictionary: `torch.compile`'s wrapper, TorchScript."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> bool:
        return bool(getattr(self._module, name))


def _attributes(module: nn.Module) -> Any:
    """Where the flag can be read, in half the time of an attribute."""
    return vars(module) if "training" in vars(module) else _Property(module)


def _set_training(module: nn.Module, flag: bool) -> bool:
    """Not `train()`, which sets the modules below as well and may be overridden. Returns whether it changed."""
    if module.training is flag:
        return False
    module.training = flag
    return True


def _set_requires_grad(tensor: torch.Tensor, flag: bool) -> bool:
    if tensor.requires_grad is flag:
        return False
    tensor.requires_grad_(flag)
    return True


def _set_gradients(parameters: Mapping[str, torch.Tensor], kept: Collection[str]) -> None:
    """Let those of the `kept` names have a gradient, zeros if it is new, and no others."""
    own = {id(p) for name, p in parameters.items() if name in kept}
    for parameter in parameters.values():
        if id(parameter) not in own:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class TensorCopy:
    """The copy of one tensor, made again when the tensor has changed.

    Trusts the tensor's version counter, and looks from time to time whether it may.

    Code can change a tensor without the counter (`.data`, a numpy array of the same memory). `recheck` compares the
    contents, and so do renewals: the first ten, then 16, 32, 64, ...; all of a small tensor where `closely`. Once they
    have found that, each renewal copies.
    """

    def __init__(
        self, tensor: torch.Tensor, *, is_original: bool = False, has_changed: bool = False, closely: bool = False
    ) -> None:
        """is_original: every start builds it again, so that it is copied only once it has changed. has_changed: it has
        been replaced, or loaded with other values than the program builds."""
        self.tensor = tensor
        self.value: torch.Tensor | None = None
        """The copy; None: the tensor has not changed since the program built it."""
        self.has_changed = has_changed
        """The training has changed the tensor."""
        self._always = tensor.is_inference()  # it has no counter
        self._version = -1 if self._always else tensor._version
        self._description = self._describe()
        self._renewals = 0
        self._compares = closely and tensor.nbytes <= _SMALL and tensor.device.type == "cpu"
        self._sum = sums_of([tensor]) if is_original else [0]
        if not is_original:
            self._copy()

    @property
    def is_stale(self) -> bool:
        """The tensor's counter has moved since the copy, or it has none; or the tensor has other memory now or means
        something else by it (``.data = ...``), which moves no counter."""
        return self._always or self._version != self.tensor._version or self._description != self._describe()

    def _describe(self) -> tuple[object, ...]:
        tensor = self.tensor
        if type(tensor) not in _WITH_ADDRESS or tensor.layout is not torch.strided:
            return tensor.dtype, tensor.shape
        return tensor.dtype, tensor.shape, tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()

    def renew(self) -> None:
        """A boundary: copy the tensor if it has changed."""
        if self.is_stale:
            self._copy()
            self.has_changed = True
            return
        count = self._renewals = self._renewals + 1
        if self._compares or count <= _FIRST or count & (count - 1) == 0:
            self.recheck()

    def recheck(self) -> None:
        """Compare the contents. For a moment in which the tensor is as at the boundary."""
        if not self._always and not self._is_same():
            self._always = self.has_changed = True
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        self.value = self.tensor.detach().clone()
        self._description = self._describe()
        if not self._always:
            self._version = self.tensor._version

    @torch.no_grad()
    def _is_same(self) -> bool:
        if self.value is None:
            return sums_of([self.tensor]) == self._sum
        if self.value.dtype != self.tensor.dtype:
            return False
        return torch.equal(local_part(self.value), local_part(self.tensor))


@torch.no_grad()
def sums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each, all its bytes, taken as numbers; 0 for what has none of its own. Other values have another sum, but for
    a few that cancel each other out. Waits once for each device."""
    found = [0] * len(tensors)
    on_devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(map(local_part, tensors)):
        if tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta) and tensor.numel():
            total = _words(tensor).sum(dtype=torch.int64)
            on_devices.setdefault(total.device, []).append((number, total))
    for sums in on_devices.values():
        for (number, _), total in zip(sums, torch.stack([each for _, each in sums]).tolist(), strict=True):
            found[number] = total
    return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(_WORDS.get(flat.element_size(), torch.int32))


class ExtraTensors:
    """Those of one module and everything below it, by name."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[str, TensorCopy | None] = {}
        """None: the place holds no tensor."""
        self.follow()

    def follow(self) -> None:
        """Find the places that there are now."""
        self._pruned = pruned_in(self._module)
        self._places: dict[str, tuple[dict[str, Any], str]] = {
            **{place: (vars(child), name) for place, (child, name) in self._pruned.items()},
            **_loose_buffers(self._module),
        }
        self.are_used = bool(self._places)
        """Without any there is nothing to copy."""
        before, self._copies = self._copies, {}
        for name, (table, key) in self._places.items():
            self._copies[name] = before[name] if name in before else self._first_copy(name, table.get(key))

    def _first_copy(self, name: str, tensor: torch.Tensor | None) -> TensorCopy | None:
        if tensor is None:
            return None
        return TensorCopy(tensor, is_original=tensor.nbytes > _LARGE and name not in self._pruned)

    @property
    def pruned(self) -> Collection[str]:
        """The places of the pruned parameters, by their first names (``fc.weight``)."""
        return self._pruned.keys()

    def copy(self) -> None:
        """This is a boundary."""
        for name, (table, key) in self._places.items():
            tensor, copy = table.get(key), self._copies[name]
            if copy is not None and tensor is copy.tensor:
                copy.renew()
            elif tensor is not None or copy is not None:
                self._copies[name] = None if tensor is None else TensorCopy(tensor, has_changed=True)

    def recheck(self) -> None:
        """Also find what moves no version counter. The program has not gone on since `copy`."""
        for name, (table, key) in self._places.items():
            copy = self._copies[name]
            if copy is not None and table.get(key) is copy.tensor:
                copy.recheck()

    def kept(self) -> dict[str, torch.Tensor | None]:
        """The copies of the last boundary."""
        return {name: copy.value for name, copy in self._copies.items() if copy is not None}

    def go_back(self, kept: Mapping[str, torch.Tensor | None]) -> None:
        """Let the copies that `kept` has given count again."""
        for name, copy in self._copies.items():
            if copy is not None and name in kept:
                copy.value = kept[name]

    def state(self) -> dict[str, torch.Tensor | None]:
        found: dict[str, torch.Tensor | None] = {}
        for name, copy in self._copies.items():
            if copy is None:
                found[name] = None
            elif copy.value is not None:
                found[name] = local_part(copy.value)
        return found

    def live(self) -> dict[str, torch.Tensor]:
        """The tensors themselves."""
        return {name: t for name, (table, key) in self._places.items() if (t := table.get(key)) is not None}

    def changed(self) -> list[str]:
        """The buffers that the training has changed, so that another rank may have others."""
        return [n for n, c in self._copies.items() if c is not None and c.has_changed and n not in self._pruned]

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load in place where shape and type fit. Names that this module lacks are passed over."""
        for name in state.keys() & self._places.keys():
            (table, key), saved, copy = self._places[name], state[name], self._copies[name]
            live = table.get(key)
            is_same = live is saved
            if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
                saved = with_layout_of(live, saved).to(live.device)
                is_same = live.dtype == saved.dtype and torch.equal(local_part(live), local_part(saved))
                table[key] = live if is_same else filled(live, saved)
            else:
                table[key] = saved
            has_changed = not is_same or (copy is not None and copy.has_changed)
            self._copies[name] = None if table[key] is None else TensorCopy(table[key], has_changed=has_changed)


def _loose_buffers(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    return {
        f"{prefix}.{key}" if prefix else key: (table, key)
        for prefix, child in module.named_modules()
        for table in [buffers_of(child)]
        for key in table
        if key in child._non_persistent_buffers_set
    }


def pruned_in(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The pruned parameters by their first names: the module that each is in, and its name there."""
    found = {}
    for prefix, child in module.named_modules():
        for hook in child._forward_pre_hooks.values():
            # By name: few programs import it.
            if any(c.__name__ == "BasePruningMethod" for c in type(hook).__mro__):
                name = str(getattr(hook, "_tensor_name", ""))
                found[f"{prefix}.{name}" if prefix else name] = (child, name)
    return found


def prune_as(module: nn.Module, wanted: Collection[str]) -> bool:
    """Prune the parameters at these places and no others; masks and products come with the state. Returns whether
    something has changed."""
    from torch.nn.utils import prune

    pruned, modules = pruned_in(module), dict(module.named_modules())
    missing = [place for place in wanted if place not in pruned]
    for place in missing:
        prefix, _, name = place.rpartition(".")
        child = modules.get(prefix)
        if child is not None and (parameter := child._parameters.get(name)) is not None:  # else loading says so
            prune.custom_from_mask(child, name, torch.ones_like(parameter))
    surplus = [place for place in pruned if place not in wanted]
    for place in surplus:
        prune.remove(*pruned[place])
    return bool(missing or surplus)


def original_names(named: Mapping[str, Any], pruned: Iterable[str]) -> dict[str, Any]:
    """`named` by the names that the parameters had before they were pruned."""
    renamed = {f"{place}_orig": place for place in pruned}
    return {renamed.get(name, name): value for name, value in named.items()}


class OwnAttributes:
    """The attributes of some owners, by place. Training thread, but for `state`."""

    def __init__(self, *, is_stable: bool) -> None:
        """`is_stable`: tensors and generators change only inside of updates, so that `state` reads them in place."""
        self._is_stable = is_stable
        self._keys = (str, int, nn.Parameter) if is_stable else (str, int)
        self._owners: Mapping[str, object] = {}
        self._moved: set[_Key] = set()
        self._first: dict[_Key, object] = {}
        self.seen: Mapping[_Key, Any] = {}
        """The attributes that have changed, as they were at the boundary that counts; without what is read in place."""

    def set_owners(self, owners: Mapping[str, object]) -> None:
        self._owners = owners
        self.copy()

    def copy(self) -> None:
        """Copy them, at a boundary."""
        if not self._owners:
            return
        seen: dict[_Key, Any] = {}
        for key, value in self._items():
            if key not in self._moved:
                look = _look(value)
                if self._first.setdefault(key, look) == look:
                    continue
                self._moved.add(key)
            if not self._is_stable or type(value) in _NUMBERS:
                seen[key] = snapshot(value, key[1])
        self.seen = seen

    def state(self, but: Iterable[torch.Tensor] = ()) -> dict[str, dict[str, Any]]:
        """The attributes by place and name. `but`: tensors that are kept elsewhere. Empty: there are none."""
        found: dict[str, dict[str, Any]] = {}
        others = set(map(id, but))
        for place, name in sorted(self._moved & {key for key, _ in self._items()}):
            value = attributes_of(self._owners[place]).get(name)
            if any(id(tensor) in others for _, tensor in tensors_in(value, name)):
                continue
            if isinstance(value, torch.Tensor) and self._is_stable:
                found.setdefault(place, {})[name] = local_part(value).detach()
            else:
                key = place, name
                found.setdefault(place, {})[name] = self.seen[key] if key in self.seen else snapshot(value, name)
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back what `state` has given. Raises MismatchError for owners that are not there."""
        if lost := [place for place in state if place not in self._owners]:
            raise MismatchError(f"the checkpoint has attributes of objects that are not there: {listed(lost, 3)}")
        for place, values in state.items():
            owner = self._owners[place]
            for name, saved in values.items():
                self._moved.add((place, name))
                live = attributes_of(owner).get(name)
                own = saved.get("generator") if isinstance(saved, dict) else None
                is_older = isinstance(own, dict) and "kind" in own  # a generator in files of version 0.2
                value = put_back(live, {MARK: GENERATOR, "state": own} if is_older else saved, name)
                if value is not live and isinstance(value, torch.Tensor) and isinstance(owner, torch.Tensor):
                    value = value.to(owner.device)
                object.__setattr__(owner, name, value)
        self.copy()

    def _items(self) -> Iterator[tuple[_Key, Any]]:
        torchs = set_by_torch()
        for place, owner in self._owners.items():
            for name, value in (table_of(owner) or {}).items():
                if name not in torchs and _is_state(value, self._keys):
                    yield (place, name), value


@cache
def set_by_torch() -> frozenset[str]:
    """The attributes that torch itself sets on optimizers, modules and schedulers. Not at import: torch's first
    optimizer imports its whole compiler."""
    found = {*vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)), *vars(nn.Module())}
    return frozenset(found | {"_opt_called", "_step_count"})


def _is_state(value: Any, keys: tuple[type, ...], depth: int = 0) -> bool:
    """Numbers, tensors, generators; numbers and tensors in lists and in dicts with keys of the types `keys`."""
    kind = type(value)
    if kind in (list, tuple, deque, dict):
        inner: Any = value.values() if kind is dict else value
        if depth == _DEEPEST or len(value) > _MOST_ITEMS or (kind is dict and not {*map(type, value)} <= {*keys}):
            return False
        return all(_is_state(one, keys, depth + 1) for one in inner)
    is_generator = depth == 0 and isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)
    return kind in _NUMBERS or kind is torch.Tensor or is_generator


def _look(value: Any) -> object:
    """Equal as long as the value is the same."""
    if type(value) is torch.Tensor:
        return id(value), 0 if value.is_inference() else value._version
    if type(value) in (list, tuple, deque):
        return tuple(map(_look, value))
    if type(value) is dict:
        return tuple((id(key) if isinstance(key, torch.Tensor) else key, _look(one)) for key, one in value.items())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, GENERATORS):
        bits: Any = value.bit_generator if isinstance(value, np.random.Generator) else value
        state = bits.state if hasattr(bits, "state") else bits.get_state(legacy=False)
        return tuple(each.tobytes() if isinstance(each, np.ndarray) else each for each in state["state"].values())
    return type(value), repr(value)
