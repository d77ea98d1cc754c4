"""The index of a plain ``enumerate`` over a named loader: told where it steers the training, and only there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.guard.test_loops import Program
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


def every_second(p: Program, loss: Any = None) -> None:
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            p.step(*batch)
            if i % 2 == 0 and loss is not None:
                loss.backward()
            p.guard.step_end()


def breaks(p: Program) -> None:
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            if i >= 3:
                break
            p.step(*batch)
            p.guard.step_end()


def sets_the_rate(p: Program, optimizer: Any = None) -> None:
    for epoch in p.guard.epochs(2):
        for i, batch in enumerate(p.loader, start=1):
            progress = epoch + i / 4
            for group in [{}] if optimizer is None else optimizer.param_groups:
                group["lr"] = 0.1 * progress
            p.step(*batch)
            p.guard.step_end()


def breaks_by_what_it_finds(p: Program) -> None:
    is_bad = False
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            p.step(*batch)
            is_bad = len(batch) > 5
            if i % 3 == 2:
                print(i)
                if is_bad:
                    break
            p.guard.step_end()


def schedules_every_second(p: Program) -> None:
    """An update in each batch: a resumed run would count the batches between two changes of the rate anew."""
    scheduler = torch.optim.lr_scheduler.StepLR(p.opt, 1)
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            p.step(*batch)
            if (i + 1) % 3 == 0 and i > 90:
                scheduler.step()
            p.guard.step_end()


def second_optimizer_every_third(p: Program) -> None:
    optimizer, other = p.opt, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            p.step(*batch)
            optimizer.step()
            if i % 3 == 2:
                other.step()
            p.guard.step_end()


def but_for_every_fourth(p: Program, optimizer: Any = None) -> None:
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            p.step(*batch)
            if not (i % 3 == 2) and optimizer is not None:  # noqa: SIM201
                optimizer.step()
            p.guard.step_end()


def begins_at_5(p: Program, optimizer: Any = None) -> None:
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader, 5):
            p.step(*batch)
            if i % 3 == 2 and optimizer is not None:
                optimizer.step()
            p.guard.step_end()


class MetricLogger:
    """As torchvision's references have one."""

    def log_every(self, batches: Any, number: int) -> Iterator[Any]:
        for i, batch in enumerate(batches):
            yield batch
            if i % number == 0:
                print(f"{i} of {len(batches)}")


def every_second_of_a_generator(p: Program, loss: Any = None) -> None:
    logger = MetricLogger()
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(logger.log_every(p.loader, 2)):
            p.step(*batch)
            if i % 2 == 0 and loss is not None:
                loss.backward()
            p.guard.step_end()


def test_batches_that_a_generator_passes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    p = Program(tmp_path)
    with p.guard:
        every_second_of_a_generator(p)
    (told,) = [r.getMessage() for r in caplog.records if "the index i of" in r.getMessage()]
    assert "Write for i, batch in logger.log_every(guard.enumerate(p.loader), 2):" in told


def test_numbered_batches_have_the_length_of_the_loader(tmp_path: Path) -> None:
    p = Program(tmp_path)
    with p.guard:
        for _ in p.guard.epochs(1):
            for i, batch in MetricLogger().log_every(p.guard.enumerate(p.loader), 2):
                assert i == p.guard.step
                p.step(*batch)
                p.guard.step_end()
            assert p.guard.step == len(p.guard.enumerate(p.loader))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "program",
    [
        every_second,
        breaks,
        sets_the_rate,
        breaks_by_what_it_finds,
        schedules_every_second,
        second_optimizer_every_third,
        but_for_every_fourth,
        begins_at_5,
    ],
)
def test_told(tmp_path: Path, program: Callable[[Program], None], caplog: pytest.LogCaptureFixture) -> None:
    p = Program(tmp_path)
    with p.guard:
        program(p)
    (told,) = [r.getMessage() for r in caplog.records if "the index i of" in r.getMessage()]
    start = {"sets_the_rate": ", start=1", "begins_at_5": ", start=5"}.get(program.__name__, "")
    assert f"Write for i, batch in guard.enumerate(p.loader{start}):" in told


def saves(*_: object) -> None:
    pass


def logs(p: Program) -> None:
    running, losses = 0.0, []
    for epoch in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            p.step(*batch)
            running += 1
            if i % 2 == 1:
                print(f"{epoch} {i}: {running / 2}")
                losses.append((i, running))
                running = 0.0
            if i == 3:
                saves(f"{i}.png")
            print("%d of %d" % (i, 4))  # noqa: UP031
            p.guard.step_end()


def breaks_in_a_dry_run(p: Program) -> None:
    args = argparse.Namespace(dry_run=False, log_interval=2)
    for epoch in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            p.step(*batch)
            p.guard.step_end()
            if i % args.log_interval == 0:
                print(f"{epoch} {i}")
                if args.dry_run:
                    break


def accumulates(p: Program, loss: Any = None) -> None:
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            if (i + 1) % 2 == 0 and loss is not None:
                loss.step()
            p.step(*batch)
            p.guard.step_end()


def accumulates_counted_from_0(p: Program, loss: Any = None) -> None:
    every = 2
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            if i % 2 == 1 and loss is not None:
                loss.step()
            if i % every == every - 1 and loss is not None:
                loss.step()
            p.step(*batch)
            p.guard.step_end()


def window_around_the_boundary(p: Program) -> None:
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader):
            if (i + 1) % 1 == 0:
                p.step(*batch)
                p.guard.step_end()


def ours(p: Program) -> None:
    for _ in p.guard.epochs(2):
        for i, batch in p.guard.enumerate(p.loader):
            if i > 30:
                break
            p.step(*batch)
            p.guard.step_end()


def begins_where_the_epoch_goes_on(p: Program, loss: Any = None) -> None:
    for _ in p.guard.epochs(2):
        for i, batch in enumerate(p.loader, start=p.guard.position.step_in_epoch):
            p.step(*batch)
            if i % 2 == 0 and loss is not None:
                loss.backward()
            p.guard.step_end()


@pytest.mark.parametrize(
    "program",
    [
        begins_where_the_epoch_goes_on,
        logs,
        breaks_in_a_dry_run,
        accumulates,
        accumulates_counted_from_0,
        window_around_the_boundary,
        ours,
    ],
)
def test_left_alone(tmp_path: Path, program: Callable[[Program], None], caplog: pytest.LogCaptureFixture) -> None:
    p = Program(tmp_path)
    with p.guard:
        program(p)
    assert not [r for r in caplog.records if "the index i of" in r.getMessage()]
