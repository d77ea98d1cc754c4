"""Strategy files: round trips, files of MindSpore's made by hand, hostile ones, and MindSpore's functions over them."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms import small_files
from mindx_elastic.platforms.strategy_file import (
    load_strategy,
    merge_strategies,
    messages,
    save_strategy,
)
from tests.start.strategies import draw_placements


def layout_item(
    name: str,
    dev_matrix: Sequence[int],
    tensor_map: Sequence[Any],
    *,
    split: Sequence[int] = (),
    offsets: Sequence[int] = (),
    step: int = 0,
    size: int = 0,
) -> Any:
    """A tensor of a strategy file. tensor_map: of the whole tensor, or a list for each of its dimensions."""
    item = messages().ParallelLayoutItem(param_name=name)
    layouts = item.parallel_layouts
    layouts.field, layouts.opt_weight_shard_step, layouts.opt_weight_shard_size = 0, step, size
    layouts.dev_matrix.add(dim=dev_matrix)
    for each in [tensor_map] if all(isinstance(k, int) for k in tensor_map) else tensor_map:
        layouts.tensor_map.add(dim=each)
    layouts.param_split_shape.add(dim=split)
    layouts.indices_offset.add(dim=offsets)
    return item


def strategy_map(*items: Any, stage: int = 0) -> bytes:
    """A strategy file with one operator."""
    content = messages().ParallelStrategyMap(current_stage=1, parallel_layout_item=items)
    content.parallel_strategy_item.add(node_name="Default/MatMul-op0").parallel_strategys.stage = stage
    data: bytes = content.SerializeToString(deterministic=True)
    return data


both_forms = pytest.mark.parametrize("name", ["s.pb", "s.ckpt", "s.json"])


def stage_layout(stage: int, placements: tuple[str, ...] = ("R", "S(0)")) -> Layout:
    return Layout((2, 2), placements, range(4 * stage, 4 * stage + 4), ("dp", "tp"))  # type: ignore[arg-type]


def pipeline() -> Strategy:
    """Two stages of four ranks, and what MindSpore's fields cannot say."""
    specs = [
        TensorSpec("embed", (12, 4), stage_layout(0), "F32"),
        TensorSpec("optimizer.state.embed.exp_avg", (12, 4), stage_layout(0, ("_S(0,2)", "S(0)")), "F32", "embed"),
        TensorSpec("head", (8, 6), stage_layout(1, ("S(0)", "S(1)")), "BF16"),
        TensorSpec("uneven", (7,), stage_layout(1)),
        TensorSpec("scale", (), stage_layout(1, ("R", "R"))),
        TensorSpec("weight-norm", (4,), stage_layout(1)),
        TensorSpec("permuted", (9,), Layout((4,), ("S(0)",), (3, 1, 0, 2))),  # type: ignore[arg-type]
        TensorSpec("everywhere", (3,), Layout((8,), ("R",))),  # type: ignore[arg-type]
    ]
    return Strategy(8, tuple(specs))


def facts(strategy: Strategy) -> dict[tuple[str, int], Any]:
    """What a strategy says, mesh names included (equality of layouts leaves them out)."""
    return {spec.key: (spec, spec.layout.mesh_dim_names) for spec in strategy.tensors}


# --- ours ---


def test_our_json_is_mindspores_json_too(tmp_path: Path) -> None:
    content = json.loads(save_strategy(tmp_path / "s.json", pipeline()).read_bytes())
    assert content["parallel_layout_item"]["0-embed"] == {
        "dev_matrix": [2, 2],
        "tensor_map": [0, -1],
        "tensor_shape": [12, 4],
        "field": 0,
        "opt_weight_shard_step": 0,
        "opt_weight_shard_size": 0,
    }
    for key in ("version", "world_size", "layouts", "tensors"):
        del content[key]
    (tmp_path / "theirs.json").write_text(json.dumps(content))
    found = load_strategy(tmp_path / "theirs.json")
    assert found.by_name["embed"][0].shape == (12, 4)
    assert found.by_name["embed"][0].layout == stage_layout(0)


def mindspores(path: Path, *items: tuple[str, list[int]], stage: int = 0) -> Path:
    """A strategy file as MindSpore writes it: parameters with their tensor maps on a mesh of 2 x 2."""
    path.write_bytes(strategy_map(*(layout_item(name, [2, 2], tensor_map) for name, tensor_map in items), stage=stage))
    return path


