"""Digests of what a training step has seen and made: tensors, batches, states of objects, random streams."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from mindx_elastic.core.looks import attributes_of, items_of
from mindx_elastic.core.mersenne import NumpyState, PythonState
from mindx_elastic.core.tensor_memory import memory_of

__all__ = ["digest", "leaves", "stream_digest"]

_MOST_TEXT = 80
_PLAIN: tuple[Any, ...] = (type(None), bool, int, float, complex, str)
_DEPTH = 20


def digest(value: Any) -> str:
    """16 hexadecimal digits for anything; equal bits, types and shapes give equal ones.

    Small values are shown as they are. Of objects that hold no tensors, numbers or texts only the type counts.
    """
    if issubclass(type(value), torch.Tensor):
        return _of_tensor(value)
    if issubclass(type(value), np.ndarray):
        head = f"{value.dtype} {value.shape}"
        body = value.tobytes() if value.dtype != object else repr(value.tolist()).encode()
        return _hash(head, body)
    if issubclass(type(value), np.generic):
        value = value.item()
    if (base := next((each for each in _PLAIN if issubclass(type(value), each)), None)) is not None:
        text = base.__repr__(value)  # a class made from it may have its own `__repr__`
        return text if len(text) <= _MOST_TEXT else _hash("text", text.encode())
    if issubclass(type(value), (bytes, bytearray, memoryview)):
        return _hash("bytes", bytes(value))
    if issubclass(type(value), (set, frozenset)):
        return _hash("set", json.dumps(sorted(digest(item) for _, item in items_of(value) or ())).encode())
    if _children(value) is not None:
        parts = [[name, part] for name, part in leaves(value)]
        return _hash(type(value).__name__, json.dumps(parts).encode())
    return type(value).__qualname__


def leaves(value: Any, name: str = "", *, depth: int = _DEPTH, most: int | None = None) -> Iterator[tuple[str, str]]:
    """The digest of each tensor, number and text in nested containers, by its place: ``param_groups.0.lr``. `most`: a
    container of more items (a replay memory, which shifts at each step) gets one digest."""
    inside = _children(value) if depth else None
    if inside is None or (most is not None and len(inside) > most):
        yield name, digest(value)
        return
    if not inside:
        yield name, "empty"
    for key, item in inside.items():
        yield from leaves(item, f"{name}.{key}" if name else str(key), depth=depth - 1, most=most)


def stream_digest(state: Any) -> int:
    """The digest of one random stream as `capture_rng` gives it; never 0."""
    kind = type(state)
    if kind is torch.Tensor:
        content: Any = memory_of(state.cpu())
    elif kind is PythonState or kind is NumpyState:
        content = state.to_bytes()
    else:
        content = digest(state).encode()
    return xxhash.xxh3_64_intdigest(content) or 1


def _children(value: Any) -> dict[str, Any] | None:
    """What a container holds; None: it is none."""
    kind = type(value)
    if issubclass(type(value), (dict, list, tuple, deque)):
        items, names = items_of(value) or (), getattr(kind, "_fields", None)
        return {str(key if names is None else names[key]): item for key, item in items}
    if issubclass(type(value), Mapping):
        return {str(key): item for key, item in value.items()}
    if is_dataclass(kind):
        own = attributes_of(value)
        return {field.name: own.get(field.name) for field in fields(kind)}
    if kind.__name__ in ("BatchEncoding", "BatchFeature", "PackedSequence", "Data", "Batch"):
        return attributes_of(value)
    return None


def _of_tensor(tensor: torch.Tensor) -> str:
    with torch.no_grad():
        local = tensor.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
        head = f"{local.dtype} {tuple(local.shape)}"
        if local.device.type == "meta":
            return head
        try:
            if local.dim() == 0:
                return f"{local.dtype} {digest(local.item())}"
            if local.layout is not torch.strided:
                local = local.to_dense()
            flat = local.cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
            return _hash(head, memory_of(flat))
        except (RuntimeError, TypeError, NotImplementedError):  # a tensor subclass or dtype without plain bytes
            return _hash(head, repr(local.tolist() if local.numel() < 1 << 16 else local).encode())


def _hash(head: str, body: Any) -> str:
    hasher = xxhash.xxh3_64(head.encode())
    hasher.update(body)
    return hasher.hexdigest()
