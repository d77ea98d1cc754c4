"""Plain safetensors files: name -> tensor, as MindSpore writes them (and most others).

Read: one file; a folder of files that hold different tensors; or ``rank_{r}/*.safetensors``, one file a rank, which a
strategy says how to put together. Written: one file with whole tensors, a tensor at a time. Names are kept.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from mindx_elastic.convert.assemble import assemble
from mindx_elastic.convert.mapped import MappedFile, Scratch
from mindx_elastic.errors import CorruptCheckpointError, MismatchError, UnsupportedStateError, UsageError
from mindx_elastic.persist.catalog import rank_of_folder
from mindx_elastic.persist.dtypes import BY_NAME, NAMES
from mindx_elastic.persist.format import place_tensors
from mindx_elastic.persist.packed import flat_bytes

if TYPE_CHECKING:
    from mindx_elastic.plan.strategy import Strategy, TensorSpec

__all__ = ["PlainFile", "read_plain", "read_shards", "write_plain"]

_FURTHER_DTYPES = {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
_PIECE_BYTES = 8 << 20
_MAX_NAME = 80


class PlainFile:
    """One file, its header checked; `tensor` maps what it is asked for. Raises CorruptCheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            with safe_open(path, framework="pt"):  # the stock reader checks sizes and offsets
                pass
            (length,) = struct.unpack("<Q", self._raw(0, 8))
            content = json.loads(self._raw(8, 8 + length))
            content.pop("__metadata__", None)
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


def read_plain(path: Path) -> dict[str, torch.Tensor]:
    """One file, or every ``*.safetensors`` file of one folder. Raises CorruptCheckpointError, UsageError."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found: dict[str, torch.Tensor] = {}
    where: dict[str, Path] = {}
    for each in files:
        file = PlainFile(each)
        for name in file.entries:
            if name in found:
                raise UsageError(
                    f"{name!s:.{_MAX_NAME}} is in {where[name]} and in {each}: these are several "
                    "checkpoints; give one file"
                )
            found[name], where[name] = file.tensor(name), each
    return found


def read_shards(path: Path, strategy: Strategy, scratch: Scratch) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Whole tensors from ``rank_{r}/*.safetensors`` below `path`, one file a rank; and notes for people.

    A tensor that `strategy` does not name must be the same in all files. Raises UsageError, MismatchError, and
    CorruptCheckpointError for a part that no sound file holds.
    """
    files, damaged = _rank_files(path, strategy.world_size)
    held: dict[str, list[int]] = {}
    for rank, file in files.items():
        for name in file.entries:
            held.setdefault(name, []).append(rank)
    found: dict[str, torch.Tensor] = {}

    for name, ranks in held.items():

        def read(rank: int, name: str = name) -> torch.Tensor | None:
            if rank in damaged:
                raise damaged[rank]
            file = files.get(rank)
            return file.tensor(name) if file is not None and name in file.entries else None

        specs = strategy.by_name.get(name, ())
        if not specs:
            found[name] = _same_everywhere(name, ranks, files)
            continue
        wholes = [assemble(name, spec.layout, _whole_shape(spec, files), read, scratch) for spec in specs]
        if any(_digest(other) != _digest(wholes[0]) for other in wholes[1:]):
            raise MismatchError(f"{name}: {len(specs)} different tensors of this name, on different ranks")
        found[name] = wholes[0]
    absent = [spec.name for spec in strategy.tensors if spec.name not in held]
    if absent and damaged:
        raise CorruptCheckpointError(
            f"{absent[0]!s:.{_MAX_NAME}}: in no file; {next(iter(damaged.values()))}", path=path
        )
    shown = ", ".join(absent[:4]) + (" ..." if len(absent) > 4 else "")
    return found, [f"in the strategy and in no file: {shown}"] if absent else []


def _rank_files(path: Path, world_size: int) -> tuple[dict[int, PlainFile], dict[int, CorruptCheckpointError]]:
    files: dict[int, PlainFile] = {}
    damaged: dict[int, CorruptCheckpointError] = {}
    for folder in sorted(path.iterdir()):
        rank = rank_of_folder(folder)
        if rank is None or not folder.is_dir():
            continue
        if rank >= world_size:
            raise MismatchError(f"{folder}: the strategy has only {world_size} ranks", path=folder)
        names = sorted(folder.glob("*.safetensors"))
        if len(names) > 1:
            raise UsageError(f"{folder} holds {len(names)} safetensors files; leave the one of the step that you want")
        try:
            for name in names:
                files[rank] = PlainFile(name)
        except CorruptCheckpointError as error:
            damaged[rank] = error
    if not files:
        raise next(iter(damaged.values()), UsageError(f"{path}: no rank_*/ folder holds a safetensors file"))
    return dict(sorted(files.items())), damaged


def _whole_shape(spec: TensorSpec, files: Mapping[int, PlainFile]) -> tuple[int, ...] | None:
    """From the parts where the strategy does not know it: MindSpore's own files do not say it. None: a part is missing,
    which `assemble` will name."""
    if spec.shape:
        return spec.shape
    from mindx_elastic.plan.strategy import Strategy
    from mindx_elastic.plan.strategy_file import with_shapes

    entries = {rank: files[rank].entries.get(spec.name) for rank in spec.layout.ranks if rank in files}
    shapes = {rank: entry.shape for rank, entry in entries.items() if entry is not None}
    if len({spec.layout.shard_of(rank) for rank in shapes}) < spec.layout.num_shards:
        return None
    try:
        world_size = max(spec.layout.ranks) + 1
        return with_shapes(Strategy(world_size, (spec,)), {spec.name: shapes}).tensors[0].shape
    except UsageError as error:
        raise MismatchError(f"{error}: the files and the strategy do not belong together") from None


def _same_everywhere(name: str, ranks: list[int], files: Mapping[int, PlainFile]) -> torch.Tensor:
    first = files[ranks[0]].tensor(name)
    digest = _digest(first)
    for rank in ranks[1:]:
        other = files[rank].tensor(name)
        if other.shape != first.shape or other.dtype != first.dtype or _digest(other) != digest:
            raise MismatchError(
                f"{name}: differs between rank {ranks[0]} and rank {rank}, and the strategy does not say "
                "how it is laid out"
            )
    return first


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128(flat_bytes(tensor).numpy().data if tensor.numel() else b"").hexdigest()


def write_plain(temp: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` to the existing file `temp`, one after the other. Tied ones are written for each of their names.

    Raises UnsupportedStateError for a type that such a file cannot name; the caller flushes and renames.
    """
    for name, tensor in tensors.items():
        if name == "__metadata__" or re.search(r"[\ud800-\udfff]", name):
            raise UnsupportedStateError(name[:_MAX_NAME], "a safetensors file cannot hold a tensor of this name")
        if tensor.dtype not in NAMES or tensor.layout is not torch.strided or type(tensor) not in _PLAIN_TYPES:
            kind = f"{tensor.layout} of {tensor.dtype}" if tensor.dtype in NAMES else f"{tensor.dtype}"
            raise UnsupportedStateError(name, f"a plain safetensors file cannot hold a tensor of type {kind}")
    entries = place_tensors(tensors)
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        content[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.start, entry.end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(temp, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            data = flat_bytes(tensors[entry.name].detach().resolve_neg()).numpy().data if entry.nbytes else b""
            for start in range(0, entry.nbytes, _PIECE_BYTES):
                file.write(data[start : start + _PIECE_BYTES])
        file.flush()
        os.fsync(file.fileno())


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
