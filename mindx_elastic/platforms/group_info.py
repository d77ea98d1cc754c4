"""The group info file that ``GROUP_INFO_FILE`` names, one for each rank: the ranks that hold the same as this one.

Source of the form: MindSpore's message ``ParallelGroupMap`` (``train/node_strategy_pb2.py``). The two functions that
find a replica's checkpoint with its help take and return what those in MindSpore 2.10 do: `restore_group_info_list` in
``parallel/checkpoint_transform.py``, `get_ckpt_path_with_strategy` in ``train/serialization.py``.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mindx_elastic.core.layout import MAX_RANKS, Layout
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import CheckpointError, ForeignCheckpointError, StrPath, UsageError
from mindx_elastic.platforms.small_files import ArgumentTypeError, read_bounded, write_whole
from mindx_elastic.platforms.strategy_file import load_strategy, messages, parse_message

__all__ = [
    "get_ckpt_path_with_strategy",
    "groups_of",
    "restore_group_info_list",
    "save_group_info",
    "write_group_info_file",
]

_WHAT = "group info file"
_RANK = re.compile(r"rank_(\d{1,9})(?!\d)")
_NOT_SAVED = ("accu_grads", "inputs")
"""How names begin of what a MindSpore strategy lists and no checkpoint holds."""


def save_group_info(path: StrPath, groups: Mapping[str, Sequence[int]], restore_ranks: Sequence[int]) -> Path:
    """Write a group info file, whole or not at all. Raises UsageError for numbers that are not ranks, SaveError."""
    content = messages().ParallelGroupMap()
    for name, ranks in groups.items():
        item = content.parallel_group_item.add(group_name=name)
        item.parallel_group_ranks.dim.extend(_checked(ranks, f"group {name!r:.200}"))
    content.ckpt_restore_rank_list.dim.extend(_checked(restore_ranks, "the restore ranks"))
    data: bytes = content.SerializeToString(deterministic=True)
    return write_whole(path, data)


def _checked(ranks: Sequence[int], what: str) -> tuple[int, ...]:
    if not 0 < len(ranks) <= MAX_RANKS:
        raise UsageError(f"{what}: {len(ranks)} ranks")
    found = tuple(ranks)
    if len(set(found)) != len(found) or not all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in found):
        raise UsageError(f"{what}: {found!r:.80} where different ranks from 0 to {MAX_RANKS - 1} should be")
    return found


def _is_strategy(data: bytes) -> bool:
    """A strategy file begins with a number (field 1), a group info file with a message; writers put fields in order."""
    return data[:1] == b"\x08"


def restore_group_info_list(group_info_file_name: StrPath) -> list[int]:
    """The ranks whose checkpoints have the same content as that of the rank that wrote the file, which is among them.

    Raises UsageError (a ValueError) for a malformed file or one without such a list, TypeError for anything but a path.
    """
    data, where = read_bounded(group_info_file_name, _WHAT), f"{_WHAT} {group_info_file_name}"
    if _is_strategy(data):
        raise UsageError(f"{where}: is a strategy file")
    content = parse_message("ParallelGroupMap", data, where)
    if not content.HasField("ckpt_restore_rank_list"):
        raise UsageError(f"{where}: has no restore rank list")
    return list(_checked(content.ckpt_restore_rank_list.dim, f"{where}: the restore ranks"))


# --- written at the start of training ---


def write_group_info_file(strategy: Strategy, rank: int, path: StrPath) -> Path:
    """Write the group info file of `rank` to `path`. Raises UsageError for a rank without tensors, SaveError."""
    restore_ranks = next((group for group in strategy.replica_groups() if rank in group), None)
    if restore_ranks is None:
        raise UsageError(f"rank {rank} holds nothing in a strategy for {strategy.world_size} ranks")
    return save_group_info(path, groups_of(strategy, rank), restore_ranks)


def groups_of(strategy: Strategy, rank: int) -> dict[str, tuple[int, ...]]:
    """The communication groups of `rank` by name: one along each mesh dimension of more than one rank."""
    names: dict[tuple[int, ...], str] = {}
    for each in strategy.classes:
        if rank in each.layout:
            for name, ranks in _groups(each.layout, rank):
                names.setdefault(ranks, name)
    groups: dict[str, tuple[int, ...]] = {}
    for ranks, name in names.items():
        groups[name if name not in groups else f"{name}-{len(groups)}"] = ranks
    return groups


def _groups(layout: Layout, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and ranks of the communication groups of `rank`, one for each dimension of the mesh."""
    place = list(layout.ranks).index(rank)
    for m, size in enumerate(layout.mesh_shape):
        if size > 1:
            stride = math.prod(layout.mesh_shape[m + 1 :])
            first = place - place // stride % size * stride
            ranks = tuple(sorted(layout.ranks[first + part * stride] for part in range(size)))
            name = layout.mesh_dim_names[m] if m < len(layout.mesh_dim_names) else f"{size}"
            yield f"{name}-{ranks[0]}-{ranks[-1]}", ranks


