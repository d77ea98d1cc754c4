from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.convert.conversion import ConversionRequest, Converted, convert
from mindx_elastic.core.layout import Layout
from mindx_elastic.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    NoUsableCheckpointError,
    UsageError,
)
from tests.checkpoint_files import flip_bit_in_data, flip_bit_in_header
from tests.convert.samples import write_rank
from tests.start.worlds import cut as part

WEIGHT = torch.arange(70.0).reshape(10, 7)
BIAS = torch.arange(7, dtype=torch.bfloat16)
ALL = Layout((4,), ("R",))  # type: ignore[arg-type]
ROWS = Layout((2, 2), ("R", "S(0)"))  # type: ignore[arg-type]
STRIDED = Layout((2, 2), ("_S(0,2)", "S(0)"))  # type: ignore[arg-type]


def write_job(root: Path, layout: Layout, **fields: Any) -> None:
    """Four ranks; `weight` laid out, `bias` on all; each has a generator of its own."""
    for rank in range(4):
        state = {
            "model": {"weight": part(WEIGHT, layout, rank), "bias": BIAS},
            "optimizer": {
                "state": {0: {"exp_avg": part(WEIGHT * 2, layout, rank)}},
                "param_groups": [{"params": [0, 1]}],
            },
            "rng": torch.full((5,), rank),
        }
        named = {place: [0, [10, 7]] for place in ("model.weight", "optimizer.state.0.exp_avg")}
        record = {"parameters": {"optimizer": ["model.weight", "model.bias"]}}
        write_rank(root, rank, 4, state, layouts=[layout, ALL], tensors=named, default=1, record=record, **fields)


def run(source: Path, **options: Any) -> tuple[Any, Converted]:
    """To a torch file; its content."""
    made = source.parent / "made.pt"
    result = convert(ConversionRequest(source=source, destination=made, force=True, **options))
    return torch.load(made, weights_only=True), result


@pytest.mark.parametrize("layout", [STRIDED, ALL], ids=str)
def test_shards_become_whole(tmp_path: Path, layout: Layout) -> None:
    write_job(tmp_path / "ckpt", layout)
    model, result = run(tmp_path / "ckpt")
    assert torch.equal(model["weight"], WEIGHT) and torch.equal(model["bias"], BIAS)
    assert (result.step, result.num_tensors, result.notes) == (17, 2, [])


def test_a_replica_stands_in(tmp_path: Path) -> None:
    write_job(tmp_path / "ckpt", ROWS)  # ranks 0 and 2 hold the same, 1 and 3 do
    shutil.rmtree(tmp_path / "ckpt" / "rank_0")
    flip_bit_in_header(tmp_path / "ckpt" / "rank_1" / "m-1_7.safetensors")
    model, result = run(tmp_path / "ckpt")
    assert torch.equal(model["weight"], WEIGHT)
    assert any("rank 0 takes rank 2's file" in note for note in result.notes)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_named_users_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(write_rank(tmp_path / "ckpt", 0, 1, {"model": {"w": WEIGHT}}), 4242, -1)
    with pytest.raises(CheckpointError, match="belongs to user 4242"):
        run(tmp_path / "ckpt")
    monkeypatch.setenv("MINDX_TRUSTED_USERS", "4242")
    assert torch.equal(run(tmp_path / "ckpt")[0]["w"], WEIGHT)


def test_damaged_tensors_come_from_another_rank(tmp_path: Path) -> None:
    write_job(tmp_path / "ckpt", ROWS)
    for rank in (0, 1):
        flip_bit_in_data(tmp_path / "ckpt" / f"rank_{rank}" / "m-1_7.safetensors")  # the bias, the narrowest
    model, _ = run(tmp_path / "ckpt")
    assert torch.equal(model["bias"], BIAS)


def test_one_rank_s_file_is_not_a_model(tmp_path: Path) -> None:
    write_job(tmp_path / "ckpt", ROWS)
    with pytest.raises(UsageError, match="rank 2's part of 4: give the directory that holds all ranks, and --step 17"):
        run(tmp_path / "ckpt" / "rank_2" / "m-1_7.safetensors")


