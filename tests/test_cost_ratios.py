"""What a save, a snapshot and a guarded step cost beside the bare work, as ratios in one run.

CPU time and not seconds, so that other programs on the machine count little; medians of alternated rounds. The bounds
are two to four times what was measured, so they find a copy too many or work that has come back on the training thread,
and not a percent. `benchmarks/` has the figures.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import mindx_elastic as mx
from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.persist.writer import write_checkpoint

ROUNDS = 5
MIB = 1 << 20


def ratio(ours: Callable[[], float], base: Callable[[], float]) -> float:
    """The median of the rounds' ratios; each round runs both, in turn in one order and in the other."""
    ours(), base()  # caches, and what is reserved once
    found = []
    for number in range(ROUNDS):
        pair = {}
        for method in (ours, base) if number % 2 else (base, ours):
            pair[method] = method()
        found.append(pair[ours] / pair[base])
    return statistics.median(found)


def test_a_save_takes_little_more_cpu_than_writing_its_bytes(tmp_path: Path) -> None:
    state = {"model": {f"layer{n}": torch.randn(4 * MIB // 4) for n in range(16)}}
    content = b"".join(tensor.numpy().tobytes() for tensor in state["model"].values())
    numbers = itertools.count()
    info = CheckpointInfo(
        run_id="ratios",
        world_size=1,
        rank=0,
        step=1,
        epoch=1,
        step_in_epoch=1,
        batch_num=0,
        reason="ratios",
        kind="periodic",
        created=1.0,
    )

    def save() -> float:
        path = tmp_path / f"{next(numbers)}.safetensors"
        began = time.process_time()
        write_checkpoint(path, state, info)
        seconds = time.process_time() - began
        path.unlink()
        return seconds

    def write() -> float:
        began = time.process_time()
        fd = os.open(tmp_path / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        os.close(fd)
        return time.process_time() - began

    assert ratio(save, write) < 4


class Training:
    """A network of many parameters whose step is a few milliseconds."""

    def __init__(self, width: int, depth: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(width, width) for _ in range(depth)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(16, width)

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def tensors(self) -> list[torch.Tensor]:
        moments = [each for state in self.optimizer.state.values() for each in state.values()]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]


@contextmanager
def guarded(training: Training, folder: Path, snapshot_every: int) -> Iterator[mx.Guard]:
    guard = mx.Guard(
        model=training.model,
        optimizer=training.optimizer,
        directory=folder,
        signals=(),
        final_save=False,
        unmanaged="warn",  # it asks for guard.steps, which runs through once
        snapshot_every=snapshot_every,
    )
    with guard:
        yield guard


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_guarded_step_takes_little_more_cpu_than_a_bare_one(tmp_path: Path) -> None:
    bare, training = Training(64, 12), Training(64, 12)

    def run(step: Callable[[], object]) -> float:
        began = time.thread_time()
        for _ in range(20):
            step()
        return time.thread_time() - began

    with guarded(training, tmp_path, 0) as guard:

        def step() -> None:
            training.step()
            guard.step_end()

        assert ratio(lambda: run(step), lambda: run(bare.step)) < 1.5


def test_a_snapshot_takes_little_more_cpu_than_a_copy_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("MINDX_ARENA_DIR", str(memory))
    training, plain = Training(512, 12), Training(512, 12)
    training.step()
    copies = [torch.empty_like(tensor) for tensor in training.tensors]

    def copy() -> float:
        """What a step takes, and a plain copy of all its state."""
        began = time.process_time()
        for target, tensor in zip(copies, training.tensors, strict=True):
            target.copy_(tensor)
        return time.process_time() - began

    with guarded(training, tmp_path / "ckpt", 1) as guard:

        def run(step: Callable[[], object]) -> float:
            began = time.process_time()
            for _ in range(4):
                step()
            return time.process_time() - began

        def step() -> None:
            training.step()
            guard.step_end()

        assert ratio(lambda: run(step) - run(plain.step), lambda: 4 * copy()) < 8
        assert any(memory.rglob("*")), "snapshots were taken"
