"""A gradient scaler is copied without a wait for its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindx_elastic.capture.components import component_for
from mindx_elastic.capture.scaler_component import ScalerComponent


def used_scaler(**options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("options", [{}, {"growth_factor": 4.0, "backoff_factor": 0.25}, {"growth_interval": 100}])
def test_its_state_is_that_of_the_scaler(options: dict[str, Any]) -> None:
    scaler = used_scaler(**options)
    component = component_for("scaler", scaler)
    assert isinstance(component, ScalerComponent)
    assert component.state() == scaler.state_dict()
    fresh = torch.amp.GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})
    component_for("scaler", fresh).load(component.state())
    assert fresh.state_dict() == scaler.state_dict()


def test_a_boundary_keeps_the_values_of_then() -> None:
    scaler = used_scaler()
    component = component_for("scaler", scaler)
    before = scaler.state_dict()
    scaler.update(1024.0)
    assert component.state() == before
    kept = component.kept()
    component.copy()
    assert component.state()["scale"] == 1024.0
    component.go_back(kept)
    assert component.state() == before


def test_an_unused_or_disabled_one_is_as_torch_says() -> None:
    for options in ({}, {"enabled": False}):
        scaler = torch.amp.GradScaler("cpu", **options)
        assert component_for("scaler", scaler).state() == scaler.state_dict()


def test_one_with_a_state_of_its_own_is_asked_for_it() -> None:
    class Own(torch.amp.GradScaler):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": 1}

    component = component_for("scaler", Own("cpu"))
    assert not isinstance(component, ScalerComponent) and component.state()["more"] == 1
