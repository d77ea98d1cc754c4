from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindx_elastic.convert.conversion import ConversionRequest, convert
from mindx_elastic.convert.mindspore_file import read_plain
from mindx_elastic.convert.plain_file import write_plain
from mindx_elastic.errors import (
    CorruptCheckpointError,
    UnsupportedStateError,
    UsageError,
)


def test_folders_of_ranks_are_for_mindspore_to_put_together(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / "ms" / f"rank_{rank}").mkdir(parents=True)
        save_file({"w": torch.ones(2)}, tmp_path / "ms" / f"rank_{rank}" / "net-1_10.safetensors")
    with pytest.raises(UsageError, match=r"has a folder for each rank.*mindspore\.unified_safetensors"):
        convert(ConversionRequest(source=tmp_path / "ms", destination=tmp_path / "m.pt"))


def test_ckpt_files_of_mindspore_are_told_from_damage(tmp_path: Path) -> None:
    ckpt = b"\n1\n\x06weight\x12'\x08\x02\x08\x03\x12\x07Float3" + bytes(64)  # as MindSpore 2.10 begins one
    (tmp_path / "ms" / "rank_0").mkdir(parents=True)
    for name in ("net-1_5.ckpt", "ms/rank_0/net-1_5.ckpt"):
        (tmp_path / name).write_bytes(ckpt)
    for source, kind in [
        (tmp_path / "net-1_5.ckpt", "mindspore"),
        (tmp_path / "net-1_5.ckpt", None),
        (tmp_path / "ms" / "rank_0", "mindspore"),
        (tmp_path / "ms", "mindspore"),
        (tmp_path / "ms", None),
    ]:
        with pytest.raises(UsageError, match=r"net-1_5.ckpt is a MindSpore .ckpt .*save it as safetensors"):
            convert(ConversionRequest(source=source, source_kind=kind, destination=tmp_path / "m.pt"))
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


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_types_that_such_a_file_cannot_hold(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedStateError, match=r"^x: a plain safetensors file cannot hold"):
        write_plain(tmp_path / "x", {"x": tensor})
    with pytest.raises(UnsupportedStateError, match="__metadata__"):
        write_plain(tmp_path / "x", {"__metadata__": torch.ones(1)})
    assert not (tmp_path / "x").exists()
