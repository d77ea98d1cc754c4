"""What optimizers of libraries keep outside of their state_dict goes on in a resumed run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.core.position import Position
from tests.capture.round_trip import through_format


class Wealth(torch.optim.Optimizer):
    """As parameterfree's KT, timm's Adahessian and pytorch_optimizer's Ranger21: counts, sums, a generator, attributes
    of the parameters, a setting, and a dict by parameter."""

    def __init__(self, parameters: Any, every: int = 3) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.every, self._first, self._count, self._wealth = every, True, 0, 1.0
        self.total, self.momenta = torch.zeros(1), {}  # type: tuple[torch.Tensor, dict[Any, Any]]
        self.generator = torch.Generator().manual_seed(7)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.hess = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if self._count % self.every == 0:
                    p.hess = torch.randn(p.shape, generator=self.generator)
                momentum = self.momenta.setdefault(p, {"value": torch.zeros_like(p)})["value"]
                p.add_(momentum.add_(p, alpha=0.1))
                p.add_(p.hess * self._wealth * (0.5 if self._first else 0.1) + self.total)
        self._first, self._count = False, self._count + 1
        self._wealth *= 1.1
        self.total += 0.01


def trained(steps: int, every: int = 3) -> tuple[nn.Linear, Wealth, Collector]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Wealth(model.parameters(), every)
    collector = Collector({"model": model, "optimizer": optimizer})
    for step in range(1, steps + 1):
        optimizer.step()
        collector.copy(Position(step=step, epoch=1, step_in_epoch=step))
    return model, optimizer, collector


def test_attributes_that_change_go_on_in_a_resumed_run() -> None:
    straight, *_ = trained(5)
    for stop in (1, 2, 4):
        saved = through_format(trained(stop)[2].state())
        model, optimizer, collector = trained(0)
        collector.load(saved)
        for _ in range(stop, 5):
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), straight.parameters())), stop


def test_a_setting_is_the_programs_own_and_a_stock_optimizer_has_no_attributes() -> None:
    saved = through_format(trained(2)[2].state())
    _, optimizer, collector = trained(0, every=2)
    collector.load(saved)
    assert optimizer.every == 2
    model = nn.Linear(2, 2)
    stock = torch.optim.AdamW(model.parameters())
    collector = Collector({"model": model, "optimizer": stock})
    model(torch.ones(2)).sum().backward()
    stock.step()
    collector.copy(Position(step=1, epoch=1, step_in_epoch=1))
    assert "own" not in collector.state()["optimizer"]


class Bank(nn.Module):
    """As CrossBatchMemory, and as torchmetrics' metrics: a place, a flag, sums, in no state_dict."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 2))
        self.size, self.place, self.is_full, self.losses = size, 0, False, [torch.zeros(1)]
        self.total, self.last, self.memories = torch.zeros(2), None, {"v": 0.0}

    def add(self, row: torch.Tensor) -> None:
        self.get_buffer("rows")[self.place] = row
        self.place = (self.place + 1) % self.size
        self.is_full = self.is_full or self.place == 0
        self.total += row
        self.memories["v"] += float(row[0])
        self.last = row.clone()  # type: ignore[assignment]
        self.losses.append(row.sum().reshape(1))


def test_a_module_that_is_named_by_itself_comes_back_whole() -> None:
    bank, fresh = Bank(), Bank()
    collector = Collector({"bank": bank})
    for step in range(1, 5):
        bank.add(torch.full((2,), float(step)))
        collector.copy(Position(step=step, epoch=1, step_in_epoch=step))
    saved = through_format(collector.state())
    bank.add(torch.ones(2))  # after the boundary
    total = fresh.total
    Collector({"bank": fresh}).load(saved)
    assert (fresh.place, fresh.is_full, fresh.size) == (1, True, 3)
    assert fresh.memories == {"v": 10.0}
    assert fresh.total is total and total.tolist() == [10.0, 10.0]
    assert fresh.last is not None and fresh.last.tolist() == [4.0, 4.0]
    assert [float(loss) for loss in fresh.losses] == [0.0, 2.0, 4.0, 6.0, 8.0]
