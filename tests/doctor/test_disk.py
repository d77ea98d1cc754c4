"""The disk is measured as saves write to it: the faster way counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.doctor import disk
from mindx_elastic.doctor.disk import measure


@pytest.mark.parametrize(
    ("direct_s", "cached_s", "page_cache", "way", "bytes_per_s"),
    [
        (1.0, 2.0, "auto", "direct I/O", 100),
        (1.0, 0.95, "auto", "direct I/O", 100),  # not clearly
        (1.0, 0.5, "auto", "through the page cache, which is faster here", 200),
        (1.0, 0.5, "never", "direct I/O", 100),
        (1.0, 2.0, "always", "through the page cache", 50),
        (None, 0.5, "auto", "through the page cache", 200),
        (None, 0.5, "never", "through the page cache", 200),
    ],
)
def test_the_faster_way_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    direct_s: float | None,
    cached_s: float,
    page_cache: str,
    way: str,
    bytes_per_s: float,
) -> None:
    """direct_s: None where the file system does not take direct I/O."""

    def write(*_: Any, cached: bool) -> Any:
        is_direct = not cached and direct_s is not None
        return disk._Written(100, direct_s if is_direct and direct_s is not None else cached_s, is_direct)

    monkeypatch.setattr(disk, "_write", write)
    found = measure(tmp_path, 1.0, page_cache)
    assert found.way == way
    assert found.bytes_per_s == pytest.approx(bytes_per_s)


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
