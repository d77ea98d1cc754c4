"""Limits, containers and devices of machines that are not there; files of cgroups as kernels write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.doctor.container import judge_first_process, judge_slurm
from mindx_elastic.doctor.finding import Level, worst
from mindx_elastic.doctor.machine import available_memory, judge_open_files, memory_of_container
from mindx_elastic.doctor.places import Mount, find_mount, read_mounts


@pytest.mark.parametrize(("files", "level"), [(-1, Level.GOOD), (128, Level.PROBLEM), (1000, Level.WARNING)])
def test_open_files(files: int, level: Level) -> None:
    found = judge_open_files(files)
    assert found.level is level and bool(found.remedy) == (level is not Level.GOOD)


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


def test_mounts_by_the_innermost(tmp_path: Path) -> None:
    text = "1 0 8:1 / / rw shared:1 - ext4 /dev/a rw\n2 1 0:9 / /mnt/a\\040b rw - nfs4 host:/x rw\nbroken line\n"
    mounts = read_mounts(text)
    assert mounts == [Mount("/", "ext4"), Mount("/mnt/a b", "nfs4")]
    assert find_mount(Path("/mnt/a b/c"), mounts) == mounts[1]
    assert find_mount(Path("/mnt/a bc"), mounts) == mounts[0]
    assert find_mount(Path("/x"), []) is None


def test_slurm() -> None:
    config, job = "KillWait                = 30 sec\nKillOnBadExit = 0\n", "JobId=7 Requeue=0 Restarts=0"
    short, again = judge_slurm(config, job, 60)
    assert (short.level, again.level) == (Level.PROBLEM, Level.WARNING)
    assert "--grace 30" in short.remedy and "--requeue" in again.remedy
    assert worst(judge_slurm(config, job.replace("=0", "=1"), 30)) is Level.GOOD
    assert worst(judge_slurm("", "", 30)) is Level.UNKNOWN


def test_a_shell_as_the_first_process() -> None:
    assert judge_first_process("bash").level is Level.WARNING and judge_first_process("tini").level is Level.GOOD
