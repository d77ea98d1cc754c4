"""MindSpore's functions over whole strategy files: stages put together, and who needs whose checkpoint after a change.

Names, arguments and results are those that MindSpore documents; errors are `UsageError`, which is a ValueError, and
where MindSpore raises TypeError or NotADirectoryError they are that too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mindx_elastic.core.layout import MAX_RANKS, Interval
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.errors import StrPath, UsageError
from mindx_elastic.platforms.small_files import ArgumentTypeError
from mindx_elastic.platforms.strategy_file import Content, load_strategy, read_strategy, save_strategy

__all__ = ["merge_strategies", "rank_list_for_transform"]

_SUFFIXES = (".ckpt", ".json", ".pb", ".strategy")


class _NoDirectoryError(UsageError, NotADirectoryError):
    pass


def merge_strategies(sources: StrPath | Iterable[StrPath], destination: StrPath | None = None) -> Strategy:
    """One strategy out of files of single pipeline stages, as MindSpore's ``merge_pipeline_strategys``.

    sources: a directory (its ``*.ckpt``, ``*.json``, ``*.pb`` and ``*.strategy`` files), or paths. Several files of one
    stage, one from each of its ranks, are as good as one. destination: where to write the result; None: nowhere.

    Raises UsageError, for a directory that is none also as NotADirectoryError: files that contradict each other, a
    stage that is in no file.
    """
    paths = _listed(sources) if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not paths:
        raise UsageError(f"no strategy file in {sources!r:.200}: looked for {', '.join(_SUFFIXES)}")
    contents = {path: read_strategy(path) for path in paths}
    _check_sizes(contents)
    specs = dict.fromkeys(spec for content in contents.values() for spec in content.strategy.tensors)
    world_size = max(content.strategy.world_size for content in contents.values())
    try:
        merged = Strategy(world_size, tuple(specs))
    except UsageError as error:
        raise UsageError(f"the strategy files {_few(paths)} contradict each other: {error}") from None
    absent = [rank for rank in range(world_size) if rank not in merged.ranks]
    if absent:
        raise UsageError(
            f"the strategy files {_few(paths)} say nothing of {len(absent)} ranks, {absent[0]} first: the file of a "
            "pipeline stage is missing"
        )
    if destination is not None:
        save_strategy(destination, merged)
    return merged


def _listed(folder: StrPath) -> list[Path]:
    root = Path(folder)
    if not root.is_dir():
        raise _NoDirectoryError(f"{folder} is no directory; give one, or a list of files")
    try:
        return sorted(path for path in root.iterdir() if path.suffix in _SUFFIXES and not path.name.startswith("."))
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None


def _check_sizes(contents: Mapping[StrPath, Content]) -> None:
    """That all files speak of one job."""
    sizes = {content.stage_size: path for path, content in contents.items() if content.stage_size}
    if len(sizes) > 1:
        (size, one), (other_size, other) = list(sizes.items())[:2]
        raise UsageError(f"contradictory strategy files: stages of {size} ranks in {one}, of {other_size} in {other}")
    worlds = {content.strategy.world_size: path for path, content in contents.items() if not content.stage_size}
    if len(worlds) > 1 or any(
        content.strategy.world_size > min(worlds, default=MAX_RANKS) for content in contents.values()
    ):
        raise UsageError(
            f"contradictory strategy files, of jobs with different numbers of ranks: {_few(list(contents))}"
        )


def _few(paths: Sequence[StrPath]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(map(str, paths[:3])) + more


# --- from one layout to another ---


def rank_list_for_transform(
    rank_id: int, src_strategy_file: StrPath | None = None, dst_strategy_file: StrPath | None = None
) -> list[int]:
    """The ranks of the old job, ascending, whose checkpoints rank `rank_id` of the new job needs.

    Of ranks that hold the same one is named, as MindSpore does: the one that stands where `rank_id` stands. None for a
    strategy: nothing is split; the one checkpoint of such an old job is that of rank 0. Empty, when all that the rank
    gets is empty.

    Raises UsageError for a malformed strategy, a rank that it does not have, and strategies without a tensor in common;
    TypeError for arguments of a wrong type.
    """
    if type(rank_id) is not int:
        raise ArgumentTypeError(f"rank_id is {rank_id!r:.80}; give a whole number")
    if rank_id < 0:
        raise UsageError(f"rank_id is {rank_id}; ranks count from 0")
    for name, value in (("src_strategy_file", src_strategy_file), ("dst_strategy_file", dst_strategy_file)):
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise ArgumentTypeError(f"{name} is {value!r:.80}; give a path")
    target = None if dst_strategy_file is None else load_strategy(dst_strategy_file)
    if target is not None and rank_id not in target.ranks:
        raise UsageError(f"rank_id is {rank_id}, but {dst_strategy_file} has {target.world_size} ranks")
    if src_strategy_file is None:
        return [0]
    found: set[int] = set()
    handled = set()
    for old, new in _pairs(load_strategy(src_strategy_file), target, rank_id):
        key = (old.layout, old.shape, new and new.layout, new and new.shape)
        if key not in handled:  # thousands of tensors share a few layouts
            handled.add(key)
            found.update(_needed_ranks(old, new, rank_id))
    if not handled:
        raise UsageError(f"{dst_strategy_file} gives rank {rank_id} no tensor that {src_strategy_file} has")
    return sorted(found)


def _pairs(source: Strategy, target: Strategy | None, rank: int) -> Iterator[tuple[TensorSpec, TensorSpec | None]]:
    """Tensors that `rank` of the new job gets, as they lie in the old and in the new one (None: whole)."""
    if target is None:
        yield from ((old, None) for old in source.tensors)
        return
    for new in target.tensors:
        if rank in new.layout:
            yield from ((old, new) for old in source.by_name.get(new.name, ()))


def _needed_ranks(old: TensorSpec, new: TensorSpec | None, rank: int) -> set[int]:
    shape = _common_shape(old, new)
    place = list(new.layout.ranks).index(rank) if new else rank
    wanted: list[list[Interval]] = [[(0, size)] for size in shape]
    if new is not None:
        wanted = new.layout.segments(shape, new.layout.shard_of(rank))
    model = old.layout.ranks[place % old.layout.size]
    holders = old.layout.holders
    replica = holders[old.layout.shard_of(model)].index(model)
    return {
        holders[shard][replica]
        for shard in range(old.layout.num_shards)
        if all(map(_meet, wanted, old.layout.segments(shape, shard)))
    }


def _meet(one: Sequence[Interval], other: Sequence[Interval]) -> bool:
    return any(max(a, c) < min(b, d) for a, b in one for c, d in other)


def _common_shape(old: TensorSpec, new: TensorSpec | None) -> tuple[int, ...]:
    """The tensor's; where no strategy knows it, one that both can split evenly: the same parts meet."""
    shapes = {spec.shape for spec in (old, new) if spec is not None and spec.shape}
    if len(shapes) > 1:
        raise UsageError(f"{old.name} has different shapes in the two strategies: {sorted(shapes)}")
    if shapes:
        return shapes.pop()
    layouts = [spec.layout for spec in (old, new) if spec is not None]
    splits = [(layout.placements[m].dim or 0, layout.mesh_shape[m]) for layout in layouts for m in layout.splitting]
    sizes = [1] * (1 + max((dim for dim, _ in splits), default=0))
    for dim, parts in splits:
        sizes[dim] *= parts
    return tuple(sizes)
