"""Hypothesis strategies for everything that a checkpoint can hold, and an equality that sees types and bits."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
]
NUMPY_DTYPES = [
    *("?", "<u1", "<i2", "<u8", "<f2", "<f4", "<f8", ">f4", ">i8"),
    *("<c8", "<c16", "<U3", "S5", "<M8[ns]", "<m8[s]"),
]
_FORMS = ["plain", "transposed", "sliced", "expanded", "offset"]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits (nan payloads, denormals and all) in a tensor of `dtype`."""
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(np.asarray(rng.integers(0, 2, shape), dtype=bool))
    raw = torch.from_numpy(rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dense CPU tensor: types, empty and 0-dim, strided, conjugated, with and without gradient, parameters."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    tensor = tensor_of(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 2**32 - 1)))
    form = draw(st.sampled_from(_FORMS))
    if form == "transposed" and tensor.dim() >= 2:
        tensor = tensor.transpose(0, 1)
    elif form == "sliced" and tensor.dim() >= 1:
        tensor = tensor[::2]
    elif form == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *shape)
    elif form == "offset" and tensor.dim() >= 1 and tensor.shape[0] > 1:
        tensor = tensor[1:]
    if tensor.dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        how = draw(st.sampled_from(["no", "grad", "parameter", "frozen parameter"]))
        if how == "grad":
            tensor = tensor.detach().requires_grad_()
        elif how != "no":
            tensor = torch.nn.Parameter(tensor, requires_grad=how == "parameter")
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Numpy arrays of plain types, both byte orders, C and Fortran order, 0-dim, empty, read-only."""
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    array: np.ndarray[Any, Any]
    if dtype.kind == "U":  # random bits are not code points
        array = rng.integers(0, 10**3, shape).astype(dtype)
    else:
        high = 2 if dtype.kind == "b" else 256
        raw = rng.integers(0, high, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        array = raw.view(dtype).reshape(shape) if raw.size else np.empty(shape, dtype)
    if draw(st.booleans()):
        array = np.asfortranarray(array)
    if draw(st.booleans()):
        array = array[::-1] if array.ndim else array.copy()
    array.flags.writeable = draw(st.booleans()) or not array.flags.owndata
    return array


_text = st.text(st.characters(exclude_categories=[]), max_size=8)  # lone surrogates too: file names can have them
_floats = st.floats() | st.sampled_from([math.nan, -math.nan, math.inf, -0.0])
_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(1, 9).map(lambda n: -(n << 17_000))  # more digits than Python turns into decimal text
    | _floats
    | _text
    | st.binary(max_size=20)
    | st.complex_numbers()
)
_numpy_scalars = st.one_of(
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.booleans().map(np.bool_),
    st.complex_numbers().map(np.complex128),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4).map(np.str_),
    st.integers(0, 10**12).map(lambda ns: np.datetime64(ns, "ns")),
)
_torch_values: st.SearchStrategy[object] = st.one_of(
    st.lists(st.integers(0, 5), max_size=3).map(torch.Size),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda"), torch.device("cuda:1"), torch.device("meta")]),
)


def _is_plain_key(value: object) -> bool:
    return value == value  # nan is not equal to itself, so two dicts with such keys cannot be compared


_keys: st.SearchStrategy[Hashable] = st.recursive(
    st.one_of(_scalars.filter(_is_plain_key), _torch_values, _text),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
_leaves: st.SearchStrategy[Any] = st.one_of(
    _scalars, _numpy_scalars, _torch_values, tensors(), arrays(), st.binary(min_size=1025, max_size=1030)
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.dictionaries(_text, inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        names,
        st.dictionaries(_keys, inner, max_size=4),
        names.map(OrderedDict),
        st.builds(defaultdict, st.sampled_from([None, list, dict, set, int, float]), names),
        st.dictionaries(_keys, st.integers(), max_size=3).map(Counter),
        st.sets(_keys, max_size=3),
        st.frozensets(_keys, max_size=3),
        st.builds(deque, st.lists(inner, max_size=4), st.none() | st.integers(0, 5)),
    )


states: st.SearchStrategy[Any] = st.recursive(_leaves, _containers, max_leaves=12)
"""Nested values of every kind that a checkpoint holds."""


def assert_same(actual: Any, expected: Any, where: str = "state") -> None:
    """Equal down to types, order, signs of zero, nan payloads, strides of dense tensors."""
    assert type(actual) is type(expected), f"{where}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(actual, expected, where)
    elif isinstance(expected, np.ndarray | np.generic):
        assert actual.dtype == expected.dtype, where
        assert actual.shape == expected.shape, where
        assert actual.tobytes() == expected.tobytes(), where
    elif isinstance(expected, float):
        assert struct.pack("d", actual) == struct.pack("d", expected), where
    elif isinstance(expected, complex):
        assert struct.pack("dd", actual.real, actual.imag) == struct.pack("dd", expected.real, expected.imag), where
    elif isinstance(expected, dict):
        assert_same(list(actual.keys()), list(expected.keys()), f"{where} keys")
        for number, key in enumerate(expected):  # a key may be an integer that is too long to print
            assert_same(actual[key], expected[key], f"{where}, value {number}")
    elif isinstance(expected, list | tuple | deque):
        assert len(actual) == len(expected), where
        for index, item in enumerate(expected):
            assert_same(actual[index], item, f"{where}[{index}]")
        assert getattr(actual, "maxlen", None) == getattr(expected, "maxlen", None), where
    else:
        assert actual == expected, where


def _assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    facts = ("dtype", "shape", "requires_grad", "device")
    for fact in facts:
        assert getattr(actual, fact) == getattr(expected, fact), f"{where}: {fact}"
    assert bits(actual) == bits(expected), f"{where}: bits"
    dense = torch.empty_like(expected.detach().resolve_conj(), memory_format=torch.preserve_format)
    if expected.numel() and not expected.is_contiguous() and dense.stride() == expected.stride():
        assert actual.stride() == expected.stride(), f"{where}: strides"


def bits(tensor: torch.Tensor) -> bytes:
    """The values as bytes, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).tolist())