# --- a replica's checkpoint ---


def get_ckpt_path_with_strategy(cur_ckpt_path: StrPath, cur_strategy_path: StrPath) -> str | None:
    """`cur_ckpt_path` where that checkpoint can be used, else the same path of another rank that holds the same.

    cur_ckpt_path: has ``rank_{n}`` in it, n being this rank; without, the answer is itself or None.
    cur_strategy_path: this rank's group info file, or a strategy file.

    A file can be used when it exists and is not empty, and where it is one of ours when its header is sound. None: no
    such file. Raises UsageError for a malformed strategy and for one that does not know rank n, TypeError for arguments
    that are no paths. No process group is needed.
    """
    for name, value in (("cur_ckpt_path", cur_ckpt_path), ("cur_strategy_path", cur_strategy_path)):
        if not isinstance(value, (str, os.PathLike)):
            raise ArgumentTypeError(f"{name} is {value!r:.80}; give a path")
    path = os.fspath(cur_ckpt_path)
    if _can_be_used(path):
        return path
    found = _RANK.findall(path)
    if not found:
        return None
    rank = int(found[-1])
    for other in _same_as(rank, cur_strategy_path):
        for candidate in _renamed(path, found[-1], other):
            if other != rank and _can_be_used(candidate):
                return candidate
    return None


def _same_as(rank: int, path: StrPath) -> list[int]:
    """Ranks that hold the same as `rank`, ascending."""
    if not str(os.fspath(path)).endswith(".json") and not _is_strategy(read_bounded(path, "strategy file")):
        ranks = restore_group_info_list(path)
    else:
        strategy = load_strategy(path)
        saved = tuple(spec for spec in strategy.tensors if not spec.name.startswith(_NOT_SAVED))
        groups = Strategy(strategy.world_size, saved).replica_groups()
        ranks = list(next((group for group in groups if rank in group), ()))
    if rank not in ranks:
        raise UsageError(f"{path}: says nothing of rank {rank}; give the file of this job, and of this rank")
    return sorted(ranks)


def _renamed(path: str, number: str, other: int) -> list[str]:
    """`path` with another rank: all places that name the old one, or the last only (a job may be called so)."""
    places = [match for match in _RANK.finditer(path) if match[1] == number]
    names = []
    for chosen in (places, places[-1:]):
        text = path
        for match in reversed(chosen):
            text = f"{text[: match.start(1)]}{other}{text[match.end(1) :]}"
        names.append(text)
    return list(dict.fromkeys(names))


def _can_be_used(path: str) -> bool:
    from mindx_elastic.persist.format import read_header

    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        read_header(path)
    except ForeignCheckpointError:
        return True
    except CheckpointError:
        return not path.endswith(".safetensors")  # another program's
    except (OSError, ValueError):  # ValueError: a null character
        return False
    return True
