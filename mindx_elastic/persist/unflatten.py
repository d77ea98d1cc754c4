"""Builds nested Python state from a JSON tree plus named tensors; `flatten` describes the grammar.

A tree is interpreted, never executed: each tag builds one kind of value, and anything unexpected is an error. A digest
covers the trees of our own files, so a malformed one is a bug or an attack; both must end in a named error.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mindx_elastic.errors import CorruptCheckpointError, StrPath
from mindx_elastic.persist.dtypes import from_stored, parse_dtype
from mindx_elastic.persist.flatten import FACTORIES, MAX_DEPTH, NUMPY_DTYPE, Tree, is_dense

__all__ = ["unflatten"]


def unflatten(tree: Tree, tensors: Mapping[str, torch.Tensor], *, path: StrPath | None = None) -> Any:
    """Rebuild a state; the exact inverse of `flatten`, types included. Tied tensors are one object again.

    The result uses the given tensors and copies only those with unusual strides. `path` is for error messages. Raises
    CorruptCheckpointError for a malformed tree or a missing tensor.
    """
    decoder = _Decoder(tensors)
    try:
        return decoder.decode(tree, 0)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error) as error:
        place = "malformed state tree" if path is None else f"{path}: malformed state tree"
        raise CorruptCheckpointError(f"{place}: {type(error).__name__}: {error}", path=path) from error


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[tuple[object, ...], torch.Tensor] = {}

    def decode(self, node: Tree, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, list):
            return [self.decode(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        if len(node) == 1 and "$tensor" in node:  # most nodes; as _tensor(), with nothing to be made of it
            return self._tensors[node["$tensor"]]
        tag = next((key for key in node if key.startswith("$")), None)
        if tag is None:
            return self._dict(node, depth)
        if tag in _PLAIN:
            return _PLAIN[tag](node[tag])
        if tag in _CONTAINERS:
            return self._container(tag, node, depth)
        if tag == "$tensor":
            return self._tensor(node)
        if tag == "$ndarray":
            return self._ndarray(node)
        if tag == "$blob":
            return self._tensors[node[tag]].numpy().tobytes()
        raise ValueError(f"unknown tag {tag!r}")

    def _dict(self, node: dict[str, Tree], depth: int) -> dict[str, Any]:
        tensors, decode = self._tensors, self.decode
        return {  # without a call for what most items are
            key: tensors[item["$tensor"]]
            if type(item) is dict and len(item) == 1 and "$tensor" in item
            else decode(item, depth + 1)
            for key, item in node.items()
        }

    def _container(self, tag: str, node: dict[str, Tree], depth: int) -> Any:
        if tag not in ("$map", "$odict", "$counter", "$default"):
            items = self.decode(node[tag], depth)
            return deque(items, node["maxlen"]) if tag == "$deque" else _CONTAINERS[tag](items)
        pairs = [(self.decode(key, depth + 1), self.decode(item, depth + 1)) for key, item in node[tag]]
        result = _CONTAINERS[tag](pairs)
        if len(result) != len(pairs):
            raise ValueError(f"a key appears twice in {tag}")
        if tag == "$default":
            return defaultdict(FACTORIES[node["factory"]], result)
        if "metadata" in node:
            result._metadata = self.decode(node["metadata"], depth + 1)
        return result

    def _tensor(self, node: dict[str, Tree]) -> torch.Tensor:
        strides = tuple(node["strides"]) if "strides" in node else None
        grad, parameter = node.get("grad", False), node.get("parameter", False)
        base_key = (node["$tensor"], node.get("dtype"), strides)
        key = (*base_key, grad, parameter)
        if key not in self._made:
            if base_key not in self._made:
                self._made[base_key] = self._base(node["$tensor"], node.get("dtype"), strides)
            tensor = self._made[base_key]
            if parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=grad)
            elif grad:
                tensor = tensor.detach().requires_grad_()
            self._made[key] = tensor
        return self._made[key]

    def _base(self, name: str, dtype: str | None, strides: tuple[int, ...] | None) -> torch.Tensor:
        stored = self._tensors[name]
        if strides is not None and stored.stride() != strides:
            if not is_dense(stored.shape, strides):
                raise ValueError(f"impossible strides {strides} for shape {tuple(stored.shape)}")
            stored = torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device="cpu").copy_(stored)
        return stored if dtype is None else from_stored(stored, parse_dtype(dtype))

    def _ndarray(self, node: dict[str, Tree]) -> np.ndarray[Any, Any]:
        dtype = _numpy_dtype(node["dtype"])
        stored = self._tensors[node["$ndarray"]]
        array: np.ndarray[Any, Any]
        if "shape" in node:
            array = stored.numpy().view(dtype).reshape(node["shape"])
        elif dtype.kind == "c":
            array = torch.view_as_complex(stored).numpy()
        else:
            array = stored.numpy()
        if array.dtype != dtype:
            raise ValueError(f"array of type {array.dtype} where {dtype} was expected")
        return np.asfortranarray(array) if node.get("order") == "F" else array


def _numpy_dtype(text: str) -> np.dtype[Any]:
    if not NUMPY_DTYPE.fullmatch(text):
        raise ValueError(f"numpy type {text!r} is not allowed")
    return np.dtype(text)


def _decode_scalar(value: list[str]) -> np.generic:
    dtype, data = _numpy_dtype(value[0]), bytes.fromhex(value[1])
    if dtype.itemsize == 0:  # an empty numpy string
        return dtype.type()  # type: ignore[no-any-return]
    (scalar,) = np.frombuffer(data, dtype)
    return scalar  # type: ignore[no-any-return]


def _decode_int(text: str) -> int:
    return int(text, 16)  # hex: decimal text of thousands of digits is refused by Python


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "$int": _decode_int,
    "$float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "$complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$scalar": _decode_scalar,
    "$size": torch.Size,
    "$dtype": parse_dtype,
    "$device": torch.device,
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "$map": dict,
    "$odict": OrderedDict,
    "$default": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$deque": deque,
}
