"""A step that replicas have divided among their files is put together, and not from what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mindx_elastic.convert.conversion import ConversionRequest, convert
from mindx_elastic.errors import CheckpointError, UsageError
from mindx_elastic.persist.flatten import flatten
from tests.checkpoint_files import flip_bit_in_data
from tests.start.divided import Replicas


def test_a_lost_file_of_two_copies_and_a_damaged_one(tmp_path: Path) -> None:
    job = Replicas(tmp_path / "ckpt", 4)
    files = [job.write_share(rank, 2) for rank in range(4)]
    files[1].unlink()
    flip_bit_in_data(files[3])
    convert(ConversionRequest(source=job.root, destination=tmp_path / "m.pt"))
    found, wanted = torch.load(tmp_path / "m.pt", weights_only=True), job.state(0)["model"]
    assert flatten(found)[1].keys() == flatten(wanted)[1].keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_without_a_part_nothing_is_written(tmp_path: Path) -> None:
    job = Replicas(tmp_path / "ckpt", 3)
    files = [job.write_share(rank, 1) for rank in range(3)]
    files[2].unlink()
    with pytest.raises(CheckpointError):
        convert(ConversionRequest(source=job.root, destination=tmp_path / "m.pt"))
    with pytest.raises((CheckpointError, UsageError), match="divided"):
        convert(ConversionRequest(source=files[0], destination=tmp_path / "m.pt"))
    assert not (tmp_path / "m.pt").exists()
