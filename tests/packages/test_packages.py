"""Each part of each package that is installed: equal after a real stop, refused or told as the table says."""

from __future__ import annotations

import functools

import pytest

from tests.packages.part import Part
from tests.packages.runs import Result, run_package
from tests.packages.table import PARTS, by_package

pytestmark = [pytest.mark.slow, pytest.mark.drill]


@functools.cache
def results(package: str) -> dict[str, Result]:
    return {result.id: result for result in run_package(by_package()[package])}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.id)
def test_a_part_is_equal_or_said(part: Part) -> None:
    result = results(part.package).get(part.id)
    if result is None:
        pytest.skip(f"{part.package} is not installed: make packages")
    want, _, words = part.want.partition(": ")
    assert result.verdict == want, result
    assert words in result.text, result
