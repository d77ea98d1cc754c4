"""Builders of real checkpoint files, and of damaged ones, named for the damage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.persist.writer import write_checkpoint

BATCHES = 10  # a made-up epoch length: step 17 is epoch 2, batch 7
STATE = {
    "model": {"weight": torch.arange(1000.0), "bias": torch.zeros(3, dtype=torch.bfloat16)},
    "optimizer": {"state": {0: {"exp_avg": torch.ones(1000), "step": 3}}, "lr": (0.1,)},
    "rng": [1, 2**70, float("inf")],
    "empty": {},
}
EPOCH_0 = 1_700_000_000.0  # step n was created n seconds later


def info_of(step: int = 17, **fields: Any) -> CheckpointInfo:
    """Of a file of one rank; `fields` replace others."""
    facts = {
        "run_id": "run-a",
        "world_size": 1,
        "rank": 0,
        "step": step,
        "epoch": (step - 1) // BATCHES + 1,
        "step_in_epoch": (step - 1) % BATCHES + 1,
        "batch_num": BATCHES,
        "reason": fields.get("kind", "periodic"),
        "kind": "periodic",
        "created": EPOCH_0 + step,
        "torch_version": "2.6.0",
    }
    return CheckpointInfo(**{**facts, **fields})


def write(path: Path, *, step: int = 17, state: object = None, **fields: Any) -> Path:
    """One checkpoint file (8006 bytes of tensors); keyword arguments replace fields of its `CheckpointInfo`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(path, STATE if state is None else state, info_of(step, **fields))
    return path


def write_step(root: Path, step: int, *, world_size: int = 2, name: str = "", **fields: Any) -> None:
    """The files of all ranks for one step, under ``rank_*/``."""
    for rank in range(world_size):
        path = root / f"rank_{rank}" / (name or f"resnet-1_{step}.safetensors")
        write(path, step=step, rank=rank, world_size=world_size, **fields)


def flip_bit_in_data(path: Path) -> None:
    """Hits ``model.bias``: the narrowest type, so the last tensor of the file."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)


def flip_bit_in_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"run-a")] ^= 0x04
    path.write_bytes(data)


def cut_off_end(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def append_garbage(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def overwrite_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 200 + data[208:])


def claim_huge_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def leave_empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_foreign_file(path: Path) -> None:
    path.unlink()
    save_file({"weight": torch.zeros(3)}, path)


def replace_by_link(path: Path) -> None:
    target = path.parent / "moved away" / path.name  # a good file still, in a folder that is not looked at
    target.parent.mkdir()
    path.rename(target)
    path.symlink_to(target)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGED_HEADERS: list[Callable[[Path], None]] = [
    flip_bit_in_header,
    cut_off_end,
    append_garbage,
    overwrite_header,
    claim_huge_header,
    leave_empty,
]
DAMAGES = [flip_bit_in_data, *DAMAGED_HEADERS, replace_by_foreign_file, replace_by_link, replace_by_folder]
