"""Every optimizer and LR scheduler of torch goes through capture, format and load, and then continues to equal weights.
So does what libraries keep outside of their state_dict."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR

from mindx_elastic import Guard
from mindx_elastic.capture.collector import Collector
from mindx_elastic.core.position import Position
from mindx_elastic.errors import MismatchError
from tests.capture.round_trip import assert_same, through_format

o = torch.optim
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


class Network(nn.Module):
    """BatchNorm for buffers, matrices only where Muon wants them, an embedding for sparse gradients."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=sparse)
        self.hidden = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.hidden(self.embedding(x)))
        return out.sum(-1).tanh()


class Job:
    """Trains on data that is a function of the step; a millisecond a step."""

    def __init__(
        self, make: MakeOptimizer, schedule: MakeScheduler | None = None, *, seed: int = 0, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.network = Network(sparse=options.get("sparse", False)).to(options.get("dtype", torch.float32))
        self.optimizer = make(self.network)
        self.targets: dict[str, Any] = {"model": self.network, "optimizer": self.optimizer}
        self.scheduler = None if schedule is None else schedule(self.optimizer)
        if self.scheduler is not None:
            self.targets["lr_scheduler"] = self.scheduler
        self.collector = Collector(self.targets)
        self.component = self.collector.components["optimizer"]
        self.steps = 0

    def forward_backward(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.steps)
        x = torch.randint(0, 8, (6,), generator=generator)
        y = torch.randn(6, generator=generator)
        self.optimizer.zero_grad()
        loss: torch.Tensor = (self.network(x).float() - y).square().mean()
        loss.backward()
        return loss.detach()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.optimizer.step(self.forward_backward)  # type: ignore[arg-type]
            if isinstance(self.scheduler, lr.ReduceLROnPlateau):
                self.scheduler.step(float(loss))
            elif self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
            self.collector.copy(Position(step=self.steps, epoch=1, step_in_epoch=self.steps))

    def state(self) -> Any:
        return through_format(self.collector.state()) | {"rng": None}

    def live(self) -> list[Any]:
        return [target.state_dict() for target in self.targets.values()]


def assert_resumes(make: Callable[..., Job], *, before: int = 5, after: int = 9) -> None:
    """Stop after `before` steps, load into a job that began differently, and go on `after` steps: all equal."""
    job, resumed = make(seed=1), make(seed=2)
    job.train(before)
    saved = through_format(job.collector.state())
    notes = resumed.collector.load(through_format(saved))
    resumed.collector.load_flags(saved)
    assert [note for note in notes if "torch's seed" not in note] == []  # the seed is another one on purpose
    assert_same(resumed.state(), saved | {"rng": None})
    assert_same(resumed.live(), job.live())
    resumed.steps = resumed.collector.position.step
    for _ in range(after):
        job.train(1)
        resumed.train(1)
        assert [g["lr"] for g in resumed.optimizer.param_groups] == [g["lr"] for g in job.optimizer.param_groups]
    assert_same(resumed.live(), job.live())
    assert_same(resumed.state(), job.state())


# --- optimizers ---


def on(kind: Any, **options: Any) -> MakeOptimizer:
    return lambda network: kind(network.parameters(), **options)


def groups(network: nn.Module) -> torch.optim.Optimizer:
    first, *rest = network.parameters()
    parts: list[dict[str, Any]] = [
        {"params": [first], "lr": 0.02, "weight_decay": 0.0},
        {"params": rest, "betas": (0.7, 0.8)},
    ]
    return o.AdamW(parts, lr=0.01)


def partly_frozen(network: nn.Module) -> torch.optim.Optimizer:
    network.get_submodule("hidden").requires_grad_(False)
    return o.AdamW(network.parameters(), lr=0.01)


class OddState(o.Adam):
    """Keeps what torch's load makes something else of: float32 and float64 beside bfloat16, as mixed-precision trainers
    do, also in lists, as Shampoo and SOAP have; whole numbers where Adam has tensors; numpy's numbers and arrays."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = count = state.get("step", 0) + 1
                assert type(count) is int
                state["even"], state["half"] = count % 2 == 0, np.float32(count / 3)
                state["note"], state["sums"] = f"step {count}", np.full(2, count / 7)
                state["recent"] = deque([*state.get("recent", ()), count], maxlen=3)
                state.setdefault("moment", torch.zeros_like(p, dtype=torch.float32)).lerp_(p.grad.float(), 0.3)
                factors = state.setdefault("factors", [torch.zeros(2, dtype=torch.float64), {"n": torch.zeros(1)}])
                factors[0].add_(state["moment"].sum().double() / (count + float(state["half"]) + state["sums"][0]))
                factors[1]["n"].add_(factors[0].sum().float() / (7 + sum(state["recent"])))
                p.sub_(group["lr"] * (state["moment"] + factors[1]["n"]).to(p.dtype))
        return loss


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
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if self._count % self.every == 0:
                    p.hess = torch.randn(p.shape, generator=self.generator)
                momentum = self.momenta.setdefault(p, {"value": torch.zeros_like(p)})["value"]
                p.add_(momentum.add_(p.grad, alpha=-0.1))
                p.add_(p.hess * self._wealth * (0.5 if self._first else 0.1) + self.total)
        self._first, self._count = False, self._count + 1
        self._wealth *= 1.1
        self.total += 0.01
        return loss


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adafactor": on(o.Adafactor, lr=0.01),
    "Adadelta": on(o.Adadelta),
    "Adagrad": on(o.Adagrad),
    "Adam amsgrad": on(o.Adam, lr=0.01, amsgrad=True),
    "Adam tensor lr": on(o.Adam, lr=torch.tensor(0.01), foreach=False),
    "Adam named": lambda network: o.Adam(network.named_parameters(), lr=0.01),
    "Adamax": on(o.Adamax),
    "AdamW fused": on(o.AdamW, lr=0.01, fused=True),
    "AdamW groups": groups,
    "AdamW frozen": partly_frozen,
    "ASGD": on(o.ASGD, t0=2),
    "LBFGS wolfe": on(o.LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
    "NAdam": on(o.NAdam, lr=0.01),
    "RAdam": on(o.RAdam, lr=0.01),
    "RMSprop": on(o.RMSprop, momentum=0.5, centered=True),
    "Rprop": on(o.Rprop),
    "SGD nesterov": on(o.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SparseAdam": lambda network: o.SparseAdam(network.get_submodule("embedding").parameters()),
}
if hasattr(o, "Muon"):  # from torch 2.9
    OPTIMIZERS["Muon"] = on(o.Muon, lr=0.01)
NO_OPTIMIZERS = {"Optimizer", "lr_scheduler", "swa_utils", "swap_in_optimizer_params_and_state"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_resumes(name: str) -> None:
    assert_resumes(lambda seed: Job(OPTIMIZERS[name], seed=seed, sparse=name == "SparseAdam"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_leaf_comes_back_with_its_type(dtype: torch.dtype) -> None:
    assert_resumes(lambda seed: Job(on(OddState, lr=0.05), seed=seed, dtype=dtype))


@pytest.mark.parametrize("before", [1, 2, 4])
def test_attributes_that_change_go_on_in_a_resumed_run(before: int) -> None:
    assert_resumes(lambda seed: Job(on(Wealth), seed=seed), before=before, after=3)


def test_attributes_of_a_parameter_that_is_pruned_in_mid_run_go_on() -> None:
    job, other = Job(on(Wealth), seed=1), Job(on(Wealth), seed=2)
    job.train(2)
    prune.l1_unstructured(job.network.hidden, "weight", 0.5)
    job.train(2)
    other.collector.load(through_format(job.collector.state()))
    other.steps = job.steps
    for each in (job, other):
        each.train(3)
    assert_same(dict(other.network.state_dict()), dict(job.network.state_dict()))


def test_a_generator_in_a_file_of_version_0_2_goes_on() -> None:
    job, other = Job(on(Wealth)), Job(on(Wealth))
    job.train(2)
    saved = through_format(job.collector.state())
    attributes = saved["optimizer"]["own"][""]
    attributes["generator"] = {"generator": attributes["generator"]["state"]}
    other.optimizer.generator.manual_seed(8)  # type: ignore[attr-defined]
    other.collector.load(saved)
    assert_same(other.collector.state()["optimizer"], job.collector.state()["optimizer"])


def test_a_setting_is_the_programs_own_and_a_stock_optimizer_has_no_attributes() -> None:
    job, other, stock = Job(on(Wealth)), Job(on(Wealth, every=2)), Job(on(o.AdamW))
    for each in (job, stock):
        each.train(2)
    other.collector.load(through_format(job.collector.state()))
    assert other.optimizer.every == 2  # type: ignore[attr-defined]
    assert "own" not in stock.collector.state()["optimizer"]


def test_loading_does_not_tie_the_optimizer_to_the_checkpoint() -> None:
    job, other = (Job(on(OddState, lr=0.05), dtype=torch.bfloat16) for _ in range(2))
    job.train(3)
    saved = through_format(job.component.state())
    untouched = through_format(saved)
    other.component.load(saved)
    other.train(2)
    assert_same(saved["param_groups"], untouched["param_groups"])


def test_another_optimizer_or_other_groups_are_refused_and_an_older_file_does_not_say() -> None:
    component = Job(on(o.AdamW, lr=0.1)).component
    with pytest.raises(MismatchError, match=r"optimizer: it has parameter groups of \[1, 1\].*this optimizer has"):
        component.load(through_format(Job(groups).component.state()))
    saved = through_format(component.state())
    with pytest.raises(MismatchError, match="optimizer: it was written by AdamW, this is SGD"):
        Job(on(o.SGD, lr=0.1)).component.load(saved)
    del saved["class"]
    Job(on(o.AdamW, lr=0.2)).component.load(saved)


@pytest.mark.parametrize("make", [on(o.AdamW, lr=torch.tensor(0.1)), on(o.SGD, lr=torch.tensor(0.1), momentum=0.9)])
def test_a_load_fills_the_tensors_that_were_there(make: MakeOptimizer) -> None:
    """A CUDA graph that was captured with them goes on with them."""
    saved, job = Job(make, seed=1), Job(make, seed=2)
    for each in (saved, job):
        each.train(1)
    parameter = job.network.hidden.weight
    before = {key: each for key, each in job.optimizer.state[parameter].items() if isinstance(each, torch.Tensor)}
    rate, wanted = job.optimizer.param_groups[0]["lr"], saved.component.state()
    wanted["param_groups"][0]["lr"] = torch.tensor(0.03)
    job.component.load(wanted)
    for key, tensor in before.items():
        assert job.optimizer.state[parameter][key] is tensor and torch.equal(tensor, wanted["state"][1][key])
    assert job.optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.03)


def test_an_optimizer_that_makes_its_state_when_it_loads_keeps_that() -> None:
    class Flat(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            for values in self.state.values():
                flat = values["momentum_buffer"].clone()
                values |= {"flat": flat, "momentum_buffer": flat.view(-1)}

    job = Job(on(Flat, lr=0.1, momentum=0.9))
    job.train(1)
    job.component.load(job.component.state())
    for values in job.optimizer.state.values():
        assert values["momentum_buffer"].data_ptr() == values["flat"].data_ptr()


def test_what_is_shared_stays_shared_and_is_not_filled_twice() -> None:
    """A learning rate of two groups, and state that shares memory."""
    parameters, rate = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))], torch.tensor(0.1)
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=rate, momentum=0.9)
    shared = torch.zeros(2)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = shared
    component = Collector({"optimizer": optimizer}).components["optimizer"]
    wanted = component.state()
    wanted["state"] = {n: {"momentum_buffer": torch.full((2,), float(n))} for n in range(2)}
    wanted["param_groups"] = [{**group, "lr": torch.tensor(0.03)} for group in wanted["param_groups"]]
    component.load(wanted)
    found = [optimizer.state[parameter]["momentum_buffer"].tolist() for parameter in parameters]
    assert found == [[0.0, 0.0], [1.0, 1.0]]
    assert all(group["lr"] is rate for group in optimizer.param_groups) and float(rate) == pytest.approx(0.03)


# --- schedulers ---


class WarmUp:
    """A callable object: torch saves its attributes."""

    def __init__(self, steps: int) -> None:
        self.steps, self.calls = steps, [0]

    def __call__(self, epoch: int) -> float:
        self.calls[0] += 1
        return min(1.0, (epoch + 1) / self.steps) / (1 + 0.01 * self.calls[0])


def sequential(optimizer: Any) -> Any:
    parts = [lr.LinearLR(optimizer, 0.1, total_iters=4), lr.CosineAnnealingLR(optimizer, 20), lr.StepLR(optimizer, 2)]
    return lr.SequentialLR(optimizer, parts, milestones=[4, 8])


def chained(optimizer: Any) -> Any:
    return lr.ChainedScheduler([lr.ConstantLR(optimizer, 0.5, 6), lr.ExponentialLR(optimizer, 0.9)], optimizer)


def nested(optimizer: Any) -> Any:
    return lr.ChainedScheduler([sequential(optimizer), lr.LambdaLR(optimizer, WarmUp(3))], optimizer)


def by(kind: Any, *arguments: Any, **options: Any) -> MakeScheduler:
    return lambda optimizer: kind(optimizer, *arguments, **options)


SCHEDULERS: dict[str, MakeScheduler] = {
    "LambdaLR function": by(lr.LambdaLR, lambda epoch: 0.5 * (1 + math.cos(epoch / 10))),
    "LambdaLR object": lambda optimizer: lr.LambdaLR(optimizer, WarmUp(7)),
    "MultiplicativeLR": by(lr.MultiplicativeLR, lambda epoch: 0.9 + 0.01 * epoch),
    "StepLR": by(lr.StepLR, 3),
    "MultiStepLR": by(lr.MultiStepLR, [2, 6, 6, 9]),
    "ConstantLR": by(lr.ConstantLR, 0.3, 7),
    "LinearLR": by(lr.LinearLR, 0.1, total_iters=8),
    "ExponentialLR": by(lr.ExponentialLR, 0.9),
    "SequentialLR": sequential,
    "ChainedScheduler nested": nested,
    "CosineAnnealingLR": by(lr.CosineAnnealingLR, 10, 1e-4),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": by(lr.ReduceLROnPlateau, patience=0, cooldown=1, threshold=0.5),
    "CyclicLR": by(lr.CyclicLR, 0.01, 0.1, 3, mode="exp_range", gamma=0.9, cycle_momentum=False),
    "CyclicLR function": by(
        lr.CyclicLR, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x, scale_mode="iterations", cycle_momentum=False
    ),
    "CosineAnnealingWarmRestarts": by(lr.CosineAnnealingWarmRestarts, 3, 2),
    "OneCycleLR": by(lr.OneCycleLR, 0.1, total_steps=40, three_phase=True),
    "PolynomialLR": by(lr.PolynomialLR, 12, 2.0),
    "SWALR": by(SWALR, 0.05, anneal_epochs=6),
    "SWALR linear": by(SWALR, 0.05, anneal_epochs=6, anneal_strategy="linear"),
}


def two_rates(network: torch.nn.Module) -> torch.optim.Optimizer:
    first, *rest = network.parameters()
    parts: list[dict[str, Any]] = [{"params": [first]}, {"params": rest, "lr": 0.03}]
    return o.AdamW(parts, lr=0.01)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_resumes(name: str) -> None:
    for make in (two_rates, on(o.SGD, lr=0.05, momentum=0.9)):
        assert_resumes(lambda seed: Job(make, SCHEDULERS[name], seed=seed))  # noqa: B023


def test_every_optimizer_and_scheduler_of_torch_is_here() -> None:
    assert {name for name in o.__all__ if name[0].isupper()} - NO_OPTIMIZERS == {n.split()[0] for n in OPTIMIZERS}
    assert set(lr.__all__) - {"LRScheduler"} | {"SWALR"} == {name.split()[0] for name in SCHEDULERS}


# --- modules that were named by themselves ---


class Bank(nn.Module):
    """As CrossBatchMemory, and as torchmetrics' metrics: a place, a flag, sums, in no state_dict."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 2))
        self.size, self.place, self.is_full, self.losses = size, 0, False, [torch.zeros(1)]
        self.total, self.last, self.memories = torch.zeros(2), None, {"generator": 0.0}

    def add(self, row: torch.Tensor) -> None:
        self.get_buffer("rows")[self.place] = row
        self.place = (self.place + 1) % self.size
        self.is_full = self.is_full or self.place == 0
        self.total += row
        self.memories["generator"] += float(row[0])
        self.last = row.clone()  # type: ignore[assignment]
        self.losses.append(row.sum().reshape(1))


def test_a_module_that_is_named_by_itself_comes_back_whole() -> None:
    bank, fresh = Bank(), Bank()
    collector = Collector({"bank": bank})
    for step in range(1, 5):
        bank.add(torch.full((2,), float(step)))
        collector.copy(Position(step=step, epoch=1, step_in_epoch=step))
    saved = through_format(collector.state())
    expected = through_format({key: value for key, value in vars(bank).items() if not key.startswith("_")})
    bank.add(torch.ones(2))  # after the boundary
    total = fresh.total
    Collector({"bank": fresh}).load(saved)
    assert_same({key: vars(fresh)[key] for key in expected}, expected)
    assert fresh.total is total and fresh.place == 1


class Noisy(nn.Module):
    """An augmentation with generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.python = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.numpy.random() * self.python.random() + torch.rand(3, generator=self.tensors)


@pytest.mark.usefixtures("clean")
def test_generators_of_a_module_that_is_named_by_itself_go_on(tmp_path: Path) -> None:
    def train(name: str, steps: int) -> list[float]:
        torch.manual_seed(0)
        model, noisy = nn.Linear(3, 1, bias=False), Noisy()
        optimizer = o.SGD(model.parameters(), lr=0.1)
        targets: Any = {"model": model, "optimizer": optimizer, "stateful": {"noisy": noisy}}
        with Guard(**targets, directory=tmp_path / name) as guard:
            for _ in guard.steps(steps):
                optimizer.zero_grad()
                model(noisy(torch.ones(3))).sum().square().backward()
                optimizer.step()
                guard.step_end()
        values: list[float] = model.weight.flatten().tolist()
        return values

    train("again", 3)
    assert train("again", 7) == train("straight", 7)
