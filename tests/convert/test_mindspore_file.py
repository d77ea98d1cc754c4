from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindx_elastic.convert.conversion import ConversionRequest, convert
from mindx_elastic.convert.mapped import Scratch
from mindx_elastic.convert.mindspore_file import read_plain, read_shards
from mindx_elastic.convert.plain_file import write_plain
from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.errors import (
    CorruptCheckpointError,
    MismatchError,
    UnsupportedStateError,
    UsageError,
)
from mindx_elastic.platforms.strategy_file import save_strategy
from tests.checkpoint_files import cut_off_end
from tests.convert.samples import part

WEIGHT = torch.arange(48.0).reshape(8, 6)
SPLIT = Layout((2, 2), ("R", "S(1)"))  # type: ignore[arg-type]
STRATEGY = Strategy(4, (TensorSpec("w", (8, 6), SPLIT),))


def write_shards(root: Path, layout: Layout, *, extra: dict[str, torch.Tensor] | None = None) -> None:
    for rank in layout.ranks:
        (root / f"rank_{rank}").mkdir(parents=True)
        tensors = {"w": part(WEIGHT, layout, rank).contiguous(), "step": torch.tensor(5)}
        save_file(tensors | (extra or {}), root / f"rank_{rank}" / "net_1-10.safetensors")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "layout",
    [
        SPLIT,
        Layout((2, 2), ("S(1)", "S(0)")),  # type: ignore[arg-type]
        Layout((2, 2), ("_S(0,2)", "S(0)")),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_shards_and_a_strategy(tmp_path: Path, layout: Layout, known: bool) -> None:
    write_shards(tmp_path / "ms", layout)
    strategy = Strategy(4, (TensorSpec("w", (8, 6) if known else (), layout),))
    found, notes = read_shards(tmp_path / "ms", strategy, Scratch(tmp_path))
    assert torch.equal(found["w"], WEIGHT) and found["step"] == 5 and notes == []


def test_uneven_shards_need_a_strategy_with_shapes(tmp_path: Path) -> None:
    layout = Layout((3,), ("S(0)",))  # type: ignore[arg-type]
    write_shards(tmp_path / "ms", layout)  # 3, 3 and 2 rows
    known = Strategy(3, (TensorSpec("w", (8, 6), layout),))
    assert torch.equal(read_shards(tmp_path / "ms", known, Scratch(tmp_path))[0]["w"], WEIGHT)
    with pytest.raises(MismatchError, match="w: one shape of its parts is expected"):
        read_shards(tmp_path / "ms", Strategy(3, (TensorSpec("w", (), layout),)), Scratch(tmp_path))


def test_a_strategy_file(tmp_path: Path) -> None:
    from mindx_elastic.platforms.strategy_file import save_strategy

    write_shards(tmp_path / "ms", SPLIT)
    file = save_strategy(tmp_path / "strategy.ckpt", STRATEGY)
    options: dict[str, Any] = {"source": tmp_path / "ms", "destination": tmp_path / "m.pt"}
    result = convert(ConversionRequest(**options, strategy=file))
    assert result.source_kind == "mindspore"
    assert torch.equal(torch.load(tmp_path / "m.pt", weights_only=True)["w"], WEIGHT)
    with pytest.raises(UsageError, match="say with --strategy"):
        convert(ConversionRequest(**options, force=True))
    (tmp_path / "bad.ckpt").write_bytes(b"\xff" * 50)
    with pytest.raises(UsageError, match=r"bad\.ckpt"):
        convert(ConversionRequest(**options, force=True, strategy=tmp_path / "bad.ckpt"))


def test_a_replica_stands_in_and_a_missing_part_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "ms", SPLIT)
    path = tmp_path / "ms" / "rank_1" / "net_1-10.safetensors"
    cut_off_end(path)
    found, _ = read_shards(tmp_path / "ms", STRATEGY, Scratch(tmp_path))
    assert torch.equal(found["w"], WEIGHT)
    (tmp_path / "ms" / "rank_3" / "net_1-10.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"w: part 2 of 2 .*rank 1: .*rank 3: no file"):
        read_shards(tmp_path / "ms", STRATEGY, Scratch(tmp_path))


def test_contradictions_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "ms", SPLIT)
    scratch = Scratch(tmp_path)
    with pytest.raises(MismatchError, match="differs between rank 0 and rank 1, and the strategy does not say"):
        read_shards(tmp_path / "ms", Strategy(4, ()), scratch)
    with pytest.raises(MismatchError, match=r"makes it .8, 2.: the files and the layout do not belong together"):
        read_shards(tmp_path / "ms", Strategy(4, (TensorSpec("w", (8, 4), SPLIT),)), scratch)
    wrong = Layout((4,), ("S(7)",))  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="splits dimension 7"):
        read_shards(tmp_path / "ms", Strategy(4, (TensorSpec("w", (), wrong),)), scratch)
    with pytest.raises(MismatchError, match="has only 2 ranks"):
        read_shards(tmp_path / "ms", Strategy(2, ()), scratch)
    two = Strategy(4, (*STRATEGY.tensors, TensorSpec("gone", (3, 4), SPLIT)))
    assert read_shards(tmp_path / "ms", two, scratch)[1] == ["in the strategy and in no file: gone"]
    save_file({"w": WEIGHT}, tmp_path / "ms" / "rank_0" / "other.safetensors")
    with pytest.raises(UsageError, match=r"rank_0 holds 2 safetensors files and .*net_1-10.safetensors does not say"):
        read_shards(tmp_path / "ms", STRATEGY, scratch)
    (tmp_path / "ms" / "rank_0" / "other.safetensors").rename(tmp_path / "ms" / "rank_0" / "net_1-1_10.safetensors")
    (tmp_path / "ms" / "rank_0" / "net_1-10.safetensors").rename(tmp_path / "ms" / "rank_0" / "net-1_10.safetensors")
    with pytest.raises(UsageError, match="are both of epoch 1, step 10"):
        read_shards(tmp_path / "ms", STRATEGY, scratch)


