"""The guard and updates that are under way, unfinished, or made without an optimizer: nothing torn is ever saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mindx_elastic import Guard
from mindx_elastic.errors import GracefulExit, UnmanagedStateError, UsageError
from mindx_elastic.persist.format import read_header
from tests.capture.round_trip import assert_same
from tests.guarded import Job, stop_and_wait
from tests.harness import events
from tests.jobs.kit import Every

pytestmark = pytest.mark.usefixtures("clean")


def outcomes(directory: Path) -> list[str]:
    return [e["outcome"] for e in events(directory, "end")]


def update(job: Job) -> None:
    x, y = next(iter(job.loader))
    nn.functional.cross_entropy(job.network(x), y).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def test_an_update_without_a_boundary_is_not_saved_at_the_end(tmp_path: Path) -> None:
    """`break` between `optimizer.step()` and `step_end()`, the alarm pending: the program finishes."""
    job = Job(tmp_path)
    with job.guard:
        for _ in job.guard.steps(2):
            update(job)
            job.guard.step_end()
        update(job)
        stop_and_wait(job)
    assert not list(tmp_path.glob("*.safetensors"))
    assert outcomes(tmp_path) == ["finished"]


def test_a_periodic_save_inside_an_update_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = Every(tmp_path, steps=99)
    job = Job(tmp_path, periodic=[policy])
    with job.guard:
        update(job)
        assert not job.guard.save_periodic(policy)
        assert "step 0 is not saved: an optimizer had stepped" in caplog.text
        job.guard.step_end()
        assert job.guard.save_periodic(policy)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["every-1_1.safetensors"]


@pytest.mark.parametrize(
    "call", [Guard.step_end, Guard.boundary, Guard.save, lambda guard: guard.request_stop("enough")]
)
def test_calls_outside_of_the_block_are_refused(tmp_path: Path, call: Callable[[Guard], object]) -> None:
    guard = Job(tmp_path).guard
    with pytest.raises(UsageError, match=r"outside of the block; write: with guard"):
        call(guard)
    with guard:
        pass
    with pytest.raises(UsageError, match="outside of the block"):
        call(guard)
    assert guard.position.step == 0


def train_by_hand(directory: Path, *, stop: int = 0, fail: int = 0, steps: int = 8) -> tuple[Guard, nn.Linear]:
    """No torch optimizer anywhere, ``p.data`` changed behind autograd's back, gradients left standing."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    guard = Guard(model=network, directory=directory)
    with guard:
        for step in range(guard.position.step + 1, steps + 1):
            network.zero_grad()
            network(torch.rand(4, 3)).square().sum().backward()
            for p in network.parameters():
                assert p.grad is not None
                p.data.sub_(p.grad, alpha=0.1)
                assert step != fail, "half of the update"
            if step == stop:
                guard.request_stop("enough")
                guard.stopper.watcher.post(lambda: None)
                while guard.stopper.agreed_step is None:
                    pass
            guard.step_end()
    return guard, network


def test_updates_by_hand_are_resumed_bit_for_bit(tmp_path: Path) -> None:
    _, expected = train_by_hand(tmp_path / "a")
    with pytest.raises(GracefulExit) as caught:
        train_by_hand(tmp_path / "b", stop=4)
    assert caught.value.path is not None and read_header(caught.value.path).info.step == caught.value.step == 4
    guard, network = train_by_hand(tmp_path / "b")
    assert guard.resumed_from_step == 4
    assert_same(dict(network.state_dict()), dict(expected.state_dict()))


def test_an_update_by_hand_that_fails_half_way_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="half of the update"):
        train_by_hand(tmp_path, fail=7)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_first_window_that_does_not_end_is_told_where_weights_move(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_moved: bool
) -> None:
    """`.data` shows nowhere else; a long accumulation is right."""
    network = nn.Linear(4, 3)
    guard = Guard(model=network, optimizer=torch.optim.SGD(network.parameters()), directory=tmp_path)
    with guard:
        for _ in guard.steps(70):
            network(torch.ones(2, 4)).sum().backward()
            if is_moved:
                network.weight.data -= 0.01
            guard.step_end()
    assert ("no optimizer has stepped" in caplog.text) == is_moved


def test_a_function_for_a_new_group_of_a_lambda_lr_is_refused(tmp_path: Path) -> None:
    network, late = nn.Linear(4, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    guard = Guard(model=[network, late], optimizer=optimizer, lr_scheduler=scheduler, directory=tmp_path)

    def train() -> None:
        with guard:
            for step in guard.steps(3):
                late(network(torch.ones(2, 4))).sum().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if step == 2:
                    optimizer.add_param_group({"params": late.parameters(), "lr": 0.1, "initial_lr": 0.1})
                    scheduler.base_lrs.append(0.1)
                    scheduler.lr_lambdas.append(lambda step: 1.0)
                guard.step_end()

    with pytest.raises(UnmanagedStateError, match="functions are not saved"):
        train()


def test_a_step_in_which_the_program_changes_one_parameters_momentum_is_not_saved(tmp_path: Path) -> None:
    """It does so before the update, and has done so in a step that was looked at."""

    def change(job: Job, step: int) -> None:
        if step in (2, 7):
            job.optimizer.state[job.network[1].get_parameter("weight")]["exp_avg"].mul_(0.5)
        if step == 7:
            raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        Job(tmp_path).run(middle=change)
    assert not list(tmp_path.glob("*.safetensors"))
