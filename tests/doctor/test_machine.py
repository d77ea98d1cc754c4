"""Files of cgroups as kernels write them."""

from __future__ import annotations

from pathlib import Path

from mindx_elastic.doctor.places import available_memory, file_system, memory_of_container


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
