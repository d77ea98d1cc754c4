from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.data.permutation import Permutation, mix

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


def test_the_order_is_part_of_the_format() -> None:
    """These numbers must never change: a checkpoint's position means a place in this order."""
    assert mix(1, 2, 3) == 0xD0734750FDE362B3
    assert table(10, 7) == [0, 3, 2, 7, 6, 5, 4, 8, 9, 1]
    assert table(1000, mix(0, 1, 1))[:6] == [544, 520, 120, 717, 333, 907]
