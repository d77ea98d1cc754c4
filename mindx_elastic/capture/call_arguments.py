"""Describes the arguments of a call as JSON, and makes arguments from such a description.

A description has what a compiler looks at: types, plain values, and of tensors sizes, strides, type, device, whether a
gradient is wanted, shared memory, and the marks of `torch._dynamo.mark_dynamic`. Large tensors come back with other
values: numbers between 0 and 1, or zeros where they are whole numbers (valid as an index). Small ones that say how the
program runs (lengths, masks, labels) come back as they were.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import torch

from mindx_elastic.core.looks import is_computed
from mindx_elastic.core.tensor_memory import memory_of

__all__ = ["UnknownArgumentError", "describe_arguments", "make_arguments", "sizes_in"]

_MOST_VALUES = 1024
"""Up to this many whole numbers or truth values are kept."""
_FEW_VALUES = 16  # of floating-point numbers
_PLAIN = (type(None), bool, int, float, str)
_MARKS = {"_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_static_indices"}
_EMPTY_MARKS = {"_dynamo_unbacked_indices", "_dynamo_hint_overrides", "_specialize_on", "_dynamo_unbacked_bounds"}


class UnknownArgumentError(ValueError):
    """An argument is of a type that cannot be made again."""


def sizes_in(value: Any) -> list[list[int]]:
    """The sizes of all tensors in an argument, in lists, tuples and dicts."""
    return [list(tensor.shape) for tensor in _tensors_in(value)]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)


# --- describing ---


def describe_arguments(arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The description. Raises UnknownArgumentError."""
    tensors: dict[int, torch.Tensor] = {}
    trees = [_describe(list(arguments), tensors), _describe(named, tensors)]
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    numbers = {key: number for number, key in enumerate(storages)}
    begins = {key: min(tensor.storage_offset() for tensor in group) for key, group in storages.items()}
    described = []
    for tensor in tensors.values():
        storage = tensor.untyped_storage()._cdata
        if len({each.dtype for each in storages[storage]}) > 1:
            raise UnknownArgumentError("tensors of several types in the same memory")
        described.append(
            {**_describe_tensor(tensor), "memory": numbers[storage], "at": tensor.storage_offset() - begins[storage]}
        )
    return {"positional": trees[0], "named": trees[1], "tensors": described}


def _describe(value: Any, tensors: dict[int, torch.Tensor]) -> list[Any]:
    kind = type(value)
    if kind in _PLAIN:
        return ["plain", value]
    if kind in (torch.Tensor, torch.nn.Parameter):
        _check(value)
        tensors.setdefault(id(value), value)
        return ["tensor", list(tensors).index(id(value))]
    if kind in (list, tuple, torch.Size):
        return ["list" if kind is list else "tuple", [_describe(each, tensors) for each in value]]
    if kind is dict:
        return ["dict", [[_describe(key, tensors), _describe(each, tensors)] for key, each in value.items()]]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    raise UnknownArgumentError(f"{kind.__module__}.{kind.__qualname__}")


def _check(tensor: torch.Tensor) -> None:
    special = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta
    if special or tensor.is_conj() or tensor.is_neg():
        raise UnknownArgumentError(f"a tensor of layout {tensor.layout}, or conjugated, quantized or meta")


def _describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    marks = vars(tensor) if hasattr(tensor, "__dict__") else {}
    if not all(_is_empty(marks.get(name)) for name in _EMPTY_MARKS):
        raise UnknownArgumentError("a tensor with marks of mark_unbacked, or with hints for its sizes")
    described: dict[str, Any] = {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    if tensor.requires_grad:
        described["gradient"] = "inner" if is_computed(tensor) else "leaf"
    if any(marks.get(name) for name in _MARKS):
        described["marks"] = _describe_marks(marks)
    limit = _FEW_VALUES if tensor.is_floating_point() else _MOST_VALUES
    if tensor.numel() <= limit and not tensor.is_complex():
        values = tensor.detach().cpu().contiguous()
        described["values"] = base64.b64encode(memory_of(values)).decode()
    return described


def _is_empty(mark: Any) -> bool:
    return not any(mark.values()) if isinstance(mark, dict) else not mark


def _describe_marks(marks: dict[str, Any]) -> dict[str, Any]:
    ranges = {each.dim: [each.min, each.max] for each in marks.get("_dynamo_dynamic_range", ())}
    return {
        "dynamic": [[place, *ranges.get(place, [None, None])] for place in sorted(marks.get(_mark("dynamic"), ()))],
        "maybe": sorted(marks.get(_mark("weak_dynamic"), ())),
        "static": sorted(marks.get(_mark("static"), ())),
    }


def _mark(kind: str) -> str:
    return f"_dynamo_{kind}_indices"


# --- making ---


def make_arguments(described: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """New arguments for a call. Draws no random number of the program's. Raises KeyError, ValueError and RuntimeError
    for a description that does not fit this machine."""
    memories: dict[int, torch.Tensor] = {}
    for number in dict.fromkeys(each["memory"] for each in described["tensors"]):
        group = [each for each in described["tensors"] if each["memory"] == number]
        memories[number] = _make_memory(max(map(_end_of, group)), group[0])
    tensors = [_make_tensor(each, memories[each["memory"]]) for each in described["tensors"]]
    positional = _make(described["positional"], tensors)
    return tuple(positional), _make(described["named"], tensors)


def _end_of(described: dict[str, Any]) -> int:
    if 0 in described["shape"]:
        return int(described["at"])
    steps = zip(described["shape"], described["stride"], strict=True)
    return int(described["at"]) + 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)


def _make_memory(size: int, described: dict[str, Any]) -> torch.Tensor:
    dtype, device = getattr(torch, described["dtype"]), torch.device(described["device"])
    if not dtype.is_floating_point:
        return torch.zeros(size, dtype=dtype, device=device)
    numbers = torch.rand(size, generator=torch.Generator().manual_seed(0), device="cpu") * 0.8 + 0.1
    return numbers.to(device=device, dtype=dtype)


@torch.inference_mode(False)
def _make_tensor(described: dict[str, Any], memory: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layout = described["shape"], described["stride"], described["at"]
        if described.get("values"):
            values = torch.frombuffer(bytearray(base64.b64decode(described["values"])), dtype=memory.dtype)
            numbers = torch.arange(memory.numel(), device="cpu")
            places = numbers.as_strided(*layout).reshape(-1)  # elements may share one place
            memory[places.to(memory.device)] = values.to(memory.device)
        tensor = memory.as_strided(*layout).data
    if described.get("gradient"):
        tensor.requires_grad_()
        if described["gradient"] == "inner":
            with torch.enable_grad():
                tensor = tensor.clone()
    if marks := described.get("marks"):
        from torch import _dynamo

        for dim, low, high in marks["dynamic"]:
            _dynamo.mark_dynamic(tensor, dim, min=low, max=high)
        for dim in marks["maybe"]:
            _dynamo.maybe_mark_dynamic(tensor, dim)
        for dim in marks["static"]:
            _dynamo.mark_static(tensor, dim)
    return tensor


def _make(described: list[Any], tensors: list[torch.Tensor]) -> Any:
    kind, content = described
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_make(each, tensors) for each in content)
    if kind == "dict":
        return {_make(key, tensors): _make(value, tensors) for key, value in content}
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    return content
