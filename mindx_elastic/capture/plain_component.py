"""Any object with ``state_dict`` and ``load_state_dict``, its own or an adapter's: the whole state is copied at every
boundary. A container that takes too long for that (a replay buffer) is read only when a boundary is saved.

The scale of a gradient scaler and its counter of good steps are tensors on the device, and its `state_dict` waits for
the device to read them: at a boundary they are copied on the device, and read when a file is written.

A state may have whole objects in it (`_NestedStates`), as that of a scheduler around another one, whose `state_dict`
gives all its attributes. An object stands in the file as its own state: what its `state_dict` gives, else its
attributes. A load puts that into the very object that the program has at the same place. What others keep (a named
optimizer, the data) and what is no state (functions) stays the program's, and only its place is noted.
"""

from __future__ import annotations

import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from mindx_elastic.capture.adapters import NO_STATE, TensorAdapter
from mindx_elastic.capture.copying import copy_items, copy_state, copy_tree, map_containers, map_tensors
from mindx_elastic.capture.exact_load import exact_loads, other_types
from mindx_elastic.capture.generators import GENERATORS, Stateful
from mindx_elastic.capture.names import optimizers_inside
from mindx_elastic.capture.values import check_objects, named_keys, originals
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import askable, attributes_of, defines, has_attributes, has_method, is_its_attributes
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError, UnsupportedStateError

__all__ = [
    "AdaptedComponent",
    "GoesThroughData",
    "InParts",
    "PlainComponent",
    "ScalerComponent",
    "Stateful",
    "WrapperComponent",
    "is_plain_scaler",
    "is_stateful",
]

_LONG_S, _LONG_SHARE, _OFTEN = 1e-3, 0.02, 5
"""A copy is too slow when it takes this long, and this share of a step, so many times in a row."""
_STATE, _ATTRIBUTES = "__mindx_state__", "__mindx_attributes__"
_OF_OTHERS = (*NO_STATE, DataLoader, Dataset, Sampler)
_FUNCTIONS = (types.FunctionType, types.MethodType)
_DEEPEST = 8
_SHALLOW = (dict, list, tuple)
_PLAIN = frozenset((type(None), bool, int, float, str))


def is_stateful(target: object) -> bool:
    """Whether `target` is `Stateful`. Asking the Protocol would run properties."""
    return has_method(target, "state_dict", "load_state_dict")


class InParts(ABC):
    """Base of classes of ours whose state is a dict of entries that do not depend on one another: for a rank that was
    killed in its step each is chosen by itself. A place in loops that is another one than that of the other ranks
    would have this rank wait in collectives that the others do not make."""

    gives_copies: ClassVar[bool] = False
    """What ``state_dict`` returns shares nothing with the object."""
    follow_the_steps: ClassVar[Collection[str]]
    """The entries that replicas move alike."""
    entries_in_words: ClassVar[Mapping[str, str]]
    """What a warning calls some of them."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...


class GoesThroughData(ABC):
    """Base of classes of ours that go through a data set in epochs."""

    gives_copies: bool
    """What ``state_dict`` returns shares nothing with the object."""
    draws: bool
    """Each epoch's order arises from random numbers that its beginning draws."""

    @property
    @abstractmethod
    def beginning(self) -> object:
        """What has been drawn for this epoch: another object in each one."""

    @abstractmethod
    def listing(self) -> Mapping[str, Any]:
        """Some of what it goes through: see `given_settings`."""

    @abstractmethod
    def noted(self) -> Any:
        """What its state can be `made_of` later. At each boundary."""

    @abstractmethod
    def made_of(self, noted: Any) -> Any:
        """The state at the time of `noted`. Any thread."""

    @abstractmethod
    def state_dict(self) -> Any: ...


