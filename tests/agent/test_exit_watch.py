"""Which ranks do not end after their training."""

from __future__ import annotations

from mindx_elastic.agent.exit_watch import IDLE_S, STOPPED_S, ExitWatch, Leaver, Overdue, Work

NS = 1_000_000_000


class Clock:
    """Looks twice a second, as an attempt does; measures the work every ten seconds."""

    def __init__(self, timeout_s: float | None, *, alone: bool = True) -> None:
        self.watch = ExitWatch(timeout_s, alone=alone)
        self.now, self.work = 1000.0, 0.0
        self.leavers: dict[int, Leaver] = {}
        self.num_live = 2
        self._measured = 0.0

    def leave(self, rank: int, *, stopped: bool = False) -> None:
        left = self.leavers[rank].left_ns if rank in self.leavers else int(self.now * NS)
        self.leavers[rank] = Leaver(pid=100 + rank, left_ns=left, stopped=stopped)

    def look(self) -> list[Overdue]:
        work = None
        if self.now - self._measured >= 10:
            self._measured, work = self.now, Work(processor_s=self.work, nbytes=0)
        return self.watch.observe(self.leavers, int(self.now * NS), num_live=self.num_live, work=work)

    def wait(self, seconds: float, *, works: float = 0.0) -> list[Overdue]:
        """Until somebody is overdue; `works`: share of a processor that is used meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self.work += works * 0.5
            if found := self.look():
                return found
        return []

    def stand_still(self, seconds: float) -> list[Overdue]:
        self.now += seconds
        return self.look()


def ranks(found: list[Overdue]) -> list[int]:
    return [each.rank for each in found]


def test_a_given_timeout_counts_from_the_guard_s_end_whatever_the_rank_does() -> None:
    clock = Clock(20)
    clock.leave(0)
    assert clock.wait(20, works=1.0) == []
    (found,) = clock.wait(1, works=1.0)
    assert found.rank == 0 and 20 < found.seconds <= 21 and not found.stopped


def test_a_stopped_one_goes_alone_and_the_others_get_their_time_again() -> None:
    clock = Clock(20)
    clock.leave(0)
    clock.leave(1, stopped=True)
    found = clock.wait(30)
    assert ranks(found) == [1] and found[0].stopped
    clock.watch.reset(int(clock.now * NS))
    del clock.leavers[1]
    assert clock.wait(20) == []
    assert ranks(clock.wait(1)) == [0]


def test_never() -> None:
    clock = Clock(0)
    clock.leave(0, stopped=True)
    assert clock.wait(100) == []


def test_by_itself_a_stopped_process_has_a_minute() -> None:
    for alone in (True, False):
        clock = Clock(None, alone=alone)
        clock.leave(0)
        clock.leave(1)
        assert clock.wait(300) == []
        clock.leave(1, stopped=True)
        assert clock.wait(STOPPED_S) == []
        assert ranks(clock.wait(1)) == [1]


def test_a_process_that_goes_on_again_was_only_paused() -> None:
    clock = Clock(None)
    clock.leave(0, stopped=True)
    assert clock.wait(STOPPED_S - 1) == []
    clock.leave(0)
    assert clock.wait(5) == []
    clock.leave(0, stopped=True)
    assert clock.wait(STOPPED_S) == []
    assert ranks(clock.wait(1)) == [0]


def test_by_itself_work_is_never_cut_off() -> None:
    """A long evaluation on one rank; the other one idles in a barrier."""
    clock = Clock(None)
    clock.leave(0)
    clock.leave(1)
    assert clock.wait(5 * IDLE_S, works=0.1) == []


def test_by_itself_idle_ranks_have_half_an_hour() -> None:
    clock = Clock(None)
    clock.leave(0)
    clock.leave(1)
    assert clock.wait(100, works=1.0) == []
    assert clock.wait(IDLE_S - 20, works=0.01) == []
    assert ranks(clock.wait(60, works=0.01)) == [0, 1]


def test_bytes_are_work_too() -> None:
    watch = ExitWatch(None)
    leavers = {0: Leaver(pid=1, left_ns=NS, stopped=False)}
    for second in range(0, int(3 * IDLE_S), 10):
        work = Work(processor_s=0.0, nbytes=second * (1 << 20))
        assert watch.observe(leavers, (second + 1) * NS, num_live=1, work=work) == []


def test_idle_ranks_are_not_judged_while_another_one_trains_or_on_another_node() -> None:
    clock = Clock(None)
    clock.leave(0)
    assert clock.wait(2 * IDLE_S) == [], "rank 1 has not left its guard"
    clock = Clock(None, alone=False)
    clock.leave(0)
    clock.leave(1)
    assert not clock.watch.wants_work
    assert clock.wait(2 * IDLE_S) == []


def test_a_machine_that_stood_still_is_not_judged_by_it() -> None:
    for timeout_s, stopped in ((20.0, False), (None, True)):
        clock = Clock(timeout_s)
        clock.leave(0, stopped=stopped)
        assert clock.look() == []
        assert clock.stand_still(3600) == []
        assert clock.wait(19) == []
        assert ranks(clock.wait(60)) == [0]


def test_a_new_attempt() -> None:
    clock = Clock(None)
    clock.leave(0, stopped=True)
    assert clock.wait(50) == []
    clock.watch.reset()
    assert clock.wait(50) == []
    clock.leavers.clear()
    assert clock.wait(50) == []
