"""Optimizers, wrappers and schedulers of other people's packages, over two stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.guard.test_optimizer_states import Net, train
from tests.guarded import no_traces, plain_environment

pytestmark = [pytest.mark.drill, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


def adam(net: Net) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def sgd(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def wrapped(make: Callable[[Any, Net], Any]) -> Callable[[Any], Callable[..., dict[str, Any]]]:
    """The guard's objects, of what `make` gives for the package and the network."""
    return lambda package: lambda net, _optimizer: {"model": net, "optimizer": make(package, net)}


def training(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer


def warmed_up(package: Any) -> Callable[..., dict[str, Any]]:
    def objects(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        then = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {
            "model": net,
            "optimizer": optimizer,
            "lr_scheduler": package.GradualWarmupScheduler(optimizer, 1, 5, then),
        }

    return objects


def split(package: Any, net: Net) -> Any:
    package.utils.compile_mode = None
    matrices, vectors = ([p for p in net.parameters() if p.ndim == n] for n in (2, 1))
    return package.SplitOpt([{"params": each, "optimizer": package.AdamW} for each in (matrices, vectors)])


PACKAGES = [
    ("pytorch_optimizer", wrapped(lambda package, net: package.Lookahead(package.AdamW(net.parameters(), lr=0.01)))),
    ("pytorch_optimizer", wrapped(lambda package, net: training(package.ScheduleFreeWrapper(adam(net))))),
    ("schedulefree", wrapped(lambda package, net: training(package.ScheduleFreeWrapper(sgd(net), momentum=0.9)))),
    ("geoopt", wrapped(lambda package, net: package.optim.RiemannianAdam(net.parameters(), lr=0.01))),
    ("magma", wrapped(lambda package, net: package.Magma(adam(net), mask_prob=0.5))),
    ("heavyball", wrapped(split)),
    ("heavyball", wrapped(lambda package, net: package.PSGDKron(net.parameters(), lr=0.001))),
    ("warmup_scheduler", warmed_up),
]


@pytest.mark.parametrize(("name", "made"), PACKAGES, ids=[f"{n}-{name}" for n, (name, _) in enumerate(PACKAGES)])
def test_a_part_of_a_package_goes_on(tmp_path: Path, name: str, made: Callable[[Any], Any]) -> None:
    objects = made(pytest.importorskip(name))
    whole = train(tmp_path / "whole", adam, objects)
    for stop in (5, 10):
        train(tmp_path / "cut", adam, objects, stop=stop)
    resumed = train(tmp_path / "cut", adam, objects)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
