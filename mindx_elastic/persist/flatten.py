"""Turns nested Python state into a JSON tree plus named tensors (`flatten`), and back (`unflatten`).

The tree makes a checkpoint loadable without pickle: it is plain data that is interpreted, never executed. It looks like
the state it describes; a value that JSON cannot express is an object with one key that starts with ``$``::

    {"model": {"conv.weight": {"$tensor": "model.conv.weight"}}, "betas": {"$tuple": [0.9, 0.999]}, "epoch": 3}

    $tensor name [dtype, strides, grad, parameter]      $ndarray name, dtype [shape, order]    $scalar [dtype, hex]
    $map [[key, value], ...]  dicts whose keys are not all plain strings   $odict, $counter    the same, other types
    $default [[key, value], ...], factory "list"      a defaultdict
    $tuple $set $frozenset [...]      $deque [...], maxlen    $bytes base64    $blob name (bytes of more than 1 KiB)
    $int hex (beyond 64 bits)         $float hex (nan, inf)   $complex hex     $size [...]    $dtype   $device

Types are matched exactly: a subclass (an enum, a namedtuple, a DTensor) would silently come back as its base, so it
is refused by name. The one exception is a `defaultdict` with a factory that is not in `_FACTORIES`, which comes back as
a `dict`: such a factory is code.

A tree is interpreted, never executed: each tag builds one kind of value, and anything unexpected is an error. A digest
covers the trees of our own files, so a malformed one is a bug or an attack; both must end in a named error.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from mindx_elastic.errors import CorruptCheckpointError, StrPath, UnsupportedStateError
from mindx_elastic.persist.dtypes import NAMES, from_stored, parse_dtype, to_stored

__all__ = ["MAX_DEPTH", "MAX_DIMS", "Tree", "flatten", "tensor_names", "unflatten"]

Tree = Any  # JSON: None, bool, int, float, str, list, dict

MAX_DEPTH = 100
"""Deepest nesting; far below Python's recursion limit. A state that contains itself exceeds it."""
MAX_DIMS = 64
"""Most dimensions of a tensor; numpy's limit."""
_FACTORIES: dict[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, list, dict, set)},
}
"""The factories of a `defaultdict` that are kept, by name."""
_AS_THEY_ARE = frozenset((str, bool, type(None)))
_FIRST = itemgetter(slice(1))
_INLINE_BYTES = 1024  # longer byte strings are stored next to the tensors: the header has an upper bound
_NAME_PART = 200
_REMEDY = "convert it to a plain dense tensor before it enters the state"
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcmMSU]\d+(\[\w+\])?")  # no objects, no structures


def flatten(state: object) -> tuple[Tree, dict[str, torch.Tensor]]:
    """Split `state` into a JSON tree and the tensors that it refers to by name.

    The tensors are those of the state, or views of their memory wherever that is possible (see `dtypes.to_stored`);
    nothing big is copied. Tensors with the same storage, offset, shape, strides and type appear once. Names are
    readable paths such as ``optimizer.state.0.exp_avg``.

    Raises UnsupportedStateError, which names the place, for anything that would not come back as it was: sparse,
    quantized, nested and meta tensors, tensor subclasses, arbitrary objects.
    """
    encoder = _Encoder()
    return encoder.encode(state, "", 0), encoder.tensors


