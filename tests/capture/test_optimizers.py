"""Every optimizer of torch goes through capture, format and load, and then continues to equal weights."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mindx_elastic.errors import MismatchError
from tests.capture.jobs import MakeOptimizer, TinyJob, assert_resumes
from tests.capture.round_trip import assert_same, through_format

o = torch.optim


def on(kind: Any, **options: Any) -> MakeOptimizer:
    return lambda network: kind(network.parameters(), **options)


def groups(network: nn.Module) -> torch.optim.Optimizer:
    first, *rest = network.parameters()
    parts: list[dict[str, Any]] = [
        {"params": [first], "lr": 0.02, "weight_decay": 0.0},
        {"params": rest, "betas": (0.7, 0.8)},
    ]
    return o.AdamW(parts, lr=0.01)


def named(network: nn.Module) -> torch.optim.Optimizer:
    return o.Adam(network.named_parameters(), lr=0.01)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adafactor": on(o.Adafactor, lr=0.01),
    "Adadelta": on(o.Adadelta),
    "Adagrad": on(o.Adagrad),
    "Adam amsgrad": on(o.Adam, lr=0.01, amsgrad=True),
    "Adam tensor lr": on(o.Adam, lr=torch.tensor(0.01), foreach=False),
    "Adam named": named,
    "Adamax": on(o.Adamax),
    "AdamW fused": on(o.AdamW, lr=0.01, fused=True),
    "AdamW groups": groups,
    "ASGD": on(o.ASGD, t0=2),
    "LBFGS wolfe": on(o.LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
    "NAdam": on(o.NAdam, lr=0.01),
    "RAdam": on(o.RAdam, lr=0.01),
    "RMSprop": on(o.RMSprop, momentum=0.5, centered=True),
    "Rprop": on(o.Rprop),
    "SGD nesterov": on(o.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SparseAdam": on(o.SparseAdam),
}
if hasattr(o, "Muon"):  # from torch 2.9
    OPTIMIZERS["Muon"] = on(o.Muon, lr=0.01)
NO_OPTIMIZERS = {"Optimizer", "lr_scheduler", "swa_utils", "swap_in_optimizer_params_and_state"}


def test_every_optimizer_of_torch_is_here() -> None:
    there = {name for name in o.__all__ if name[0].isupper()} - NO_OPTIMIZERS
    assert there == {name.split()[0] for name in OPTIMIZERS}


def sparse_only(network: nn.Module) -> torch.optim.Optimizer:
    return o.SparseAdam(network.get_submodule("embedding").parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_resumes(name: str) -> None:
    if name == "SparseAdam":
        assert_resumes(lambda seed: TinyJob(sparse_only, seed=seed, sparse=True))
    else:
        assert_resumes(lambda seed: TinyJob(OPTIMIZERS[name], seed=seed))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_leaf_comes_back_with_its_type(dtype: torch.dtype) -> None:
    assert_resumes(lambda seed: TinyJob(on(OddState, lr=0.05), seed=seed, dtype=dtype))


def test_loading_does_not_tie_the_optimizer_to_the_checkpoint() -> None:
    job, other = (TinyJob(on(OddState, lr=0.05), dtype=torch.bfloat16) for _ in range(2))
    job.train(3)
    saved = through_format(job.collector.state())["optimizer"]
    untouched = through_format(saved)
    other.collector.components["optimizer"].load(saved)
    other.train(2)
    assert_same(saved["param_groups"], untouched["param_groups"])


def test_other_parameter_groups_are_named() -> None:
    saved = through_format(TinyJob(groups).collector.state()["optimizer"])
    component = TinyJob(on(o.AdamW, lr=0.1)).collector.components["optimizer"]
    with pytest.raises(MismatchError, match=r"optimizer: it has parameter groups of \[1, 1\].*this optimizer has"):
        component.load(saved)


def test_another_optimizer_is_refused_and_an_older_file_does_not_say() -> None:
    saved = through_format(TinyJob(on(o.AdamW, lr=0.1)).collector.state()["optimizer"])
    component = TinyJob(on(o.SGD, lr=0.1)).collector.components["optimizer"]
    with pytest.raises(MismatchError, match="optimizer: it was written by AdamW, this is SGD"):
        component.load(saved)
    del saved["class"]
    TinyJob(on(o.AdamW, lr=0.2)).collector.components["optimizer"].load(saved)


def test_frozen_and_unused_parameters_have_no_state() -> None:
    def make(network: nn.Module) -> torch.optim.Optimizer:
        network.get_submodule("hidden").requires_grad_(False)
        return o.AdamW(network.parameters(), lr=0.01)

    assert_resumes(lambda seed: TinyJob(make, seed=seed))
