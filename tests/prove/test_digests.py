"""Digests of tensors, containers and large objects."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.capture.rng import capture_rng
from mindx_elastic.prove.digests import digest, stream_digest


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
