"""Which format something is in, found by what is in it and never by its name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mindx_elastic.convert.dcp import METADATA, TO_TORCH
from mindx_elastic.convert.indexed import find_index, read_index
from mindx_elastic.convert.mapped import open_source
from mindx_elastic.convert.plain_file import is_mindspore_ckpt, mindspore_ckpt_in
from mindx_elastic.convert.torch_file import is_torch_file
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, NoUsableCheckpointError, UsageError
from mindx_elastic.persist.catalog import rank_of_folder, read_entries
from mindx_elastic.start.findings import reader_trust

__all__ = ["KINDS", "SOURCES", "find_kind", "kind_of_name", "refuse_deepspeed"]

KINDS = ("dcp", "torch", "mindspore")
SOURCES = ("torch", "mindspore", "mindx")
_TORCH_NAMES = {".pt", ".pth", ".bin"}
_SNIFF_BYTES = 1 << 16  # our metadata begins at byte 20 or so
_OF_DEEPSPEED = re.compile(r"\w*_mp_rank_\d|mp_rank_0*[1-9]|mp_rank_00_model_states\.pt\Z|zero_to_fp32\.py\Z")


def find_kind(path: Path) -> str:
    """One of `SOURCES`. Raises NoUsableCheckpointError where there is nothing of any kind."""
    if path.is_dir():
        return _kind_of_folder(path)
    if path.suffix == ".json":
        return _kind_of_index(path)
    with open(open_source(path), "rb") as file:
        start = file.read(_SNIFF_BYTES)
    if is_torch_file(start):
        return "torch"
    length = int.from_bytes(start[:8], "little")
    if len(start) > 8 and start[8:9] == b"{" and length <= 100_000_000:
        return "mindx" if b'"mindx.' in start else "mindspore"
    if not start:
        raise CorruptCheckpointError(f"{path}: is empty", path=path)
    if is_mindspore_ckpt(path):
        return "mindspore"  # whose reader names the way out
    raise CorruptCheckpointError(
        f"{path}: neither a torch.save file nor a safetensors file, or its beginning is damaged", path=path
    )


def _kind_of_folder(path: Path) -> str:
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed: {error.strerror}", path=path) from error
    if METADATA in names:
        raise UsageError(
            f"{path} is a folder of torch.distributed.checkpoint; torch makes a file of it: {TO_TORCH} {path} OUT"
        )
    entries = read_entries(path, owners=reader_trust(path).of(path))
    if any(entry.header is not None for entry in entries):
        return "mindx"
    index = find_index(path)
    if index is not None:
        return _kind_of_index(index)
    # Links are what Hugging Face's cache has; ours are never followed.
    plain = [entry.path for entry in entries if entry.foreign or entry.path.is_symlink()]
    if any(each.suffix == ".safetensors" for each in plain):
        return "mindspore"
    refuse_deepspeed(path)
    bad = "; ".join(f"{entry.path}: {entry.problem}" for entry in entries[:4])
    if bad:
        raise CorruptCheckpointError(f"no checkpoint in {path} can be used: {bad}", path=path)
    if mindspore_ckpt_in(path) is not None:
        return "mindspore"
    ranks = " below its rank folders either" if any(rank_of_folder(path / name) is not None for name in names) else ""
    raise NoUsableCheckpointError(
        f"no checkpoint found in {path}: no safetensors file{ranks}; a torch.save file is given by its own name",
        path=path,
    )


def refuse_deepspeed(path: Path) -> None:
    """Raise UsageError for a folder of DeepSpeed, and for a file with the part of one rank."""
    names = os.listdir(path) if path.is_dir() else [path.name]
    if path.name == "mp_rank_00_model_states.pt":  # of stages 0 to 2: all weights, unless other model ranks have some
        names = [each.name for each in path.parent.glob("mp_rank_*") if each.name != path.name]
    if any(map(_OF_DEEPSPEED.match, names)):
        raise UsageError(
            f"{path} is DeepSpeed's, whose ranks hold parts. Its folder has a script that puts the weights together: "
            "python zero_to_fp32.py FOLDER OUT --safe_serialization; convert OUT"
        )


def _kind_of_index(index: Path) -> str:
    files = read_index(index).values()
    return "mindspore" if all(each.endswith(".safetensors") for each in files) else "torch"


def kind_of_name(destination: Path) -> str:
    """What a destination of this name is meant to be. Raises UsageError where that is not clear."""
    if destination.suffix in _TORCH_NAMES:
        return "torch"
    if not destination.suffix:
        return "dcp"
    raise UsageError(
        f"{destination.name}: say with --to what it is to be: mindspore (a plain safetensors file), torch or dcp"
    )
