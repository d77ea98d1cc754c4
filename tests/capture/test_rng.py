"""Random generators come back exactly, also in the middle of their own buffers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.capture.rng import (
    capture_rng,
    kept_rng,
    moved_streams,
    pack_rng,
    restore_rng,
    seed_rng,
)
from mindx_elastic.errors import MismatchError
from tests.capture.round_trip import assert_same, through_format

Draw = tuple[Any, ...]


def draw() -> Draw:
    return (
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        torch.randperm(7).tolist(),
    )


def keep_a_gauss() -> None:
    """Both Python and numpy make normal deviates in pairs and keep the second."""
    random.gauss(0, 1)
    np.random.randn()


@pytest.mark.parametrize("stream", ["python", "numpy", "torch"])
def test_the_stream_that_has_moved_is_named(stream: str) -> None:
    before = capture_rng()
    moves: dict[str, Callable[[], object]] = {"python": random.random, "numpy": lambda: np.random.rand(1)}
    moves.get(stream, lambda: torch.rand(1))()
    assert moved_streams(before, capture_rng(before)) == moved_streams(before, capture_rng()) == [stream]


def test_another_bit_generator_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(5))  # type: ignore[attr-defined]
        saved = capture_rng(capture_rng())
        expected = np.random.rand(5).tolist()
        restore_rng(through_format(pack_rng(saved)))
        assert np.random.rand(5).tolist() == expected
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]


def test_a_process_without_numpy_state_resumes_what_it_has() -> None:
    packed = pack_rng(capture_rng())
    del packed["numpy"]
    before = np.random.get_state(legacy=False)
    restore_rng(packed)
    assert_same(np.random.get_state(legacy=False), before)


def test_missing_cuda_devices_are_named() -> None:
    packed = pack_rng(capture_rng()) | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 64}
    with pytest.raises(MismatchError, match="64 CUDA devices"):
        restore_rng(packed)


def test_what_is_drawn_inside_kept_rng_is_not_seen_outside() -> None:
    keep_a_gauss()
    kept = pack_rng(capture_rng())
    expected = draw()
    restore_rng(kept)

    def nest() -> None:
        draw()
        with kept_rng():
            seed_rng(5)
            draw()
        draw()
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), kept_rng():
        nest()
    assert draw() == expected
