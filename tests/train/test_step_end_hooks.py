"""What callbacks do at the end of a step belongs to that step: random draws, averages, meters, the wish to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.stop_step import Decision, Offer
from mindx_elastic.errors import GracefulExit
from mindx_elastic.guard.active import entered
from mindx_elastic.guard.guard import Guard
from mindx_elastic.train import Callback, ExceptionCheckpoint, Model, RunContext
from tests.train.small_job import make_loader, make_model, make_network, same, weights
from tests.train.test_resume import At, sigterm


class Meter:
    """Counts what is not a callback's own."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Averaging(Callback):
    """Updates a moving average with a random weight, and a meter: every kind of state that a hook can change."""

    def __init__(self, average: nn.Module, meter: Meter) -> None:
        self.average, self.meter = average, meter

    @torch.no_grad()
    def on_train_step_end(self, run_context: RunContext) -> None:
        network = run_context.original_args().network
        weight = torch.rand(())
        for mine, live in zip(self.average.parameters(), network.parameters(), strict=True):
            mine.lerp_(live, weight)
        self.meter.values.append(weight.item() + run_context.original_args().net_outputs.item())


def train_with_average(*extra: Callback) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    model, average, meter = make_model(), make_network(), Meter()
    torch.manual_seed(1)
    callbacks = [ExceptionCheckpoint(directory="out"), *extra, Averaging(average, meter)]
    model.train(3, make_loader(), callbacks, stateful={"average": average, "meter": meter})
    return weights(model), dict(average.state_dict()), meter.values


def sigterm_and_let_the_watcher_decide() -> None:
    """The worst moment: the step is taken, its callbacks are not done, and the watcher has nothing left to wait for."""
    guard = entered[0]
    sigterm()
    done = threading.Event()
    guard.stopper.watcher.post(done.set)
    assert done.wait(30)


@pytest.mark.parametrize("step", [1, 6, 18])
def test_what_hooks_change_resumes_bit_for_bit(step: int) -> None:
    with pytest.raises(GracefulExit) as caught:
        train_with_average(At(step, sigterm_and_let_the_watcher_decide))
    assert caught.value.step == step
    resumed = train_with_average()
    for path in Path("out").glob("*.safetensors"):
        path.unlink()
    straight = train_with_average()
    for mine, theirs in zip(resumed[:2], straight[:2], strict=True):
        assert same(mine, theirs)
    assert resumed[2] == straight[2] and len(straight[2]) == 18


class OnlyThisRankAsks(Exchange):
    """Of two ranks, the other one goes on training."""

    def decide(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        if name.startswith("end/"):
            return Decision(None, "the other one has not come")
        return super().decide(name, offer, timeout_s)


def test_a_stop_that_one_rank_asks_for_lets_the_script_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Callback):
        ended = 0

        def on_train_step_end(self, run_context: RunContext) -> None:
            if run_context.original_args().cur_step_num == 4:
                run_context.request_stop()

        def on_train_end(self, run_context: RunContext) -> None:
            self.ended += 1

    monkeypatch.setattr(Model, "_open_exchange", lambda *_: OnlyThisRankAsks())
    monkeypatch.setattr(Guard, "world_size", property(lambda guard: 2))
    model, enough = make_model(), Enough()
    model.train(1000, make_loader(), [ExceptionCheckpoint(directory="out"), enough])
    assert enough.ended == 1 and 4 < model.position.step < 6000
    assert model.eval(make_loader())
    model.train(model.position.epoch + 1, make_loader(), ExceptionCheckpoint(directory="out2"))


class EndsAt(Callback):
    """Ends the training in its hook of one step; `cut` runs before."""

    def __init__(self, step: int, cut: Callable[[], None] = lambda: None) -> None:
        self.step, self.cut, self.ended = step, cut, 0

    def on_train_step_end(self, run_context: RunContext) -> None:
        if run_context.original_args().cur_step_num == self.step:
            self.cut()
            run_context.request_stop()

    def on_train_end(self, run_context: RunContext) -> None:
        self.ended += 1


def test_a_training_that_a_hook_has_ended_is_finished() -> None:
    """Also where that hook was cut off: it runs again, and no step follows. More epochs go on."""

    def train(ends: EndsAt, epochs: int = 3) -> int:
        model = make_model()
        model.train(epochs, make_loader(), [ExceptionCheckpoint(directory="out"), ends])
        return model.position.step

    with pytest.raises(GracefulExit):
        train(EndsAt(8, sigterm_and_let_the_watcher_decide))
    assert train(ends := EndsAt(8)) == 8 and ends.ended == 1
    assert train(ends := EndsAt(9)) == 8 and ends.ended == 1
    assert train(EndsAt(0), epochs=4) == 24