class _NestedStates:
    """The nested states of one object. Training thread."""

    def __init__(self, name: str, others: Collection[int]) -> None:
        """`others`: ids of what is kept by itself."""
        self._name, self._others = name, others

    def are_in(self, state: Any, depth: int = 0) -> bool:
        """Whether an object is in `state`, as the program gives it."""
        if type(state) in _SHALLOW and depth < _DEEPEST:
            items = state.values() if type(state) is dict else state
            return any(
                self.are_in(item, depth + 1) for _, item in askable(enumerate(items)) if type(item) not in _PLAIN
            )
        return self._is_object(state)

    def _is_object(self, value: Any) -> bool:
        """Whether it is more than a file has a word for. A module is refused by name: its weights belong to a name; and
        so is what C code keeps more of than its attributes (`random.Random`)."""
        if issubclass(type(value), (torch.Tensor, nn.Module)) or type(value) in _SHALLOW or not has_attributes(value):
            return False
        if id(value) in self._others or _has_state(value) or issubclass(type(value), _FUNCTIONS):
            return True
        return not issubclass(type(value), NO_STATE) and is_its_attributes(value) and copy_state(value) is value

    def taken_apart(self, value: Any, depth: int = 0) -> Any:
        """`value` with the state of each object in its place."""
        kind = type(value)
        if depth < _DEEPEST and kind in _SHALLOW:
            if kind is dict:
                return {key: self.taken_apart(item, depth + 1) for key, item in value.items()}
            return kind(self.taken_apart(item, depth + 1) for item in value)
        if depth >= _DEEPEST or not self._is_object(value):
            return value
        if id(value) in self._others or issubclass(type(value), _OF_OTHERS):
            return {_STATE: None}
        if _has_state(value):
            return {_STATE: self.taken_apart(value.state_dict(), depth + 1)}
        own = {key: item for key, item in attributes_of(value).items() if not issubclass(type(item), NO_STATE)}
        return {_ATTRIBUTES: self.taken_apart(own, depth + 1)}

    def stand_in(self, saved: Any) -> bool:
        """Whether the state of an object is in `saved`: the program may have had one at the save, and none now."""
        items = saved.values() if type(saved) is dict else saved if type(saved) in _SHALLOW else ()
        return _stands_for_object(saved) or any(self.stand_in(item) for item in items if type(item) not in _PLAIN)

    def put_together(self, saved: Any, live: Any, place: str = "") -> Any:
        """`saved` with the objects of the program in it, as `live` has them, after their states were loaded.

        Raises MismatchError where the program has none at a place.
        """
        kind = type(saved)
        if _stands_for_object(saved):
            ((key, state),) = saved.items()
            if not has_attributes(live):
                raise MismatchError(f"the checkpoint does not fit {self._name}: {place[1:]} is not an object here")
            if key == _ATTRIBUTES:
                for name, value in self.put_together(state, attributes_of(live), place).items():
                    object.__setattr__(live, name, value)
            elif state is not None:
                live.load_state_dict(self.put_together(state, live.state_dict(), place))
            return live
        if kind is dict:
            have = live if isinstance(live, dict) else {}
            return {key: self.put_together(item, have.get(key), f"{place}.{key}") for key, item in saved.items()}
        if kind in (list, tuple):
            there = [*live] if type(live) is kind and len(live) == len(saved) else [None] * len(saved)
            pairs = enumerate(zip(saved, there, strict=True))
            return kind(self.put_together(item, each, f"{place}.{number}") for number, (item, each) in pairs)
        return saved


def _stands_for_object(saved: Any) -> bool:
    return type(saved) is dict and len(saved) == 1 and (_STATE in saved or _ATTRIBUTES in saved)


def _has_state(value: Any) -> bool:
    return defines(value, "state_dict", "load_state_dict")


