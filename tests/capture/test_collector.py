"""The whole state of a job at one boundary, and the names of its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.module_component import ModuleComponent
from mindx_elastic.capture.names import name_targets, places_in_states
from mindx_elastic.core.position import Position
from mindx_elastic.errors import MismatchError, UsageError
from tests.capture.round_trip import assert_same, through_format


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def names(**given: Any) -> list[str]:
    roles = ("model", "optimizer", "lr_scheduler", "scaler", "loader", "stateful")
    return list(name_targets(**{**dict.fromkeys(roles), **given}))


def test_one_object_has_its_name_and_a_list_has_numbers() -> None:
    thing = object()
    assert names(model=[thing, thing], optimizer=(thing,)) == ["model_0", "model_1", "optimizer_0"]
    assert names(optimizer=thing, loader=thing, stateful={"ema": thing}) == ["optimizer", "loader", "ema"]
    for name in ("model", "optimizer_0", 7):
        with pytest.raises(UsageError, match="is taken or not a string"):
            names(model=thing, optimizer=[thing], stateful={name: thing})


def test_load_puts_back_everything_and_names_what_is_not_used() -> None:
    writer = Collector({"model": network(1), "old": torch.optim.SGD(network().parameters(), lr=0.1)})
    writer.gradient_order["model"] = [1, 0]
    writer.copy(Position(step=7, epoch=2, step_in_epoch=3, batch_num=4))
    saved = through_format(writer.state())
    model = network(2)
    torch.manual_seed(0)  # as the run's: another one is told
    reader = Collector({"model": model})
    assert reader.load(saved) == ["the checkpoint also holds old, which this job does not use"]
    assert_same(dict(model.state_dict()), saved["model"])
    assert (reader.position.step, reader.gradient_order) == (7, {"model": [1, 0]})
    reader.gradient_order["model"].append(2)
    assert saved["gradient_order"] == {"model": [1, 0]}


def test_parameters_are_not_looked_up_for_each_layer_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time reads all tables: thousands of layers took seconds to resume."""
    looked_up: list[object] = []
    named: Any = getattr(ModuleComponent.named, "fget")  # noqa: B009

    def count(component: ModuleComponent) -> Any:
        looked_up.append(component)
        return named(component)

    def times(num_layers: int) -> int:
        collector = Collector({"model": nn.Sequential(*[nn.Linear(1, 1) for _ in range(num_layers)])})
        saved = through_format(collector.state())
        looked_up.clear()
        collector.with_weights_of(saved, saved)
        collector.load(saved)
        return len(looked_up)

    monkeypatch.setattr(ModuleComponent, "named", property(count))
    assert times(2) == times(20) > 0


def test_a_missing_part_is_an_error_before_anything_changes() -> None:
    saved = through_format(Collector({"model": network(1)}).state())
    model = network(2)
    before = through_format(dict(model.state_dict()))
    collector = Collector({"model": model, "scaler": torch.amp.GradScaler(device="cpu")})
    with pytest.raises(MismatchError, match=r"nothing for scaler \(it has .*model.*resume=\"never\""):
        collector.load(saved)
    assert_same(dict(model.state_dict()), before)


def test_an_average_that_is_updated_with_gradients_can_be_updated_after_a_resume() -> None:
    model, average = network(1), network(2).requires_grad_(False)
    for held, trained in zip(average.parameters(), model.parameters(), strict=True):
        held.lerp_(trained, 0.1)
    saved = through_format(Collector({"model": model, "average": average}).state())
    again = network(3).requires_grad_(False)
    Collector({"model": network(4), "average": again}).load_flags(saved)
    assert not any(p.requires_grad for p in again.parameters())


@pytest.mark.parametrize("how", ["frozen", "left out"])
def test_a_layer_that_has_kept_its_gradient(how: str) -> None:
    """With `zero_grad(set_to_none=False)` an optimizer goes on with it: by momentum and weight decay."""

    def job(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = network(seed)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        (model.get_submodule("0") if is_left_out else model)(torch.eye(2)).pow(2).sum().backward()
        optimizer.step()

    is_left_out = False
    model, optimizer = job(1)
    step(model, optimizer)
    is_left_out = how == "left out"
    model[0].requires_grad_(how != "frozen")
    writer = Collector({"model": model, "optimizer": optimizer})
    writer.copy(Position(step=1))
    saved = through_format(writer.state())
    step(model, optimizer)
    again, its_optimizer = job(2)
    reader = Collector({"model": again, "optimizer": its_optimizer})
    reader.load(saved)
    reader.load_flags(saved)
    step(again, its_optimizer)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_gradients_that_the_program_takes_away_behind_the_boundary_are_not_made_again() -> None:
    """As `zero_grad()` after `step_end()` does: a resume does not come there, and a layer that its step leaves out has
    none."""
    model = network(1)
    writer = Collector({"model": model})
    for step in (1, 2):
        model[step % 2](torch.rand(4, 2 + step % 2)).pow(2).sum().backward()
        writer.copy(Position(step=step))
        saved = through_format(writer.state())
        model.zero_grad()
    again = network(2)
    Collector({"model": again}).load_flags(saved)
    assert all(p.grad is None for p in again.parameters())


def test_the_places_of_parameters_in_the_states_of_others() -> None:
    kept, copied = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    states = {"ema": {"weights": [copied.detach().clone(), kept.detach()]}, "plain": {"weight": kept.data}}
    found = places_in_states(states, [kept, copied])
    assert found.keys() == {"ema.weights.1", "plain.weight"} and all(value is kept for value in found.values())
