"""Plain safetensors files, name -> tensor, as MindSpore and most other programs write them.

Reads one file, or the files of a folder that make up one model (`indexed`). Names are kept.
"""

from __future__ import annotations

from pathlib import Path

import torch

from mindx_elastic.convert.indexed import SHARDING_INFO, find_index, is_shard, read_indexed
from mindx_elastic.convert.plain_file import CKPT_REMEDY, PlainFile, mindspore_ckpt_in
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import UsageError
from mindx_elastic.persist.catalog import rank_of_folder

__all__ = ["read_plain"]


def read_plain(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of one file; or of the files of one folder that belong together, or that an index names; and notes
    for people. Raises CorruptCheckpointError, UsageError."""
    index = path if path.suffix == ".json" else find_index(path) if path.is_dir() else None
    if index is not None:
        return read_indexed(index, lambda each: _open_whole(each).tensors())
    if not path.is_dir():
        return _open_whole(path).tensors(), []
    every = sorted(path.glob("*.safetensors"))
    if not every:
        raise _no_safetensors(path)
    for each in path.glob("shard-*.safetensors"):
        _open_whole(each)
    chosen = next((each for each in every if each.name == "model.safetensors"), every[0])
    if chosen.name != "model.safetensors" and (len(every) > 1 or "-of-" in chosen.name):
        names = listed([each.name for each in every], 8)
        raise UsageError(f"{path} has no index that says which files belong together: {names}; give one")
    others = [each.name for each in every if each != chosen]
    return _open_whole(chosen).tensors(), [f"other files, left out: {listed(others, 8)}"] if others else []


def _open_whole(path: Path) -> PlainFile:
    file = PlainFile(path)
    if is_shard(file):
        raise UsageError(
            f"{path} holds one rank's parts of the tensors (its {SHARDING_INFO}), which are not put together here: "
            "write them with HuggingFaceStorageWriter(..., enable_consolidation=True), and convert what that makes"
        )
    return file


def _no_safetensors(path: Path) -> UsageError:
    if (ckpt := mindspore_ckpt_in(path)) is not None:
        return UsageError(f"{ckpt} {CKPT_REMEDY}")
    if any(rank_of_folder(folder) is not None for folder in path.iterdir()):
        return UsageError(
            f"{path} has a folder for each rank. Put them together with MindSpore: "
            'mindspore.unified_safetensors(FOLDER, "strategy.ckpt", OUT); convert OUT'
        )
    return UsageError(f"{path}: no safetensors file in it")
