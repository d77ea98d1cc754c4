"""Optimizers and what is built around them, over a stop: lists of parameters in another order than in the run that a
start goes on from, and states of other forms than torch's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mindx_elastic as mx
from mindx_elastic.errors import MismatchError

RATES = {"a": 0.1, "b": 0.01, "out": 0.03}
_x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(_x, _x.sum(1, keepdim=True))

Make = Callable[["Net"], torch.optim.Optimizer]


pytestmark = pytest.mark.usefixtures("clean")


class Net(nn.Module):
    """`a` and `b` are of one shape; `order` is that in which they are registered."""

    def __init__(self, order: Sequence[str] = "ab") -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(4, 4) for name in "ab"}
        for name in order:
            setattr(self, name, layers[name])
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.tanh(self.get_submodule("b")(torch.tanh(self.get_submodule("a")(x)))))
        return out


class Agent:
    """Has its network to itself."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def state_dict(self) -> dict[str, Any]:
        return {"net": self._net.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._net.load_state_dict(state["net"])


class Noam:
    """As in the annotated Transformer: its rate follows a count of its own, and no state of its own has that."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count, self.groups = inner, 0, inner.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.count += 1
        for group in self.groups:
            group["lr"] = 0.1 * min(self.count**-0.5, self.count / 8)
        self.inner.step()


class HandingOn(Noam):
    """What it lacks is asked of the optimizer inside, `state_dict` too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)


class StateOfInner(Noam):
    """Gives the state of the optimizer inside as its own."""

    __slots__ = ()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class CountingAdam(torch.optim.Adam):
    """Its steps are whole numbers, as geoopt's are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            assert type(state["step"]) is int
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / state["step"])


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """As GradualWarmupScheduler: the one behind it is an attribute, so its state_dict has the whole object, and a
    function."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, steps: int, then: torch.optim.lr_scheduler.LRScheduler
    ) -> None:
        self.steps, self.then, self.behind = steps, then, False
        self.ramp: Callable[[int], float] = lambda step: (step + 1) / (steps + 1)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch <= self.steps:
            return [rate * self.ramp(self.last_epoch) for rate in self.base_lrs]
        self.then.step()
        return self.then.get_last_lr()


def listed(*names: str) -> Make:
    """One list of the parameters of these parts."""
    return lambda net: torch.optim.AdamW([p for n in names for p in net.get_submodule(n).parameters()], lr=0.05)


def grouped(*names: str) -> Make:
    """A group with a rate of its own for each of these parts."""

    def make(net: Net) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [*net.get_submodule(n).parameters()], "lr": RATES[n]} for n in names])

    return make


def model(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": net, "optimizer": optimizer}


def counted(kind: type[Noam]) -> Callable[[Net, torch.optim.Optimizer], dict[str, Any]]:
    return lambda net, optimizer: {"model": net, "optimizer": kind(optimizer)}


def warmed_up(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    then = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return {"model": net, "optimizer": optimizer, "lr_scheduler": Warmup(optimizer, 4, then)}


def agent(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"optimizer": optimizer, "stateful": {"agent": Agent(net)}}


def train(
    directory: Path, make: Make, objects: Callable[..., dict[str, Any]] = model, *, order: str = "ab", stop: int = 0
) -> dict[str, torch.Tensor]:
    """The weights at the end, or at step `stop`."""
    net = Net(order)
    given = objects(net, make(net))
    optimizer = given["optimizer"]
    loader = DataLoader(DATA, batch_size=8)
    guard = mx.Guard(**given, loader=loader, directory=directory, prefix="a", unmanaged="warn")
    try:
        with guard:
            for _epoch in guard.epochs(2):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = (net(x) - y).square().mean()
                    loss.backward()
                    optimizer.step()
                    if "lr_scheduler" in given:
                        given["lr_scheduler"].step()
                    if guard.step + 1 == stop:
                        guard.request_stop("the test")
                    guard.step_end(loss=loss)
    except SystemExit:
        assert stop
    return {name: tensor.clone() for name, tensor in sorted(net.state_dict().items())}


@pytest.mark.parametrize(
    ("objects", "first", "second", "order"),
    [
        (model, listed("a", "b", "out"), listed("b", "a", "out"), "ba"),  # two equal layers, registered otherwise
        (agent, listed("a", "b", "out"), listed("out", "b", "a"), "ab"),
    ],
    ids=["layers", "an agent's network"],
)
def test_state_goes_back_by_name(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    objects: Callable[..., dict[str, Any]],
    first: Make,
    second: Make,
    order: str,
) -> None:
    whole = train(tmp_path / "whole", first, objects)
    stopped = train(tmp_path / "cut", first, objects, stop=5)
    assert not torch.equal(stopped["a.weight"], whole["a.weight"])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        resumed = train(tmp_path / "cut", second, objects, order=order)
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
    assert ("registered in another order" in caplog.text) is (order == "ba")
    assert "by their order" not in caplog.text


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (listed("a", "out"), listed("b", "out"), "there it updates model.a.weight, model.a.bias, here not; here it up"),
        (listed("a", "out"), listed("a", "b", "out"), "here it updates model.b.weight, model.b.bias, there not"),
        (
            grouped("a", "b"),
            listed("a", "b"),
            r"groups of \[2, 2\].* has \[4\].*group 0 has model.a.weight, model.a.bias there",
        ),
        (
            grouped("a", "b", "out"),
            grouped("a", "out", "b"),
            r"in another order; group 1 has model.b.weight, model.b.bias there",
        ),
    ],
)
def test_other_parameters_or_groups_are_refused_by_name(tmp_path: Path, first: Make, second: Make, told: str) -> None:
    train(tmp_path, first, stop=5)
    with pytest.raises(MismatchError, match=told):
        train(tmp_path, second)


def test_parameters_of_no_named_object_go_by_their_order_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loose = [nn.Parameter(torch.ones(3)) for _ in range(2)]

    def give_gradients(*_: object) -> None:
        for p in loose:
            p.grad = torch.ones(3)

    def with_loose(net: Net) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([*net.parameters(), *loose], lr=0.01, momentum=0.9)
        optimizer.register_step_pre_hook(give_gradients)
        return optimizer

    train(tmp_path, with_loose, stop=5)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, with_loose, stop=6)
    assert "optimizer: the state of 2 of its parameters goes back by their order" in caplog.text


@pytest.mark.parametrize("objects", [*map(counted, (HandingOn, StateOfInner)), warmed_up])
def test_states_of_other_forms_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, objects: Callable[..., dict[str, Any]]
) -> None:
    def make(net: Net) -> torch.optim.Optimizer:
        return CountingAdam(net.parameters(), lr=0.05)

    whole = train(tmp_path / "whole", make, objects)
    for stop in (5, 10):
        train(tmp_path / "cut", make, objects, stop=stop)
    resumed = train(tmp_path / "cut", make, objects)
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
    assert "other types" not in caplog.text
