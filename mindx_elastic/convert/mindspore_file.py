"""Plain safetensors files, name -> tensor, as MindSpore and most other programs write them.

Reads one file; a folder of files that hold different tensors; or ``rank_{r}/*.safetensors``, which it assembles by a
strategy. A rank folder usually holds the files of several steps, ``{prefix}-{epoch}_{step}.safetensors``: one
step is chosen for all ranks. Writes one file with whole tensors, one tensor at a time. Names are kept.
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
from mindx_elastic.convert.mapped import MappedFile, Scratch, open_source
from mindx_elastic.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    UnsupportedStateError,
    UsageError,
)
from mindx_elastic.persist.catalog import rank_of_folder
from mindx_elastic.persist.dtypes import BY_NAME, NAMES
from mindx_elastic.persist.entries import place_tensors
from mindx_elastic.persist.packed import flat_bytes

if TYPE_CHECKING:
    from mindx_elastic.core.strategy import Strategy, TensorSpec

__all__ = ["PlainFile", "is_mindspore_ckpt", "read_plain", "read_shards", "write_plain"]

_COMPLEX = "C64"
_FURTHER_DTYPES = {
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    _COMPLEX: "complex64",
}
_POSITION = re.compile(r"-(\d{1,9})_(\d{1,12})(?:_breakpoint)?\.safetensors\Z")
_CKPT_REMEDY = (
    "is a MindSpore .ckpt file (protobuf), which is not read here: save it as safetensors, with "
    'mindspore.save_checkpoint(..., format="safetensors") or mindspore.ckpt_to_safetensors(path), and convert that'
)
_PIECE_BYTES = 8 << 20
_MAX_NAME = 80


class PlainFile:
    """One file, its header checked; `tensor` maps what it is asked for. Raises CorruptCheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if is_mindspore_ckpt(path):
            raise UsageError(f"{path} {_CKPT_REMEDY}")
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


def is_mindspore_ckpt(path: Path) -> bool:
    """Whether a file is what ``mindspore.save_checkpoint`` writes by default: a protobuf list of named values."""
    try:
        with open(open_source(path), "rb") as file:
            start = file.read(16)
    except CheckpointError:
        return False
    # Field 1, a message, of which field 1 is a text: the tensor's name.
    return path.suffix == ".ckpt" and start[:1] == b"\n" and b"\n" in start[2:7]


def read_plain(path: Path) -> dict[str, torch.Tensor]:
    """One file, or every ``*.safetensors`` file of one folder. Raises CorruptCheckpointError, UsageError."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise _no_safetensors(path, path)
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


def read_shards(
    path: Path, strategy: Strategy, scratch: Scratch, step: int | None = None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Whole tensors from ``rank_{r}/*.safetensors`` below `path`; and notes for people.

    step: where a rank has several files the one to take, by the last number of its name; None: the newest that every
    rank folder has. A tensor that `strategy` does not name must be the same in all files. Raises UsageError,
    MismatchError, and CorruptCheckpointError for a part that no sound file holds.
    """
    chosen, notes = _choose(_rank_folders(path, strategy.world_size), step)
    files, damaged = _open_files(chosen)
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
    return found, [*notes, *([f"in the strategy and in no file: {shown}"] if absent else [])]


def _rank_folders(path: Path, world_size: int) -> dict[int, list[Path]]:
    """The safetensors files of each rank folder that has any. Raises MismatchError, UsageError."""
    found: dict[int, list[Path]] = {}
    for folder in sorted(path.iterdir()):
        rank = rank_of_folder(folder)
        if rank is None or not folder.is_dir():
            continue
        if rank >= world_size:
            raise MismatchError(f"{folder}: the strategy has only {world_size} ranks", path=folder)
        if names := sorted(folder.glob("*.safetensors")):
            found[rank] = names
    if not found:
        raise _no_safetensors(path, *(folder for folder in path.iterdir() if rank_of_folder(folder) is not None))
    return dict(sorted(found.items()))


def _no_safetensors(path: Path, *folders: Path) -> UsageError:
    ckpt = next((each for folder in folders for each in sorted(folder.glob("*.ckpt")) if is_mindspore_ckpt(each)), None)
    if ckpt is not None:
        return UsageError(f"{ckpt} {_CKPT_REMEDY}")
    return UsageError(f"{path}: no {'' if folders == (path,) else 'rank_*/ '}folder holds a safetensors file")


def _choose(folders: Mapping[int, list[Path]], step: int | None) -> tuple[dict[int, Path], list[str]]:
    """One file of each rank, all of one step, and a note where there was a choice. Raises UsageError."""
    if all(len(names) == 1 for names in folders.values()):
        return {rank: names[0] for rank, names in folders.items()}, []
    moments: dict[int, dict[tuple[int, int], Path]] = {}
    for rank, names in folders.items():
        own = moments.setdefault(rank, {})
        for name in names:
            match = _POSITION.search(name.name)
            if match is None:
                problem = f"{name} does not say of which step it is, as in net-3_100.safetensors"
                raise UsageError(
                    f"{name.parent} holds {len(names)} safetensors files and {problem}; leave the one that you want"
                )
            moment = int(match[1]), int(match[2])
            if moment in own:
                raise UsageError(
                    f"{own[moment]} and {name} are both of epoch {moment[0]}, step {moment[1]}; leave the one that you "
                    "want"
                )
            own[moment] = name
    common = sorted(set.intersection(*(set(own) for own in moments.values())))
    wanted = [moment for moment in common if step is None or moment[1] == step]
    shown = ", ".join(f"{epoch}_{number}" for epoch, number in common[-8:]) or "none"
    if not wanted:
        what = "" if step is None else f" with step {step}"
        raise UsageError(f"no moment{what} of which every rank folder has a file; those of all ranks are: {shown}")
    if step is not None and len(wanted) > 1:
        epochs = ", ".join(f"{epoch}_{number}" for epoch, number in wanted[:8])
        raise UsageError(
            f"step {step} is in {len(wanted)} epochs ({epochs}): MindSpore counts steps within an epoch; leave the "
            "files of the epoch that you want"
        )
    chosen = wanted[-1]
    newest = max(moment for own in moments.values() for moment in own)
    missing = [rank for rank, own in moments.items() if newest not in own]
    notes = [f"of {len(common)} moments that all ranks have, {chosen[0]}_{chosen[1]} was taken"]
    if step is None and missing:
        notes.append(f"{newest[0]}_{newest[1]} is newer, but rank {missing[0]} has no file of it")
    return {rank: own[chosen] for rank, own in moments.items()}, notes


def _open_files(chosen: Mapping[int, Path]) -> tuple[dict[int, PlainFile], dict[int, CorruptCheckpointError]]:
    files: dict[int, PlainFile] = {}
    damaged: dict[int, CorruptCheckpointError] = {}
    for rank, path in chosen.items():
        try:
            files[rank] = PlainFile(path)
        except CorruptCheckpointError as error:
            damaged[rank] = error
    if not files:
        raise next(iter(damaged.values()))
    return files, damaged


def _whole_shape(spec: TensorSpec, files: Mapping[int, PlainFile]) -> tuple[int, ...] | None:
    """From the parts where the strategy does not know it: MindSpore's own files do not say it. None: a part is missing,
    which `assemble` will name."""
    if spec.shape:
        return spec.shape
    from mindx_elastic.core.strategy import Strategy
    from mindx_elastic.platforms.mindspore_layout import with_shapes

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
