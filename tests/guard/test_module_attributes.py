"""State in plain attributes of a named module is told, and nothing else of what changes there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.guarded import Job, no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Queue(Part):
    def __init__(self) -> None:
        super().__init__()
        self.queue, self.pointer = torch.zeros(4, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + self.queue.mean(0)
        self.queue[self.pointer] = x[0].detach()
        self.pointer = (self.pointer + 1) % 4
        return y


class Temperature(Part):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.95
        return super().forward(x) / self.temperature


class FirstBatch(Part):
    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.begin(x)
            self.ready = True
        return super().forward(x)

    def begin(self, x: torch.Tensor) -> None:
        self.weight.data.copy_(1 / (1 + x.detach().std(0)))


class Hidden(Part):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + self.hidden
        self.hidden = (0.5 * self.hidden + x.mean(0)).detach()
        return y


class Cell(Part):
    """A state of two tensors, which begins with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            self.state = torch.zeros(len(x), 8), torch.zeros(len(x), 8)
        h, c = self.cell(super().forward(x), self.state)
        self.state = h.detach(), c.detach()
        return torch.as_tensor(h)


class Undetached(Hidden):
    """It is detached when it is read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Part.forward(self, x) + self.hidden.detach()
        self.hidden = y.mean(0)
        return y


class Caches(Part):
    """What a forward leaves for others, a flag of a lazy table, a count for the log."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.ready, self.width = 0, False, 0
        self.attention = torch.zeros(1)
        self.epoch = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.attention = torch.softmax(x, 1).detach()
        self.both = x, self.attention
        self.output = x
        self.seen += len(x)
        self.width = x.shape[1]
        if not self.ready:
            self.table = torch.arange(8.0)
            self.ready = True
        return super().forward(x) + self.table * self.epoch

    def report(self) -> str:
        return f"{self.seen} samples, {self.attention.mean()}"


class Extra(Temperature):
    def get_extra_state(self) -> Any:
        return torch.tensor(self.temperature)

    def set_extra_state(self, state: Any) -> None:
        self.temperature = float(state)


def warnings_of(
    directory: Path,
    part: nn.Module,
    caplog: pytest.LogCaptureFixture,
    **hooks: Any,
) -> list[str]:
    network = nn.Sequential(nn.Linear(4, 8), part, nn.Dropout(0.1), nn.Linear(8, 3))
    job = Job(directory, seed=1)
    job.network = network
    job.optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    job.scheduler = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, 0.05, total_steps=100)
    rebuilt = Job(directory, seed=1, model=network, optimizer=job.optimizer, lr_scheduler=job.scheduler)
    rebuilt.network, rebuilt.optimizer, rebuilt.scheduler = network, job.optimizer, job.scheduler
    rebuilt.run(3, **hooks)
    return [r.getMessage() for r in caplog.records if "plain attribute" in r.getMessage()]


@pytest.mark.parametrize(
    ("part", "names", "line"),
    [
        (Queue, '"model.1.queue", "model.1.pointer" are', 'self.register_buffer("queue", ...)'),
        (Temperature, '"model.1.temperature" is', "get_extra_state()"),
        (FirstBatch, '"model.1.ready" is', "get_extra_state()"),
        (Hidden, '"model.1.hidden" is', 'self.register_buffer("hidden", ...)'),
        (Cell, '"model.1.state" is', 'self.register_buffer("state", ...)'),
        (Undetached, '"model.1.hidden" is', 'self.register_buffer("hidden", ...)'),
    ],
)
def test_what_is_carried_on_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: type[nn.Module], names: str, line: str
) -> None:
    (told,) = warnings_of(tmp_path, part(), caplog)
    assert told.startswith(names)
    assert line in told


def test_a_setting_of_a_module_of_torch_that_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def rate(job: Job, epoch: int) -> None:
        dropout: Any = job.network[2]
        dropout.p = min(0.5, dropout.p + 0.1)

    (told,) = warnings_of(tmp_path, Part(), caplog, between=rate)
    assert told.startswith('"model.2.p" is')
    assert "guard.epoch" in told


@pytest.mark.parametrize("part", [Caches, Extra, Part])
def test_what_is_not_carried_on_or_is_kept_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: type[nn.Module]
) -> None:
    def set_epoch(job: Job, epoch: int) -> None:
        part: Any = job.network[1]
        part.epoch = epoch

    assert not warnings_of(tmp_path, part(), caplog, between=set_epoch)
