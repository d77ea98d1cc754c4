"""A program that has written ``torch.set_default_device("cuda")``: what the package makes for itself is on the CPU.

With the default device "meta" whatever is made without a device has no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from mindx_elastic.data import ResumableLoader
from tests.guarded import Job, Points, no_traces, plain_environment, stop_at, stopped, weights_of_uninterrupted


class OnTheCpu(Dataset[Any]):
    def __len__(self) -> int:
        return len(Points())

    def __getitem__(self, index: int) -> Any:
        with torch.device("cpu"):
            return Points()[index]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield
        torch.set_default_device(None)


def make(directory: Path, **options: Any) -> Job:
    torch.set_default_device(None)
    loader = ResumableLoader(OnTheCpu(), batch_size=4, shuffle=True, seed=3)
    job = Job(directory, loader=loader, **options)
    job.loader = loader
    # The optimizer makes its state on the default device.
    job.optimizer.register_step_pre_hook(lambda *_: torch.set_default_device(None))
    job.optimizer.register_step_post_hook(lambda *_: torch.set_default_device("meta"))
    torch.set_default_device("meta")
    return job


@pytest.mark.parametrize("snapshot_every", [0, 1])
def test_a_stop_and_a_resume(tmp_path: Path, snapshot_every: int) -> None:
    wanted = weights_of_uninterrupted(tmp_path)
    stopped(make(tmp_path, snapshot_every=snapshot_every), middle=stop_at(7))
    job = make(tmp_path, snapshot_every=snapshot_every)
    found = job.run()
    assert job.steps[0] == 8
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in wanted.items()}
