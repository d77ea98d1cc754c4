"""The loop without checkpoints: order, accumulation, schedulers, precision, steps of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mindx_elastic.errors import UsageError
from mindx_elastic.train import Callback, ExceptionCheckpoint, Model, RunContext, TrainOneStep
from tests.train.small_job import Points, make_loader, make_model, make_network, same, weights


class Recorder(Callback):
    """Writes down every hook with epoch and step."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(context: RunContext) -> None:
            params = context.original_args()
            self.calls.append((name, params.cur_epoch_num, params.cur_step_num))

        return note


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, run_context: RunContext) -> None:
        if run_context.original_args().cur_step_num == self.step:
            run_context.request_stop()


def trained(epochs: int, **changes: Any) -> Model:
    """Seeded and trained in one go: dropout draws from the stream that the seed begins."""
    model = make_model(**changes)
    model.train(epochs, make_loader())
    return model


def test_hooks_come_in_mindspores_order() -> None:
    recorder = Recorder()
    make_model().train(2, make_loader(batch_size=12), recorder)
    assert recorder.calls == [
        ("on_train_begin", 1, 0),
        ("on_train_epoch_begin", 1, 0),
        ("on_train_step_begin", 1, 1),
        ("on_train_step_end", 1, 1),
        ("on_train_step_begin", 1, 2),
        ("on_train_step_end", 1, 2),
        ("on_train_epoch_end", 1, 2),
        ("on_train_epoch_begin", 2, 2),
        ("on_train_step_begin", 2, 3),
        ("on_train_step_end", 2, 3),
        ("on_train_step_begin", 2, 4),
        ("on_train_step_end", 2, 4),
        ("on_train_epoch_end", 2, 4),
        ("on_train_end", 2, 4),
    ]


def test_request_stop_ends_normally_after_the_step() -> None:
    recorder = Recorder()
    model = make_model()
    model.train(5, make_loader(), [StopAt(8), recorder])
    assert recorder.calls[-3:] == [
        ("on_train_step_end", 2, 8),
        ("on_train_epoch_end", 2, 8),
        ("on_train_end", 2, 8),
    ]
    assert model.position.step == 8


def test_it_does_what_a_plain_loop_does() -> None:
    model = make_model()
    model.train(2, make_loader())
    plain = make_model()
    loader, network = make_loader(), plain.network
    network.train()
    for _ in range(2):
        for x, y in loader:
            plain.optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            plain.optimizer.step()
            plain.lr_scheduler.step()
    assert same(weights(model), weights(plain))


def test_accumulation_divides_the_last_window_by_its_true_number() -> None:
    # Without dropout and BatchNorm a window of 4 batches of 4 is one batch of 16; the last window has 2 of them.
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3).double()

    class Plain(Points):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.x[index].double(), self.y[index]

    found = []
    for batch_size, grad_accum in ((4, 4), (16, 1)):
        model = make_model(network=network(), grad_accum=grad_accum)
        recorder = Recorder()
        model.train(2, DataLoader(Plain(), batch_size=batch_size), recorder)
        assert recorder.calls[-1] == ("on_train_end", 2, 4)
        found.append(weights(model))
    assert torch.allclose(found[0]["weight"], found[1]["weight"], rtol=0, atol=1e-12)


def test_scheduler_per_epoch_and_plateau() -> None:
    model = make_model(lr_scheduler_interval="epoch")
    model.train(6, make_loader())
    assert model.lr_scheduler.last_epoch == 6
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=10.0, threshold_mode="abs")
    model = Model(network, nn.CrossEntropyLoss(), optimizer, lr_scheduler=plateau, lr_scheduler_interval="epoch")
    model.train(3, make_loader())
    assert 0 < plateau.best < 10
    with pytest.raises(UsageError, match="lr_scheduler_interval"):
        Model(network, nn.CrossEntropyLoss(), optimizer, lr_scheduler=plateau)


def test_a_skipped_update_steps_no_scheduler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    class Burst(nn.Module):
        calls = 0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            factor = float("inf") if self.calls == 2 else 1.0
            return nn.functional.cross_entropy(outputs, targets) * factor

    model = make_model(loss_fn=Burst(), grad_scaler=scaler)
    model.train(1, make_loader())
    assert model.lr_scheduler.last_epoch == 5
    assert model.position.step == 6
    assert scaler.get_scale() == 1.0


class Own(Model):
    def train_step(self, batch: Any) -> Tensor:
        x, y = batch
        self.optimizer.zero_grad()
        loss: Tensor = self.loss_fn(self.network(x), y)  # type: ignore[misc]
        loss.backward()
        self.optimizer.step()
        return loss


def own_function(model: Any, batch: Any) -> Tensor:
    return Own.train_step(model, batch)


class OwnCell(TrainOneStep):
    def compute_loss(self, batch: Any) -> Tensor:
        x, y = batch
        assert self.model.loss_fn is not None
        return self.model.loss_fn(self.model.network(x), y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("changes", [{"kind": Own}, {"train_step": own_function}, {"train_step": OwnCell}])
def test_a_step_of_ones_own_trains_the_same(changes: dict[str, Any]) -> None:
    model, stock = trained(2, **changes), trained(2)
    assert same(weights(model), weights(stock))
    assert model.lr_scheduler.last_epoch == 12


def test_a_network_that_returns_its_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_network()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.inner(x), y)}

    model = make_model(network=WithLoss(), loss_fn=None, metrics="loss")
    model.train(1, make_loader())
    assert model.eval(make_loader())["loss"] > 0


def test_eval_counts_every_sample_once_and_disturbs_nothing() -> None:
    model = make_model(metrics={"accuracy", "loss"})
    model.network.train()
    before, stream = weights(model), torch.get_rng_state()
    found = model.eval(DataLoader(Points(), batch_size=5, shuffle=True))
    assert torch.equal(torch.get_rng_state(), stream)
    assert same(weights(model), before)
    assert model.network.training
    assert set(found) == {"accuracy", "loss"}
    assert (found["accuracy"] * 24) == pytest.approx(round(found["accuracy"] * 24))


@pytest.mark.parametrize("saving", [[], [ExceptionCheckpoint(directory="out")]], ids=["unguarded", "guarded"])
def test_eval_on_the_training_loader_in_mid_epoch_disturbs_nothing(saving: list[Callback]) -> None:
    straight, losses = trained(2), list[float]()
    model, loader = make_model(), make_loader()

    class Mid(Callback):
        def on_train_step_end(self, run_context: RunContext) -> None:
            losses.append(model.eval(loader)["loss"])

    model.train(2, loader, [*saving, Mid()])
    assert same(weights(model), weights(straight)) and len(set(losses)) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer"),
        ({"train_step": own_function, "grad_accum": 2}, "grad_accum=2"),
        ({"lr_scheduler_interval": "batch"}, "lr_scheduler_interval"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Model(**{"network": make_network(), **arguments})


def test_train_refuses_what_cannot_work() -> None:
    model = make_model()
    for epochs in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="epochs"):
            model.train(epochs, make_loader())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="without an optimizer"):
        Model(make_network(), nn.CrossEntropyLoss()).train(1, make_loader())
    with pytest.raises(UsageError, match="make an object"):
        model.train(1, make_loader(), [StopAt])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="not a Callback"):
        model.train(1, make_loader(), [print])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="callbacks=3"):
        model.train(1, make_loader(), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs a checkpoint callback"):
        model.train(1, make_loader(), resume="somewhere")
    with pytest.raises(UsageError, match="without targets"):
        model.train(1, [torch.zeros(2, 4)])
