"""Stages merged into one strategy, and the ranks that a new layout needs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import Layout, overlap
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.strategy_file import load_strategy, save_strategy
from mindx_elastic.platforms.transform import merge_strategies, rank_list_for_transform
from tests.platforms.wire import layout_item, strategy_map


def save(path: Path, *items: bytes, stage: int = 0) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(strategy_map(*items, stage=stage))
    return path


def stages(folder: Path) -> list[Path]:
    """What the 8 ranks of two stages write, each its own file."""
    items = [(layout_item("w0", (2, 2), (0,)),), (layout_item("w1", (4,), (0, -1)), layout_item("b1", (4,), (-1,)))]
    return [save(folder / f"src_strategy_{rank}.ckpt", *items[rank // 4], stage=rank // 4) for rank in range(8)]


def test_stages_become_one_strategy(tmp_path: Path) -> None:
    stages(tmp_path / "in")
    (tmp_path / "in" / "notes.txt").write_text("no strategy")
    merged = merge_strategies(str(tmp_path / "in"), tmp_path / "out.ckpt")
    assert merged.world_size == 8
    assert {(spec.name, spec.layout.ranks) for spec in merged.tensors} == {
        ("w0", range(4)),
        ("w1", range(4, 8)),
        ("b1", range(4, 8)),
    }
    assert load_strategy(tmp_path / "out.ckpt") == merged
    assert merge_strategies([tmp_path / "in" / f"src_strategy_{rank}.ckpt" for rank in (7, 0)]) == Strategy(
        8, tuple(sorted(merged.tensors, key=lambda spec: -spec.layout.ranks[0]))
    )


def test_our_own_stage_files_merge_too(tmp_path: Path) -> None:
    layouts = [Layout((2,), ("S(0)",), range(2 * s, 2 * s + 2)) for s in range(2)]  # type: ignore[arg-type]
    whole = Strategy(4, tuple(TensorSpec(f"w{s}", (6,), layout, "F32") for s, layout in enumerate(layouts)))
    paths = [save_strategy(tmp_path / f"{s}.{kind}", whole, stage=s) for s, kind in enumerate(("json", "pb"))]
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
    with pytest.raises(UsageError, match="is no directory"):
        merge_strategies(paths[0])
    with pytest.raises(NotADirectoryError):
        merge_strategies(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no strategy file in"):
        merge_strategies(tmp_path / "empty")
    with pytest.raises(UsageError, match="no strategy file in"):
        merge_strategies([])


# --- who needs whom ---


def test_ranks_for_a_transformation(tmp_path: Path) -> None:
    dp2_tp4 = save(tmp_path / "a.ckpt", layout_item("w", (2, 4), (0, -1)))
    tp2 = save(tmp_path / "b.ckpt", layout_item("w", (2,), (0, -1)))
    columns = save(tmp_path / "c.ckpt", layout_item("w", (2, 4), (-1, 0)))
    assert rank_list_for_transform(0, dp2_tp4, tp2) == [0, 1]
    assert rank_list_for_transform(1, str(dp2_tp4), str(tp2)) == [2, 3]
    assert [rank_list_for_transform(rank, tp2, dp2_tp4) for rank in range(8)] == [[0], [0], [1], [1]] * 2
    assert rank_list_for_transform(6, dp2_tp4, dp2_tp4) == [6]  # of two that hold it the one in the same place
    assert rank_list_for_transform(1, dp2_tp4, columns) == [0, 1, 2, 3]
    assert rank_list_for_transform(5, dp2_tp4, columns) == [4, 5, 6, 7]
    assert rank_list_for_transform(0, dp2_tp4) == [0, 1, 2, 3]  # whole again
    assert rank_list_for_transform(3, None, dp2_tp4) == [0]
    assert rank_list_for_transform(0) == [0]


def test_ranks_for_a_transformation_of_stages(tmp_path: Path) -> None:
    stages(tmp_path / "in")
    merge_strategies(tmp_path / "in", tmp_path / "src.ckpt")
    items = [layout_item(name, (2,), (0,)) for name in ("w0", "w1")]
    target = save(tmp_path / "dst.ckpt", *items)
    assert rank_list_for_transform(1, tmp_path / "src.ckpt", target) == [1, 6, 7]
    only_second = save(tmp_path / "second.ckpt", layout_item("0-w1", (2,), (0,)), layout_item("1-w0", (2,), (0,)))
    assert rank_list_for_transform(0, tmp_path / "src.ckpt", only_second) == [4, 5]
    assert rank_list_for_transform(2, tmp_path / "src.ckpt", only_second) == [0]
    assert rank_list_for_transform(0, tmp_path / "src.ckpt") == [0, 1, 4, 5, 6, 7]


def test_arguments_are_checked_as_documented(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", layout_item("w", (4,), (0,)))
    other = save(tmp_path / "b.ckpt", layout_item("v", (4,), (0,)))
    for arguments in [("0", path), (True, path), (0.0, path), (0, 3), (0, path, 3)]:
        with pytest.raises(TypeError) as caught:
            rank_list_for_transform(*arguments)  # type: ignore[arg-type]
        assert isinstance(caught.value, UsageError)
    with pytest.raises(UsageError, match=r"rank_id is 4, but .* has 4 ranks"):
        rank_list_for_transform(4, path, path)
    with pytest.raises(UsageError, match="rank_id is -1"):
        rank_list_for_transform(-1, path)
    with pytest.raises(UsageError, match="gives rank 0 no tensor that"):
        rank_list_for_transform(0, path, other)
    with pytest.raises(ValueError, match="strategy file"):
        rank_list_for_transform(0, tmp_path / "none.ckpt")


@st.composite
def some_layout(draw: st.DrawFn) -> Layout:
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    placements = []
    for m in range(len(mesh)):
        dim = draw(st.sampled_from([None, 0, 1]))
        factor = draw(st.sampled_from([1, math.prod(mesh[m + 1 :])]))
        placements.append("R" if dim is None else f"_S({dim},{factor})")
    return Layout(tuple(mesh), tuple(placements), draw(st.permutations(range(math.prod(mesh)))))  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(old=some_layout(), new=some_layout(), shape=st.tuples(st.integers(1, 7), st.integers(1, 7)))
def test_the_ranks_hold_all_that_is_needed_and_no_rank_is_named_in_vain(
    tmp_path_factory: pytest.TempPathFactory, old: Layout, new: Layout, shape: tuple[int, int]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    paths = []
    for name, layout in (("old.pb", old), ("new.pb", new)):
        paths.append(save_strategy(folder / name, Strategy(layout.size, (TensorSpec("w", shape, layout),))))
    for rank in new.ranks:
        wanted = new.boxes(shape, new.shard_of(rank))
        chosen = rank_list_for_transform(rank, *paths)
        held = {old.shard_of(other) for other in chosen}
        assert len(held) == len(chosen)
        for shard in range(old.num_shards):
            meets = any(overlap(a, b) for a in wanted for b in old.boxes(shape, shard))
            assert meets == (shard in held)
