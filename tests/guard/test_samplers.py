"""Weights of a loader's sampler that follow the training within an epoch are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guard.programs import run
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


_PROGRAM = """
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
sampler = WeightedRandomSampler(torch.ones(20), 20)
loader = DataLoader(TensorDataset(torch.randn(20, 3)), 5, sampler=sampler)
PARTS = dict(model=net, optimizer=opt, loader=loader, stateful=STATEFUL)
with Guard(directory=DIRECTORY, **PARTS) as guard:
    for epoch in guard.epochs(4):
        HEAD
        for x, in loader:
            update(net(x).square().mean(), opt); TAIL; guard.step_end()
notes = guard._unmanaged.notes
"""
_SET = "sampler.weights = torch.full((20,), float(epoch))"
_FILL = "sampler.weights.fill_(float(epoch))"


def told(directory: Path, head: str = "pass", tail: str = "pass", stateful: str = "{}") -> tuple[str, ...]:
    source = _PROGRAM.replace("HEAD", head).replace("TAIL", tail).replace("STATEFUL", stateful)
    return run("sampler", source, directory)


@pytest.mark.parametrize("tail", [_SET, _FILL])
def test_weights_that_follow_the_training(tail: str, tmp_path: Path) -> None:
    (note,) = told(tmp_path, tail=tail)
    assert note.startswith("the weights of loader.sampler (WeightedRandomSampler) change in the training")


def test_weights_that_the_head_of_the_epoch_sets_or_that_are_named(tmp_path: Path) -> None:
    assert told(tmp_path / "set", head=_SET) == ()
    assert told(tmp_path / "filled", head=_FILL) == ()
    assert told(tmp_path / "named", tail=_FILL, stateful='{"w": sampler.weights}') == ()