def write_moments(root: Path, *moments: str) -> None:
    """Each rank's files of these moments; "step" tells which it is."""
    for rank in SPLIT.ranks:
        (root / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
        for number, moment in enumerate(moments):
            tensors = {"w": part(WEIGHT, SPLIT, rank).contiguous(), "step": torch.tensor(number)}
            save_file(tensors, root / f"rank_{rank}" / f"net_rank{rank}-{moment}.safetensors")


def test_of_several_moments_the_newest_of_all_ranks_is_taken(tmp_path: Path) -> None:
    root, scratch = tmp_path / "ms", Scratch(tmp_path)
    write_moments(root, "1_100", "2_100", "9_5", "10_2", "10_30")
    found, notes = read_shards(root, STRATEGY, scratch)
    assert torch.equal(found["w"], WEIGHT) and found["step"] == 4  # by number and not by letter
    assert notes == ["of 5 moments that all ranks have, 10_30 was taken"]
    assert read_shards(root, STRATEGY, scratch, 2)[0]["step"] == 3
    with pytest.raises(UsageError, match=r"step 100 is in 2 epochs \(1_100, 2_100\)"):
        read_shards(root, STRATEGY, scratch, 100)
    with pytest.raises(UsageError, match=r"with step 7 of which .*: 1_100, 2_100, 9_5, 10_2, 10_30"):
        read_shards(root, STRATEGY, scratch, 7)
    (root / "rank_2" / "net_rank2-10_30.safetensors").unlink()
    found, notes = read_shards(root, STRATEGY, scratch)
    assert found["step"] == 3
    assert notes[1] == "10_30 is newer, but rank 2 has no file of it"


def test_ckpt_files_of_mindspore_are_told_from_damage(tmp_path: Path) -> None:
    ckpt = b"\n1\n\x06weight\x12'\x08\x02\x08\x03\x12\x07Float3" + bytes(64)  # as MindSpore 2.10 begins one
    (tmp_path / "ms" / "rank_0").mkdir(parents=True)
    strategy = save_strategy(tmp_path / "strategy.ckpt", STRATEGY)
    for name in ("net-1_5.ckpt", "ms/rank_0/net-1_5.ckpt"):
        (tmp_path / name).write_bytes(ckpt)
    for source, kind, layouts in [
        (tmp_path / "net-1_5.ckpt", "mindspore", None),
        (tmp_path / "net-1_5.ckpt", None, None),
        (tmp_path / "ms", "mindspore", strategy),
        (tmp_path / "ms" / "rank_0", "mindspore", None),
    ]:
        with pytest.raises(UsageError, match=r"net-1_5.ckpt is a MindSpore .ckpt .*save it as safetensors"):
            convert(ConversionRequest(source=source, source_kind=kind, destination=tmp_path / "m.pt", strategy=layouts))
    (tmp_path / "net-1_5.ckpt").write_bytes(b"something else")
    with pytest.raises(CorruptCheckpointError, match="no sound safetensors file"):
        convert(
            ConversionRequest(source=tmp_path / "net-1_5.ckpt", source_kind="mindspore", destination=tmp_path / "m.pt")
        )


def test_complex_tensors_go_both_ways(tmp_path: Path) -> None:
    value = torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex64)
    save_file({"c": value}, tmp_path / "theirs.safetensors")
    assert torch.equal(read_plain(tmp_path / "theirs.safetensors")[0]["c"], value)
    notes = write_plain(tmp_path / "ours.safetensors", {"c": value, "turned": value.t().conj(), "x": torch.ones(2)})
    assert notes == ["c and others: complex, stored as C64, which older readers refuse"]
    found = load_file(tmp_path / "ours.safetensors")
    assert torch.equal(found["c"], value) and torch.equal(found["turned"], value.t().conj())
    assert torch.equal(found["x"], torch.ones(2))


def test_one_name_in_two_stages(tmp_path: Path) -> None:
    for rank, value in enumerate((5, 5)):
        (tmp_path / f"rank_{rank}").mkdir()
        save_file({"step": torch.tensor([value, rank // 2])}, tmp_path / f"rank_{rank}" / "x.safetensors")
    specs = tuple(TensorSpec("step", (2,), Layout((1,), ("R",), ranks=(rank,))) for rank in (0, 1))  # type: ignore[arg-type]
    assert read_shards(tmp_path, Strategy(2, specs), Scratch(tmp_path))[0]["step"].tolist() == [5, 0]
    save_file({"step": torch.tensor([6, 0])}, tmp_path / "rank_1" / "x.safetensors")
    with pytest.raises(MismatchError, match="2 different tensors of this name"):
        read_shards(tmp_path, Strategy(2, specs), Scratch(tmp_path))


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_types_that_such_a_file_cannot_hold(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedStateError, match=r"^x: a plain safetensors file cannot hold"):
        write_plain(tmp_path / "x", {"x": tensor})
    with pytest.raises(UnsupportedStateError, match="__metadata__"):
        write_plain(tmp_path / "x", {"__metadata__": torch.ones(1)})
    assert not (tmp_path / "x").exists()
