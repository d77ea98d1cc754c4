"""The update window finds what has moved without naming everything that has not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.capture.update_window import _changes, _differing, _leaves

NAN = float("nan")
LEAVES = st.sampled_from([0, 1, True, 0.0, NAN, float("nan"), "a", None, b"x"])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["a", "b", "lr"]), inner, max_size=3),
    ),
    max_leaves=8,
)


def by_all_leaves(one: Any, other: Any) -> set[str]:
    return _differing(dict(_leaves(one, "")), dict(_leaves(other, "")))


@settings(deadline=None)
@given(TREES, TREES)
def test_the_changes_are_those_of_all_leaves(one: Any, other: Any) -> None:
    assert set(_changes(one, other)) == by_all_leaves(one, other)


def test_tensors_and_arrays() -> None:
    one = {"t": torch.ones(3), "n": np.ones(2), "g": [{"lr": torch.tensor(0.1)}]}
    other = {"t": torch.ones(3), "n": np.zeros(2), "g": [{"lr": torch.tensor(0.2)}]}
    assert set(_changes(one, other)) == {"n", "g.0.lr"} == by_all_leaves(one, other)
