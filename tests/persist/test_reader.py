"""Loading: digests, damage of the data section, memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.persist import reader
from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.reader import read_checkpoint, verify_file
from mindx_elastic.persist.writer import write_checkpoint
from tests.checkpoint_files import info_of
from tests.persist.states import assert_same

INFO = info_of(reason="periodic")


def make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer{i}": torch.rand(50_000 * i + 1, generator=generator) for i in range(6)} | {"n": [1, None]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, make_state(), INFO, layout={"a": 1})
    return path


def damage(path: Path, tensor: str, *, byte: int = 0) -> None:
    """Flip one bit in the data of one tensor."""
    header = read_header(path)
    offset = header.data_start + header.entries[tensor].start + byte
    with open(path, "r+b") as opened:
        opened.seek(offset)
        value = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([value ^ 0x10]))


@pytest.mark.parametrize("large", [1, 300_000, 1 << 30])
def test_all_of_a_checkpoint_comes_back(file: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(reader, "_LARGE_BYTES", large)
    monkeypatch.setattr(reader, "_PIECE_BYTES", 5000)
    checkpoint = read_checkpoint(file)
    assert_same(checkpoint.state, make_state())
    assert checkpoint.info.step == 17
    assert checkpoint.layout == {"a": 1}
    for name in ("layer0", "layer1"):  # alone in its memory: one that is kept or resized takes no others along
        assert checkpoint.state[name].untyped_storage().nbytes() == checkpoint.state[name].nbytes


@pytest.mark.parametrize("large", [1, 1 << 30])
def test_flipped_bit_names_the_tensor(file: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(reader, "_LARGE_BYTES", large)
    damage(file, "layer3", byte=100_000)
    with pytest.raises(CorruptCheckpointError, match="layer3") as caught:
        read_checkpoint(file)
    assert (caught.value.path, caught.value.tensor) == (file, "layer3")


def test_file_cut_while_it_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def cut_first(fd: int, buffers: Any, offset: int) -> int:
        os.truncate(file, 5000)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_first)
    with pytest.raises(CorruptCheckpointError, match="cut off"):
        read_checkpoint(file)


def test_short_reads_are_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:60_001]], offset))
    assert_same(read_checkpoint(file).state, make_state())


def test_failing_medium_is_a_damaged_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CorruptCheckpointError, match="Input/output error") as caught:
        read_checkpoint(file)
    assert caught.value.tensor is not None
    assert len(verify_file(file)) == 6


def test_verify_finds_every_bad_tensor(file: Path) -> None:
    assert verify_file(file) == []
    damage(file, "layer1")
    damage(file, "layer5", byte=77)
    problems = verify_file(file)
    assert ["layer1" in problems[0], "layer5" in problems[1], len(problems)] == [True, True, 2]


def test_verify_reports_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "link").symlink_to("text")
    save_file({"w": torch.ones(1)}, tmp_path / "stock")
    for name, says in [("text", "header"), ("link", "symbolic"), ("stock", "mindx"), ("none", "No such")]:
        (problem,) = verify_file(tmp_path / name)
        assert says in problem