def test_pipeline_stages_are_merged(tmp_path: Path) -> None:
    stages = [Layout((2,), ("S(0)",), ranks=(0, 1)), Layout((2,), ("S(0)",), ranks=(2, 3))]  # type: ignore[arg-type]
    for rank in range(4):
        stage = rank // 2
        state = {"model": {f"layers.{stage}": part(WEIGHT + stage, stages[stage], rank)}}
        write_rank(
            tmp_path / "ckpt", rank, 4, state, layouts=stages, tensors={f"model.layers.{stage}": [stage, [10, 7]]}
        )
    model, _ = run(tmp_path / "ckpt")
    assert torch.equal(model["layers.0"], WEIGHT) and torch.equal(model["layers.1"], WEIGHT + 1)


def test_stages_that_all_count_from_zero_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        alone = Layout((1,), ("R",), ranks=(rank,))  # type: ignore[arg-type]
        state = {"model": {"w": WEIGHT + rank}}
        write_rank(tmp_path / "ckpt", rank, 2, state, layouts=[alone], default=0)
    with pytest.raises(MismatchError, match="rank 0 and rank 1 hold different tensors of this name"):
        run(tmp_path / "ckpt")
    model, result = run(tmp_path / "ckpt" / "rank_1" / "m-1_7.safetensors")
    assert torch.equal(model["w"], WEIGHT + 1) and "other ranks of 2 may hold more" in result.notes[0]


@pytest.mark.parametrize(("volatile", "fits"), [({"model": ["mean"]}, True), ({}, False)])
def test_what_is_only_assumed_to_be_equal(tmp_path: Path, volatile: dict[str, Any], fits: bool) -> None:
    both = Layout((2,), ("R",))  # type: ignore[arg-type]
    for rank in range(2):
        state = {"model": {"w": WEIGHT, "mean": BIAS + rank}}
        record = {"assumed": [0], "volatile": volatile}
        write_rank(tmp_path / "ckpt", rank, 2, state, layouts=[both], default=0, record=record)
    if fits:
        assert torch.equal(run(tmp_path / "ckpt")[0]["mean"], BIAS)
    else:
        with pytest.raises(MismatchError, match=r"rank 0 and rank 1 hold different tensors of this name"):
            run(tmp_path / "ckpt")


def test_which_step(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    write_rank(root, 0, 1, {"model": {"w": WEIGHT}}, name="a.safetensors", step=10)
    write_rank(root, 0, 1, {"model": {"w": WEIGHT + 1}}, name="b.safetensors", step=20)
    write_rank(root, 0, 1, {"model": {"w": WEIGHT + 2}}, name="c.safetensors", step=30, resumable=False, kind="eval")
    assert torch.equal(run(root)[0]["w"], WEIGHT + 1)
    assert torch.equal(run(root, step=10)[0]["w"], WEIGHT)
    assert torch.equal(run(root / "c.safetensors")[0]["w"], WEIGHT + 2)
    with pytest.raises(NoUsableCheckpointError, match=r"step 11 is not used: .*steps that are there: 20, 10"):
        run(root, step=11)
    with pytest.raises(UsageError, match="is of step 10, not 11"):
        run(root / "a.safetensors", step=11)


def test_a_world_that_a_small_file_claims_is_refused(tmp_path: Path) -> None:
    write_rank(tmp_path / "ckpt", 0, 1 << 18, {"model": {"w": WEIGHT}}, coordinates={"replicas": 1 << 18})
    with pytest.raises(UsageError, match="262144 ranks wrote it, and 1 files are here; give one of them"):
        run(tmp_path / "ckpt")


def test_damage_without_a_stand_in(tmp_path: Path) -> None:
    path = write_rank(tmp_path / "ckpt", 0, 1, {"model": {"w": WEIGHT}})
    flip_bit_in_data(path)
    with pytest.raises(CorruptCheckpointError, match=r"model.w does not match its digest"):
        run(tmp_path / "ckpt")
    flip_bit_in_header(path)
    with pytest.raises(CorruptCheckpointError, match="digest does not match"):
        run(tmp_path / "ckpt")
