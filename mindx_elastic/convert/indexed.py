"""Which files of a folder make up one model: Hugging Face's, MindSpore's, and shards of torch's Hugging Face writer.

An index (``*.index.json``, MindSpore's ``param_name_map.json``) names the file of every tensor. What is named and
missing is an error, what is not named is left out and told. ``HuggingFaceStorageWriter(save_distributed=True)`` of
torch has each rank write its parts of the tensors into ``shard-{rank}-model-*``, with the offset of each part in the
file's metadata: such files are refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mindx_elastic.convert.mapped import open_source
from mindx_elastic.convert.plain_file import PlainFile
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import CorruptCheckpointError, UsageError

__all__ = [
    "SHARDING_INFO",
    "find_index",
    "is_shard",
    "read_index",
    "read_indexed",
]

SHARDING_INFO = "DCP_SHARDING_INFO"
_SAVED_OFFSETS = re.compile(r'"saved_offsets":\s*\[[^\]]*[1-9]')
"""In a part that does not begin where its tensor does."""
_MINDSPORE_INDEX = "param_name_map.json"
_SHARD = re.compile(r"shard-(\d{1,9})-.+\.safetensors\Z")
_MAX_INDEX_BYTES = 1 << 28


def find_index(folder: Path) -> Path | None:
    """The one index in a folder. Raises UsageError where there are several."""
    found = sorted([*folder.glob("*.index.json"), *folder.glob(_MINDSPORE_INDEX)])
    if len(found) > 1:
        raise UsageError(f"{folder} has {len(found)} indexes: {listed([each.name for each in found], 8)}; give one")
    return found[0] if found else None


def read_index(index: Path) -> dict[str, str]:
    """Tensor -> name of its file. Raises CorruptCheckpointError."""
    try:
        with open(open_source(index), "rb") as file:
            content = json.loads(file.read(_MAX_INDEX_BYTES))
        named = content.get("weight_map", content)
        if not named or not all(type(each) is str for each in named.values()):
            raise ValueError("it names no files")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{index}: no index of tensors: {error!s:.200}", path=index) from error
    for each in named.values():
        if each in ("", ".", "..") or "/" in each or "\0" in each:
            raise CorruptCheckpointError(f"{index}: names {each!r:.80}, which is outside of its folder", path=index)
    return dict(named)


def read_indexed(index: Path, read: Callable[[Path], Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The tensors that `index` names, from the files that it names; and notes for people.

    read: the tensors of one file by name. Raises CorruptCheckpointError where a file or a tensor is missing.
    """
    named = read_index(index)
    files: dict[str, list[str]] = {}
    for name, file in named.items():
        files.setdefault(file, []).append(name)
    _check_there(index, files)
    found: dict[str, Any] = {}
    more: list[str] = []
    for file, names in files.items():
        there = read(index.parent / file)
        absent = [name for name in names if name not in there]
        if absent:
            problem = f"{index.parent / file}: has no tensor {absent[0]!s:.80}, which {index.name} says is in it"
            raise CorruptCheckpointError(problem, path=index.parent / file, tensor=absent[0])
        found |= {name: there[name] for name in names}
        more += [name for name in there if name not in named]
    suffixes = {Path(file).suffix for file in files}
    others = sorted(each.name for each in index.parent.iterdir() if each.suffix in suffixes and each.name not in files)
    notes = [f"not in {index.name}, left out: {listed(others, 8)}"] if others else []
    return found, notes + ([f"tensors that {index.name} does not name, left out: {listed(more, 8)}"] if more else [])


def _check_there(index: Path, files: Iterable[str]) -> None:
    """`files` may be very many: the first ones that are missing are named."""
    missing = list(itertools.islice((file for file in files if not (index.parent / file).is_file()), 5))
    if missing:
        raise CorruptCheckpointError(
            f"{index.parent}: {index.name} names {listed(missing, 4)}, which is not there: the weights are not "
            "complete. Copy it here, or give one file by its name for what is in that one",
            path=index.parent,
        )


# --- torch's Hugging Face writer ---


def is_shard(file: PlainFile) -> bool:
    """Whether a file is one rank's parts of tensors. The first rank's has offsets of 0, as a file of whole tensors from
    the same writer: its name tells."""
    offsets = _SAVED_OFFSETS.search(file.metadata.get(SHARDING_INFO, ""))
    return SHARDING_INFO in file.metadata and (offsets is not None or bool(_SHARD.match(file.path.name)))
