"""Digests of tensors, containers and large objects."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.capture.rng import capture_rng
from mindx_elastic.prove.digests import digest, leaves, stream_digest


@dataclass
class Thing:
    number: int
    parts: tuple[Any, ...]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        ("x" * 100, "x" * 101),
        ({1, 2}, {1, 3}),
        (Thing(1, ()), Thing(2, ())),
        ([1, 2], (1, 2)),
    ],
)
def test_other_bits_types_and_shapes_give_other_digests(one: Any, other: Any) -> None:
    assert digest(one) == digest(one) != digest(other)


def test_a_stream_s_digest_moves_with_it_and_not_without() -> None:
    def digests() -> dict[str, int]:
        state = {**capture_rng(), "cuda": [torch.get_rng_state()], "another": np.random.PCG64(bits[0]).state}
        return {name: stream_digest(stream) for name, stream in state.items()}

    bits = [1]
    before = digests()
    assert digests() == before and all(before.values())
    random.random(), np.random.rand(), torch.rand(1)
    bits[0] = 2
    assert all(before[name] != moved for name, moved in digests().items())


def test_small_values_are_shown() -> None:
    assert [digest(value) for value in (3, 0.5, True, None, "adam")] == ["3", "0.5", "True", "None", "'adam'"]


def test_leaves_are_named_by_their_place() -> None:
    state = {"groups": [{"lr": 0.1, "empty": {}}], "thing": Thing(1, (2,))}
    assert dict(leaves(state)) == {
        "groups.0.lr": "0.1",
        "groups.0.empty": "empty",
        "thing.number": "1",
        "thing.parts.0": "2",
    }


def test_a_large_container_has_one_digest() -> None:
    items = deque((torch.full((2,), float(n)), n) for n in range(300))
    memory = {"at": 7, "items": items, "small": [1, 2]}
    before = dict(leaves(memory, most=256))
    assert set(before) == {"at", "items", "small.0", "small.1"}
    items.append(items.popleft())
    after = dict(leaves(memory, most=256))
    assert {name for name in before if before[name] != after[name]} == {"items"}
