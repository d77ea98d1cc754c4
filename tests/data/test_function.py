"""The loader of a function's batches: what the function draws is a function of the batch's number."""

from __future__ import annotations

import pytest
import torch

from mindx_elastic import data as mx_data


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """Stands for the default generator of a CUDA device."""
    generator = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    return generator


def test_what_is_drawn_on_a_device_does_not_move_with_the_training(device: torch.Generator) -> None:
    """nanoGPT's ``torch.randint(..., device="cuda")``, one batch ahead of a dropout on the same stream."""

    def make() -> float:
        return float(torch.rand((), generator=device))

    batches = iter(mx_data.from_function(make))
    first = [next(batches) for _ in range(4)]
    torch.rand(3, generator=device)  # dropout
    before = device.get_state()
    again = iter(mx_data.from_function(make))
    assert [next(again) for _ in range(4)] == first and len(set(first)) == 4
    assert torch.equal(device.get_state(), before), "the training's own numbers go on as they were"


def test_a_device_that_the_function_brings_to_life_begins_at_its_seed(
    device: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(alive))
    before = device.get_state()

    def make() -> float:
        alive.append(True)
        return float(torch.rand((), generator=device))

    next(iter(mx_data.from_function(make)))
    assert torch.equal(device.get_state(), before)
