"""Strategy files: a `Strategy` on disk in MindSpore's form, and several files of one job as one.

A path that ends in ``.json`` is JSON, anything else protobuf (``strategy.proto``). What we write says everything twice:
in MindSpore's fields as far as they can, and exactly in fields that MindSpore skips. A file that MindSpore wrote has
the layouts but not the shapes: such tensors come back with shape ``()``. Pipeline stages: a file of one stage has plain
names, a file of several ``{stage}-{name}``.

Source of the form: MindSpore's ``train/node_strategy_pb2.py`` (messages) and ``parallel/_parallel_serialization.py``
(what they mean) in version 2.10. `merge_strategies` takes and returns what ``merge_pipeline_strategys`` in
``parallel/checkpoint_transform.py`` does. Errors are `UsageError`, and NotADirectoryError too where MindSpore raises
that.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mindx_elastic.core.fields import load_json
from mindx_elastic.core.layout import MAX_RANKS, Layout
from mindx_elastic.core.strategy import MAX_TENSOR_DIMS, Strategy, TensorSpec
from mindx_elastic.errors import StrPath, UsageError
from mindx_elastic.platforms.mindspore_layout import Fields, fields_of, layout_of, stage_size_of
from mindx_elastic.platforms.small_files import read_bounded, write_whole

__all__ = [
    "Content",
    "load_strategy",
    "merge_strategies",
    "messages",
    "parse_message",
    "read_strategy",
    "save_strategy",
]

_SUFFIXES = (".ckpt", ".json", ".pb", ".strategy")
_STAGED = re.compile(r"(\d{1,8})-(.+)", re.DOTALL)


def messages() -> Any:
    """The generated module of ``strategy.proto``, imported when it is needed: ``import mindx_elastic`` needs no
    protobuf."""
    return importlib.import_module("mindx_elastic.platforms.strategy_pb2")


def parse_message(kind: str, data: bytes, where: str) -> Any:
    """A message of ``strategy.proto`` from bytes of unknown quality. Raises UsageError."""
    message = getattr(messages(), kind)()
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    try:
        message.MergeFromString(data)
    except (decode_error, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where}: damaged, or no protobuf file of this kind: {error!s:.200}") from None
    if not message.IsInitialized():  # protobuf would name what is missing in each of a million entries
        raise UsageError(f"{where}: damaged, or no protobuf file of this kind: a required field is missing")
    return message


@dataclass(frozen=True)
class Content:
    """A strategy file, and what only matters together with other files of the same job."""

    strategy: Strategy
    stage_size: int = 0
    """Ranks of a pipeline stage; 0: we wrote the file, and it names the ranks of each tensor."""


# --- save ---


def save_strategy(path: StrPath, strategy: Strategy) -> Path:
    """Write `strategy` to `path`: JSON when that ends in ``.json``, else protobuf. Appears whole or not at all.

    Where there are several pipeline stages, the names are ``{stage}-{name}``, as `merge_strategies` leaves them. Raises
    SaveError when it cannot be written. Any thread.
    """
    size = stage_size_of(strategy)
    stages = range(-(-strategy.world_size // size))
    items, others = [], []
    for spec in strategy.tensors:
        fields = fields_of(spec, size) if "-" not in spec.name else None  # MindSpore splits names there
        # Scalars: MindSpore writes none, and its `get_parameter_redundancy` fails on an empty map.
        if fields is None or not fields.num_dims or spec.layout.ranks[0] // size not in stages:
            others.append(spec)
        else:
            prefix = f"{spec.layout.ranks[0] // size}-" if len(stages) > 1 else ""
            items.append((prefix + spec.name, fields, spec))
    if str(os.fspath(path)).endswith(".json"):
        return write_whole(path, _to_json(strategy, items, stages))
    return write_whole(path, _to_proto(strategy.world_size, items, others, stages))


_Items = Sequence[tuple[str, Fields, TensorSpec]]


def _to_json(strategy: Strategy, items: _Items, stages: Sequence[int]) -> bytes:
    theirs = {
        "current_stage": 1,
        "parallel_strategy_item": {f"stage-{stage}": {"stage": stage, "parallel_strategy": []} for stage in stages},
        "parallel_layout_item": {
            name: {
                "dev_matrix": fields.dev_matrix,
                "tensor_map": fields.tensor_map[0],
                "tensor_shape": spec.shape,
                "field": fields.field,
                "opt_weight_shard_step": fields.opt_weight_shard_step,
                "opt_weight_shard_size": fields.opt_weight_shard_size,
            }
            for name, fields, spec in items
            if not fields.is_nested  # MindSpore's reader of JSON would refuse the whole file
        },
    }
    return json.dumps({**strategy.to_json(), **theirs}).encode()


def _to_proto(world_size: int, items: _Items, others: Iterable[TensorSpec], stages: Sequence[int]) -> bytes:
    content = messages().ParallelStrategyMap(current_stage=1, world_size=world_size)
    for stage in stages:
        content.parallel_strategy_item.add(node_name=f"stage-{stage}").parallel_strategys.stage = stage
    for name, fields, spec in items:
        layouts = content.parallel_layout_item.add(param_name=name).parallel_layouts
        layouts.dev_matrix.add().dim.extend(fields.dev_matrix)
        for each in fields.tensor_map:
            layouts.tensor_map.add().dim.extend(each)
        layouts.param_split_shape.add()
        layouts.indices_offset.add()
        layouts.field = fields.field
        layouts.opt_weight_shard_step = fields.opt_weight_shard_step
        layouts.opt_weight_shard_size = fields.opt_weight_shard_size
        _fill_exact(layouts.exact, spec)
    for spec in others:
        _fill_exact(content.other_tensor.add(), spec)
    data: bytes = content.SerializeToString(deterministic=True)
    return data


def _fill_exact(exact: Any, spec: TensorSpec) -> None:
    exact.name, exact.dtype, exact.parameter = spec.name, spec.dtype, spec.parameter
    exact.shape.extend(spec.shape)
    exact.mesh_shape.extend(spec.layout.mesh_shape)
    exact.placement.extend(map(str, spec.layout.placements))
    exact.mesh_dim_name.extend(spec.layout.mesh_dim_names)
    if spec.num_dims is not None:
        exact.num_dims = spec.num_dims
    runs: list[int] = []
    if isinstance(spec.layout.ranks, range):
        runs = [spec.layout.ranks[0], spec.layout.size]
    else:
        for rank in spec.layout.ranks:
            if runs and runs[-2] + runs[-1] == rank:
                runs[-1] += 1
            else:
                runs += [rank, 1]
    exact.rank_run.extend(runs)


# --- load ---


def load_strategy(path: StrPath) -> Strategy:
    """The strategy in a file of ours or of MindSpore's: JSON when `path` ends in ``.json``, else protobuf.

    Tensors whose shape the file does not tell have shape ``()``. Raises UsageError, which names the file and the
    tensor, for everything that is wrong with it. Any thread.
    """
    return read_strategy(path).strategy


def read_strategy(path: StrPath) -> Content:
    """`load_strategy`, and what `merge_strategies` compares."""
    data = read_bounded(path, "strategy file")
    where = f"strategy file {path}"
    try:
        return _from_json(data) if str(os.fspath(path)).endswith(".json") else _from_proto(data)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        # UnicodeDecodeError and JSONDecodeError are ValueErrors.
        raise UsageError(f"{where}: damaged or malformed: {error!r:.200}") from None


def _from_proto(data: bytes) -> Content:
    content = parse_message("ParallelStrategyMap", data, "content")
    nodes = content.parallel_strategy_item
    builder = _Builder(nodes[0].parallel_strategys.stage if nodes else 0)
    for item in content.parallel_layout_item:
        layouts = item.parallel_layouts
        if layouts.HasField("exact"):
            builder.add_exact(layouts.exact)
        else:
            fields = _fields_from_proto(item.param_name, layouts)
            pieces, offsets = layouts.param_split_shape, layouts.indices_offset
            _check_not_cut(item.param_name, pieces[0].dim if pieces else (), offsets[0].dim if offsets else (), fields)
            builder.add_foreign(item.param_name, fields, ())
    for exact in content.other_tensor:
        builder.add_exact(exact)
    return builder.finish(content.world_size)


def _fields_from_proto(name: str, layouts: Any) -> Fields:
    if len(layouts.dev_matrix) != 1 or not 1 <= len(layouts.tensor_map) <= MAX_TENSOR_DIMS:
        raise UsageError(f"{name}: {len(layouts.dev_matrix)} dev_matrix and {len(layouts.tensor_map)} tensor_map")
    return Fields(
        tuple(layouts.dev_matrix[0].dim),
        tuple(tuple(each.dim) for each in layouts.tensor_map),
        layouts.field,
        layouts.opt_weight_shard_step,
        layouts.opt_weight_shard_size,
    )


def _check_not_cut(name: str, pieces: Sequence[Any], offsets: Sequence[Any], fields: Fields) -> None:
    """Raise UsageError for a tensor cut by hand: what each rank holds cannot be said. Some writers note the shape of
    their own slice in the place of the pieces."""
    if offsets or len(pieces) not in (0, fields.num_dims):
        raise UsageError(f"{name!r:.200}: cut by hand into pieces of {list(pieces)!r:.80}, which is not supported")


def _from_json(data: bytes) -> Content:
    content = load_json(data)
    if not isinstance(content, dict):
        raise UsageError("not a JSON object")
    if "tensors" in content:
        return Content(Strategy.from_json(content))
    nodes, items = content.get("parallel_strategy_item") or {}, content.get("parallel_layout_item")
    if not isinstance(items, dict) or not isinstance(nodes, dict):
        raise UsageError('neither "tensors" nor a "parallel_layout_item" with parameters in it')
    stage = next(iter(nodes.values()))["stage"] if nodes else 0
    builder = _Builder(_whole(stage, "stage", 0))
    for name, item in items.items():
        maps = item["tensor_map"]
        nested = any(isinstance(each, list) for each in maps)
        fields = Fields(
            _numbers(item["dev_matrix"], MAX_TENSOR_DIMS),
            tuple(_numbers(each if isinstance(each, list) else [each], MAX_TENSOR_DIMS) for each in maps)
            if nested
            else (_numbers(maps, MAX_TENSOR_DIMS),),
            *(_whole(int(item.get("field", 0)), "field", 0),),
            *(_whole(item.get(f"opt_weight_shard_{key}", 0), key, -1) for key in ("step", "size")),
        )
        pieces, offsets = (_numbers(item.get(key) or [], MAX_RANKS) for key in ("param_split_shape", "indices_offset"))
        _check_not_cut(name, pieces, offsets, fields)
        builder.add_foreign(name, fields, _numbers(item.get("tensor_shape") or [], MAX_TENSOR_DIMS))
    return builder.finish(0)


def _whole(value: Any, what: str, low: int) -> int:
    if type(value) is not int or not low <= value < 1 << 62:
        raise UsageError(f"{what} is {value!r:.80} where a whole number from {low} on should be")
    return value


def _numbers(value: Any, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > limit:
        raise UsageError(f"{value!r:.80} where a list of at most {limit} numbers should be")
    return tuple(_whole(each, "an entry", -1) for each in value)


class _Builder:
    """Collects the tensors of one file."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        """The stage of names without one."""
        self.specs: list[TensorSpec] = []
        self.sizes: dict[int, str] = {}
        """Numbers of ranks of the layouts that MindSpore wrote, each with a tensor that has it."""
        self._layouts: dict[object, Layout] = {}  # thousands of tensors share a few layouts

    def add_foreign(self, param_name: str, fields: Fields, shape: tuple[int, ...]) -> None:
        """A tensor that MindSpore wrote."""
        staged = _STAGED.fullmatch(param_name)
        stage, name = (int(staged[1]), staged[2]) if staged else (self.stage, param_name)
        try:
            key = (fields, stage)
            if key not in self._layouts:
                self._layouts[key] = layout_of(fields, stage * fields.num_ranks)
            layout = self._layouts[key]
            if shape:
                layout.local_shape(shape, 0)
                if min(shape) < 0:
                    raise UsageError(f"tensor_shape {list(shape)}")
            spec = TensorSpec(name, shape, layout, num_dims=None if shape else fields.num_dims)
        except UsageError as error:
            raise UsageError(f"{param_name!r:.200}: {error}") from None
        if not name:
            raise UsageError("a tensor without a name")
        self.sizes.setdefault(fields.num_ranks, param_name)
        self.specs.append(spec)

    def add_exact(self, exact: Any) -> None:
        """A tensor of ours."""
        name = exact.name
        try:
            texts = (name, exact.dtype, exact.parameter, *exact.placement, *exact.mesh_dim_name)
            if not all(isinstance(text, str) for text in texts):  # protobuf gives proto2's bad strings as bytes
                raise UsageError("a name that is not UTF-8")
            num_dims = exact.num_dims if exact.HasField("num_dims") else None
            if num_dims is not None and num_dims > MAX_TENSOR_DIMS:
                raise UsageError(f"{num_dims} dimensions")
            layout = self._exact_layout(exact)
            spec = TensorSpec(name, tuple(exact.shape), layout, exact.dtype, exact.parameter, num_dims=num_dims)
            if len(spec.shape) > MAX_TENSOR_DIMS or max(spec.shape, default=0) >= 1 << 62:
                raise UsageError(f"shape {list(spec.shape)!r:.80}")
            if spec.shape:
                spec.layout.local_shape(spec.shape, 0)
            if not name:
                raise UsageError("a tensor without a name")
        except UsageError as error:
            raise UsageError(f"{name!r:.200}: {error}") from None
        self.specs.append(spec)

    def _exact_layout(self, exact: Any) -> Layout:
        runs, names = tuple(exact.rank_run), tuple(exact.mesh_dim_name)
        key = (tuple(exact.mesh_shape), tuple(exact.placement), runs, names)
        if key not in self._layouts:
            starts, counts = runs[::2], runs[1::2]
            if not counts or len(runs) % 2 or not min(counts) or sum(counts) > MAX_RANKS:
                raise UsageError(f"its ranks are {runs!r:.80}")
            ranks = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
            # strings are taken for placements by Layout itself
            self._layouts[key] = Layout(
                key[0], key[1], ranks[0] if len(ranks) == 1 else tuple(chain.from_iterable(ranks)), names
            )
        return self._layouts[key]

    def finish(self, world_size: int) -> Content:
        """`world_size`: as the file says; 0: it does not."""
        if len(self.sizes) > 1:
            (size, one), (other_size, other) = list(self.sizes.items())[:2]
            raise UsageError(f"{one!r:.200} is on {size} ranks and {other!r:.200} on {other_size}: of one strategy?")
        if not self.specs and not world_size:
            raise UsageError("no tensor in it")
        world_size = world_size or 1 + max(max(spec.layout.ranks) for spec in self.specs)
        return Content(Strategy(world_size, tuple(self.specs)), next(iter(self.sizes), 0))


# --- several files of one job ---


class _NoDirectoryError(UsageError, NotADirectoryError):
    pass


def merge_strategies(sources: StrPath | Iterable[StrPath], destination: StrPath | None = None) -> Strategy:
    """One strategy out of files of single pipeline stages, as MindSpore's ``merge_pipeline_strategys``.

    sources: a directory (its ``*.ckpt``, ``*.json``, ``*.pb`` and ``*.strategy`` files), or paths. Several files of one
    stage, one from each of its ranks, are as good as one. destination: where to write the result; None: nowhere.

    Raises UsageError for files that contradict each other and for a stage without a file; for a source that is not a
    directory it is a NotADirectoryError too.
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
        raise _NoDirectoryError(f"{folder} is not a directory; give one, or a list of files")
    try:
        return sorted(path for path in root.iterdir() if path.suffix in _SUFFIXES and not path.name.startswith("."))
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None


def _check_sizes(contents: Mapping[StrPath, Content]) -> None:
    """Check that all files describe one job."""
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
