"""Trainings under ``mindx-elastic run --recover in-place`` whose functions catch errors, clean up, retry.

``--form NAME`` is one of `FORMS`. Faults, options and printed lines are those of ``in_place.py``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.jobs.in_place import Training, make_parser, plain
from tests.jobs.kit import say

FORMS: dict[str, Callable[[Training], None]] = {"plain": plain}


def form(train: Callable[[Training], None]) -> Callable[[Training], None]:
    FORMS[train.__name__] = train
    return train


def step_form(do_step: Callable[[Training, Any, Any], None]) -> None:
    """A training each step of which is done by this function."""

    @functools.wraps(do_step)
    def train(t: Training) -> None:
        for epoch in t.epochs():
            for x, y, index in t.loader:
                t.begin(epoch, index)
                do_step(t, x, y)

    form(train)


def caught(t: Training, error: BaseException) -> None:
    say(f"CAUGHT {t.rank} {type(error).__name__}")


# --- errors that are caught ---


@step_form
def catches_what_backward_raises(t: Training, x: Any, y: Any) -> None:
    """And steps with the gradients that there are."""
    loss = t.forward(x, y)
    try:
        t.backward(loss)
    except Exception as error:
        caught(t, error)
    t.update()
    t.end()


@step_form
def catches_everything_in_a_step(t: Training, x: Any, y: Any) -> None:
    try:
        t.do_step(x, y)
    except BaseException as error:
        caught(t, error)


@form
def catches_everything_around_the_loop(t: Training) -> None:
    try:
        plain(t)
    except BaseException as error:
        caught(t, error)


@step_form
def translates_errors(t: Training, x: Any, y: Any) -> None:
    try:
        t.do_step(x, y)
    except RuntimeError as error:
        raise ValueError(f"step {t.step} has failed") from error


@form
def leaves_the_process_after_an_error(t: Training) -> None:
    try:
        plain(t)
    except RuntimeError as error:
        caught(t, error)
        sys.exit(3)


@step_form
def tries_again(t: Training, x: Any, y: Any) -> None:
    for _ in range(3):
        try:
            t.backward(t.forward(x, y))
            break
        except RuntimeError as error:
            caught(t, error)
            t.optimizer.zero_grad()
    t.update()
    t.end()


# --- collectives of the program's own ---


@step_form
def ends_each_step_with_a_collective(t: Training, x: Any, y: Any) -> None:
    try:
        t.do_step(x, y)
    finally:
        dist.all_reduce(torch.ones(3))


def with_a_collective_at_its_end(batches: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from batches
    finally:
        dist.all_reduce(torch.ones(3))


@form
def closes_a_named_generator_with_a_collective(t: Training) -> None:
    """It lives as long as the name does."""
    for epoch in t.epochs():
        batches = with_a_collective_at_its_end(t.loader)
        for x, y, index in batches:
            t.begin(epoch, index)
            t.do_step(x, y)


def step_with_a_mean(t: Training, x: Any, y: Any, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The mean of the losses, the step's last collective, scales the gradients."""
    loss = t.forward(x, y)
    t.backward(loss)
    mean = average(loss.detach().clone())
    for parameter in t.network.parameters():
        parameter.grad *= 1.0 + 0.1 * mean.item()
    t.update()
    t.end()


@step_form
def suppresses_a_failed_wait(t: Training, x: Any, y: Any) -> None:
    def average(mean: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(mean, async_op=True)
        t.faults.at(t.step, "inside")
        with contextlib.suppress(RuntimeError):
            work.wait()
        return mean

    step_with_a_mean(t, x, y, average)


@step_form
def suppresses_a_failed_functional_collective(t: Training, x: Any, y: Any) -> None:
    """Where the result does not come, the first use of it fails, and the next one does not."""

    def average(mean: torch.Tensor) -> torch.Tensor:
        group: Any = dist.group.WORLD
        mean = functional.all_reduce(mean, "sum", group)
        t.faults.at(t.step, "inside")
        with contextlib.suppress(RuntimeError):
            functional.wait_tensor(mean)
        return mean

    step_with_a_mean(t, x, y, average)


@step_form
def asks_whether_collectives_are_over(t: Training, x: Any, y: Any) -> None:
    """And never waits for one."""

    def average(mean: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(mean, async_op=True)
        t.faults.at(t.step, "inside")
        while not work.is_completed():
            time.sleep(0)
        return mean

    step_with_a_mean(t, x, y, average)


@step_form
def averages_by_hand_and_suppresses(t: Training, x: Any, y: Any) -> None:
    """Gradients without DDP's reduction, with waits whose errors are swallowed."""
    with t.ddp.no_sync():
        t.backward(t.forward(x, y))
    works = [dist.all_reduce(p.grad, async_op=True) for p in t.network.parameters()]
    t.faults.at(t.step, "inside")
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
    t.update()
    t.end()


# --- state outside ---

HISTORY: list[torch.Tensor] = []


@step_form
def keeps_tensors_outside(t: Training, x: Any, y: Any) -> None:
    """The mean of all losses so far, in a list that the guard does not keep, has a part in the next loss."""
    loss = t.forward(x, y)
    HISTORY.append(loss.detach().clone())
    t.backward(loss * (1.0 + 0.1 * torch.stack(HISTORY).mean().item()))
    t.update()
    t.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = make_parser()
    parser.add_argument("--form", choices=FORMS, required=True)
    args = parser.parse_args()
    Training(args).run(FORMS[args.form])
    dist.destroy_process_group()
