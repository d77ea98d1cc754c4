"""Which parts of a data set are compared, and how."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from mindx_elastic.capture.given_settings import difference, listing_of


class Rows:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is made")


class Table:
    """As one of pandas."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    @property
    def iloc(self) -> list[int]:
        return self.rows

    def __len__(self) -> int:
        return 3


def listing(**held: Any) -> Any:
    rows = Rows(**held)
    return listing_of({"dataset": rows, "collate_fn": SimpleNamespace(files=["a"])})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a/x", "a/y", "a/z"], ["b/x", "b/z", "b/y"]),
        (["a/x", "a/y", "b/x"], ["b/x", "b/y", "a/x"]),
        ([("a/x", "m/a"), ("b/x", "m/b"), ("c/x", "m/c")], [("b/x", "m/a"), ("a/x", "m/b"), ("c/x", "m/c")]),
        ([{"id": 1}, {"id": 2}, {"id": 3}], [{"id": 1}, {"id": 3}, {"id": 2}]),
        ([(torch.zeros(2), "a")] * 3, [(torch.ones(2), "a")] * 3),
        (np.eye(3), 2 * np.eye(3)),
        (torch.eye(3).bfloat16(), 2 * torch.eye(3).bfloat16()),
        (Table([1, 2, 3]), Table([1, 3, 2])),
    ],
)
def test_other_items(one: Any, other: Any) -> None:
    assert difference(listing(held=other), listing(held=one)).startswith("dataset.held has other items")
    assert not difference(listing(held=one), listing(held=one))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_other_indices(kind: Any) -> None:
    one, other = listing(indices=kind([1, 2, 3])), listing(indices=kind([1, 3, 2]))
    assert difference(other, one) == "dataset.indices has other items, or has them in another order"
    assert listing(indices=kind([1, 2, 3])) == one


def test_another_number_of_files() -> None:
    one, other = listing(held=[Path("a/x")]), listing(held=[Path("a/x"), Path("a/y")])
    assert difference(one, other) == "dataset.held has 1 items and had 2"


def test_what_is_not_compared() -> None:
    """Objects, numbers that are no rows, what hangs elsewhere, and lists that fail."""
    array, sparse = np.array([object()] * 3), torch.eye(3).to_sparse()
    assert not listing(objects=[object()] * 3, sizes=[224, 256], empty=[], indices=[], array=array, sparse=sparse)
    assert not listing(few=torch.eye(2), none=[None] * 3)


def test_tensors_of_a_data_set() -> None:
    one, other = (TensorDataset(torch.eye(3), torch.tensor(y)) for y in ([1, 2, 3], [1, 3, 2]))
    found = difference(listing_of({"dataset": other}), listing_of({"dataset": one}))
    assert found == "dataset.tensors[1] has other items, or has them in another order"


def test_folders_and_signatures_do_not_count() -> None:
    held = [f"s3://shard/{number}.tar" for number in range(100_000)]
    found = listing(held=held)
    assert not difference(listing(held=[f"/scratch/job-7/{each[11:]}?signature=9" for each in held]), found)
    assert difference(listing(held=[*held[1:], held[0]]), found)
