"""Maps tensor types to the names of a safetensors file, and stores the types that have no name as others.

Only names that every safetensors release since 0.4 reads are written: one unknown name makes the stock reader refuse
the whole file. Complex tensors are stored as their real view (one more axis of size 2), the remaining
types as unsigned integers of the same width; the tree (see `flatten`) says what they were.
"""

from __future__ import annotations

import torch

__all__ = ["BY_NAME", "NAMES", "from_stored", "parse_dtype", "to_stored"]

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
BY_NAME = {name: dtype for dtype, name in NAMES.items()}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def parse_dtype(name: str) -> torch.dtype:
    """``"float32"`` -> `torch.float32`. Raises ValueError for anything that is not a type of this torch."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch ({torch.__version__}) has no type {name!r}")
    return dtype


def to_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes under a type that the file can name.

    A view of the same memory, except that lazily conjugated and negated tensors are computed.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in NAMES:
        return tensor
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor)
    return tensor.view(_UNSIGNED[tensor.dtype.itemsize])


def from_stored(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `to_stored`, always a view. Raises RuntimeError where shape or width cannot fit."""
    if dtype.is_complex:
        return torch.view_as_complex(stored)
    if stored.dtype.itemsize != dtype.itemsize:
        raise RuntimeError(f"{stored.dtype} cannot stand in for {dtype}")
    return stored.view(dtype)
