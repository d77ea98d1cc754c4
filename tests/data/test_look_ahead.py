"""Which batches the steps have used, from what was fetched: simulated loops of every shape."""

from __future__ import annotations

import random

import pytest

from mindx_elastic.data.look_ahead import Fetches, LookAhead


class Loop:
    """Fetches as a loop does, and knows what it has used."""

    def __init__(self, epoch: int, *, per_step: int, ahead: int, across: bool) -> None:
        self.size, self.per_step, self.ahead, self.across = epoch, per_step, ahead, across
        self.handed = self.asked = self.used = 0
        self.iteration, self.left, self.exhausted = 1, epoch, False

    def fetch(self) -> bool:
        self.asked += 1
        if not self.left:
            self.exhausted = True
            return False
        self.left -= 1
        self.handed += 1
        self.exhausted = False
        return True

    def anew(self) -> None:
        self.iteration, self.left = self.iteration + 1, self.size

    @property
    def seen(self) -> Fetches:
        return Fetches(self.handed, self.asked, self.iteration, self.exhausted)

    def steps(self, number: int):  # type: ignore[no-untyped-def]
        """Yield at each boundary."""
        in_step = 0
        for _ in range(number * self.per_step):
            while self.handed - self.used <= self.ahead and not (self.exhausted and not self.across):
                if not self.fetch() and self.across:
                    self.anew()
            self.used += 1
            in_step += 1
            at_end = not self.across and self.used == self.handed and (self.exhausted or not self.left)
            if in_step == self.per_step or at_end:
                in_step = 0
                yield
            if at_end:
                if not self.exhausted:
                    self.fetch()
                self.anew()
                self.exhausted = False


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("per_step", [1, 2, 4])
@pytest.mark.parametrize("epoch", [12, 13])
def test_what_is_used_is_known_from_the_second_boundary_on(epoch: int, per_step: int, ahead: int, across: bool) -> None:
    loop, look = Loop(epoch, per_step=per_step, ahead=ahead, across=across), LookAhead()
    for number, _ in enumerate(loop.steps(20), start=1):
        known = look.at_boundary(loop.seen)
        assert known or (number == 1 and per_step + ahead > 1)
        if known:
            assert look.used == loop.used, (number, loop.seen)
    assert (look.ahead, look.per_step) == (ahead, per_step)


@pytest.mark.parametrize("seed", range(20))
def test_batches_that_are_left_out_are_not_taken_for_look_ahead(seed: int) -> None:
    draw = random.Random(seed)
    ahead = draw.randrange(3)
    look = LookAhead(ahead)
    handed = ahead
    for _ in range(50):
        handed += draw.choice([1, 1, 1, 2, 3])
        assert look.at_boundary(Fetches(handed, handed, 1))
        assert look.used == handed - ahead


def test_a_loop_that_reads_all_at_once() -> None:
    look = LookAhead()
    assert [look.at_boundary(Fetches(5, 6, 1, exhausted=True)) for _ in range(5)] == [False, True, True, True, True]
    assert look.used == 5


def test_a_batch_that_is_peeked_at_is_not_ahead() -> None:
    look = LookAhead()
    dropped = Fetches(1, 1, 1)
    assert look.at_boundary(Fetches(2, 2, 2, dropped=dropped))
    assert look.used == 2
    assert look.at_boundary(Fetches(3, 3, 2, dropped=dropped))
    assert (look.used, look.ahead) == (3, 0)


def test_an_epoch_of_one_batch_does_not_tell() -> None:
    """Of a resumed epoch one batch is left; the loop reads two ahead."""
    look = LookAhead()
    assert look.at_boundary(Fetches(1, 3, 1, exhausted=True))
    assert (look.used, look.ahead) == (1, None)
    assert not look.at_boundary(Fetches(4, 6, 2))
    assert look.at_boundary(Fetches(5, 7, 2))
    assert (look.used, look.ahead) == (3, 2)
