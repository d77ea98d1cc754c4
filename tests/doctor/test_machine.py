"""Limits, containers and devices of machines that are not there; files of cgroups as kernels write them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from mindx_elastic.doctor.container import judge_first_process, judge_slurm
from mindx_elastic.doctor.finding import Level, worst
from mindx_elastic.doctor.machine import CgroupLimits, available_memory, judge_limits, read_cgroup
from mindx_elastic.doctor.places import Mount, find_mount, read_mounts
from mindx_elastic.doctor.saving import State

GENEROUS = {resource.RLIMIT_NOFILE: 65536}


@pytest.mark.parametrize(
    ("limits", "cgroup", "word", "level"),
    [
        ({}, CgroupLimits(), "", Level.GOOD),
        ({resource.RLIMIT_NOFILE: 128}, CgroupLimits(), "ulimit -n", Level.PROBLEM),
        ({resource.RLIMIT_NOFILE: 1000}, CgroupLimits(), "ulimit -n", Level.WARNING),
        ({}, CgroupLimits(pids=200, pids_used=10), "pids.max", Level.PROBLEM),
        ({resource.RLIMIT_NPROC: 1024}, CgroupLimits(), "ulimit -u", Level.WARNING),
        ({resource.RLIMIT_FSIZE: 1 << 20}, CgroupLimits(), "ulimit -f", Level.PROBLEM),
    ],
)
def test_limits(limits: dict[int, int], cgroup: CgroupLimits, word: str, level: Level) -> None:
    soft = {**GENEROUS, **limits}
    findings = list(judge_limits(lambda name: soft.get(name, -1), cgroup, State(nbytes=1 << 30)))
    assert worst(findings) is level
    bad = [finding for finding in findings if finding.level is not Level.GOOD]
    assert len(bad) == (level is not Level.GOOD)
    assert all(word in finding.text and finding.remedy for finding in bad)


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
    write(root / "a/b/pids.max", "max\n")
    found = read_cgroup(tmp_path / "self", root)
    assert (found.memory_bytes, found.memory_left, found.pids) == (1000, 100, None)
    write(tmp_path / "meminfo", "MemTotal: 9 kB\nMemAvailable:   1 kB\n")
    assert available_memory(found, tmp_path / "meminfo") == 100
    assert available_memory(CgroupLimits(), tmp_path / "meminfo") == 1024
    assert available_memory(CgroupLimits(), tmp_path / "none") is None


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
