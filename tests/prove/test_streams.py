from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mindx_elastic.capture.rng import capture_rng, pack_rng
from mindx_elastic.prove.digests import stream_bytes
from mindx_elastic.prove.streams import numbers_between

CPU = ("python", "numpy", "torch")


def states() -> dict[str, bytes]:
    return {name: stream_bytes(state) for name, state in pack_rng(capture_rng()).items()}


def draw(count: int) -> None:
    torch.rand(count)
    for _ in range(count):
        random.getrandbits(32)
    np.random.randint(0, 2**32, size=count, dtype=np.uint32)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.mark.parametrize("offset", [0, 3, 624])
@pytest.mark.parametrize("count", [0, 1, 2, 621, 623, 624, 625, 1248, 5000])
def test_numbers_are_counted_on_every_stream_of_the_cpu(count: int, offset: int) -> None:
    draw(offset)
    before = states()
    draw(count)
    after = states()
    assert {name: numbers_between(name, before[name], after[name]) for name in CPU} == dict.fromkeys(CPU, count)


def test_a_stream_that_was_seeded_is_no_continuation() -> None:
    before = states()
    torch.manual_seed(1)
    assert numbers_between("torch", before["torch"], states()["torch"], most=10_000) is None


def test_a_stream_does_not_go_back() -> None:
    before = states()
    draw(2)
    assert numbers_between("torch", states()["torch"], before["torch"], most=10_000) is None


def test_more_than_the_most_is_not_counted() -> None:
    before = states()
    draw(3000)
    assert numbers_between("torch", before["torch"], states()["torch"], most=1000) is None


def test_the_offset_of_a_cuda_stream_counts() -> None:
    one = (5).to_bytes(8, "little") + (8).to_bytes(8, "little")
    two = (5).to_bytes(8, "little") + (20).to_bytes(8, "little")
    seeded = (6).to_bytes(8, "little") + (20).to_bytes(8, "little")
    assert numbers_between("cuda:0", one, two) == 12
    assert numbers_between("cuda:0", one, one) == 0
    assert numbers_between("cuda:0", two, one) is None
    assert numbers_between("cuda:0", one, seeded) is None


def test_states_that_cannot_be_read_are_not_counted() -> None:
    assert numbers_between("torch", b"short", b"other") is None
    assert numbers_between("numpy", b"[]", b"[1]") is None
