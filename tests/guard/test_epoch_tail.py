"""Code behind an epoch's loop that needs its batches: stopped at any boundary, a start does not fail in it."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.capture.loop_ends import names_of_tail_values, tail_values_in
from mindx_elastic.guard.loops.epoch_tail import EpochValues, put_back_values
from tests.capture.round_trip import assert_same
from tests.guard.program import BATCHES, EPOCHS, LAST, Loop, Program, check, run, stopped
from tests.guarded import Done

pytestmark = pytest.mark.usefixtures("clean")


def one_pass(p: Program) -> float:
    total, count = 0.0, 0
    for x, y in p.loader:
        p.step(x, y)
        p.guard.step_end()
        total, count = total + float(y.sum()), count + 1
    return total / count


class Killed(Exception):
    """Leaves the tail as a kill does: nothing waits for it."""


def pass_tail(p: Program, epoch: int) -> None:
    if getattr(p, "killed_in", 0) == epoch:
        raise Killed


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.sum, self.count = self.sum + value, self.count + 1

    def mean(self) -> float:
        return self.sum / self.count


class Window(Meter):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.last: deque[float] = deque(maxlen=size)

    def update(self, value: float) -> None:
        super().update(value)
        self.last.append(value)


class Logger:
    """The way of many projects: meters by name, some made in front and the others when a step first names them."""

    def __init__(self) -> None:
        self.meters: dict[str, Window] = defaultdict(Window)

    def __getattr__(self, name: str) -> Any:
        if name in self.meters:
            return self.meters[name]
        raise AttributeError(name)

    def update(self, **values: float) -> None:
        for name, value in values.items():
            self.meters[name].update(value)

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        yield from batches


class Losses(list[float]):
    """Its items are no attributes."""


class Holder:
    """Keeps the sums of an epoch in each of the ways that programs have."""

    def __init__(self, p: Program) -> None:
        self.p = p

    def one_pass(self, epoch: int) -> Any:
        total, count = 0.0, 0
        losses: list[torch.Tensor] = []
        self.losses: list[float] = []
        average = Meter()
        logger = Logger()
        logger.meters["lr"] = Window(1)
        for x, y in logger.over(self.p.loader):
            self.p.step(x, y)
            value = float(y.sum())
            losses.append(y.sum())
            self.losses.append(value)
            average.update(value)
            logger.update(loss=value, lr=float(epoch))
            self.p.guard.step_end()
            total, count = total + value, count + 1
        pass_tail(self.p, epoch)
        means = {name: (each.mean(), list(each.last)) for name, each in logger.meters.items()}
        logger.update(more=0.5)  # still one that makes what it does not have
        return (
            *(torch.stack(losses).tolist(), max(self.losses), total / count, len(x), average.mean()),
            *(means, logger.loss.mean(), list(logger.more.last)),
        )

    def train(self) -> None:
        for epoch in self.p.guard.epochs(EPOCHS):
            self.p.log.append(self.one_pass(epoch))


class Trainer:
    """Two functions of one name, the one inside the other."""

    def train(self, p: Program) -> None:
        def train(epoch: int) -> float:
            count = 0
            for x, y in p.loader:
                p.train((x, y))
                count += len(y)
                losses.append(float(y.sum()))
                average.update(float(y.sum()))
            pass_tail(p, epoch)
            return len(x) / count

        for epoch in p.guard.epochs(EPOCHS):
            count, losses, average = 100 * epoch, list[float](), Meter()
            p.log.append((train(epoch), count, losses, average.mean()))


def in_steps_of_an_endless_loader(p: Program) -> None:
    batches = itertools.chain.from_iterable(itertools.repeat(p.loader))
    for epoch in p.guard.epochs(EPOCHS):
        total = 0.0
        for _ in p.guard.steps(BATCHES):
            x, y = next(batches)
            p.step(x, y)
            p.guard.step_end()
            total += float(y.sum())
        pass_tail(p, epoch)
        p.log.append((epoch, total, len(x)))


@pytest.mark.parametrize(
    "loop",
    [in_steps_of_an_endless_loader, lambda p: Holder(p).train(), lambda p: Trainer().train(p)],
    ids=["steps", "a method", "two of one name"],
)
@pytest.mark.parametrize("epoch", [1, EPOCHS])
def test_killed_in_the_tail_the_next_start_runs_it_with_what_it_needs(tmp_path: Path, loop: Loop, epoch: int) -> None:
    whole, expected = run(loop, tmp_path / "whole")
    first = Program(tmp_path / "killed")
    vars(first)["killed_in"] = epoch
    with pytest.raises(Killed), first.guard:
        loop(first)
    second, result = run(loop, tmp_path / "killed", seed=99)
    assert second.guard.resumed_from_step == epoch * BATCHES
    left = EPOCHS - epoch + 1
    assert second.log[-left:] == whole.log[-left:]
    assert_same(result, expected)


def is_kept_of(frame: FrameType) -> bool:
    """Whether its variable `value` is part of a boundary."""
    found = EpochValues(None, ()).changed(frame)
    (owners,) = [owners for function, owners in found.items() if frame.f_code.co_name in function] or [{}]
    return "value" in owners.get("", {}).get("value", {})


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        ([0.5] * 100, True),
        ([0.5] * 30_000, False),
        ({"a": Window()}, True),
        ([Window() for _ in range(30_000)], False),
        (Losses([0.5]), False),  # its items are no attributes
        (ITSELF, False),
    ],
)
def test_small_values_are_kept_and_long_lists_not_walked_through(value: Any, is_kept: bool) -> None:
    assert is_kept_of(sys._getframe()) is is_kept


class Job:
    """Its loop is over a generator of its own, and a method makes the steps."""

    def __init__(self) -> None:
        self.rank, self.total = 1, 0.0

    def epochs(self, begun: list[EpochValues]) -> Iterator[int]:
        begun.append(EpochValues(sys._getframe(), ()))
        yield 1

    def step(self, values: EpochValues) -> dict[str, Any]:
        self.total += 1.0
        return values.changed(sys._getframe())


def train(job: Job) -> dict[str, Any]:
    begun: list[EpochValues] = []
    found: dict[str, Any] = {}
    for _ in job.epochs(begun):
        found = job.step(begun[0])
    return found


def test_what_no_step_has_changed_is_not_kept_for_a_tail() -> None:
    """Neither of the functions around the loop nor of an object with another name there: another rank may get it."""
    rank = 1
    names = set(names_of_tail_values(tail_values_in({"tail_values": train(Job())})))
    assert "self.total" in names and not {"self.rank", "job.rank", "rank"} & names and rank


def test_a_view_of_the_data_is_not_written_into() -> None:
    data, rows = torch.zeros(4, 2), np.zeros((4, 2))
    x = data[:2]
    pair: list[Any] = [data[2:], rows[:2]]
    values = EpochValues(sys._getframe(), ())
    x, pair[:] = torch.ones(2, 2), [torch.ones(2, 2), np.ones((2, 2))]
    found = values.changed(sys._getframe())
    x, pair[:] = data[:2], [data[2:], rows[:2]]
    same = pair
    put_back_values(sys._getframe(), found)
    assert x.sum() == pair[0].sum() == pair[1].sum() == 4 and same is pair
    assert not data.any() and not rows.any()


def test_what_is_too_big_for_a_boundary_is_left_to_the_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def outputs(p: Program) -> None:
        for epoch in p.guard.epochs(EPOCHS):
            for x, y in p.loader:
                p.step(x, y)
                big, small = torch.zeros(1 << 19), len(x)
                p.guard.step_end()
            pass_tail(p, epoch)
            p.log.append(small)
            p.log.append(float(big.sum()))

    first = Program(tmp_path)
    vars(first)["killed_in"] = 1
    with pytest.raises(Killed), first.guard:
        outputs(first)
    second = Program(tmp_path, seed=99)
    with pytest.raises(UnboundLocalError, match="big"), second.guard:
        outputs(second)
    assert second.log == [4] and "epoch 1 was resumed after its last step" in caplog.text
    assert "Set what the code after that loop reads in front of it" in caplog.text


def test_a_pass_after_the_last_epoch_is_the_same_whole_one_in_a_resumed_run(tmp_path: Path) -> None:
    passes: list[list[Any]] = []

    def then_once_more(p: Program) -> None:
        for _ in p.guard.epochs(EPOCHS):
            for batch in p.loader:
                p.train(batch)
        passes.append([x.tolist() for x, _ in p.loader])  # as update_bn() does

    run(then_once_more, tmp_path / "whole")
    run(then_once_more, tmp_path / "whole", seed=99)
    stopped(then_once_more, tmp_path / "stopped", LAST)
    run(then_once_more, tmp_path / "stopped", seed=99)
    assert len(passes[0]) == BATCHES and passes == passes[:1] * 3


def test_a_break_behind_the_last_batch_stays_one(tmp_path: Path) -> None:
    def until_two(p: Program) -> None:
        for epoch in p.guard.epochs(EPOCHS):
            for batch in p.loader:
                p.train(batch)
            if epoch == 2 and len(batch[0]):
                break

    assert check(until_two, tmp_path).guard.step == 2 * BATCHES


class Patience:
    """Leaves the loop after so many epochs; the count is kept, the number is the program's."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_loop_that_was_left_early_goes_on_with_more_patience(tmp_path: Path) -> None:
    """What has decided to leave decides again, as if the run had had that patience from the start."""

    def train(directory: Path, most: int) -> tuple[list[int], Any]:
        """The epochs after which the loop has asked, and the weights."""
        patience, asked = Patience(most), Done()

        def loop(p: Program) -> None:
            for epoch in p.guard.epochs(9):
                for batch in p.loader:
                    p.train(batch)
                patience.count += 1
                asked.append(epoch)
                if patience.count >= patience.most:
                    break

        return asked, run(loop, directory, stateful={"patience": patience})[1]

    assert train(tmp_path / "job", 2)[0] == [1, 2]
    assert train(tmp_path / "job", 2)[0] == [2], "nothing is trained, and nothing is counted twice"
    asked, result = train(tmp_path / "job", 4)
    assert asked == [2, 3, 4]
    assert_same(result, train(tmp_path / "straight", 4)[1])


