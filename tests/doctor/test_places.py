"""The disk is measured as saves write to it; files of cgroups as kernels write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.doctor.places import available_memory, file_system, measure, memory_of_container


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    write(tmp_path / "self", "0::/a/b\n")
    root = tmp_path / "fs"
    write(root / "cgroup.controllers", "memory pids\n")
    write(root / "a/memory.max", "1000\n")
    write(root / "a/memory.current", "900\n")
    write(root / "a/b/memory.max", "500\n")
    write(root / "a/b/memory.current", "100\n")
    found = memory_of_container(tmp_path / "self", root)
    assert found == 100
    write(tmp_path / "meminfo", "MemTotal: 9 kB\nMemAvailable:   1 kB\n")
    assert available_memory(found, tmp_path / "meminfo") == 100
    assert available_memory(None, tmp_path / "meminfo") == 1024
    assert available_memory(None, tmp_path / "none") is None


def test_the_file_system_of_a_path() -> None:
    assert file_system(Path("/proc/self")) == "proc"


@pytest.mark.parametrize("page_cache", [False, True])
def test_it_is_written_and_nothing_is_left(tmp_path: Path, page_cache: bool) -> None:
    found = measure(tmp_path, 0.02, page_cache=page_cache)
    assert found.measured_bytes > 0 and found.bytes_per_s > 0 and not list(tmp_path.iterdir())
    assert found.way == "the page cache" or not page_cache
