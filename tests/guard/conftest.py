"""Stoppers to test, and a clean process around a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.guard.stopper_parts import Parts
from tests.guarded import no_traces, plain_environment

Make = Callable[..., Parts]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of the environment counts, and nothing is left behind."""
    plain_environment(monkeypatch)
    with no_traces():
        yield


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
