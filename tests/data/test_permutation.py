from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.data.permutation import Permutation, mix, mix_array

keys = st.integers(0, 2**64 - 1)


def table(size: int, key: int) -> list[int]:
    return [int(index) for index in Permutation(size, key)(np.arange(size, dtype=np.int64))]


@given(size=st.integers(1, 3000), key=keys)
def test_every_index_comes_exactly_once(size: int, key: int) -> None:
    assert sorted(table(size, key)) == list(range(size))


@given(size=st.integers(1, 2**62), key=keys, data=st.data())
def test_any_position_can_be_asked_for(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    order = Permutation(size, key)
    together = order(np.array(positions, dtype=np.int64)).tolist()
    assert together == [int(order(np.array([position]))[0]) for position in positions]
    assert len(set(together)) == len(positions)
    assert all(0 <= index < size for index in together)


def test_shape_is_kept_and_input_is_not_changed() -> None:
    positions = np.arange(12, dtype=np.int64).reshape(3, 4)
    assert Permutation(12, 5)(positions).shape == (3, 4)
    assert positions.ravel().tolist() == list(range(12))
    assert Permutation(0, 5)(np.empty(0, dtype=np.int64)).size == 0


def test_no_table_is_built() -> None:
    tracemalloc.start()
    Permutation(10**15, 1)(np.arange(1000, dtype=np.int64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_the_order_is_part_of_the_format() -> None:
    """These numbers must never change: a checkpoint's position means a place in this order."""
    assert mix(1, 2, 3) == 0xD0734750FDE362B3
    assert table(10, 7) == [0, 3, 2, 7, 6, 5, 4, 8, 9, 1]
    assert table(1000, mix(0, 1, 1))[:6] == [544, 520, 120, 717, 333, 907]


def test_another_process_gets_the_same_order() -> None:
    code = (
        "import numpy as np; from mindx_elastic.data.permutation import Permutation;"
        "print(Permutation(777, 42)(np.arange(777)).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str(table(777, 42))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 10, 33, 100])
def test_each_index_is_equally_likely_at_each_place(size: int) -> None:
    rounds = 1500
    orders = np.array([table(size, mix(9, number)) for number in range(rounds)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    chi_square = float(((counts - rounds / size) ** 2 / (rounds / size)).sum())
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5 + 5


def test_neighbours_do_not_stay_neighbours() -> None:
    order = np.array(table(100_000, 3))
    assert abs(float(np.corrcoef(np.arange(order.size), order)[0, 1])) < 0.02
    assert (np.abs(np.diff(order)) == 1).sum() < 20


@settings(max_examples=50)
@given(prefix=st.lists(keys, min_size=1, max_size=3), words=st.lists(keys, min_size=1, max_size=5))
def test_the_array_hash_is_the_hash(prefix: list[int], words: list[int]) -> None:
    hashed = mix_array(mix(*prefix), np.array(words, dtype=np.uint64)).tolist()
    assert hashed == [mix(*prefix, word) for word in words]
