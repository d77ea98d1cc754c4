from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.convert import torch_file
from tests.checkpoint_files import cut_off_end, flip_bit_in_data, write
from tests.cli.conftest import Run

WEIGHT = torch.arange(1000.0)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    write(tmp_path / "ckpt" / "resnet-2_7.safetensors")
    return tmp_path / "ckpt"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "everything"),
    [("mindspore", []), *((kind, words) for kind in ("torch", "dcp") for words in ([], ["--all"]))],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_the_lines_that_load_it_work(run: Run, ckpt: Path, tmp_path: Path, kind: str, everything: list[str]) -> None:
    import safetensors.torch
    import torch.distributed.checkpoint

    made = tmp_path / "made"
    result = run("convert", ckpt, made, "--to", kind, "--json", *everything)
    lines = json.loads(result.stdout)["load"]
    if kind == "mindspore":
        lines = lines[1:]  # for torch
    model: Any = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(1000)))
    model.register_buffer("bias", torch.zeros(3, dtype=torch.bfloat16))
    model.weight.data.fill_(5)
    exec("\n".join(lines), {"model": model, "torch": torch, "safetensors": safetensors})  # noqa: S102 - our own lines
    assert torch.equal(model.weight, WEIGHT)


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_nothing_is_overwritten_unasked(run: Run, ckpt: Path, tmp_path: Path, kind: str) -> None:
    made = tmp_path / "made"
    assert run("convert", ckpt, made, "--to", kind).exit_code == 0
    before = {p: p.stat().st_mtime_ns for p in [made, *made.rglob("*")]}
    result = run("convert", ckpt, made, "--to", kind)
    assert result.exit_code == 2 and "exists; give --force to replace it" in result.stderr and result.stdout == ""
    assert {p: p.stat().st_mtime_ns for p in [made, *made.rglob("*")]} == before
    assert run("convert", ckpt, made, "--to", kind, "--force").exit_code == 0
    assert {p: p.stat().st_mtime_ns for p in [made, *made.rglob("*")]} != before
    assert names(tmp_path) == ["ckpt", "made"]


def test_force_has_its_limits(run: Run, ckpt: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for destination, kind, message in [
        ("folder", "dcp", "is a folder with other things than a DCP checkpoint; it is never replaced"),
        ("folder", "torch", "is a folder; give the name of a file"),
        ("file", "dcp", "is a file; a DCP checkpoint is a folder"),
        ("ckpt/resnet-2_7.safetensors", "mindspore", "is the source"),
        ("no/where", "torch", "is not a folder; make it first"),
    ]:
        source = ckpt / "resnet-2_7.safetensors"
        result = run("convert", source, tmp_path / destination, "--to", kind, "--force")
        assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr
    assert (tmp_path / "folder" / "thesis.txt").exists() and (tmp_path / "file").read_text() == "x"
    (tmp_path / "empty").mkdir()
    assert run("convert", ckpt, tmp_path / "empty", "--to", "dcp").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ckpt", "x.safetensors"], "say with --to what it is to be"),
        (["ckpt", "x.pt", "--to", "onnx"], "'onnx' is not written"),
        (["ckpt", "x.pt", "--from", "dcp"], "'dcp' is not read: leave out --from"),
        (["m.pt", "x.pt", "--step", "3"], "--step is for checkpoints of this package"),
    ],
)
def test_wrong_usage_is_named(
    run: Run, ckpt: Path, tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": WEIGHT}}, "m.pt")
    result = run("convert", *words)
    assert message in result.stderr
    assert (result.exit_code, result.stdout) == (2, "")
    assert names(tmp_path) == ["ckpt", "m.pt"]


def test_nothing_there_is_3(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run("convert", tmp_path / "empty", tmp_path / "x.pt")
    assert result.exit_code == 3 and "no checkpoint found" in result.stderr
    result = run("convert", tmp_path / "empty", tmp_path / "x.pt", "--from", "mindx")
    assert result.exit_code == 3


@pytest.mark.parametrize("damage", [cut_off_end, flip_bit_in_data])
def test_damage_is_1(run: Run, ckpt: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(ckpt / "resnet-2_7.safetensors")
    result = run("convert", ckpt, tmp_path / "x.pt")
    assert result.exit_code == 1 and "resnet-2_7.safetensors" in result.stderr
    assert names(tmp_path) == ["ckpt"]


def test_a_full_disk_leaves_nothing(run: Run, ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.pt").write_text("before")

    def fail(temp: Path, state: Any) -> None:
        temp.write_bytes(b"half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch_file, "write_torch_file", fail)
    result = run("convert", ckpt, tmp_path / "x.pt", "--force")
    assert result.exit_code == 1 and "No space left on device; what was there before is untouched" in result.stderr
    assert names(tmp_path) == ["ckpt", "x.pt"] and (tmp_path / "x.pt").read_text() == "before"
