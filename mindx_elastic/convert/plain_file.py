"""One plain safetensors file, name -> tensor, as MindSpore, Hugging Face and most other programs write it."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mindx_elastic.convert.mapped import MappedFile, open_source
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError, UsageError
from mindx_elastic.persist.dtypes import BY_NAME, NAMES
from mindx_elastic.persist.entries import place_tensors
from mindx_elastic.persist.packed import flat_bytes

__all__ = ["CKPT_REMEDY", "PlainFile", "is_mindspore_ckpt", "mindspore_ckpt_in", "write_plain"]

_COMPLEX = "C64"
_FURTHER_DTYPES = {
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    _COMPLEX: "complex64",
}
CKPT_REMEDY = (
    "is a MindSpore .ckpt file (protobuf), which is not read here: save it as safetensors, with "
    'mindspore.save_checkpoint(..., format="safetensors") or mindspore.ckpt_to_safetensors(path) '
    "(without texts in append_dict, which safetensors has no place for), and convert that"
)
_PIECE_BYTES = 8 << 20
_MAX_NAME = 80


class PlainFile:
    """One file, its header checked; `tensor` maps what it is asked for. Raises CorruptCheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if is_mindspore_ckpt(path):
            raise UsageError(f"{path} {CKPT_REMEDY}")
        self._file = MappedFile(path)
        try:
            with safe_open(path, framework="pt"):  # the stock reader checks sizes and offsets
                pass
            (length,) = struct.unpack("<Q", self._raw(0, 8))
            content = json.loads(self._raw(8, 8 + length))
            self.metadata: dict[str, str] = content.pop("__metadata__", {})
            self.entries = {str(name): _Entry(path, name, value, 8 + length) for name, value in content.items()}
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(f"{path}: no sound safetensors file: {error!s:.200}", path=path) from error

    def _raw(self, start: int, end: int) -> bytes:
        return bytes(self._file.tensor(torch.uint8, (end - start,), start, end).numpy().data)

    def tensor(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        return self._file.tensor(entry.dtype, entry.shape, entry.start, entry.end)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.tensor(name) for name in self.entries}


class _Entry:
    def __init__(self, path: Path, name: str, value: Mapping[str, Any], data_start: int) -> None:
        dtype = BY_NAME.get(value["dtype"])
        if dtype is None:
            dtype = getattr(torch, _FURTHER_DTYPES.get(value["dtype"], ""), None)
        if not isinstance(dtype, torch.dtype):
            problem = (
                f"{path}: tensor {name!s:.{_MAX_NAME}} is of type {value['dtype']!s:.40}, which torch does not have"
            )
            raise CorruptCheckpointError(problem, path=path, tensor=name)
        self.dtype, self.shape = dtype, tuple(value["shape"])
        self.start, self.end = (data_start + offset for offset in value["data_offsets"])
        if self.end - self.start != math.prod(self.shape) * dtype.itemsize:
            raise ValueError(f"tensor {name!s:.{_MAX_NAME}}: its bytes do not fit its shape and type")


def is_mindspore_ckpt(path: Path) -> bool:
    """Whether a file is what ``mindspore.save_checkpoint`` writes by default: a protobuf list of named values."""
    try:
        with open(open_source(path), "rb") as file:
            start = file.read(16)
    except CheckpointError:
        return False
    # Field 1, a message, of which field 1 is a text: the tensor's name.
    return path.suffix == ".ckpt" and start[:1] == b"\n" and b"\n" in start[2:7]


def mindspore_ckpt_in(folder: Path) -> Path | None:
    """The first of such files in a folder, or in its folders for ranks."""
    return next(filter(is_mindspore_ckpt, sorted([*folder.glob("*.ckpt"), *folder.glob("rank_*/*.ckpt")])), None)


def write_plain(temp: Path, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Write `tensors` to the existing file `temp`, one after the other, and return notes for people.

    Tied ones are written for each of their names. Raises UnsupportedStateError for a type that such a file cannot name;
    the caller flushes and renames.
    """
    for name, tensor in tensors.items():
        if name == "__metadata__" or re.search(r"[\ud800-\udfff]", name):
            raise UnsupportedStateError(name[:_MAX_NAME], "a safetensors file cannot hold a tensor of this name")
        known = tensor.dtype in NAMES or tensor.dtype is torch.complex64
        if not known or tensor.layout is not torch.strided or type(tensor) not in _PLAIN_TYPES:
            kind = f"{tensor.layout} of {tensor.dtype}" if known else f"{tensor.dtype}"
            raise UnsupportedStateError(name, f"a plain safetensors file cannot hold a tensor of type {kind}")
    # A complex number is stored as its two parts, one after the other: the same bytes as a tensor with one more axis.
    complex_names = [name for name, tensor in tensors.items() if tensor.is_complex()]
    plain = {
        name: torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
        for name, tensor in tensors.items()
    }
    entries = place_tensors(plain)
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        dtype, shape = (
            (_COMPLEX, tensors[entry.name].shape) if entry.name in complex_names else (entry.dtype, entry.shape)
        )
        content[entry.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [entry.start, entry.end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(temp, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            data = flat_bytes(plain[entry.name].resolve_neg()).numpy().data if entry.nbytes else b""
            for start in range(0, entry.nbytes, _PIECE_BYTES):
                file.write(data[start : start + _PIECE_BYTES])
        file.flush()
        os.fsync(file.fileno())
    if not complex_names:
        return []
    more = " and others" if len(complex_names) > 1 else ""
    return [f"{complex_names[0]!s:.{_MAX_NAME}}{more}: complex, stored as {_COMPLEX}, which older readers refuse"]


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
