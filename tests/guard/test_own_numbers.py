"""A number of an object that goes on from step to step is told where it steers the training, and only there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from mindx_elastic.data import ResumableLoader
from tests.guarded import Job, no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


def update(job: Job, loss: torch.Tensor) -> None:
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


class Agent:
    def __init__(self) -> None:
        self.epsilon = 1.0

    def act(self) -> int:
        if random.random() < self.epsilon:
            return random.randrange(2)
        return 0


class Annealed:
    def __init__(self) -> None:
        self.beta = 0.0

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        loss = out.square().mean()
        loss = loss + self.beta * out.abs().mean()
        self.beta = min(1.0, self.beta + 0.01)
        return loss


class ByALocal:
    """The agent of many tutorials: epsilon is worked out from a count of steps."""

    def __init__(self) -> None:
        self.steps_done = 0

    def act(self) -> int:
        threshold = 0.05 + 0.85 * 0.9**self.steps_done
        self.steps_done += 1
        if random.random() > threshold:
            return 0
        return random.randrange(2)


class Warmup:
    """A schedule of the program's own, which keeps its optimizer under another name than torch's do."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt, self.t = opt, 0

    def step(self) -> None:
        self.t += 1
        rate = 0.01 * min(1.0, self.t / 10)
        for group in self.opt.param_groups:
            group["lr"] = rate


class Clip:
    """The first value is none."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def __call__(self, parameters: Any) -> None:
        norm = sum(p.grad.square().sum().item() for p in parameters) ** 0.5
        limit = norm if self.mean is None else 1.1 * self.mean
        self.mean = norm if self.mean is None else 0.9 * self.mean + 0.1 * norm
        if norm > limit:
            for p in parameters:
                p.grad.mul_(limit / norm)


class ByATest:
    """A count that decides when another number changes."""

    def __init__(self) -> None:
        self.tokens, self.scale = 0, 1.0

    def rate(self, group: dict[str, Any]) -> None:
        group["lr"] = 0.01 * self.scale
        self.tokens += 8
        if self.tokens % 800 == 0:
            self.scale *= 0.9


class ByAnAttribute:
    def __init__(self) -> None:
        self.seen, self.weight = 0, 0.0

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        self.seen += len(out)
        self.weight = min(1.0, self.seen / 1000)
        loss = out.square().mean() + self.weight * out.abs().mean()
        return loss


class Patience:
    def __init__(self) -> None:
        self.bad = 0

    def is_over(self) -> bool:
        self.bad += 1
        return self.bad >= 1000


class Meter:
    """Statistics."""

    def __init__(self) -> None:
        self.sum, self.count, self.average = 0.0, 0, 0.0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.average = self.sum / self.count

    def mean(self) -> float:
        if self.count == 0:
            return 0.0
        return self.sum / self.count


class Clock:
    """Tells how far it is, now and then."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks % 2 == 0:
            print(self.ticks)


class NowAndThen:
    def __init__(self) -> None:
        self.calls = 0

    def tell(self, loss: float) -> None:
        self.calls += 1
        if self.calls % 4:
            return
        rate = self.calls / 100
        print(f"{self.calls}: {loss:.3f} {rate}")


class Part:
    def __init__(self) -> None:
        self.strength = 1.0


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        self.noise, self.calls = 0.5, 0
        self.parts = [Part() for _ in range(100)]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.calls += 1
        return torch.full((4,), float(index)) * self.noise, index


def an_agent(job: Job) -> str:
    agent = Agent()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x + agent.act()).square().mean())
            agent.epsilon *= 0.9
            job.guard.step_end()
    return "agent.epsilon"


def a_factor_of_the_loss(job: Job) -> str:
    annealed = Annealed()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, annealed.loss(job.network(x)))
            job.guard.step_end()
    return "annealed.beta"


def a_count_by_a_local(job: Job) -> str:
    agent = ByALocal()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, (job.network(x) * agent.act()).square().mean())
            job.guard.step_end()
    return "agent.steps_done"


def a_schedule(job: Job) -> str:
    warmup = Warmup(job.optimizer)
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            warmup.step()
            update(job, job.network(x).square().mean())
            job.guard.step_end()
    return "warmup.t"


def a_clip(job: Job) -> str:
    clip = Clip()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            job.network(x).square().mean().backward()
            clip(list(job.network.parameters()))
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.guard.step_end()
    return "clip.mean"


def a_count_by_a_test(job: Job) -> str:
    rates = ByATest()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            rates.rate(job.optimizer.param_groups[0])
            update(job, job.network(x).square().mean())
            job.guard.step_end()
    return "rates.tokens"


def a_count_by_an_attribute(job: Job) -> str:
    task = ByAnAttribute()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, task.loss(job.network(x)))
            job.guard.step_end()
    return "task.seen"


