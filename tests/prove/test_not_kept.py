"""What goes on from step to step and is not kept: one line of facts in a first run, and a field of its files."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import mindx_elastic as mx
from mindx_elastic.errors import GracefulExit
from mindx_elastic.persist.format import read_header
from tests.guarded import stop_and_wait

calls = 0


def fetch() -> tuple[torch.Tensor, torch.Tensor]:
    global calls
    calls += 1
    return torch.randn(2, 4), torch.randn(2, 2)


class Meter:
    def __init__(self) -> None:
        self.val = self.sum = self.count = self.avg = 0.0

    def update(self, value: float) -> None:
        self.val, self.sum, self.count = value, self.sum + value, self.count + 1
        self.avg = self.sum / self.count


class Counter:
    """Its `state_dict` has one of its two counts, under another name."""

    def __init__(self) -> None:
        self.seen, self._skipped = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["number"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        output: torch.Tensor = self.layer(x)
        self.last_output = output
        return output


def train(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    guard.step_end(loss=loss)
    return loss


def facts(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if "go on from step to step" in record.getMessage()]
    caplog.clear()
    return [line.partition("kept: ")[2].partition(". The next")[0] for line in lines]


Loop = Callable[[mx.Guard, nn.Module, torch.optim.Optimizer, Any], None]


def run(folder: Path, loop: Loop, num_samples: int = 0, model: nn.Module | None = None, **stateful: Any) -> None:
    torch.manual_seed(0)
    model = model or Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(num_samples, 4), torch.randn(num_samples, 2))
    loader = DataLoader(data, batch_size=2, shuffle=True) if num_samples else None
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, stateful=stateful, directory=folder)
    with guard:
        loop(guard, model, optimizer, guard.loader)


def everything(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, counter: Counter) -> None:
    best, number, meter, rows, average = 1e9, 0, Meter(), [1.0], torch.zeros(2)
    inputs, labels = fetch()
    began = time.perf_counter()
    for step in guard.steps(7):
        counter.seen += 1
        counter._skipped += 2
        loss = train(guard, model, optimizer, (inputs, labels)).item()
        inputs, labels = fetch()
        print(time.perf_counter() - began)
        began = time.perf_counter()
        if loss < best:
            best = loss
        if number % 2 == 0:
            meter.update(loss)
        number += step % 2 + 1
        rows.append(loss)
        average.mul_(0.9)


def test_one_line_names_what_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mindx_elastic")
    counter = Counter()
    run(tmp_path, lambda guard, model, optimizer, _: everything(guard, model, optimizer, counter), counter=counter)
    (line,) = facts(caplog)
    names = "inputs, labels, best, number, calls, rows, average, meter (4 attributes), model.forwards"
    assert set(line.split(", ")) == set(names.split(", "))
    (path,) = tmp_path.glob("*_final.safetensors")
    assert read_header(path).info.not_kept == line


def supervised(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for epoch in guard.epochs(2):
        for i, batch in guard.enumerate(loader):
            loss = train(guard, model, optimizer, batch)
            print(i)
        print(epoch, loss.item())


def repeated(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, _: Any) -> None:
    for _step in guard.steps(7):
        train(guard, model, optimizer, (torch.ones(2, 4), torch.ones(2, 2)))


def generated(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    def batches() -> Any:
        number = 0
        for epoch in itertools.count():
            if loader is not None:
                for x, y in loader:
                    yield x * epoch, y
            number = number + 1
            yield torch.full((2, 4), float(number)), torch.ones(2, 2)

    source = batches()
    for _ in guard.steps(7):
        train(guard, model, optimizer, next(source))


def cycled(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    batches = itertools.cycle(loader)
    for _ in guard.steps(7):
        train(guard, model, optimizer, next(batches))


def another_optimizer(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, _: Any) -> None:
    decayed, centers = [*model.parameters()], nn.Parameter(torch.zeros(2))
    own = torch.optim.SGD([centers], lr=0.1)  # without a state, so it is not refused
    for _step in guard.steps(6):
        inputs, labels = fetch()
        train(guard, model, optimizer, (inputs, labels + centers))
        own.step()
    assert decayed


def metered(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, _: Any) -> None:
    meters = [Meter()]
    for _step in guard.steps(6):
        loss = train(guard, model, optimizer, fetch()).item()
        for meter in meters:
            meter.update(loss)


class Queue(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        queue = self.get_buffer("queue").add_(output.detach().mean(0))
        return output + queue.clone()


@pytest.mark.parametrize(
    ("loop", "num_samples", "names"),
    [
        (supervised, 20, "model.forwards"),
        (generated, 30, "number of batches(), epoch of batches(), model.forwards"),
        (cycled, 30, "batches, model.forwards"),
        (another_optimizer, 0, "centers, calls, model.forwards"),
        (metered, 0, "calls, meters, model.forwards"),
    ],
)
def test_what_a_loop_leaves_for_its_next_step_is_named_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loop: Loop, num_samples: int, names: str
) -> None:
    caplog.set_level(logging.INFO, "mindx_elastic")
    run(tmp_path, loop, num_samples)
    assert facts(caplog) == [names]


def test_what_the_guard_keeps_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A buffer of the module inside of a wrapper; an attribute of the model that is named."""
    caplog.set_level(logging.INFO, "mindx_elastic")
    network, model = Queue(), Model()
    run(tmp_path / "wrapped", repeated, model=nn.Sequential(network))
    assert network.get_buffer("queue").any() and facts(caplog) == []
    run(tmp_path / "named", supervised, 20, model=model, counts=mx.attributes(model, "forwards"))
    assert facts(caplog) == []


