"""What all tests of simulations share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def young_objects_only() -> Iterator[None]:
    """A world is full of cycles, and torch's objects need not be looked at each time that they are collected."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