class Stopper:
    """YOLO's: the best value decides which epoch was the best one, and that when to stop."""

    def __init__(self) -> None:
        self.best_fitness, self.best_epoch = 0.0, 0

    def __call__(self, epoch: int, fitness: float) -> bool:
        if fitness >= self.best_fitness:
            self.best_epoch = epoch
            self.best_fitness = fitness
        delta = epoch - self.best_epoch
        return delta >= 30


class Saver:
    """Steers nothing."""

    def __init__(self) -> None:
        self.best, self.best_epoch, self.path = 0.0, 0, ""

    def __call__(self, epoch: int, fitness: float) -> str:
        if fitness >= self.best:
            self.best = fitness
            self.best_epoch = epoch
            self.path = f"best_{self.best:.3f}_of_{self.best_epoch}.pt"
        return self.path


def a_best_epoch(job: Job) -> str:
    stopper = Stopper()
    for epoch in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean())
            job.guard.step_end()
        if stopper(epoch, 1.0 * epoch):
            break
    return "stopper.best_fitness"


def a_patience(job: Job) -> str:
    patience = Patience()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean())
            job.guard.step_end()
        if patience.is_over():
            break
    return "patience.bad"


@pytest.mark.parametrize(
    "program",
    [
        an_agent,
        a_factor_of_the_loss,
        a_patience,
        a_best_epoch,
        a_count_by_a_local,
        a_schedule,
        a_clip,
        a_count_by_a_test,
        a_count_by_an_attribute,
    ],
)
def test_told(program: Callable[[Job], str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    with job.guard:
        name = program(job)
    (told,) = [r.getMessage() for r in caplog.records if "is carried from one step into another" in r.getMessage()]
    assert told.startswith(f'"{name}" (') and "stateful={" in told


def test_a_change_in_the_first_step_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stop there would leave it out of the file."""
    agent, job = Agent(), Job(tmp_path)
    with job.guard:
        for _ in job.guard.steps(1):
            agent.epsilon *= 0.5
            x, _ = next(iter(job.loader))
            update(job, (job.network(x) * agent.act()).square().mean())
            job.guard.step_end()
    assert '"agent.epsilon" (Agent, ' in caplog.text and "is carried from one step into another" in caplog.text


def test_a_number_of_the_data_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is set where samples are made is left to `prove`; what the program sets is kept, but deep inside of much."""
    data = Noisy()
    deep = data.parts[0]
    job = Job(tmp_path, loader=ResumableLoader(data, batch_size=4, shuffle=True))
    with job.guard:
        for _ in job.guard.epochs(3):
            for x, _ in job.guard.loader:
                update(job, job.network(x).square().mean())
                job.guard.step_end()
            data.noise *= 0.7
            deep.strength *= 0.7
    (told,) = [r.getMessage() for r in caplog.records if "is carried from one step into another" in r.getMessage()]
    assert told.startswith('"deep.strength" (Part') and "from the epoch" in told


def test_statistics_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, meter, clock, teller, saver = Job(tmp_path), Meter(), Clock(), NowAndThen(), Saver()
    with job.guard:
        for epoch in job.guard.epochs(3):
            for x, _ in job.loader:
                loss = job.network(x).square().mean()
                update(job, loss)
                meter.update(loss.item())
                clock.tick()
                teller.tell(loss.item())
                job.guard.step_end()
            print(meter.mean(), meter.average, saver(epoch, 1.0 * epoch))
    assert "is not kept" not in caplog.text


def test_what_is_named_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    patience = Patience()
    job = Job(tmp_path, stateful={"patience": patience})
    with job.guard:
        for _ in job.guard.epochs(3):
            for x, _ in job.loader:
                update(job, job.network(x).square().mean())
                job.guard.step_end()
            if patience.is_over():
                break
    assert "is not kept" not in caplog.text


agent_of_all = Agent()


class KeepsIt:
    """As an adapter for grain's iterator does: ``return batches.get_state()``."""

    def state_dict(self) -> Any:
        return {"epsilon": agent_of_all.epsilon}

    def load_state_dict(self, state: Any) -> None:
        agent_of_all.epsilon = state["epsilon"]


@pytest.mark.parametrize("is_library", [True, False])
def test_a_librarys_object_that_a_named_one_keeps(
    is_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(KeepsIt.state_dict, "__module__", "train")
    monkeypatch.setattr("mindx_elastic.guard.checks.kept.is_library", lambda module: is_library and module == __name__)
    job = Job(tmp_path, stateful={"kept": KeepsIt()})
    with job.guard:
        for _ in job.guard.epochs(1):
            for x, _ in job.loader:
                update(job, job.network(x + agent_of_all.act()).square().mean())
                agent_of_all.epsilon *= 0.9
                job.guard.step_end()
    assert ("agent_of_all.epsilon" in caplog.text) is not is_library
