"""What `mindx_elastic.peek` says of a directory, and that a start does the same."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

import mindx_elastic as mx
from mindx_elastic.errors import MismatchError, NoUsableCheckpointError, UsageError
from tests.checkpoint_files import EPOCH_0, cut_off_end, write, write_step
from tests.start.arenas import Machine


def found(directory: Path, **options: int) -> mx.Peek:
    result = mx.peek(directory, **options)
    assert result is not None
    return result


def test_nothing_is_there(tmp_path: Path) -> None:
    assert mx.peek(tmp_path) is None and mx.peek(tmp_path / "missing") is None
    assert not (tmp_path / "missing").exists()


def test_the_newest_complete_step(tmp_path: Path) -> None:
    write_step(tmp_path, 7)
    write_step(tmp_path, 17, reason="SIGTERM", kind="breakpoint")
    write_step(tmp_path, 22, unmanaged=["a generator that no file has"])
    assert (found(tmp_path).exact, found(tmp_path).inexact_because) == (False, ("a generator that no file has",))
    (tmp_path / "rank_1" / "resnet-1_22.safetensors").unlink()
    seen = found(tmp_path)
    assert (seen.step, seen.epoch, seen.step_in_epoch) == (17, 2, 7)
    assert (seen.reason, seen.world_size, seen.exact, seen.inexact_because) == ("SIGTERM", 2, None, ())
    assert [path.parent.name for path in seen.paths] == ["rank_0", "rank_1"]
    assert seen.saved_at == datetime.fromtimestamp(EPOCH_0 + 17, timezone.utc)
    assert len(seen.rejected) == 1 and "step 22" in seen.rejected[0]


def test_it_fails_where_a_start_does(tmp_path: Path) -> None:
    write_step(tmp_path, 7)
    path = tmp_path / "rank_1" / "resnet-1_7.safetensors"
    with pytest.raises(UsageError, match="is a file"):
        mx.peek(path)
    with pytest.raises(MismatchError, match="written by 2 ranks"):
        mx.peek(tmp_path, world_size=3)
    cut_off_end(path)
    with pytest.raises(NoUsableCheckpointError, match=path.name):
        mx.peek(tmp_path)


def test_a_snapshot_in_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    monkeypatch.setenv("MINDX_ARENA_DIR", str(machine.base))
    write(machine.directory / "a-1_7.safetensors", step=7)
    machine.snapshot(9)
    assert found(machine.directory).step == 9
    monkeypatch.setenv("MINDX_ARENA_DIR", "none")
    assert found(machine.directory).step == 7


def test_a_start_does_what_was_said(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def guard() -> mx.Guard:
        return mx.Guard(model=model, optimizer=optimizer, directory=tmp_path)

    def train(until: int) -> None:
        with guard() as first:
            for step in first.steps(5):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                first.step_end()
                if step == until:
                    raise RuntimeError("a fault of the program")

    with pytest.raises(RuntimeError, match="a fault"):
        train(until=3)
    seen = found(tmp_path)
    assert (seen.step, seen.reason) == (3, "exception: RuntimeError: a fault of the program")
    with guard() as second:
        assert second.resumed_from_step == seen.step and [second.resumed_path] == list(seen.paths)
