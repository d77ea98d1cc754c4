"""The disk is measured as saves write to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.doctor.places import measure


@pytest.mark.parametrize("page_cache", [False, True])
def test_it_is_written_and_nothing_is_left(tmp_path: Path, page_cache: bool) -> None:
    found = measure(tmp_path, 0.02, page_cache=page_cache)
    assert found.measured_bytes > 0 and found.bytes_per_s > 0 and not list(tmp_path.iterdir())
    assert found.way == "the page cache" or not page_cache