@both_forms
def test_foreign_tensor_maps_keep_an_entry_for_each_dimension(name: str, tmp_path: Path) -> None:
    given: dict[str, list[int]] = {"w": [1, -1], "v": [-1, -1, -1], "b": [-1], "k": [-1, 0, -1]}
    path = mindspores(tmp_path / "theirs.ckpt", *given.items())
    for turn in range(2):  # ours from theirs, and ours from ours
        path = save_strategy(tmp_path / f"{turn}-{name}", load_strategy(path))
        if name.endswith(".json"):
            found = {
                key: item["tensor_map"] for key, item in json.loads(path.read_bytes())["parallel_layout_item"].items()
            }
        else:
            content = messages().ParallelStrategyMap.FromString(path.read_bytes())
            found = {i.param_name: list(i.parallel_layouts.tensor_map[0].dim) for i in content.parallel_layout_item}
        assert found == given


def test_json_leaves_out_what_mindspores_reader_refuses(tmp_path: Path) -> None:
    nested = TensorSpec("nested", (8, 4), Layout((2, 2), ("S(0)", "S(0)"), range(4)))  # type: ignore[arg-type]
    two = TensorSpec("two", (8, 4), Layout((2, 2), ("_S(0,2)", "S(0)"), range(4)))  # type: ignore[arg-type]
    both = TensorSpec("both", (8, 4), Layout((2, 2, 2), ("S(0)", "S(0)", "S(1)"), range(8)))  # type: ignore[arg-type]
    scalar = TensorSpec("scalar", (), Layout((2, 2), ("R", "R"), range(4)))  # type: ignore[arg-type]
    for world, specs in ((4, (nested, two, scalar)), (8, (both,))):
        strategy = Strategy(world, specs)
        path = save_strategy(tmp_path / f"{world}.json", strategy)
        items = json.loads(path.read_bytes())["parallel_layout_item"]
        assert all(item["tensor_map"] and isinstance(item["tensor_map"][0], int) for item in items.values())
        assert "scalar" not in items
        assert facts(load_strategy(path)) == facts(strategy)


@st.composite
def some_strategy(draw: st.DrawFn) -> Strategy:
    specs = []
    world_size = draw(st.integers(1, 12))
    for number in range(draw(st.integers(0, 4))):
        mesh = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))]
        while math.prod(mesh) > world_size:
            mesh.pop()
        mesh = mesh or [1]
        ranks = list(range(world_size))
        if draw(st.booleans()):
            ranks = draw(st.permutations(ranks))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        layout = Layout(tuple(mesh), draw_placements(draw, mesh, len(shape)), ranks[: math.prod(mesh)])
        specs.append(TensorSpec(draw(st.sampled_from(["w", "a-b", "3-c", "ä\n"])) + str(number), shape, layout, "F16"))
    return Strategy(world_size, tuple(specs))


@settings(max_examples=120, deadline=None)
@given(strategy=some_strategy())
@pytest.mark.parametrize("name", ["random.pb", "random.json"])
def test_any_strategy_comes_back(tmp_path_factory: pytest.TempPathFactory, name: str, strategy: Strategy) -> None:
    path = tmp_path_factory.getbasetemp() / name
    found = load_strategy(save_strategy(path, strategy))
    assert (found.world_size, facts(found)) == (strategy.world_size, facts(strategy))
    for old, new in zip(strategy.tensors, found.tensors, strict=False):
        assert set(found.by_name) == set(strategy.by_name)
        for rank in old.layout.ranks:
            match = next(spec for spec in found.by_name[old.name] if rank in spec.layout)
            shard, other = old.layout.shard_of(rank), match.layout.shard_of(rank)
            assert old.layout.box(old.shape, shard) == match.layout.box(match.shape, other)
        assert new.dtype == "F16"


@settings(max_examples=120, deadline=None)
@given(strategy=some_strategy())
def test_mindspores_fields_alone_give_the_same_boxes(
    tmp_path_factory: pytest.TempPathFactory, strategy: Strategy
) -> None:
    """What we write for MindSpore is right or absent: read back without our own fields."""
    path = tmp_path_factory.getbasetemp() / "stripped.ckpt"
    content = messages().ParallelStrategyMap()
    content.ParseFromString(save_strategy(path, strategy).read_bytes())
    content.ClearField("world_size")
    content.ClearField("other_tensor")
    shapes = {}
    for item in content.parallel_layout_item:
        shapes[item.parallel_layouts.exact.name] = tuple(item.parallel_layouts.exact.shape)
        item.parallel_layouts.ClearField("exact")
    if not shapes:
        return
    path.write_bytes(content.SerializeToString())
    for spec in load_strategy(path).tensors:
        (old,) = (each for each in strategy.by_name[spec.name] if each.layout.ranks[0] == spec.layout.ranks[0])
        for rank in old.layout.ranks:
            shard, other = old.layout.shard_of(rank), spec.layout.shard_of(rank)
            assert old.layout.box(old.shape, shard) == spec.layout.box(old.shape, other)


