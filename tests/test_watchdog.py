"""The tests' own watchdog: what is slow may take its time, what hangs is found."""

from __future__ import annotations

import os
import sys

import pytest

from tests.harness import Job
from tests.watchdog import IDLE_S, MOST_S, Stalled, Watchdog, cpu_seconds, finish


class World:
    """A clock, and a job that uses a share of a CPU and prints lines as it goes by."""

    def __init__(self) -> None:
        self.now, self.used, self.lines = 0.0, 0.0, 0
        self.watchdog = Watchdog(1, clock=lambda: self.now, used_s=lambda pid: self.used)

    def go_on(self, seconds: float, *, share: float = 0.0, line_every: float = 0.0) -> None:
        for tick in range(int(seconds * 4)):
            self.now += 0.25
            self.used += 0.25 * share
            if line_every and (tick * 0.25) % line_every == 0:
                self.lines += 1
            self.watchdog.check(self.lines)


def test_ten_times_as_slow_is_not_a_hang() -> None:
    world = World()
    world.go_on(MOST_S - 1, share=0.05)
    slow = World()
    slow.go_on(MOST_S - 1, line_every=IDLE_S / 2)


@pytest.mark.parametrize("share", [0.0, 0.02])
def test_what_waits_for_nothing_is_a_hang_though_its_watchers_look_around(share: float) -> None:
    world = World()
    world.go_on(100, share=0.5, line_every=1)
    world.go_on(IDLE_S - 2, share=share)
    with pytest.raises(Stalled, match="no output, and less than 3% of a CPU used, for 120 s"):
        world.go_on(10, share=share)


def test_what_spins_for_ever_ends_too() -> None:
    world = World()
    with pytest.raises(Stalled, match="although something is being done"):
        world.go_on(MOST_S + 1, share=1.0)


def test_the_time_of_children_counts_also_when_they_are_gone() -> None:
    before = cpu_seconds(os.getpid())
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    assert finish([sys.executable, "-c", busy]).returncode == 0
    assert cpu_seconds(os.getpid()) - before >= 0.25


def test_a_job_that_hangs_is_found_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.watchdog._LOOK_S", 0.2)
    script = "import time; print('BEGUN', flush=True); time.sleep(1000)"
    job = Job([sys.executable, "-c", script], dict(os.environ))
    try:
        job.wait_for("BEGUN")
        with pytest.raises(Stalled, match=r"for 0\.5 s.*\n(.*\n)*BEGUN"):
            job.wait_for("NEVER", idle_s=0.5)
        with pytest.raises(Stalled, match=r"the job did not end: .*\n(.*\n)*BEGUN"):
            job.wait(idle_s=0.5)
    finally:
        job.end()
    with pytest.raises(Stalled, match="BEGUN"):
        finish([sys.executable, "-c", script], most_s=0.5)