def tensor_names(tree: Tree) -> list[str]:
    """Names of the tensors that a tree refers to, each once. A stack instead of recursion: a file decides how deep it
    is."""
    names: dict[str, None] = {}
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            names |= {node[tag]: None for tag in ("$tensor", "$ndarray", "$blob") if isinstance(node.get(tag), str)}
            node = list(node.values())
        if isinstance(node, list):
            stack.extend(reversed(node))
    return list(names)


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        # Most tensors are alone at their address, so that an identity is worked out for few of them.
        self._first: dict[int, torch.Tensor] = {}
        self._first_name: dict[int, str] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._in_key = False

    def encode(self, value: Any, where: str, depth: int) -> Tree:
        kind = type(value)
        if kind in (str, bool) or value is None:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if depth >= MAX_DEPTH:
            raise UnsupportedStateError(where, f"nested deeper than {MAX_DEPTH} levels, or it contains itself")
        if isinstance(value, np.generic):
            return self._scalar(value, where)
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise UnsupportedStateError(where or "state", _why_unsupported(value))
        return handler(self, value, where, depth)

    def _items(self, values: Iterable[object], where: str, depth: int) -> list[Tree]:
        inner = depth + 1
        handler_of = _HANDLERS.get if inner < MAX_DEPTH else _NO_HANDLERS.get
        return [  # without a call for what most items are
            item
            if type(item) in _AS_THEY_ARE or (type(item) is float and item - item == 0.0)  # finite
            else handler_of(type(item), _Encoder.encode)(self, item, f"{where}.{index}", inner)
            for index, item in enumerate(values)
        ]

    def _list(self, value: list[Any], where: str, depth: int) -> Tree:
        kinds = {*map(type, value)}
        if kinds == {int} and min(value) >= -(1 << 63) and max(value) < 1 << 63:
            return value.copy()  # an optimizer's list of parameters has thousands
        if kinds <= _AS_THEY_ARE:
            return value.copy()
        return self._items(value, where, depth)

    def _tuple(self, value: tuple[object, ...], where: str, depth: int) -> Tree:
        return {"$tuple": self._items(value, where, depth)}

    def _deque(self, value: deque[object], where: str, depth: int) -> Tree:
        return {"$deque": self._items(value, where, depth), "maxlen": value.maxlen}

    def _key(self, key: object, where: str, depth: int) -> Tree:
        outer, self._in_key = self._in_key, True
        try:
            return self.encode(key, where, depth)
        finally:
            self._in_key = outer

    def _dict(self, value: dict[object, object], where: str, depth: int) -> Tree:
        if {*map(type, value)} <= {str} and "$" not in {*map(_FIRST, value)}:  # type: ignore[arg-type]
            inner, prefix = depth + 1, f"{where}." if where else ""
            handler_of = _HANDLERS.get if inner < MAX_DEPTH else _NO_HANDLERS.get
            return {  # without a call for what most items are; the names as by _join()
                key: item
                if type(item) in _AS_THEY_ARE
                or (type(item) is int and -(1 << 63) <= item < 1 << 63)
                or (type(item) is float and item - item == 0.0)  # finite
                else handler_of(type(item), _Encoder.encode)(self, item, f"{prefix}{key[:_NAME_PART]}", inner)  # type: ignore[index]
                for key, item in value.items()
            }
        return {"$map": self._pairs(value, where, depth)}

    def _pairs(self, value: Mapping[Any, Any], where: str, depth: int) -> list[Tree]:
        pairs = []
        for key, item in value.items():
            is_small = type(key) is int and -(1 << 63) <= key < 1 << 63  # an optimizer's parameters, by thousands
            place = f"{where}.{key}" if is_small and where else _join(where, key)
            handler = _Encoder._dict if type(item) is dict and depth + 1 < MAX_DEPTH else _Encoder.encode
            node = key if is_small else self._key(key, place, depth + 1)
            pairs.append([node, handler(self, item, place, depth + 1)])
        return pairs

    def _ordered(self, value: OrderedDict[Any, Any], where: str, depth: int) -> Tree:
        node = {"$odict": self._pairs(value, where, depth)}
        # Module.state_dict() hangs its version numbers there, and load_state_dict() looks at them.
        metadata = vars(value).get("_metadata")
        if metadata is not None:
            node["metadata"] = self.encode(metadata, _join(where, "_metadata"), depth + 1)
        return node

    def _default(self, value: defaultdict[Any, Any], where: str, depth: int) -> Tree:
        factory = next((name for name, made_by in _FACTORIES.items() if made_by is value.default_factory), None)
        if factory is None:
            return self._dict(value, where, depth)
        return {"$default": self._pairs(value, where, depth), "factory": factory}

    def _counter(self, value: Counter[Any], where: str, depth: int) -> Tree:
        return {"$counter": self._pairs(value, where, depth)}

    def _set(self, value: set[object] | frozenset[object], where: str, depth: int) -> Tree:
        nodes = [self._key(item, where, depth + 1) for item in value]
        # Sorted: a set's own order changes with the hash seed, and equal states should give equal files.
        return {f"${type(value).__name__}": sorted(nodes, key=json.dumps)}

    def _complex(self, value: complex, where: str, depth: int) -> Tree:
        return {"$complex": struct.pack(">dd", value.real, value.imag).hex()}

    def _bytes(self, value: bytes, where: str, depth: int) -> Tree:
        if len(value) <= _INLINE_BYTES:
            return {"$bytes": base64.b64encode(value).decode()}
        return {"$blob": self._add(torch.frombuffer(bytearray(value), dtype=torch.uint8), where)}

    def _size(self, value: torch.Size, where: str, depth: int) -> Tree:
        return {"$size": list(value)}

    def _dtype(self, value: torch.dtype, where: str, depth: int) -> Tree:
        return {"$dtype": str(value).removeprefix("torch.")}

    def _device(self, value: torch.device, where: str, depth: int) -> Tree:
        return {"$device": str(value)}

    def _scalar(self, value: np.generic, where: str) -> Tree:
        _check_numpy(value.dtype, where)
        return {"$scalar": [value.dtype.str, value.tobytes().hex()]}

    def _ndarray(self, value: np.ndarray[Any, Any], where: str, depth: int) -> Tree:
        _check_numpy(value.dtype, where)
        plain = np.asarray(value, order="C")
        if not plain.flags.writeable or any(stride < 0 for stride in plain.strides):
            plain = plain.copy()  # torch warns about read-only arrays and refuses negative strides
        node: dict[str, Tree] = {"$ndarray": "", "dtype": value.dtype.str}
        if value.flags.f_contiguous and not value.flags.c_contiguous:
            node["order"] = "F"
        if value.dtype.kind in "biufc" and value.dtype.isnative and value.dtype != np.longdouble:
            try:
                stored = to_stored(torch.from_numpy(plain))
            except TypeError:  # a type that torch lacks, for example the long complex
                stored = None
        else:
            stored = None
        if stored is None:
            stored = torch.from_numpy(plain.reshape(-1).view(np.uint8))
            node["shape"] = list(value.shape)
        node["$ndarray"] = self._add(stored, where)
        return node

    def _tensor(self, value: torch.Tensor, where: str, depth: int) -> Tree:
        if self._in_key:
            raise UnsupportedStateError(where or "state", "a tensor cannot be a dictionary key or a member of a set")
        if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            raise UnsupportedStateError(where or "state", _tensor_problem(value))
        has_name = value.dtype in NAMES
        # The first is to_stored() for most tensors.
        plain, has_grad = has_name and not value.is_neg() and not value.is_conj(), value.requires_grad
        stored = to_stored(value) if not plain else value.detach() if has_grad else value
        address = value.data_ptr()  # of an empty tensor: null
        if address in self._first or not where.isascii() or where in self.tensors or where in ("", "__metadata__"):
            name = self._name(value, stored, where)
        else:  # the first tensor at this address, and nothing against its name
            self._first[address], self._first_name[address], self.tensors[where] = value, where, stored
            name = where
        node: dict[str, Tree] = {"$tensor": name}
        if not has_name:
            node["dtype"] = str(value.dtype).removeprefix("torch.")
        if stored.dim() > MAX_DIMS:
            raise UnsupportedStateError(where or "state", f"a tensor of {stored.dim()} dimensions; {MAX_DIMS} at most")
        if not stored.is_contiguous():  # the order of the axes: products with a transposed matrix have other last bits
            node["strides"] = list(torch.empty_like(stored, device="meta").stride())
        if has_grad:
            node["grad"] = True
        if type(value) is torch.nn.Parameter:  # isinstance() would cost as much as all of the above
            node["parameter"] = True
        return node

    def _name(self, value: torch.Tensor, stored: torch.Tensor, where: str) -> str:
        """A new name, or that of the same view of the same memory."""
        address = value.data_ptr()  # of an empty tensor: null
        first = self._first.get(address)
        if first is None:
            self._first[address] = value
            name = self._first_name[address] = self._add(stored, where)
            return name
        self._names.setdefault(_identity(first), self._first_name[address])
        key = _identity(value)
        known = self._names.get(key)
        if known is None:
            known = self._names[key] = self._add(stored, where)
        return known

    def _add(self, tensor: torch.Tensor, where: str) -> str:
        # Lone surrogates are legal in a Python string and illegal in a file that other readers open.
        base = where if where.isascii() else where.encode("utf-8", "replace").decode()
        base = base or "state"
        name, count = base, 1
        while name in self.tensors or name == "__metadata__":
            count += 1
            name = f"{base}~{count}"
        self.tensors[name] = tensor
        return name