# --- MindSpore's own, made by hand ---


def test_the_bytes_of_mindspore(tmp_path: Path) -> None:
    text = (
        "08 01"  # current stage
        "12 0c 0a 02 6f70 12 06 08 01 12 02 08 02"  # operator "op" in stage 1, split in 2
        "1a 24 0a 01 77 12 1f"  # tensor "w"
        "0a 04 08 04 08 02 12 0d 08 00 08 ffffffffffffffffff01"  # dev_matrix 4, 2; tensor_map 0, -1
        "1a 00 22 00 28 00 30 02 38 04"  # neither pieces nor offsets; 4 optimizer shards, 2 apart
    )
    path = tmp_path / "s.ckpt"
    path.write_bytes(bytes.fromhex(text.replace(" ", "")))
    (w,) = load_strategy(path).tensors
    assert (w.name, str(w.layout), w.layout.ranks) == ("w", "[m0=4:_S(0,2), m1=2:S(0)]", range(8, 16))
    item = layout_item("w", (4, 2), (0, -1), step=2, size=4)
    assert item.SerializeToString() == path.read_bytes()[18:]


def test_layouts_of_mindspore(tmp_path: Path) -> None:
    path = tmp_path / "src_strategy_0.ckpt"
    path.write_bytes(
        strategy_map(
            layout_item("dense.weight", (2, 4), (0, -1)),
            layout_item("dense.bias", (4, 2), (0,), step=2, size=4),
            layout_item("moments.dense.weight", (2, 2, 2), ((1, 0), (-1,))),
            layout_item("accu_grads.dense.weight", (2, 4), (0, -1), size=-1),
            layout_item("noted", (2, 4), (0, -1), split=(3, 7)),
        )
    )
    found = load_strategy(path)
    assert found.world_size == 8
    texts = {spec.name: (spec.shape, str(spec.layout), spec.layout.ranks) for spec in found.tensors}
    assert texts == {
        "dense.weight": ((), "[m0=2:R, m1=4:S(0)]", range(8)),
        "dense.bias": ((), "[m0=4:_S(0,2), m1=2:S(0)]", range(8)),
        "moments.dense.weight": ((), "[m0=2:R, m1=2:S(0), m2=2:S(0)]", range(8)),
        "accu_grads.dense.weight": ((), "[m0=2:R, m1=4:S(0)]", range(8)),
        "noted": ((), "[m0=2:R, m1=4:S(0)]", range(8)),
    }
    (bias,) = found.by_name["dense.bias"]
    assert bias.layout.box((16,), bias.layout.shard_of(1)) == ((8, 10),)
    again = load_strategy(save_strategy(tmp_path / "again.ckpt", found))
    assert facts(again) == facts(found)
    path.write_bytes(strategy_map(layout_item("table", (2, 4), (0,), split=(3, 3, 3, 1), offsets=(0, 3, 6, 9))))
    assert "'table': cut by hand" in refused(path)


