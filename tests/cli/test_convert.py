from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_files import cut_off_end, flip_bit_in_data, write
from tests.cli.conftest import Run

WEIGHT = torch.arange(1000.0)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    write(tmp_path / "ckpt" / "resnet-2_7.safetensors")
    return tmp_path / "ckpt"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.bin"])
def test_the_lines_that_load_it_work(run: Run, ckpt: Path, tmp_path: Path, name: str) -> None:
    import safetensors.torch

    lines = run("convert", ckpt, tmp_path / name).stdout.splitlines()
    model: Any = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(1000)))
    model.register_buffer("bias", torch.zeros(3, dtype=torch.bfloat16))
    model.weight.data.fill_(5)
    exec(lines[-1].strip(), {"model": model, "torch": torch, "safetensors": safetensors})  # noqa: S102 - our own line
    assert torch.equal(model.weight, WEIGHT)


def test_nothing_is_overwritten_unasked(run: Run, ckpt: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.pt"
    assert run("convert", ckpt, made).exit_code == 0
    before = made.stat()
    result = run("convert", ckpt, made)
    assert result.exit_code == 2 and "exists; give --force to replace it" in result.stderr and result.stdout == ""
    assert made.stat() == before
    assert run("convert", ckpt, made, "--force").exit_code == 0
    assert made.stat().st_ino != before.st_ino
    assert names(tmp_path) == ["ckpt", "made.pt"]


def test_wrong_usage_is_named(run: Run, ckpt: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.pt").mkdir()
    source = ckpt / "resnet-2_7.safetensors"
    cases: list[tuple[list[Any], str]] = [
        ([tmp_path / "folder.pt", "--force"], "is a folder; give the name of a file"),
        ([source, "--force"], "is the source"),
        ([tmp_path / "no" / "where.pt"], "is not a folder; make it first"),
        ([tmp_path / "x.onnx"], "give a name that ends in .pt, .pth, .bin, .safetensors"),
    ]
    for words, message in cases:
        result = run("convert", source, *words)
        assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr
    assert names(tmp_path) == ["ckpt", "folder.pt"]


def test_another_program_s_file_is_1(run: Run, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "theirs").mkdir()
    torch.save({"w": WEIGHT}, tmp_path / "theirs.pt")
    save_file({"w": WEIGHT}, tmp_path / "theirs" / "model.safetensors")
    for name, code in (("theirs.pt", 1), ("theirs/model.safetensors", 1), ("theirs", 3)):
        result = run("convert", tmp_path / name, tmp_path / "x.pt")
        assert result.exit_code == code and name in result.stderr and "torch.load(FILE" in result.stderr
    assert names(tmp_path) == ["theirs", "theirs.pt"]


def test_nothing_there_is_3(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run("convert", tmp_path / "empty", tmp_path / "x.pt")
    assert result.exit_code == 3 and "no checkpoint found" in result.stderr


@pytest.mark.parametrize("damage", [cut_off_end, flip_bit_in_data])
def test_damage_is_1(run: Run, ckpt: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(ckpt / "resnet-2_7.safetensors")
    result = run("convert", ckpt, tmp_path / "x.pt")
    assert result.exit_code == 1 and "resnet-2_7.safetensors" in result.stderr
    assert names(tmp_path) == ["ckpt"]


def test_a_full_disk_leaves_nothing(run: Run, ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.pt").write_text("before")

    def fail(state: Any, temp: Path) -> None:
        temp.write_bytes(b"half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch, "save", fail)
    result = run("convert", ckpt, tmp_path / "x.pt", "--force")
    assert result.exit_code == 1 and "No space left on device; what was there before is untouched" in result.stderr
    assert names(tmp_path) == ["ckpt", "x.pt"] and (tmp_path / "x.pt").read_text() == "before"