class Levelled(TensorDataset):
    level = 1


def test_what_a_loader_keeps_of_its_data_and_samplers_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mindx_elastic")
    model, weights = Model(), torch.ones(20, dtype=torch.double)
    data = Levelled(torch.randn(20, 4), torch.randn(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=2, sampler=WeightedRandomSampler(weights, 20))  # type: ignore[arg-type]
    with mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=tmp_path) as guard:
        for epoch in guard.epochs(3):
            data.level = epoch
            for batch in loader:
                weights[0] += 1
                train(guard, model, optimizer, batch)
    assert "weights" not in caplog.text and "level" not in caplog.text


@pytest.mark.parametrize("clears_all", [False, True])
def test_gradients_that_no_optimizer_clears_go_on(
    clears_all: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mindx_elastic")
    model = Model()
    optimizer = torch.optim.SGD([model.layer.bias], lr=0.1)
    with mx.Guard(model=model, optimizer=optimizer, directory=tmp_path) as guard:
        for _step in guard.steps(6):
            if clears_all:
                before = None if model.layer.weight.grad is None else weakref.ref(model.layer.weight.grad)
                model.zero_grad()
                assert before is None or before() is None, "its memory is free"
            train(guard, model, optimizer, fetch())
    (line,) = facts(caplog)
    assert ("gradients of model.layer.weight (the next step adds to them: " in line) is not clears_all


@pytest.mark.parametrize("clears_first", [False, True])
def test_gradients_of_a_backward_after_their_update_go_on(
    clears_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a discriminator, which the generator's backward goes through."""
    caplog.set_level(logging.INFO, "mindx_elastic")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mx.Guard(model=model, optimizer=optimizer, directory=tmp_path) as guard:
        for _step in guard.steps(6):
            if clears_first:
                optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=clears_first)
            model(torch.ones(1, 2)).sum().backward()
            guard.step_end()
    assert ("gradients of model.bias and 1 more" in caplog.text) is not clears_first


def test_a_resumed_run_says_it_in_its_files_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mindx_elastic")

    def loop(steps: int) -> Loop:
        def counted(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, _: Any) -> None:
            number = 0
            for _step in guard.steps(steps):
                train(guard, model, optimizer, fetch())
                number = number + 1

        return counted

    run(tmp_path, loop(6))
    assert "number" in facts(caplog)[0]
    run(tmp_path, loop(12))
    assert facts(caplog) == []
    newest = max(tmp_path.glob("*_final.safetensors"), key=lambda path: read_header(path).info.step)
    assert read_header(newest).info.step == 12 and "number" in read_header(newest).info.not_kept
    run(tmp_path, loop(14))  # this process is too short to know it; what it resumed from does
    newest = max(tmp_path.glob("*_final.safetensors"), key=lambda path: read_header(path).info.step)
    assert read_header(newest).info.step == 14 and "number" in read_header(newest).info.not_kept
    run(tmp_path / "short", loop(2))  # too short to know it
    run(tmp_path / "short", loop(8))
    assert "number, calls, model.forwards. This run was resumed without them and may differ" in caplog.text


class Stopper:
    def __init__(self) -> None:
        self.best, self.rates = 1e9, 0.0


def test_what_changes_between_epochs_is_told_before_the_next_one_and_at_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An early stop's best loss; and what each epoch makes again is no loss."""
    caplog.set_level(logging.INFO, "mindx_elastic")

    def stopped_before(stop: int) -> Loop:
        stopper = Stopper()

        def stopping(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
            for epoch in guard.epochs(4):
                stopper.rates = float(model.layer.weight.detach().sum())  # type: ignore[union-attr, operator]
                for batch in loader:
                    if guard.step + 1 == stop:
                        stop_and_wait(SimpleNamespace(guard=guard))  # type: ignore[arg-type]
                    loss = train(guard, model, optimizer, batch)
                stopper.best = min(stopper.best, loss.item() + epoch)

        return stopping

    with pytest.raises(GracefulExit):
        run(tmp_path, stopped_before(14), num_samples=20)
    lines = [record.getMessage() for record in caplog.records]
    told = "have changed and are not kept: stopper.best, stopper.rates. The next resume shows whether they matter"
    assert told in lines
    caplog.clear()
    run(tmp_path, stopped_before(0), num_samples=20)
    (line,) = [record for record in caplog.records if "not got back" in record.getMessage()]
    lost, _, others = line.getMessage().partition("; not as they were either: ")
    assert line.levelno == logging.WARNING and "stopper.best" in lost and "stopper.rates" not in lost, line
    assert "stopper.rates" in others


def test_an_average_of_every_second_step_that_has_begun_anew_is_told_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step that is compared does not change it, and the process was stopped before it had looked for such."""
    caplog.set_level(logging.INFO, "mindx_elastic")

    def stopped_in(stop: int) -> Loop:
        average = SimpleNamespace(updates=0)

        def averaging(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
            for _ in guard.epochs(1):
                for batch in loader:
                    if guard.step + 1 == stop:
                        stop_and_wait(SimpleNamespace(guard=guard))  # type: ignore[arg-type]
                    average.updates += guard.step % 2
                    model.forwards = 0  # type: ignore[assignment]  # or it would be told as well
                    train(guard, model, optimizer, batch)

        return averaging

    with pytest.raises(GracefulExit):
        run(tmp_path, stopped_in(4), num_samples=40)
    run(tmp_path, stopped_in(0), num_samples=40)
    (line,) = [record.getMessage() for record in caplog.records if "verified: step 5" in record.getMessage()]
    assert "average.updates (2, now 0); if what comes later reads them, keep them" in line


def test_what_only_the_first_step_sets_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a scale that is taken from the first batch: no later boundary shows it."""
    caplog.set_level(logging.INFO, "mindx_elastic")
    model = Model()

    def train_with(settings: dict[str, Any]) -> None:
        optimizer, meter = torch.optim.SGD(model.parameters(), lr=0.1), Meter()
        with mx.Guard(model=model, optimizer=optimizer, directory=tmp_path) as guard:
            limit, meter.avg = 6, 1.0  # in front of the loop
            for step in guard.steps(limit):
                batch = torch.ones(2, 4), torch.zeros(2, 2)
                if step == 1:
                    settings["scale"], meter.first_loss = 2.0, "large"  # type: ignore[attr-defined]
                train(guard, model, optimizer, batch)

    train_with({"lr": 0.1})
    assert changes(caplog) == [
        ("go on from step to step", "model.forwards"),
        ("were set in the first step", "settings, meter.avg, meter.first_loss"),
    ]


def changes(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    lines = [record.getMessage() for record in caplog.records if " not kept: " in record.getMessage()]
    parts = [line.partition(" and are not kept: ") for line in lines]
    return [(how, names.partition(". The next")[0]) for how, _, names in parts]


def test_attributes_that_change_one_after_the_other_are_told_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mindx_elastic")
    phases = SimpleNamespace(**dict.fromkeys("abcdef", 0))

    def loop(guard: mx.Guard, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for epoch in guard.epochs(5):
            for batch in loader:
                train(guard, model, optimizer, batch)
            vars(phases).update(dict.fromkeys("abcdef"[: epoch + 1], epoch))

    run(tmp_path, loop, num_samples=12)
    told = [name for how, names in changes(caplog) if how == "have changed" for name in names.split(", ")]
    assert len(told) == len(set(told)) >= 4 and set(told) <= {f"phases.{name}" for name in "abcdef"}, told


def test_a_named_object_whose_variable_the_loop_binds_again_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    centre, recent, seen = torch.zeros(2), list[float](), {"steps": 0}
    stateful = {"centre": centre, "recent": recent, "seen": seen}
    with mx.Guard(model=model, optimizer=optimizer, directory=tmp_path, stateful=stateful) as guard:
        for _ in guard.steps(6):
            out = model(fetch()[0])
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            centre = 0.9 * centre + out.detach().mean(0)
            recent[:] = [*recent, 1.0][-3:]
            seen["steps"] += 1
            guard.step_end()
    (warning,) = [r.getMessage() for r in caplog.records if "is another object by now" in r.getMessage()]
    assert warning.startswith('centre is another object by now than stateful["centre"]')
