"""What the steps of an epoch fill is told where it steers the training behind them, and only there."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic import Guard
from tests.guarded import Job, no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


class Meter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int = 1) -> None:
        self.sum, self.count = self.sum + value * count, self.count + count

    @property
    def average(self) -> float:
        return self.sum / max(1, self.count)


def update(job: Job, loss: torch.Tensor) -> None:
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def a_list_whose_mean_a_scheduler_gets(job: Job, plateau: Any) -> str:
    for _ in job.guard.epochs(3):
        losses = []
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            losses.append(loss.item())
            job.guard.step_end()
        mean = sum(losses) / len(losses)
        plateau.step(mean)
    return "losses"


def a_dict_that_decides_when_to_stop(job: Job, plateau: Any) -> str:
    totals = {"loss": 0.0, "count": 0}
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            totals["loss"] += loss.item()
            totals["count"] += 1
            job.guard.step_end()
        if totals["loss"] / totals["count"] < 1e-6:
            break
    return "totals"


def a_meter_of_a_function(job: Job, plateau: Any) -> str:
    def train_epoch() -> float:
        meter = Meter()
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            meter.update(loss.item(), len(x))
            job.guard.step_end()
        print(meter.average)
        return meter.average

    for _ in job.guard.epochs(3):
        plateau.step(train_epoch())
    return "meter"


def a_meter_of_a_function_by_a_variable(job: Job, plateau: Any) -> str:
    def train_epoch() -> tuple[float, int]:
        meter = Meter()
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            meter.update(loss.item(), len(x))
            job.guard.step_end()
        return meter.average, 1

    for _ in job.guard.epochs(3):
        train_loss, _ = train_epoch()
        print(train_loss)
        if train_loss < 1e-9:
            break
    return "meter"


def a_window_that_decides_about_steps(job: Job, plateau: Any) -> str:
    recent: collections.deque[float] = collections.deque(maxlen=5)
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            loss.backward()
            if not recent or loss.item() < 100 * sum(recent) / len(recent):
                job.optimizer.step()
            job.optimizer.zero_grad()
            recent.append(loss.item())
            job.guard.step_end()
    return "recent"


class Logger:
    def __init__(self) -> None:
        self.meters: dict[str, Meter] = collections.defaultdict(Meter)

    def update(self, **values: float) -> None:
        for name, value in values.items():
            self.meters[name].update(value)


def a_logger_of_meters(job: Job, plateau: Any) -> str:
    def train_epoch() -> dict[str, float]:
        metric_logger = Logger()
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            metric_logger.update(loss=loss.item())
            job.guard.step_end()
        return {name: meter.average for name, meter in metric_logger.meters.items()}

    for _ in job.guard.epochs(3):
        train_stats = train_epoch()
        plateau.step(train_stats["loss"])
    return "metric_logger"


TOLD = [
    a_logger_of_meters,
    a_window_that_decides_about_steps,
    a_list_whose_mean_a_scheduler_gets,
    a_dict_that_decides_when_to_stop,
    a_meter_of_a_function,
    a_meter_of_a_function_by_a_variable,
]


def told_by(
    program: Callable[[Job, Any], Any], folder: Path, log: pytest.LogCaptureFixture, stateful: dict[str, Any]
) -> tuple[list[str], Any]:
    job = Job(folder)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer)
    job.guard = Guard(
        model=job.network,
        optimizer=job.optimizer,
        lr_scheduler=plateau,
        loader=job.loader,
        directory=folder,
        stateful=stateful,
    )
    with job.guard:
        given = program(job, plateau)
    return [r.getMessage() for r in log.records if "is filled by the steps of an epoch" in r.getMessage()], given


@pytest.mark.parametrize("program", TOLD)
def test_told(program: Callable[[Job, Any], str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (told,), name = told_by(program, tmp_path, caplog, {})
    assert told.startswith(f"{name} (") and f'Guard(stateful={{"{name}": {name}}}, ...)' in told


def test_a_value_in_a_dict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"lr": 0.1, "steps": 0}

    def program(job: Job, plateau: Any) -> None:
        for _ in job.guard.epochs(3):
            for group in job.optimizer.param_groups:
                group["lr"] = settings["lr"]
            for x, _ in job.loader:
                update(job, job.network(x).square().mean())
                settings["steps"] += 1
                print(settings["steps"])
                job.guard.step_end()
            settings["lr"] *= 0.5

    told_by(program, tmp_path, caplog, {})
    (told,) = [r.getMessage() for r in caplog.records if "is not kept" in r.getMessage()]
    assert told.startswith("settings['lr'] (") and 'Guard(stateful={"settings": settings}, ...)' in told


def test_a_value_in_a_dict_that_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"lr": 0.1}

    def program(job: Job, plateau: Any) -> None:
        for _ in job.guard.epochs(3):
            for group in job.optimizer.param_groups:
                group["lr"] = settings["lr"]
            for x, _ in job.loader:
                update(job, job.network(x).square().mean())
                job.guard.step_end()
            settings["lr"] *= 0.5

    told_by(program, tmp_path, caplog, {"settings": settings})
    assert "is not kept" not in caplog.text


def shows_a_mean(job: Job, plateau: Any) -> None:
    history: dict[str, list[float]] = {"loss": []}
    for epoch in job.guard.epochs(3):
        losses, meter = [], Meter()
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            losses.append(loss.item())
            meter.update(loss.item())
            history["loss"].append(loss.item())
            job.guard.step_end()
        print(epoch, sum(losses) / len(losses), meter.average)
        if epoch % 2 == 0 and len(losses) > 3:
            print(history)
        plateau.step(job.network(x).mean().item())


def fills_and_empties_in_a_step(job: Job, plateau: Any) -> None:
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            parts = []
            for part in x.chunk(2):
                parts.append(job.network(part).square().mean())
            loss = sum(parts)
            assert isinstance(loss, torch.Tensor)
            update(job, loss)
            job.guard.step_end()
        plateau.step(sum(parts).item())


def evaluates(job: Job, plateau: Any) -> None:
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean())
            job.guard.step_end()
        scores = []
        with torch.no_grad():
            for part in x.chunk(2):
                scores.append(job.network(part).mean().item())
        plateau.step(sum(scores))


def scales_the_rate_of_a_step(job: Job, plateau: Any) -> None:
    """For sequences of several lengths, and puts it back (AWD-LSTM)."""
    optimizer = job.optimizer
    for epoch in job.guard.epochs(3):
        for x, _ in job.loader:
            rate = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = rate * 2
            update(job, job.network(x).square().mean())
            optimizer.param_groups[0]["lr"] = rate
            job.guard.step_end()
        if epoch == 2:
            optimizer.param_groups[0]["lr"] /= 10.0


def warms_up_in_the_groups(job: Job, plateau: Any) -> None:
    """From the number of the step and the rate that each group has begun with (YOLO)."""
    for group in job.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    for epoch in job.guard.epochs(3, start=0):
        for i, (x, _) in job.guard.enumerate(job.loader):
            if i + epoch * 3 <= 4:
                for j, each in enumerate(job.optimizer.param_groups):
                    each["lr"] = each["initial_lr"] * (0.1 if j == 0 else i / 4)
                    each["momentum"] = 0.8 + i / 40
            update(job, job.network(x).square().mean())
            job.guard.step_end()


@pytest.mark.parametrize(
    "program", [warms_up_in_the_groups, scales_the_rate_of_a_step, shows_a_mean, fills_and_empties_in_a_step, evaluates]
)
def test_left_alone(program: Callable[[Job, Any], None], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told, _ = told_by(program, tmp_path, caplog, {})
    assert not told


def test_what_is_kept_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses: list[float] = []

    def program(job: Job, plateau: Any) -> None:
        for _ in job.guard.epochs(3):
            losses.clear()
            for x, _ in job.loader:
                loss = job.network(x).square().mean()
                update(job, loss)
                losses.append(loss.item())
                job.guard.step_end()
            plateau.step(sum(losses))

    told, _ = told_by(program, tmp_path, caplog, {"losses": losses})
    assert not told


def sum_of_a_function(job: Job, plateau: Any) -> list[str]:
    def train_epoch() -> tuple[float, float]:
        total, count, correct = 0.0, 0, 0.0
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            total += loss.item() * len(x)
            count += len(x)
            correct += loss.item()
            job.guard.step_end()
        print(correct / len(job.loader))
        mean = total / count
        return mean, 0.0

    for _ in job.guard.epochs(3):
        train_loss, _ = train_epoch()
        plateau.step(train_loss)
    return ["total", "count"]


def sum_of_a_function_for_the_log(job: Job, plateau: Any) -> list[str]:
    def train_epoch() -> float:
        total = 0.0
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            total += loss.item()
            job.guard.step_end()
        return total / len(job.loader)

    def evaluate() -> float:
        total = 0.0
        for _ in range(3):
            total += 0.5
        return total

    for _ in job.guard.epochs(3):
        train_loss = train_epoch()
        print("train", train_loss)
        plateau.step(evaluate())
    return []


@pytest.mark.parametrize("program", [sum_of_a_function, sum_of_a_function_for_the_log])
def test_a_sum_in_a_plain_number_of_a_function(
    program: Callable[[Job, Any], list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, names = told_by(program, tmp_path, caplog, {})
    told = [r.getMessage() for r in caplog.records if "adds up over the steps of an epoch" in r.getMessage()]
    assert [text.split()[2] for text in told] == names
    assert all("test_epoch_sums.py, and is not kept" in text and 'state["' in text for text in told)
