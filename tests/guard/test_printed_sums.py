"""A run that is resumed in the middle of an epoch says which sums of it begin anew. They are exact all the same."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from mindx_elastic import Guard
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    plain_environment(monkeypatch)
    caplog.set_level(logging.INFO)
    with no_traces():
        yield


class StoppedError(Exception):
    pass


def stop_at(step: int | None, guard: Guard) -> None:
    if guard.step == step:
        raise StoppedError


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def update(self, value: float) -> None:
        self.total += value


def job(directory: Path, sums: dict[str, float]) -> tuple[Guard, torch.nn.Module, torch.optim.Optimizer, DataLoader]:  # type: ignore[type-arg]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.rand(24, 4)), batch_size=4)
    guard = Guard(model=model, optimizer=optimizer, loader=loader, stateful={"sums": sums}, directory=directory)
    return guard, model, optimizer, loader


class Trainer:
    """A loop in a method, with a sum in an attribute."""

    def __init__(self, directory: Path) -> None:
        self.guard, self.model, self.optimizer, self.loader = job(directory, {})
        self.total = 0.0
        self.history: list[float] = []

    def train(self, stop: int | None = None) -> None:
        with self.guard:
            for _ in self.guard.epochs(1):
                self.train_epoch(stop)
                print(self.total)

    def train_epoch(self, stop: int | None) -> None:
        for (x,) in self.loader:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.total += loss.item()
            self.history.append(loss.item())
            self.guard.step_end()
            stop_at(stop, self.guard)


def train(directory: Path, stop: int | None = None) -> None:
    sums = {"kept": 0.0}
    guard, model, optimizer, loader = job(directory, sums)
    num_steps = 0
    with guard:
        for _ in guard.epochs(2):
            running, right, losses, meter = 0.0, torch.zeros(()), [], Meter()
            sums["kept"] = 0.0
            for i, (x,) in enumerate(loader):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                running += loss.item()
                right += (loss < 1).sum()
                losses.append(loss.item())
                meter.update(loss.item())
                sums["kept"] += loss.item()
                num_steps += 1
                if i % 2:
                    print(running / 2, num_steps)
                    running = 0.0
                guard.step_end()
                stop_at(stop, guard)
            print(right, sum(losses), meter.total, sums)


def test_resumed_in_mid_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoppedError):
        train(tmp_path, stop=2)
    assert "what is printed" not in caplog.text
    train(tmp_path)
    (said,) = (line for line in caplog.messages if "what is printed" in line)
    assert said.startswith(
        "what is printed of running, right, num_steps, losses, meter (train() in test_printed_sums.py) "
        "lacks the steps in front, 2 of this epoch"
    )
    (said,) = (line for line in caplog.messages if "enumerate" in line)
    assert said.startswith("enumerate(loader) counts from its start again; guard.enumerate() of the named loader")


def test_resumed_between_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoppedError):
        train(tmp_path, stop=6)
    train(tmp_path)
    assert "what is printed" not in caplog.text and "guard.enumerate" not in caplog.text


def test_what_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for stop in (2, None):
        sums = {"loss": 0.0}
        guard, model, optimizer, loader = job(tmp_path, sums)
        try:
            with guard:
                for _ in guard.epochs(2):
                    for i, (x,) in guard.enumerate(loader):
                        print(i, end="\r")
                        optimizer.zero_grad()
                        loss = model(x).square().mean()
                        loss.backward()
                        optimizer.step()
                        sums["loss"] += loss.item()
                        num_seen = guard.step
                        num_seen += 1
                        guard.step_end()
                        stop_at(stop, guard)
                    print(i, sums)
        except StoppedError:
            assert stop
    assert "what is printed" not in caplog.text and "counts from" not in caplog.text


def test_attributes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoppedError):
        Trainer(tmp_path).train(stop=2)
    Trainer(tmp_path).train()
    (said,) = (line for line in caplog.messages if "what is printed" in line)
    assert said.startswith("what is printed of self.total, self.history (train_epoch() in test_printed_sums.py) lacks")


class Logger:
    """Has its meters by name, as those that many projects copy from one another."""

    def __init__(self) -> None:
        self.meters: dict[str, Meter] = {}

    def update(self, **values: float) -> None:
        for name, value in values.items():
            self.meters.setdefault(name, Meter()).update(value)

    def flush(self) -> None:
        pass


class Average:
    """Of the weights. It sums nothing up for a print."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        for mine, new in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(new, 0.1)


def test_a_logger_of_meters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is only written to is a log, and what has weights is looked at elsewhere."""

    def train(stop: int | None = None) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(torch.rand(24, 4)), batch_size=4)
        model_ema, log_writer = Average(model), Logger()
        stateful = {"ema": model_ema.module}
        guard = Guard(model=model, optimizer=optimizer, loader=loader, stateful=stateful, directory=tmp_path)
        with guard:
            for _ in guard.epochs(2):
                metric_logger = Logger()
                for (x,) in loader:
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    model_ema.update(model)
                    metric_logger.update(loss=loss.item())
                    log_writer.update(loss=loss.item(), head=0)
                    guard.step_end()
                    stop_at(stop, guard)
                log_writer.flush()
                print({name: meter.total for name, meter in metric_logger.meters.items()})

    with pytest.raises(StoppedError):
        train(stop=2)
    train()
    (said,) = (line for line in caplog.messages if "what is printed" in line)
    assert said.startswith(
        "what is printed of metric_logger (train() in test_printed_sums.py) lacks the steps in front"
    )
