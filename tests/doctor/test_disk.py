"""The disk is measured as saves write to it, and the other way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.doctor import disk
from mindx_elastic.doctor.disk import measure
from mindx_elastic.doctor.saving import Disk, judge_time


@pytest.mark.parametrize(
    ("direct_s", "cached_s", "page_cache", "way", "speeds", "setting"),
    [
        (1.0, 2.0, False, "direct I/O", (100, 50), "always"),
        (1.0, 0.5, False, "direct I/O", (100, 200), "always"),
        (1.0, 0.5, True, "the page cache", (200, 100), "never"),
        (None, 0.5, False, "the page cache", (200, 200), "always"),
        (None, 0.5, True, "the page cache", (200, 200), "never"),
    ],
)
def test_the_way_of_saves_and_the_other_one_are_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    direct_s: float | None,
    cached_s: float,
    page_cache: bool,
    way: str,
    speeds: tuple[float, float],
    setting: str,
) -> None:
    """direct_s: None where the file system does not take direct I/O."""

    def write(*_: Any, cached: bool) -> Any:
        is_direct = not cached and direct_s is not None
        return disk._Written(100, direct_s if is_direct and direct_s is not None else cached_s, is_direct)

    monkeypatch.setattr(disk, "_write", write)
    found = measure(tmp_path, 1.0, page_cache=page_cache)
    assert (found.way, found.other_setting) == (way, setting)
    assert (found.bytes_per_s, found.other_bytes_per_s) == pytest.approx(speeds)


def test_a_way_that_is_clearly_faster_is_named() -> None:
    slow = Disk(bytes_per_s=1e9, measured_bytes=1 << 30, way="direct I/O", other_bytes_per_s=1.2e9)
    assert "MINDX_PAGE_CACHE" not in str(list(judge_time(slow, None, 30.0)))
    (found, _) = judge_time(replace(slow, other_bytes_per_s=1.3e9), None, 30.0)
    assert "MINDX_PAGE_CACHE=always" in str(found)


def test_both_ways_are_written_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = disk._write

    def note(*args: Any, cached: bool) -> Any:
        written.append((cached, write(*args, cached=cached)))
        return written[-1][1]

    monkeypatch.setattr(disk, "_write", note)
    found = measure(tmp_path, 0.02)
    assert [cached for cached, _ in written] == [False, True][: 1 + written[0][1].is_direct]
    assert found.measured_bytes in {each.nbytes for _, each in written} and not list(tmp_path.iterdir())