_HANDLERS: dict[type, Callable[[_Encoder, Any, str, int], Tree]] = {
    list: _Encoder._list,
    tuple: _Encoder._tuple,
    dict: _Encoder._dict,
    defaultdict: _Encoder._default,
    OrderedDict: _Encoder._ordered,
    Counter: _Encoder._counter,
    set: _Encoder._set,
    frozenset: _Encoder._set,
    deque: _Encoder._deque,
    bytes: _Encoder._bytes,
    complex: _Encoder._complex,
    torch.Size: _Encoder._size,
    torch.dtype: _Encoder._dtype,
    torch.device: _Encoder._device,
    np.ndarray: _Encoder._ndarray,
    torch.Tensor: _Encoder._tensor,
    torch.nn.Parameter: _Encoder._tensor,
}
_NO_HANDLERS: dict[type, Callable[[_Encoder, Any, str, int], Tree]] = {}  # too deep: `encode` says so


def _join(where: str, key: object) -> str:
    try:
        text = key if isinstance(key, str) else type(key).__name__ if isinstance(key, torch.Tensor) else repr(key)
    except ValueError:  # an integer of more digits than Python is willing to print
        text = type(key).__name__
    text = text[:_NAME_PART]
    return f"{where}.{text}" if where else text


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same view of the same memory."""
    if tensor.numel() == 0:
        return ("empty", id(tensor))  # the address of an empty tensor is null, which would tie unrelated ones
    view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.device, tensor.dtype, *view)


def _is_dense(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Whether the elements fill one block of memory without holes and overlaps, in any order of the axes."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _tensor_problem(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return f"nested tensors cannot be stored; {_REMEDY}"
    if tensor.layout != torch.strided:
        kind = "sparse tensor" if "sparse" in str(tensor.layout) else "tensor"
        return f"{kind} of layout {tensor.layout} cannot be stored; {_REMEDY}"
    if tensor.is_quantized:
        return f"quantized tensor of type {tensor.dtype} cannot be stored; {_REMEDY}"
    return "a tensor on the meta device has no data; give it memory (to_empty) first"


def _why_unsupported(value: object) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"tensor of class {name} cannot be stored; {_REMEDY}"
    return f"value of type {name} cannot be stored; use numbers, strings, tensors, arrays, lists, tuples, sets, dicts"


def _check_numpy(dtype: np.dtype[Any], where: str) -> None:
    if not _NUMPY_DTYPE.fullmatch(dtype.str):
        raise UnsupportedStateError(where or "state", f"numpy data of type {dtype} cannot be stored")


# --- and back ---------------------------------------------------------------------------------------------------------


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
            return defaultdict(_FACTORIES[node["factory"]], result)
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
            if not _is_dense(stored.shape, strides):
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
    if not _NUMPY_DTYPE.fullmatch(text):
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
