"""A gradient scaler is copied without a wait for its device."""

from __future__ import annotations

from typing import Any

import torch

from mindx_elastic.capture.components import component_for
from mindx_elastic.capture.plain_component import ScalerComponent


def used_scaler(**options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


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


def test_one_with_a_state_of_its_own_is_asked_for_it() -> None:
    class Own(torch.amp.GradScaler):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": 1}

    component = component_for("scaler", Own("cpu"))
    assert not isinstance(component, ScalerComponent) and component.state()["more"] == 1
