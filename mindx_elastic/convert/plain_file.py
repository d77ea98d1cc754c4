"""One plain safetensors file, name -> tensor, as MindSpore, Hugging Face and most other programs read it."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.errors import UnsupportedStateError
from mindx_elastic.persist.dtypes import NAMES
from mindx_elastic.persist.entries import place_tensors
from mindx_elastic.persist.packed import flat_bytes

__all__ = ["write_plain"]

_PIECE_BYTES = 8 << 20
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def write_plain(temp: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` to the file `temp`, one after the other: safetensors' own writer needs memory for all of them.

    Tied ones are written for each of their names. Raises UnsupportedStateError for a type that such a file cannot name;
    the caller flushes and renames.
    """
    for name, tensor in tensors.items():
        if name == "__metadata__" or re.search(r"[\ud800-\udfff]", name):
            raise UnsupportedStateError(
                name[:80], "a safetensors file cannot hold a tensor of this name; write a .pt file"
            )
        if tensor.dtype not in NAMES or tensor.layout is not torch.strided or type(tensor) not in _PLAIN_TYPES:
            kind = f"a {tensor.layout} tensor of {tensor.dtype}"
            raise UnsupportedStateError(name, f"a plain safetensors file cannot hold {kind}; write a .pt file")
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    entries = place_tensors(plain)
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        offsets = [entry.start, entry.end]
        content[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(temp, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            data = flat_bytes(plain[entry.name].resolve_neg()).numpy().data if entry.nbytes else b""
            for start in range(0, entry.nbytes, _PIECE_BYTES):
                file.write(data[start : start + _PIECE_BYTES])
