"""Checkpoints to convert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mindx_elastic.core.layout import Layout
from mindx_elastic.persist.writer import write_checkpoint
from tests.checkpoint_files import info_of


def model_state() -> dict[str, torch.Tensor]:
    """Every type that all formats hold, 0-dim, empty, transposed, and larger than what is put together in memory."""
    torch.manual_seed(0)
    shared = torch.randn(5, 3)
    state = {
        "big": torch.randn(600, 700),
        "tied.a": shared,
        "tied.b": shared,
        "transposed": torch.randn(4, 6).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32):
        state[str(dtype)] = torch.arange(11).to(dtype)
    return state


def assert_same_model(found: Any, expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected) or set(found) == set(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(
            other.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        )


def write_rank(
    root: Path,
    rank: int,
    world_size: int,
    state: dict[str, Any],
    *,
    layouts: list[Layout] | None = None,
    tensors: dict[str, list[Any]] | None = None,
    default: int | None = None,
    name: str = "m-1_7.safetensors",
    record: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """One rank's file of step 17; `tensors`: place -> [layout number, whole shape]."""
    folder = root / f"rank_{rank}" if world_size > 1 else root
    folder.mkdir(parents=True, exist_ok=True)
    layout = None
    if layouts is not None:
        layout = {
            "version": 2,
            "rank": rank,
            "world_size": world_size,
            "layouts": [each.to_json() for each in layouts],
            "default": default,
            "tensors": tensors or {},
            "parameters": {},
            **(record or {}),
        }
    path = folder / name
    write_checkpoint(path, state, info_of(**{"world_size": world_size, "rank": rank, **fields}), layout=layout)
    return path
