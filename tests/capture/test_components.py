"""Modules and plain objects: what is copied at the boundary, what is read live, and how both come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils import prune

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import (
    ModuleComponent,
    PlainComponent,
    component_for,
    unwrap_module,
)
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.core.position import Position
from mindx_elastic.errors import MismatchError, UnsupportedStateError, UsageError
from tests.capture.round_trip import assert_same, through_format


class Holder(nn.Module):
    """A parameter, a buffer, and whatever a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(2))
        self.count: torch.Tensor


def boundary(module: nn.Module) -> ModuleComponent:
    component = ModuleComponent("model", module)
    component.copy()
    return component


def rename(module: Holder) -> None:
    del module.count
    module.register_buffer("late", torch.ones(2))


CHANGES: dict[str, Callable[[Holder], object]] = {
    "same shape": lambda module: setattr(module, "count", torch.full((2,), 9.0)),
    "other shape": lambda module: setattr(module, "count", torch.full((4,), 9.0)),
    "other type": lambda module: setattr(module, "count", torch.full((2,), 9, dtype=torch.int64)),
    "scalar": lambda module: setattr(module, "count", torch.tensor(9.0)),  # would broadcast
    "transposed": lambda module: setattr(module, "count", torch.arange(6.0).view(2, 3).t()),
    "expanded": lambda module: setattr(module, "count", torch.ones(1).expand(4)),
    "none": lambda module: setattr(module, "count", None),
    "all types": lambda module: module.double(),
    "another name": rename,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_replaced_buffer_is_followed_and_comes_back(name: str) -> None:
    module, second = Holder(), Holder()
    component = boundary(module)
    CHANGES[name](module)
    assert component.state().get("count", torch.zeros(2)).tolist() == [0, 0], "not before the boundary"
    for _ in range(2):
        component.copy()
        assert_same(component.state(), dict(module.state_dict()))
    if name not in ("all types", "another name"):  # these the program has to make
        resumed(component, second)
        assert_same(dict(second.state_dict()), dict(module.state_dict()))
    if getattr(module, "count", None) is not None:
        module.count.data.untyped_storage().fill_(1)  # type: ignore[attr-defined]
        assert component.state()["count"].ne(module.count).all()


def _retype(buffer: torch.Tensor) -> None:
    buffer.data = buffer.data.view(torch.int32)


def _spread(buffer: torch.Tensor) -> None:
    buffer.data = torch.arange(4.0)[::2]


def _conjugate(buffer: torch.Tensor) -> None:
    buffer.data = torch.full((2,), 1j).conj()


def _shorten(buffer: torch.Tensor) -> None:
    buffer.data = buffer.data[:1]


def _table(buffer: torch.Tensor) -> None:
    buffer.data = buffer.data.view(2, 1)


def _grow(buffer: torch.Tensor) -> None:
    buffer.resize_(5).fill_(3.0)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("change", [_retype, _spread, _conjugate, _shorten, _table, _grow])
def test_a_buffer_whose_memory_means_something_else_is_followed(
    change: Callable[[torch.Tensor], None], persistent: bool
) -> None:
    """In place, in mid-run: neither the object nor, with a view, its address shows it. It comes back as the same
    object, of the new type. By then no look at the contents is due, which the first boundaries have."""
    module, second = Holder(), Holder()
    for each in (module, second):
        each.register_buffer("seen", torch.arange(1.0, 3.0), persistent=persistent)
    component = boundary(module)
    for _ in range(11):
        component.copy()
    change(module.get_buffer("seen"))
    component.copy()
    component.recheck()
    expected, held = module.get_buffer("seen").clone(), second.get_buffer("seen")
    module.get_buffer("seen").zero_()
    resumed(component, second)
    assert_same(second.get_buffer("seen").resolve_conj(), expected.resolve_conj())
    assert not persistent or second.get_buffer("seen") is held


def test_what_a_boundary_does_not_look_at_is_seen_by_the_reader() -> None:
    """A buffer's memory means something else since a boundary: in mid-step nobody can tell on which side of it, right
    at it the buffer is read again. What a killed rank has left is read as its replica's."""
    module, second = Holder(), Holder()
    component = boundary(module)
    component.copy()
    _retype(module.count)
    component.copy()
    with pytest.raises(UnsupportedStateError, match="mean something else"):
        component.state()
    component.recheck()
    replica = component.state()
    assert replica["count"].dtype is torch.int32
    killed = boundary(second)
    second.count.fill_(2.5)
    killed.copy()
    _retype(second.count)
    killed.copy()
    assert_same(component.with_buffers(replica, killed.buffers(), {}, {})["count"], second.count)


def test_a_boundary_sees_new_buffers_and_modules_and_lost_ones() -> None:
    """Also those that no update shows, and no hook: what `insert` puts in, a layer without parameters that goes."""
    first, inner = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    module = nn.Sequential(first, inner)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    collector, gate = Collector({"model": module, "optimizer": optimizer}), UpdateGate()
    collector.on_new_parameters = gate.follow
    gate.watch(collector.parameters, collector.optimizers())
    collector.watch()

    def step(number: int) -> None:
        optimizer.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        gate.pass_boundary(collector.copy, Position(number))

    try:
        for number in range(1, 9):
            step(number)
            assert not collector.problems
        first.register_buffer("late", torch.ones(1))
        step(9)
        inner[1]._buffers["by_hand"] = torch.ones(1)
        step(10)
        inner[1].get_buffer("by_hand").zero_()
        state = collector.state()["model"]
        assert "0.late" in state and state["1.1.by_hand"] == 1
        del inner[1]
        step(11)
        assert collector.problems == ["model: 1.1 is gone"]
        inner.insert(1, nn.Tanh())
        step(12)
        assert not collector.problems
        inner.insert(2, nn.Tanh())
        step(13)
        assert collector.problems == ["model: 1.2 is new"]
        del inner[2]
        first.register_buffer("scratch", torch.zeros(1), persistent=False)
        step(14)
        assert not collector.problems
        del first.scratch
        first.register_buffer("kept", torch.ones(1))  # as many as before
        step(15)
        assert "0.kept" in collector.state()["model"]
        weight = first.weight
        del first.weight
        first.register_buffer("weight", weight.detach())
        step(16)
        assert collector.problems[0] == "model: 0.weight is gone"
    finally:
        collector.unwatch()
        gate.unwatch()


def test_buffers_that_no_record_of_a_rank_has_are_named() -> None:
    """Those that the training changes, counters too, in the process that does and in the one that goes on."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (first, second):
        module.register_buffer("mean", torch.zeros(2), persistent=False)
        module.register_buffer("seen", torch.zeros(2, dtype=torch.int64), persistent=False)
        module.register_buffer("table", torch.arange(2.0), persistent=False)
        module.register_buffer("apart", torch.ones(2, 2)[:, :1])
    component = boundary(first)
    assert component.buffers_of_this_rank(leads=True) == ["apart"]
    first.get_buffer("mean").add_(1)
    first.get_buffer("seen").add_(1)
    component.copy()
    assert component.buffers_of_this_rank(leads=True) == ["apart", "mean", "seen"]
    again = resumed(component, second)
    assert again.buffers_of_this_rank(leads=True) == ["apart", "mean", "seen"]


@pytest.mark.parametrize("is_older", [False, True])
def test_a_pruned_parameter_comes_back_with_its_product_and_its_mask_goes_again(is_older: bool) -> None:
    """The product is older than the last update, and the next pruning ranks by it. Version 0.2 kept it by itself."""
    first, second = nn.Sequential(nn.Linear(600, 600)), nn.Sequential(nn.Linear(600, 600))
    untouched, component = boundary(nn.Sequential(nn.Linear(600, 600))), boundary(first)
    prune.l1_unstructured(first[0], "weight", 0.5)
    with torch.no_grad():
        first.get_parameter("0.weight_orig").mul_(2)
    component.follow()
    component.copy()
    extras = component.module_extras()
    if is_older:
        extras |= {"pruned": extras["buffers"], "buffers": {}}
    again = resumed(component, second, extras)
    assert_same(second[0].weight, first[0].weight)
    assert_same(dict(second.state_dict()), dict(first.state_dict()))
    assert again.buffers_of_this_rank(leads=True) == []
    resumed(untouched, second)
    assert_same(dict(sorted(second.state_dict().items())), dict(sorted(untouched.module.state_dict().items())))


def resumed(trained: ModuleComponent, module: nn.Module, extras: Any = None) -> ModuleComponent:
    """`module`, as a start builds it, with the state of `trained`."""
    state, module_extras = through_format(trained.state()), through_format(extras or trained.module_extras())
    component = ModuleComponent("model", module)
    component.prepare(module_extras, state)
    component.load(state)
    component.load_module_extras(module_extras)
    return component


def test_a_changed_model_is_refused_with_names_and_shapes_and_left_alone() -> None:
    first = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    second = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1).double())
    before = through_format(dict(second.state_dict()))
    with pytest.raises(MismatchError) as caught:
        resumed(boundary(first), second)
    for part in (
        "does not fit model",
        "0.weight has shape [3, 2] there and [4, 2] here",
        "1.running_mean is missing in the checkpoint",
        "2.bias is torch.float32 there and torch.float64 here",
        'resume="never"',
    ):
        assert part in str(caught.value)
    assert_same(through_format(dict(second.state_dict())), before)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_parts_of_torchscript_and_a_compiled_module_keep_names_buffers_and_modes() -> None:
    def make() -> nn.Module:
        scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        return nn.Sequential(scripted, nn.Linear(4, 2))

    first, second = make(), make()
    component = ModuleComponent("model", first)
    first(torch.randn(5, 3))
    first.eval()
    component.copy()
    compiled = OptimizedModule(second, torch._dynamo.disable())  # what torch.compile gives, without its compiler
    again = resumed(component, compiled)
    again.flags.load(component.module_extras())
    assert unwrap_module(compiled) is second and not compiled.training and not second.training
    assert component.state()["0.1.num_batches_tracked"] == 1
    assert_same(dict(second.state_dict()), dict(first.state_dict()))


def test_a_lazy_module_is_refused_before_its_first_forward() -> None:
    lazy = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(UnsupportedStateError, match=r"0\.weight, .* of a lazy module .* Run one batch through"):
        ModuleComponent("model", lazy)
    lazy(torch.randn(4, 3))
    assert set(boundary(lazy).state()) == set(lazy.state_dict())


class Rounding:
    """Its load makes something else of what it has given."""

    def __init__(self) -> None:
        self.count: Any = 3

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [{"count": self.count}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = torch.tensor(float(state["inner"][0]["count"]))


def test_a_load_that_changes_types_is_told(caplog: pytest.LogCaptureFixture) -> None:
    PlainComponent("meter", Rounding()).load({"inner": [{"count": 5}]})
    assert "meter: its load_state_dict() gives other types than were saved: inner.0.count was int" in caplog.text


class WithoutInit(torch.optim.Optimizer):
    """As Lookahead of torch_optimizer: it never calls `Optimizer.__init__`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    def state_dict(self) -> Any:
        return super().state_dict()


def test_an_optimizer_whose_state_dict_fails_is_refused_in_words() -> None:
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"optimizer: state_dict\(\) of .*WithoutInit fails by itself"):
        component_for("optimizer", WithoutInit(inner))


def test_a_boundary_keeps_a_scalers_values_of_then() -> None:
    scaler, parameter = torch.amp.GradScaler("cpu", init_scale=8.0), nn.Parameter(torch.ones(2))
    scaler.scale(parameter.sum()).backward()
    component = component_for("scaler", scaler)
    before = scaler.state_dict()
    scaler.update(1024.0)
    assert component.state() == before
    kept = component.kept()
    component.copy()
    assert component.state()["scale"] == 1024.0
    component.go_back(kept)
    assert component.state() == before


def test_a_scaler_with_a_state_of_its_own_is_asked_for_it() -> None:
    class Own(torch.amp.GradScaler):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": 1}

    assert component_for("scaler", Own("cpu")).state()["more"] == 1