class PlainComponent:
    """The whole state is copied at every boundary."""

    is_stream = False
    """A random generator: an evaluation must leave it as it was, and code before the first batch may draw from it."""
    is_heavy = False
    """It is not copied at every boundary."""

    is_on_device = False
    """Its copy is on a device, and to read it waits for that; every replica has the same."""

    def __init__(self, name: str, target: Any, stateful: Stateful | None = None, others: Collection[int] = ()) -> None:
        """`stateful`: has the two methods, if `target` has not. others: ids of what is kept by itself."""
        self.name = name
        self.target = target
        self._stateful: Stateful = stateful or target
        self._gives_copies = isinstance(target, (GoesThroughData, InParts)) and target.gives_copies
        self._nested = _NestedStates(name, others)
        self._has_objects = stateful is None and self._nested.are_in(target.state_dict())
        """Whether its state has objects in it."""
        self._is_scheduler = stateful is None and not self._has_objects and _is_stock_scheduler(target)
        self._source = target if isinstance(target, GoesThroughData) and not self._has_objects else None
        self._names: Mapping[int, str] = {}
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._has_parameter_keys = False
        self.make: Callable[[], Any] = self.look
        """Makes `copied`, which is all that `copy` does, but for classes that have their own."""
        if self._is_scheduler:
            # What its state_dict would give, which makes a dict in a loop of Python's.
            self.make = partial(copy_items, vars(target), but="optimizer")
        elif self._source is not None:
            self.make = self._source.noted
        self.copied: Any = None
        self.copy()

    def set_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """`parameters`: of the job's modules, by place. They may be keys in the state (of an optimizer around another
        one), and stand there by name."""
        self._parameters, self._names = parameters, {id(p): name for name, p in parameters.items()}

    def check(self) -> None:
        """Look once at what the state has. Raises UnsupportedStateError for an object that would not come back."""
        if not self.is_heavy and not self._gives_copies:
            state = self.live_state()
            check_objects(state, self.name, self._parameters)
            self._has_parameter_keys = named_keys(state, self._names) is not state

    def copy(self) -> None:
        self.copied = self.make()

    def live_state(self) -> Any:
        """What its `state_dict` gives, the objects in it taken apart."""
        state = self._stateful.state_dict()
        return self._nested.taken_apart(state) if self._has_objects else state

    def look(self) -> Any:
        """The state as it is now; None for a heavy one."""
        state = self.live_state()
        return state if self._gives_copies else copy_state(state)

    def _made_of(self, noted: Any) -> Any:
        if self._source is None:
            return noted
        state = self._source.made_of(noted)
        return state if self._gives_copies else copy_state(state)

    @property
    def seen(self) -> Any:
        """The boundary's copy; None for a heavy one."""
        return self._made_of(self.copied)

    def state(self) -> Any:
        state = self.copied
        if self._source is not None:  # as `_made_of`
            state = self._source.made_of(state)
            state = state if self._gives_copies else copy_state(state)
        return named_keys(state, self._names) if self._has_parameter_keys else state

    def kept(self) -> Any:
        return self.copied

    def go_back(self, kept: Any) -> None:
        self.copied = kept

    def load(self, state: Any) -> None:
        self.put_back(state)
        self.copy()
        if changed := list(other_types(state, self.seen)):
            logger.warning(
                "%s: its load_state_dict() gives other types than were saved: %s. The resumed run may differ",
                self.name,
                listed(changed, 3),
            )

    def put_back(self, state: Any) -> None:
        """Make the target as `state` says, which `look` or `state` has given."""
        with exact_loads(optimizers_inside(self.target)):
            own = originals(copy_tree(state), self._parameters)
            if self._has_objects or self._nested.stand_in(own):
                own = self._nested.put_together(own, self._stateful.state_dict())
            self._stateful.load_state_dict(own)


class WrapperComponent(PlainComponent):
    """An optimizer around others, by its own `state_dict` and `load_state_dict`. As of an optimizer, its tensors are
    the live ones, which only a step changes; numbers and single values are copied at each boundary."""

    is_on_device = True  # not worth a copy: every replica has the same

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Itself, if it is one of torch's, and those inside."""
        own = [self.target] if isinstance(self.target, torch.optim.Optimizer) else []
        return [*own, *optimizers_inside(self.target)]

    def look(self) -> Any:
        return map_tensors(map_containers(self.live_state()), lambda t: t if t.dim() else t.detach().clone())


def _is_stock_scheduler(target: Any) -> bool:
    """Whether its state is all its attributes but the optimizer, as torch's schedulers have it."""
    if not isinstance(target, LRScheduler) or type(target).state_dict is not LRScheduler.state_dict:
        return False
    variables, state = vars(target), target.state_dict()
    expected = [key for key in variables if key != "optimizer"]
    return list(state) == expected and all(state[key] is variables[key] for key in expected)


