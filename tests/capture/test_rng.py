"""Random generators come back exactly, also in the middle of their own buffers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.capture.rng import capture_rng, kept_rng, pack_rng, restore_rng
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


def move_nothing() -> None:
    pass


def keep_a_gauss() -> None:
    """Both Python and numpy make normal deviates in pairs and keep the second."""
    random.gauss(0, 1)
    np.random.randn()


def half_a_word() -> None:
    np.random.randint(0, 2, dtype=np.uint8)
    torch.randn(17)


@pytest.mark.parametrize("prepare", [move_nothing, keep_a_gauss, half_a_word])
def test_the_streams_go_on_where_they_were(prepare: Callable[[], None]) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    prepare()
    saved = capture_rng()
    expected = [draw() for _ in range(5)]
    packed = through_format(pack_rng(saved))
    for _ in range(2):
        restore_rng(packed)
        assert [draw() for _ in range(5)] == expected


@pytest.mark.parametrize(
    "move",
    [
        move_nothing,
        np.random.rand,
        np.random.randn,
        lambda: np.random.seed(5),
        lambda: np.random.bytes(1),
        lambda: np.random.shuffle([1, 2]),
    ],
)
@pytest.mark.parametrize("prepare", [move_nothing, keep_a_gauss])
def test_taking_over_an_earlier_state_changes_nothing(prepare: Callable[[], None], move: Callable[[], object]) -> None:
    """numpy's state is only read again when it has moved; the shortcut must notice every way of moving."""
    np.random.seed(2)
    prepare()
    earlier = capture_rng()
    move()
    quick = capture_rng(earlier)
    assert_same(pack_rng(quick)["numpy"], pack_rng(capture_rng())["numpy"])


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


@pytest.mark.parametrize("before", [move_nothing, keep_a_gauss])
def test_what_is_drawn_inside_kept_rng_is_not_seen_outside(before: Callable[[], None]) -> None:
    before()
    kept = pack_rng(capture_rng())
    expected = draw()
    restore_rng(kept)

    def nest() -> None:
        with kept_rng():
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)
            draw()
        draw()
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), kept_rng():
        nest()
    assert draw() == expected
