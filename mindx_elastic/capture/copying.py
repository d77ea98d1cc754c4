"""Copies of nested state: of the small state at every boundary, and of everything into host memory for a save."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from mindx_elastic.capture.nested import ATOMS, leaves_of, rebuilt
from mindx_elastic.capture.values import stand_in
from mindx_elastic.core.looks import are_equal

__all__ = [
    "copy_items",
    "copy_state",
    "copy_tree",
    "map_containers",
    "map_tensors",
    "same_tree",
    "tensors_in",
    "to_host",
]

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_SEQUENCES = frozenset((list, tuple))
_WITH_COPY = frozenset((set, Counter, bytearray, np.ndarray))


def _as_it_is(value: Any) -> Any:
    return value.detach().clone() if issubclass(type(value), torch.Tensor) else value


def _stand_in(value: Any) -> Any:
    known = stand_in(value, copy_state)
    return _as_it_is(value) if known is value else known


def copy_state(value: Any) -> Any:
    """As `copy_tree`, with a stand-in for what a checkpoint has no word for: see `capture.values`."""
    return copy_tree(value, _stand_in)


def copy_tree(value: Any, of_others: Callable[[Any], Any] = _as_it_is) -> Any:
    """A copy that shares nothing mutable with `value`: containers are rebuilt, tensors and arrays cloned.

    Unlike `copy.deepcopy` it keeps no memo (ten times faster on scheduler state) and takes no objects apart: what it
    does not know is what `of_others` makes of it, by default the same object, which the checkpoint format refuses by
    name at the first boundary.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    # Most of what a scheduler or a loader has are plain values: no call for each of them.
    if kind is dict:
        return {key: item if type(item) in ATOMS else copy_tree(item, of_others) for key, item in value.items()}
    if kind is list:
        for item in value:
            if type(item) not in ATOMS:
                return [copy_tree(item, of_others) for item in value]
        return value.copy()
    if kind is tuple:
        for item in value:
            if type(item) not in ATOMS:
                return tuple([copy_tree(item, of_others) for item in value])
        return value
    if kind is OrderedDict:
        copied = kind((key, copy_tree(item, of_others)) for key, item in value.items())
        if (metadata := vars(value).get("_metadata")) is not None:  # a TensorDict keeps its batch size there
            copied._metadata = copy_tree(metadata, of_others)  # type: ignore[attr-defined]
        return copied
    if kind in _TENSORS:
        return value.detach().clone()
    if kind is defaultdict:
        return defaultdict(value.default_factory, ((key, copy_tree(item, of_others)) for key, item in value.items()))
    if kind is deque:
        return deque((copy_tree(item, of_others) for item in value), value.maxlen)
    if kind in _WITH_COPY:
        return value.copy()
    return of_others(value)


def copy_items(value: dict[str, Any], *, but: str) -> dict[str, Any]:
    """A copy of `value` as `copy_state` makes it, without the item named `but`, which is no atom."""
    copied = {**value}
    for key, item in value.items():  # at each boundary: without a call for what most are
        if type(item) in ATOMS:
            continue
        if key == but:
            del copied[key]
        elif type(item) in _SEQUENCES and ATOMS.issuperset(map(type, item)):  # betas; the rates of a scheduler
            copied[key] = item[:]
        else:
            copied[key] = copy_tree(item, _stand_in)
    return copied


def same_tree(one: Any, other: Any) -> bool:
    """Whether two nested states are the same, with the same types throughout; nan is the same as nan."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _same_bits(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return False
        pairs: Iterable[tuple[Any, Any]] = [(item, other[key]) for key, item in one.items()]
    elif isinstance(one, (list, tuple, deque)):
        if len(one) != len(other):
            return False
        pairs = zip(one, other, strict=True)
    else:
        return are_equal(one, other) or (type(one) is float and one != one and other != other)
    for mine, theirs in pairs:  # without a call for what most are
        if mine is theirs or (type(mine) in ATOMS and type(mine) is type(theirs) and mine == theirs):
            continue
        if not same_tree(mine, theirs):
            return False
    return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    if torch.equal(one, other) or not (one.is_floating_point() or one.is_complex()) or one.layout is not torch.strided:
        return bool(torch.equal(one, other))
    return bool(torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)))


def tensors_in(value: Any, place: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested containers, each with its place: ``{place}.exp_avg``."""
    return [(where, leaf) for where, leaf in leaves_of(value, place) if isinstance(leaf, torch.Tensor)]


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor replaced by ``change(tensor)``; tied tensors stay tied.

    The same memory seen the same way is changed once, for `state_dict()` gives a new object for each name of a tied
    weight.
    """
    done: dict[object, torch.Tensor] = {}

    def change_once(leaf: Any) -> Any:
        if not issubclass(type(leaf), torch.Tensor):
            return leaf
        key = _memory(leaf)
        if key not in done:
            done[key] = change(leaf)
        return done[key]

    return rebuilt(value, change_once)


def map_containers(value: Any) -> Any:
    """`value` in new containers, as `map_tensors` makes them, with stand-ins for what a checkpoint has no word
    for; everything else is the same object."""
    kind = type(value)
    if kind in ATOMS or kind in _TENSORS:
        return value
    if isinstance(value, dict):
        copied = value.copy()
        for key, item in value.items():
            if type(item) not in ATOMS and type(item) is not torch.Tensor:
                copied[key] = map_containers(item)
        return copied
    if kind in (list, tuple):
        if ATOMS.issuperset(map(type, value)):
            return kind(value)
        return kind([map_containers(one) for one in value])
    if kind is deque:
        return deque([map_containers(one) for one in value], value.maxlen)
    return stand_in(value, map_containers)


def _memory(tensor: torch.Tensor) -> object:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return id(tensor)  # a DTensor has no own memory, nor has a sparse tensor
    if tensor.is_meta or tensor.is_quantized or tensor.numel() == 0:
        return id(tensor)
    view = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)


def to_host(state: Any) -> Any:
    """A copy of `state` in host memory, for a caller that goes on training while it is written.

    What is on a CUDA device is copied into pinned memory, on this thread's current stream. Returns once all copies are
    complete.
    """
    devices: set[torch.device] = set()

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor.detach().clone()
        if tensor.device.type != "cuda":
            return tensor.detach().to("cpu")
        devices.add(tensor.device)
        host = torch.empty_like(tensor.detach(), device="cpu", pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)

    moved = map_tensors(state, move)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return moved
