"""Which parts of a data set are compared, and how."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.capture.data_listing import first_difference, listing_of


class Rows:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is made")


def listing(**held: Any) -> Any:
    rows = Rows(**held)
    return listing_of(rows, {"dataset": rows, "collate_fn": SimpleNamespace(files=["a"])})


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (["a/x", "a/y", "a/z"], ["b/x", "b/z", "b/y"], "item 1 of dataset.held is now z and was y"),
        ([Path("a/x")], [Path("a/x"), Path("a/y")], "dataset.held has 2 items and had 1"),
        ([{"id": 1}, {"id": 2}, {"id": 3}], [{"id": 1}, {"id": 2}, {"id": 4}], "item 2 of dataset.held is now 4 and"),
        ([0, 1, 2], [0, 2, 1], "item 1 of dataset.held is now 2 and was 1"),
        (range(3), range(3, 6), "item 0 of dataset.held is now 3 and was 0"),
        (np.eye(3), 2 * np.eye(3), "item 0 of dataset.held is now values"),
        (torch.eye(3).bfloat16(), 2 * torch.eye(3).bfloat16(), "item 0 of dataset.held is now values"),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]), "item 2 of dataset.held is now 4 and was 3"),
    ],
)
def test_the_first_item_that_is_another_one(one: Any, other: Any, told: str) -> None:
    assert told in first_difference(listing(held=other), listing(held=one))
    assert not first_difference(listing(held=one), listing(held=one))


def test_what_is_not_compared() -> None:
    """Objects, numbers that are no rows, what hangs elsewhere, and lists that fail."""
    objects = np.array([object()] * 3)
    assert not listing(
        objects=[object()] * 3, sizes=[224, 256], empty=[], array=objects, sparse=torch.eye(3).to_sparse()
    )
    assert not first_difference(listing(held=["a"]), None)


def test_a_long_list_is_looked_at_in_some_places() -> None:
    held = [f"s3://shard/{number}.tar?signature={number}" for number in range(100_000)]
    found = listing(held=held)
    assert len(found["dataset.held"]["items"]) == 32
    assert found["dataset.held"]["items"][-1] == "99999.tar"
    assert first_difference(listing(held=[*held[1:], held[0]]), found)
