"""Packs a small nested state into one run of bytes, to be stored inside a larger file or in shared memory.

::

    8 bytes   length of the JSON text, little endian
    JSON      {"tree": ..., "tensors": [[name, dtype, shape], ...]}      (see `flatten`)
    bytes     of the tensors, one after the other
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindx_elastic.core.tensor_memory import memory_of
from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.persist.dtypes import BY_NAME, NAMES
from mindx_elastic.persist.flatten import flatten
from mindx_elastic.persist.unflatten import unflatten

__all__ = ["flat_bytes", "pack_state", "tensor_at", "unpack_section"]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in file order, on its device; copies only where memory has another order."""
    if not tensor.is_contiguous():
        # On the host: a training job has no spare accelerator memory.
        tensor = tensor.cpu().contiguous()
    # Not reshape(-1): it keeps the odd strides that tensors of one or no element may have, which view() then refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tensor_at(data: bytes, start: int, dtype: str, shape: Sequence[int]) -> tuple[torch.Tensor, int]:
    """The tensor whose bytes begin at `start`, in its own memory, and where they end. Raises ValueError."""
    tensor = torch.empty(shape, dtype=BY_NAME[dtype], device="cpu")
    source = data[start : start + tensor.nbytes]
    if len(source) != tensor.nbytes:
        raise ValueError("cut off")
    if source:
        memory_of(tensor)[:] = source
    return tensor, start + tensor.nbytes


def pack_state(state: object, *, at: Sequence[str] = ()) -> list[memoryview]:
    """`state` as pieces to be written one after the other. They are views of the state's CPU tensors, not copies.

    `at`: the place of `state` in a larger one, see `persist.packer`. Raises UnsupportedStateError as `flatten` does.
    """
    tree, tensors = flatten(state)
    named = [[name, NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
    content = {"at": list(at), "tree": tree, "tensors": named} if at else {"tree": tree, "tensors": named}
    text = json.dumps(content, separators=(",", ":")).encode()
    pieces = [memoryview(struct.pack("<Q", len(text)) + text)]
    for tensor in tensors.values():
        if tensor.numel():
            pieces.append(memory_of(flat_bytes(tensor.detach().cpu())))
    return pieces


def unpack_section(
    data: bytes,
    start: int,
    unpack_shaped: Callable[[dict[str, Any], bytes, int], tuple[Any, int]] | None = None,
) -> tuple[list[str], Any, int]:
    """What `pack_state` has made and begins at `start`: its `at`, the state (every tensor has its own memory), and
    where it ends. `unpack_shaped` reads the content of a section
    that has a shape. Raises CorruptCheckpointError."""
    try:
        (length,) = struct.unpack_from("<Q", data, start)
        position = start + 8 + length
        content = json.loads(data[start + 8 : position])
        at = content.get("at", [])
        if not isinstance(at, list) or not all(isinstance(key, str) for key in at):
            raise ValueError(f"at {at!r}")
        if "shape" in content and unpack_shaped is not None:
            return at, *unpack_shaped(content, data, position)
        tensors: dict[str, torch.Tensor] = {}
        for name, dtype, shape in content["tensors"]:
            tensors[name], position = tensor_at(data, position, dtype, shape)
        return at, unflatten(content["tree"], tensors), position
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise CorruptCheckpointError(f"malformed packed state: {error!r}") from error
