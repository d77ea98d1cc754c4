"""What a guarded step costs the training thread, in counts: they are the same on every machine and under any load.

A figure that grows has its reason in the change that is under test. Lower the bounds where they have become loose.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mindx_elastic as mx
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.boundaries import BoundaryLog
from tests.harness import run_job

_FIRST, _LAST = 33, 40
"""Steps in which nothing is looked at that is only looked at now and then; the caches and shapes are all made."""
_BOUNDARY, _LOG, _FORWARD = (20, 24), (15, 35), (9, 22)
"""Calls of Python functions and of built-in ones: `step_end`, and what a DDP rank writes to shared memory besides."""


class _Ops(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """Of one thread while `work` runs."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.python: Counter[str] = Counter()
        self.builtin: Counter[str] = Counter()
        ops = _Ops()
        with ops:
            gc.disable()  # what dies elsewhere is not the step's
            sys.setprofile(self._note)
            try:
                work()
            finally:
                sys.setprofile(None)
                gc.enable()
        self.ops = ops.seen

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.python[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            self.builtin[f"{getattr(argument, '__module__', None)}.{getattr(argument, '__qualname__', argument)}"] += 1

    @property
    def num(self) -> tuple[int, int]:
        return self.python.total(), self.builtin.total()

    def of(self, *parts: str) -> list[str]:
        """The functions of Python whose file and name have one of `parts` in them."""
        return [name for name in self.python if any(part in name for part in parts)]


def network(blocks: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4, 2))


Costs = tuple[Calls, Calls, Calls]


def costs(folder: Path, model: nn.Module) -> Costs:
    """Of the cheapest step: `step_end`, the log at the boundary, the log at the end of the forward."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    data = torch.utils.data.TensorDataset(torch.randn(2 * _LAST + 2, 4))
    loader = mx.data.ResumableLoader(data, batch_size=2, shuffle=True, seed=0)
    guard = mx.Guard(model=model, optimizer=optimizer, lr_scheduler=scheduler, loader=loader, directory=folder / "ckpt")
    found: list[Costs] = []
    arena = RankArena(folder, folder / "log", 0)
    with guard:
        log = BoundaryLog(arena, guard._collector, (), guard._loops)
        log.begin("run", 0)
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            forward = log._forward_ended
            ahead = Calls(forward) if guard._loops.step >= _FIRST else forward()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if guard._loops.step < _FIRST:
                guard.step_end()
                log.at_boundary()
                continue
            boundary, logged = Calls(guard.step_end), Calls(log.at_boundary)
            assert isinstance(ahead, Calls)
            found.append((boundary, logged, ahead))
            if guard._loops.step >= _LAST:
                break
        log.close()
        arena.close()
    return min(found, key=lambda each: sum(sum(one.num) for one in each))


@pytest.fixture(scope="module")
def deep_and_shallow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Costs, Costs]:
    return (
        costs(tmp_path_factory.mktemp("deep"), network(20)),
        costs(tmp_path_factory.mktemp("shallow"), network(2)),
    )


PARTS = ["step_end", "log at the boundary", "log after the forward"]


@pytest.mark.parametrize("part", range(3), ids=PARTS)
def test_no_operation_of_torch(deep_and_shallow: tuple[Costs, Costs], part: int) -> None:
    """Buffers are read from memory; each operation would take about as long as a hundred of their bytes."""
    for model in deep_and_shallow:
        assert not model[part].ops


@pytest.mark.parametrize("part", range(3), ids=PARTS)
def test_a_deeper_network_takes_no_more_calls(deep_and_shallow: tuple[Costs, Costs], part: int) -> None:
    """Whatever is asked of each tensor or module is asked inside of one call."""
    deep, shallow = (model[part] for model in deep_and_shallow)
    assert deep.python == shallow.python
    assert deep.builtin == shallow.builtin


@pytest.mark.parametrize(("part", "most"), [*enumerate((_BOUNDARY, _LOG, _FORWARD))], ids=PARTS)
def test_the_number_of_calls(deep_and_shallow: tuple[Costs, Costs], part: int, most: tuple[int, int]) -> None:
    calls = deep_and_shallow[0][part]
    python, builtin = calls.num
    assert python <= most[0], f"{python} calls: {calls.python.most_common(12)}"
    assert builtin <= most[1], f"{builtin} calls: {calls.builtin.most_common(12)}"


@pytest.mark.parametrize("part", range(3), ids=PARTS)
def test_nothing_that_does_not_belong_on_the_training_thread(deep_and_shallow: tuple[Costs, Costs], part: int) -> None:
    """No JSON, no isinstance of a Protocol, no meeting of ranks but the step gate, no event and no file."""
    calls = deep_and_shallow[0][part]
    json = os.path.join("json", "")
    assert not [name for name in calls.of(f"{os.sep}{json}") if "mindx_elastic" not in name]
    assert not calls.of("__instancecheck__", "__subclasscheck__", "runtime_checkable", "_get_protocol_attrs")
    assert not [name for name in calls.of(os.path.join("mindx_elastic", "agreement")) if "step_gate" not in name]
    assert not calls.of(os.path.join("core", "events"), os.path.join("mindx_elastic", "mirror"))
    assert not [name for name in calls.builtin if name.startswith(("posix.", "io.", "_io.", "_json.", "fcntl."))]
    assert "_abc._abc_instancecheck" not in calls.builtin


_MOST = {"entry": 2980, "step 1": 975, "step 2": 170, "step 3": 145, "step 4": 80, "stop": 490, "threads": 140}
"""Calls of the package's own Python functions in the README's loop; `stop`: from SIGTERM to the end. Of the training
thread, whose number is the same in every run; `threads`: all others together, about 110, and some 20 more where they
look again on a busy machine."""


def test_the_calls_of_a_start_of_the_first_steps_and_of_a_stop(tmp_path: Path) -> None:
    job = run_job("counted_calls.py", tmp_path, env={"MINDX_OVERLAP": "0"}, code=143, fresh=True)
    found = {name: (total, most) for name, total, most in (json.loads(m[1]) for m in job.matches(r"CALLS (.*)"))}
    assert list(tmp_path.glob("mlp-1_6_breakpoint.safetensors")), job.report()
    assert found.keys() >= _MOST.keys()
    for name, most in _MOST.items():
        assert found[name][0] <= most, f"{name}: {found[name]}"