def is_plain_scaler(target: object) -> bool:
    """Whether it is torch's gradient scaler, with torch's own state."""
    return isinstance(target, torch.amp.GradScaler) and (
        type(target).state_dict is torch.amp.GradScaler.state_dict
        and isinstance(getattr(target, "_scale", None), torch.Tensor | None)
        and isinstance(getattr(target, "_growth_tracker", None), torch.Tensor | None)
    )


class ScalerComponent(PlainComponent):
    """The component of torch's `GradScaler`."""

    def copy(self) -> None:
        self.copied = self.look()
        # Every replica's is the same, as the gradients are.
        self.is_on_device = any(isinstance(v, torch.Tensor) and not v.is_cpu for v in self.copied.values())

    @torch.no_grad()
    def look(self) -> dict[str, Any]:
        """As its `state_dict`, with copies of the tensors in place of what is in them."""
        scaler = self.target
        scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
        if scale is None or tracker is None or not scaler.is_enabled():
            return dict(scaler.state_dict())  # nothing is on a device, or not yet
        return {
            "scale": scale.detach().clone(),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": tracker.detach().clone(),
        }

    def state(self) -> dict[str, Any]:
        return {key: v.cpu().item() if isinstance(v, torch.Tensor) else v for key, v in self.copied.items()}


class AdaptedComponent(PlainComponent):
    """An object without ``state_dict``, by its adapter. One that takes too long to copy is read when it is saved."""

    def __init__(self, name: str, target: Any, adapter: Stateful) -> None:
        self.is_stream = isinstance(target, GENERATORS)
        self._adapter = adapter
        self.at_boundary = True
        """The program has not gone on since the last boundary; for heavy ones."""
        self.may_be_last = False
        """The coming boundary may be the last of the training: copy also where it takes long."""
        self._num_long, self._ended = 0, time.perf_counter()
        super().__init__(name, target, adapter)

    def copy(self) -> None:
        if self.is_heavy and not self.may_be_last:
            self.copied, self.at_boundary = None, True
            return
        began = time.perf_counter()
        adapter = self._adapter
        self.copied = (
            adapter.boundary_state(closely=False) if isinstance(adapter, TensorAdapter) else self._adapter.state_dict()
        )
        ended = time.perf_counter()
        if not self.is_heavy:
            took, step = ended - began, ended - self._ended
            self._num_long = self._num_long + 1 if took > max(_LONG_S, _LONG_SHARE * step) else 0
            self._ended = ended
            if self._num_long >= _OFTEN:
                self._become_heavy(took, step)

    def _become_heavy(self, took: float, step: float) -> None:
        self.is_heavy = True
        logger.warning(
            "%s takes %.1f ms to copy, %.0f %% of a step: from here on it is read only when a file is written at a "
            "boundary. After an exception or a hang in mid-step there is no save of the last boundary, an older one is "
            "used; periodic saves or snapshots make that recent",
            self.name,
            1e3 * took,
            100 * took / step,
        )

    def go_back(self, kept: Any) -> None:
        super().go_back(kept)
        self.at_boundary = False  # a heavy one cannot be read as it was then

    def recheck(self) -> None:
        """Look more closely than `copy` did. The program has not gone on since."""
        if isinstance(self._adapter, TensorAdapter):
            self.copied = self._adapter.boundary_state(closely=True)

    def check(self) -> None:
        """Its adapter has said at the start what it cannot keep."""

    def put_back(self, state: Any) -> None:
        self._stateful.load_state_dict(copy_tree(state))

    def look(self) -> Any:
        return None if self.is_heavy else self._adapter.state_dict()

    @property
    def seen(self) -> Any:
        return None if self.is_heavy else self.copied

    def state(self) -> Any:
        if self.copied is None:
            if not self.at_boundary:
                raise UnsupportedStateError(
                    self.name,
                    "it takes too long to be copied at every boundary, and the program has gone on since the last one",
                )
            self.copied = self._adapter.state_dict()
        return self.copied
