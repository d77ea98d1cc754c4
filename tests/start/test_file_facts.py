"""What is found in the headers of one scan, which share what they say alike, is what each says by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.core.layout import Layout, parse_placement
from mindx_elastic.core.strategy import LaidOut, LayoutRecord
from mindx_elastic.persist.catalog import read_entry
from mindx_elastic.persist.shared_json import SharedJson
from mindx_elastic.persist.writer import write_checkpoint
from mindx_elastic.start.file_facts import Strategies, facts_of
from tests.checkpoint_files import info_of

NUM_LAYERS = 12


def state_of(width: int = 2, dtype: torch.dtype = torch.float32, value: float = 0.0, **more: Any) -> dict[str, Any]:
    layers = range(NUM_LAYERS)
    weights = {f"layers.{n}.weight": torch.full((2, width), value, dtype=dtype) for n in layers}
    moments = {n: {"exp_avg": torch.full((2, width), value)} for n in layers}
    optimizer = {"state": moments, "param_groups": [{"lr": value, "params": [*layers]}]}
    return {"model": weights, "optimizer": optimizer, "ema": {f"ema.{n}.weight": torch.ones(2) for n in layers}, **more}


def save(path: Path, rank: int, state: dict[str, Any], record: dict[str, Any]) -> Path:
    whole = LaidOut(Layout((4,), (parse_placement("R"),)), (), True)
    layout = LayoutRecord(rank=rank, world_size=4, default=whole, modules=["model", "optimizer"]).json | record
    write_checkpoint(path, state, info_of(3, world_size=4, rank=rank), layout=layout)
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of four ranks, most of them with something of their own."""
    states: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        *((rank, state_of(), {}) for rank in range(4)),
        (1, state_of(value=1.0), {}),
        (2, state_of(width=3), {}),
        (3, state_of(dtype=torch.float64), {}),
        (0, state_of(dtype=torch.complex64), {}),
        (1, state_of(more=torch.ones(1)), {}),
        (2, state_of(), {"modules": ["model"]}),
        (3, state_of(), {"parameters": {"optimizer": [f"model.layers.{n}.weight" for n in range(NUM_LAYERS)]}}),
        (0, state_of(), {"volatile": {"model": [f"layers.{n}.weight" for n in range(4)]}}),
        (1, state_of(), {"rank": 2}),
        (2, state_of(), {"version": 1}),
        (3, state_of(), {"layouts": [{"mesh": [4], "placements": ["S(0)"], "ranks": [[0, 4]]}]}),
    ]
    return [save(tmp_path / f"{n}.safetensors", rank, state, more) for n, (rank, state, more) in enumerate(states)]


def test_each_file_says_the_same_alone_and_in_a_scan(files: list[Path]) -> None:
    shared = SharedJson()
    strategies = Strategies(shared)
    said = []
    for path in [*files, *reversed(files)]:
        alone, entry = read_entry(path), read_entry(path, shared=shared)
        assert alone is not None and entry is not None
        together = facts_of([entry], strategies)
        assert together == facts_of([alone]), path
        said.append(together)
    ranks = [facts[0].strategy for facts, _ in said[:4]]
    assert all(strategy is ranks[0] for strategy in ranks)
    assert len({fact.strategy for facts, _ in said for fact in facts}) >= 8, "they do not all say the same"
    assert [bool(rejected) for _, rejected in said[: len(files)]].count(True) == 2
