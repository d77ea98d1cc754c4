"""Weights that change behind torch's counters while gradients are kept: no step would ever be a boundary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from mindx_elastic import Guard
from mindx_elastic.errors import UnmanagedStateError
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


def train(folder: Path, *, changes: bool, steps: int = 12, begins: int = 0) -> int:
    """How many steps a program does that has an optimizer and updates by hand, from step `begins` on."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model=model, optimizer=optimizer, directory=folder) as guard:
        for step in guard.steps(steps):
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            for p in model.parameters() if changes and step >= begins else ():
                assert p.grad is not None
                p.data -= 0.1 * p.grad
            guard.step_end()
    return steps


def test_it_is_refused_before_many_steps_are_lost(tmp_path: Path) -> None:
    with pytest.raises(UnmanagedStateError, match=r"in 9 steps no optimizer has stepped.*through \.data"):
        train(tmp_path, changes=True)


def test_one_that_begins_later_is_seen_later(tmp_path: Path) -> None:
    with pytest.raises(UnmanagedStateError, match="in 65 steps no optimizer has stepped"):
        train(tmp_path, changes=True, steps=70, begins=20)


def test_a_long_accumulation_is_one(tmp_path: Path) -> None:
    assert train(tmp_path, changes=False, steps=70) == 70


def test_a_momentum_encoder_under_accumulation_is_no_update(tmp_path: Path) -> None:
    """Its weights follow in each forward, with version counters and without: the window stays open, and ends with the
    optimizer's step."""
    model, slow = nn.Linear(3, 3), nn.Linear(3, 3)
    slow.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cuts = []
    with Guard(model=[model, slow], optimizer=optimizer, directory=tmp_path, final_save=False) as guard:
        for step in guard.steps(40):
            with torch.no_grad():
                for mine, theirs in zip(slow.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
                    mine.data = 0.9 * mine.data + 0.1 * theirs.data
            model(torch.ones(2, 3)).sum().backward()
            if step % 20 == 0:
                optimizer.step()
                optimizer.zero_grad()
            guard.step_end()
            cuts.append(guard.position.step if guard._cut else 0)
    assert [step for step in cuts if step] == [20, 40]