def exchange(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    parameter.data = value


def overwrite(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    parameter.data.copy_(value)


@pytest.mark.parametrize("put", [exchange, overwrite])
def test_averaged_weights_that_an_exception_leaves_in_the_model_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, put: Any
) -> None:
    """As in the evaluation of an EMA after each epoch. Put back, they are no change."""

    def loop(p: Program) -> None:
        for epoch in p.guard.epochs(EPOCHS):
            for batch in p.loader:
                p.train(batch)
            own = {parameter: parameter.detach().clone() for parameter in p.network.parameters()}
            for parameter in own:
                put(parameter, torch.zeros_like(parameter))
            if epoch == 2:
                raise ValueError("in the evaluation")
            for parameter, value in own.items():
                put(parameter, value)

    with pytest.raises(ValueError, match="in the evaluation"):
        run(loop, tmp_path)
    assert "6 parameters were changed since the boundary without torch's knowledge" in caplog.text
    assert not [*tmp_path.glob("*.safetensors")]


@pytest.mark.parametrize("end", ["a break", "an exception", "the end of a trainer's own epochs"])
def test_modes_are_those_of_the_boundary_where_an_evaluation_ends_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """As in early stopping, with a part that was frozen a few steps before."""

    def loop(p: Program) -> None:
        by_itself = range(1, EPOCHS + 1)
        for epoch in by_itself if end.startswith("the end") else p.guard.epochs(EPOCHS + 1):
            for batch in p.loader:
                p.step(*batch)
                p.guard.step_end()
                if p.guard.step == LAST - 2:
                    p.network[1].eval()
            p.network.eval()
            if epoch == EPOCHS and end != "an exception":
                break
            if epoch == EPOCHS:
                raise ValueError("in the evaluation")
            p.network.train()

    if end != "an exception":
        run(loop, tmp_path)
    else:
        with pytest.raises(ValueError, match="in the evaluation"):
            run(loop, tmp_path)
    assert "has changed within the last 48 steps" not in caplog.text
    second = Program(tmp_path)
    with second.guard:
        assert [each.training for each in second.network][:3] == [True, False, True]
