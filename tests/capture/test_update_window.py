"""Which values have changed between two looks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.capture.update_window import _differing, _leaves


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        (3, 3.0, {""}),
        ({"a": 1, "b": [1, (2, 3)]}, {"a": 1, "b": [1, (2, 4)]}, {"b.1.1"}),
        ({"a": 1}, {"a": True}, {"a"}),
        ({"a": [1]}, {"a": None}, {"a (length)", "a.0", "a"}),
        ({"a": None}, {"b": None}, {"a", "b"}),
        (
            {"t": torch.ones(3), "n": np.ones(2), "g": [{"lr": torch.tensor(0.1)}]},
            {"t": torch.ones(3), "n": np.zeros(2), "g": [{"lr": torch.tensor(0.2)}]},
            {"n", "g.0.lr"},
        ),
    ],
)
def test_changes_by_place(one: Any, other: Any, changed: set[str]) -> None:
    ours, theirs = _leaves(one), _leaves(other)
    assert _differing(ours, theirs) == _differing(theirs, ours) == changed
