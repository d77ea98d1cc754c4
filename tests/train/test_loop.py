"""Parts of the loop that need no training: windows, the running loss, the stop of several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindx_elastic.agreement.stop_step import Decision
from mindx_elastic.errors import UsageError
from mindx_elastic.train.callbacks import CallbackList
from mindx_elastic.train.loop import CutHooks, EpochLoss, TrainLoop, Unguarded
from tests.train.small_job import make_model


def test_the_running_loss_resumes_bit_for_bit() -> None:
    model = make_model()
    straight, first, second = EpochLoss(model), EpochLoss(model), EpochLoss(model)
    losses = torch.rand(20, generator=torch.Generator().manual_seed(1))

    def add(running: EpochLoss, some: torch.Tensor) -> None:
        for loss in some:
            running.begin_step()
            running.note(loss * 2)
            running.note(loss)  # replaces it

    add(straight, losses)
    add(first, losses[:9])
    second.load_state_dict(first.state_dict())
    add(second, losses[9:])
    assert torch.equal(straight.mean(), second.mean())
    straight.reset()
    assert straight.mean().isnan()
    add(straight, losses[:1])
    assert straight.mean() == losses[0].double()


class Peers:
    """An exchange whose other ranks do, or do not, ask for the stop too."""

    def __init__(self, all_ask: bool) -> None:
        self.all_ask = all_ask

    def decide(self, name: str, offer: int, timeout_s: float) -> Decision:
        return Decision(offer if self.all_ask else None)


class AskedGuard(Unguarded):
    def __init__(self) -> None:
        super().__init__([], rank=0, world_size=2)
        self.asked: list[tuple[str, int]] = []

    def request_stop(self, reason: str, exit_code: int = 0) -> None:
        self.asked.append((reason, exit_code))


@pytest.mark.parametrize(("all_ask", "is_last"), [(True, False), (False, False), (False, True)])
def test_request_stop_of_some_ranks_becomes_a_stop_of_all_but_in_the_last_step(all_ask: bool, is_last: bool) -> None:
    model, guard, peers = make_model(), AskedGuard(), Peers(all_ask)
    exchange: Any = peers
    loop = TrainLoop(model, guard, CallbackList([]), [], (losses := EpochLoss(model)), [], exchange, CutHooks(losses))
    loop.params.update(epoch_num=2, cur_epoch_num=2, batch_num=4, cur_step_in_epoch=4 if is_last else 3)
    assert not loop._stop_wanted()
    loop.context.request_stop()
    assert loop._stop_wanted() is all_ask
    assert loop._stop_wanted() is all_ask
    assert guard.asked == ([] if all_ask or is_last else [("RunContext.request_stop()", 0)])


def test_without_a_guard_some_ranks_cannot_stop_all() -> None:
    with pytest.raises(UsageError, match="on every rank"):
        Unguarded([], rank=0, world_size=2).request_stop("RunContext.request_stop()")
