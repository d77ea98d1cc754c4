"""Time and room for a save, with figures of machines that are not there."""

from __future__ import annotations

import pytest

from mindx_elastic.doctor.saving import Disk, HeldState, Level, judge_memory, judge_room, judge_time

GIB = 1 << 30


def disk(gib_per_s: float) -> Disk:
    return Disk(bytes_per_s=gib_per_s * GIB, measured_bytes=GIB, way="direct I/O")


def state(size_gib: float, ranks: int = 1) -> HeldState:
    return HeldState(int(size_gib * GIB), ranks)


@pytest.mark.parametrize(
    ("size_gib", "ranks", "speed", "grace_s", "level"),
    [
        (18, 1, 2.3, 30, Level.GOOD),
        (18, 1, 0.9, 30, Level.WARNING),  # 20 s of 30
        (18, 1, 0.5, 30, Level.PROBLEM),
        (18, 1, 0.5, 120, Level.GOOD),
        (4, 8, 1, 30, Level.WARNING),  # agreed 8 s, but 32 s where a rank is dead
        (4, 2, 1, 30, Level.GOOD),
    ],
)
def test_a_save_is_compared_with_the_grace_period(
    size_gib: float, ranks: int, speed: float, grace_s: float, level: Level
) -> None:
    found = judge_time(disk(speed), state(size_gib, ranks), grace_s)
    assert found.level is level, found.text
    assert bool(found.remedy) is (level is not Level.GOOD)
    assert f"of your {grace_s:g} s of grace" in found.text


def test_the_remedy_of_a_slow_disk_is_enough() -> None:
    found = judge_time(disk(0.5), state(18), 30)
    assert "--grace 75" in found.remedy
    again = judge_time(disk(0.5), state(18), 75)
    assert again.level is Level.GOOD


@pytest.mark.parametrize(
    ("free_gib", "level"), [(100, Level.GOOD), (50, Level.WARNING), (30, Level.PROBLEM), (0.1, Level.PROBLEM)]
)
def test_room_on_the_disk(free_gib: float, level: Level) -> None:
    assert judge_room(int(free_gib * GIB), state(20, 2), "/data").level is level


@pytest.mark.parametrize(
    ("free_gib", "left_gib", "level"),
    [
        (64, None, Level.GOOD),
        (37, None, Level.WARNING),
        (0.0625, None, Level.PROBLEM),  # Docker's 64 MiB
        (64, 20, Level.PROBLEM),  # the container's limit counts too
    ],
)
def test_two_snapshots_must_fit_into_shared_memory(free_gib: float, left_gib: float | None, level: Level) -> None:
    left = None if left_gib is None else int(left_gib * GIB)
    found = judge_memory("/dev/shm", int(free_gib * GIB), state(18), left)
    assert found.level is level
    assert ("--shm-size=40g" in found.remedy) is (level is not Level.GOOD)
