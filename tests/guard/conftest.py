"""Stoppers to test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.guard.stopper_parts import Parts

Make = Callable[..., Parts]


@pytest.fixture
def make_parts(tmp_path: Path) -> Iterator[Make]:
    made: list[Parts] = []

    def make(**options: Any) -> Parts:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Parts(directory, **options))
        return made[-1]

    yield make
    for parts in made:
        parts.last_resort.stop()
        parts.watcher.stop()


@pytest.fixture
def parts(make_parts: Make) -> Parts:
    return make_parts()