def test_json_of_mindspore(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    item = {"field": 0, "opt_weight_shard_step": 2, "opt_weight_shard_size": 4}
    content = {
        "current_stage": 1,
        "parallel_strategy_item": {"op": {"stage": 1, "parallel_strategy": [[2, 4], [4, 1]]}},
        "parallel_layout_item": {
            "w": {"dev_matrix": [4, 2], "tensor_map": [0, -1], "tensor_shape": [16, 3], **item},
            "unshaped": {"dev_matrix": [4, 2], "tensor_map": [[1, 0], -1]},
        },
    }
    path.write_text(json.dumps(content))
    w, unshaped = load_strategy(path).tensors
    assert (w.shape, str(w.layout), w.layout.ranks) == ((16, 3), "[m0=4:_S(0,2), m1=2:S(0)]", range(8, 16))
    assert (unshaped.shape, str(unshaped.layout)) == ((), "[m0=4:S(0), m1=2:S(0)]")


# --- bad input ---


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_strategy(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def error_or_strategy(path: Path) -> None:
    problem = None
    try:
        load_strategy(path)
    except UsageError as error:
        problem = str(error)
    assert problem is None or str(path) in problem


JSON_BOMBS = {
    "deep": "[" * 100_000,
    "many ranks": '{"tensors": [], "layouts": [], "world_size": 999999999}',
    "bad shape": '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [1, 0], "tensor_shape": [4]}}}',
    "one twice": '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [0]}, "w": {"dev_matrix": [4], '
    '"tensor_map": [0]}}}',
    "huge mesh": '{"parallel_layout_item": {"w": {"dev_matrix": [4611686018427387903, 9], "tensor_map": [0]}}}',
}


@pytest.mark.parametrize("text", JSON_BOMBS.values(), ids=JSON_BOMBS)
def test_bad_json_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    refused(path)


@both_forms
def test_damaged_files_are_an_error_or_a_strategy(name: str, tmp_path: Path) -> None:
    data = save_strategy(tmp_path / name, pipeline()).read_bytes()
    path, chance = tmp_path / f"damaged-{name}", random.Random(4)
    for number in range(600):
        if number % 3 == 0:
            bad = data[: chance.randrange(len(data))]
        elif number % 3 == 1:
            changed = bytearray(data)
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            bad = bytes(changed)
        else:
            place = chance.randrange(len(data))
            bad = data[:place] + chance.choice([b"\xff" * 9 + b"\x01", b"9" * 30, b"[[", b"\x00"]) + data[place + 1 :]
        path.write_bytes(bad)
        error_or_strategy(path)


def test_only_regular_files_of_a_sane_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save_strategy(tmp_path / "s.ckpt", pipeline())
    link, pipe = tmp_path / "link.ckpt", tmp_path / "pipe.ckpt"
    link.symlink_to(good)
    os.mkfifo(pipe)
    assert "symbolic link" in refused(link)
    assert "not a regular file" in refused(pipe)
    assert "there is no such file" in refused(tmp_path / "none")
    assert "not a regular file" in refused(tmp_path)
    with pytest.raises(UsageError, match="null"):
        load_strategy("a\0b")
    with pytest.raises(TypeError, match="where the path of a strategy file should be"):
        load_strategy(3)  # type: ignore[arg-type]
    monkeypatch.setattr(small_files, "MAX_FILE_BYTES", good.stat().st_size - 1)
    assert "is larger than" in refused(good)
    huge = tmp_path / "huge.ckpt"
    huge.touch()
    os.truncate(huge, 1 << 40)
    assert "is larger than" in refused(huge)


# --- several files, and from one layout to another ---


def save(path: Path, *items: Any, stage: int = 0) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(strategy_map(*items, stage=stage))
    return path


def stages(folder: Path) -> list[Path]:
    """What the 8 ranks of two stages write, each its own file."""
    items = [(layout_item("w0", (2, 2), (0,)),), (layout_item("w1", (4,), (0, -1)), layout_item("b1", (4,), (-1,)))]
    return [save(folder / f"src_strategy_{rank}.ckpt", *items[rank // 4], stage=rank // 4) for rank in range(8)]


def test_our_own_stage_files_merge_too(tmp_path: Path) -> None:
    layouts = [Layout((2,), ("S(0)",), range(2 * s, 2 * s + 2)) for s in range(2)]  # type: ignore[arg-type]
    whole = Strategy(4, tuple(TensorSpec(f"w{s}", (6,), layout, "F32") for s, layout in enumerate(layouts)))
    parts = [Strategy(4, (spec,)) for spec in whole.tensors]
    paths = [save_strategy(tmp_path / f"{s}.{kind}", parts[s]) for s, kind in enumerate(("json", "pb"))]
    assert merge_strategies(paths) == whole
    with pytest.raises(UsageError, match="say nothing of 2 ranks, 2 first"):
        merge_strategies(paths[:1])
    save_strategy(tmp_path / "0.json", Strategy(6, whole.tensors))
    with pytest.raises(UsageError, match="different numbers of ranks"):
        merge_strategies(paths)


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    paths = stages(tmp_path)
    with pytest.raises(UsageError, match="4 ranks, 0 first: the file of a pipeline stage is missing"):
        merge_strategies(paths[4:])
    save(paths[1], layout_item("w0", (4,), (0,)))
    with pytest.raises(UsageError, match="contradict each other: contradictory descriptions of w0"):
        merge_strategies(tmp_path)
    save(paths[1], layout_item("w0", (2,), (0,)))
    with pytest.raises(UsageError, match=r"stages of 4 ranks in .*, of 2 in .*_1"):
        merge_strategies(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        merge_strategies(paths[0])
    with pytest.raises(NotADirectoryError):
        merge_strategies(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no strategy file in"):
        merge_strategies(tmp_path / "empty")
    with pytest.raises(UsageError, match="no strategy file in"):
        merge_strategies([])
