"""The garbage collector while many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from mindx_elastic.core.garbage import without_collections


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


def test_it_is_off_inside_and_on_again_behind() -> None:
    gc.enable()
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_behind_an_error() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="inside"), without_collections():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_program_that_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()
