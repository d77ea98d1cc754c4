"""What the function of the training has done to a survivor's objects is taken back before it is called again."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from mindx_elastic.agreement.gather import Answer
from mindx_elastic.guard.as_begun import AsBegun, VariablesPart

counted = 0
history: list[int] = []
untouched = 7


def test_hooks_are_there_once_however_often_the_function_is_called() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("of the beginning"))
    begun = AsBegun({"model": model, "optimizer": optimizer})

    def train() -> None:
        model[0].register_forward_hook(lambda *_: calls.append("forward"), with_kwargs=False)
        model[1].register_forward_pre_hook(lambda *_: calls.append("pre"))
        model[1].register_full_backward_hook(lambda *_: calls.append("backward"))
        optimizer.register_step_post_hook(lambda *_: calls.append("step"))
        model[0].weight.register_hook(lambda _: calls.append("gradient"))
        model[0].bias.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))

    train()
    begun.put_back()
    train()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert sorted(calls) == [
        *("accumulated", "backward", "forward", "gradient", "of the beginning", "pre", "step"),
    ]


def test_what_torch_has_hooked_to_a_module_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    begun = AsBegun({"model": model})
    prune.l1_unstructured(model[0], "weight", amount=1)
    begun.put_back()
    with torch.no_grad():
        model[0].weight_orig.fill_(2.0)
    model(torch.ones(1, 2))
    assert model[0].weight.count_nonzero() == 3 and model[0].weight.max() == 2, "it is computed in each forward"


def test_gradients_and_the_scalers_stage_are_those_of_the_beginning() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    begun = AsBegun({"model": model, "optimizer": optimizer, "scaler": scaler})

    def step() -> None:
        scaler.scale(model(torch.ones(1))).backward()
        scaler.unscale_(optimizer)

    step()
    with torch.no_grad():  # an evaluation that was cut off
        begun.put_back()
        assert torch.is_grad_enabled()
        step()


def test_process_groups_made_in_the_function_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import distributed_c10d

    begun = AsBegun({})
    assert begun.problem == ""
    world: Any = distributed_c10d._world
    monkeypatch.setattr(
        distributed_c10d, "_world", SimpleNamespace(group_count=world.group_count + 1, pg_map=world.pg_map)
    )
    assert "process groups are made inside of the function" in begun.problem


def test_variables_that_differ_from_those_of_the_new_process_are_named(caplog: pytest.LogCaptureFixture) -> None:
    global counted
    survivor, new = AsBegun({}), AsBegun({})
    try:
        VariablesPart(survivor, [], 0, is_new=False)  # the first entry
        fresh = VariablesPart(new, [], 1, is_new=True)
        counted, _ = 5, history.append(1)
        old = VariablesPart(survivor, [], 0, is_new=False)
    finally:
        counted, _ = 0, history.clear()
    answer = old.merge([old.say(), fresh.say()]).common
    assert answer == ['"counted" (test_as_begun.py)', 'the length of "history" (test_as_begun.py)']
    with caplog.at_level(logging.WARNING):
        old.hear(Answer(answer, None, list))
        fresh.hear(Answer(answer, None, list))
    assert len(caplog.records) == 1 and '"counted" (test_as_begun.py)' in caplog.text

    again = VariablesPart(new, [], 1, is_new=False)  # nothing has changed here since its beginning
    assert again.say() == {"changed": []}
