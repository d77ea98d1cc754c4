"""Cutting tensors into parts of equally many bytes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.core.division import Division, parts_of_member

SIZES = {"F32": 4, "F64": 8, "BF16": 2}
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
tensors = st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(list(SIZES)), shapes), min_size=1)


def division(chosen: dict[str, tuple[str, tuple[int, ...]]], count: int) -> Division:
    full = {name: (dtype, shape, math.prod(shape) * SIZES[dtype]) for name, (dtype, shape) in chosen.items()}
    return Division.of(full, count)


@given(tensors, st.integers(1, 9))
def test_the_parts_are_all_rows_once_and_balanced(chosen: dict[str, Any], count: int) -> None:
    made = division(chosen, count)
    sizes, largest_row = [0] * count, 0
    for name, (dtype, shape) in chosen.items():
        tensor = made.tensors[name]
        row = math.prod(shape[1:]) * SIZES[dtype]
        largest_row = max(largest_row, row)
        assert tensor.pieces[0].start == 0 and tensor.pieces[-1].stop == shape[0]
        assert all(one.stop == two.start and one.part < two.part for one, two in pairwise(tensor.pieces))
        for piece in tensor.pieces:
            sizes[piece.part] += (piece.stop - piece.start) * row
    total = sum(sizes)
    assert max(abs(size - total / count) for size in sizes) <= largest_row
    assert Division.from_json(made.to_json()) == made
    assert division(dict(reversed(chosen.items())), count).digest == made.digest


@pytest.mark.parametrize(
    "broken",
    [
        {"count": 0, "tensors": {}},
        {"count": 2, "tensors": {"x": ["F32", [], [[0, 0, 1]]]}},
        {"count": 2, "tensors": {"x": ["F32", [4], [[0, 0, 2]]]}},
        {"count": 2, "tensors": {"x": ["F32", [4], [[0, 0, 2], [1, 1, 4]]]}},
        {"count": 2, "tensors": {"x": ["F32", [4], [[0, 0, 2], [2, 2, 4]]]}},
        {"count": 2, "tensors": {"x": ["F32", [4], [[1, 0, 2], [0, 2, 4]]]}},
        {"count": 2, "tensors": {"x": ["F32", [0], []]}},
    ],
)
def test_what_cuts_nothing_up_is_refused(broken: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Division.from_json(broken)


@pytest.mark.parametrize(("count", "copies"), [(2, 1), (5, 3), (2, 2)])
def test_each_part_has_as_many_members_as_copies(count: int, copies: int) -> None:
    held = [parts_of_member(member, count, copies) for member in range(count)]
    assert all(sum(part in parts for parts in held) == copies for part in range(count))
