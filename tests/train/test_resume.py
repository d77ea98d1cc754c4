"""`Model` on the real guard, in one process: stop at any step, run the same again, end with the same weights."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mindx_elastic.terminating_message
from mindx_elastic.errors import GracefulExit, UsageError
from mindx_elastic.guard.active import entered
from mindx_elastic.persist.format import read_header
from mindx_elastic.train import (
    Callback,
    CheckpointConfig,
    ExceptionCheckpoint,
    Model,
    ModelCheckpoint,
    OnRequestExit,
    RunContext,
    TimeMonitor,
)
from tests.train.small_job import Points, make_loader, make_model, make_network, same, weights


class Counter(Callback):
    """Counts steps; its start value is set in a hook, which must not undo a resume."""

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[float] = []

    def on_train_begin(self, run_context: RunContext) -> None:
        self.steps = 0
        self.losses = []

    def on_train_step_end(self, run_context: RunContext) -> None:
        self.steps += 1
        self.losses.append(run_context.original_args().net_outputs.item())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.losses = state["steps"], state["losses"]


class At(Callback):
    """Does something at one step of one process."""

    def __init__(self, step: int, action: Any, hook: str = "on_train_step_end") -> None:
        self.step, self.action, self.done = step, action, False
        setattr(self, hook, self._act)

    def _act(self, run_context: RunContext) -> None:
        if run_context.original_args().cur_step_num == self.step and not self.done:
            self.done = True
            self.action()


def sigterm(number: int = signal.SIGTERM) -> None:
    """Signal this process and wait until the stop step is agreed on: it is the coming boundary."""
    stopper = entered[0].stopper
    os.kill(os.getpid(), number)
    while stopper.agreed_step is None:
        time.sleep(0.001)


class Broken(Exception):
    pass


def explode() -> None:
    raise Broken("on purpose")


def train(callbacks: list[Callback], *, epochs: int = 3, loader: Any = None, **changes: Any) -> tuple[Model, Counter]:
    model, counter = make_model(**changes), Counter()
    model.train(epochs, loader or make_loader(), [*callbacks, counter])
    return model, counter


def stop_and_resume(action: Any, step: int, hook: str = "on_train_step_end", **changes: Any) -> tuple[Model, Counter]:
    """Interrupted once, then run again with the same arguments."""
    with pytest.raises((GracefulExit, Broken)):
        train([ExceptionCheckpoint(directory="out"), At(step, action, hook)], **changes)
    return train([ExceptionCheckpoint(directory="out")], **changes)


class MeanLoss(Callback):
    """As people write it: nothing says that its sum must survive a restart."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0
        self.means: list[float] = []

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self.total, self.count = 0.0, 0

    def on_train_step_end(self, run_context: RunContext) -> None:
        self.total += run_context.original_args().net_outputs.item()
        self.count += 1

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self.means.append(self.total / self.count)


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_mean_over_the_epochs_steps_stopped_behind_the_last_of_them(epoch: int) -> None:
    whole, every = MeanLoss(), []
    reference, _ = train([ExceptionCheckpoint(directory="whole"), whole])
    assert len(whole.means) == 3
    for resumed in (False, True):
        mean = MeanLoss()
        every.append(mean)
        if resumed:
            model, _ = train([ExceptionCheckpoint(directory="out"), mean])
        else:
            with pytest.raises(GracefulExit):
                train([ExceptionCheckpoint(directory="out"), At(6 * epoch, sigterm), mean])
    assert same(weights(model), weights(reference))
    assert [value for mean in every for value in mean.means] == whole.means


class MultiOptimizer(Model):
    """Two optimizers, one of them for a module that only this class knows."""

    def __init__(self, network: nn.Module, **arguments: Any) -> None:
        super().__init__(network, **arguments)
        self.head = nn.Linear(3, 3)
        self.head_optimizer = torch.optim.Adam(self.head.parameters(), lr=0.01)

    def train_step(self, batch: Any) -> Tensor:
        x, y = batch
        assert self.loss_fn is not None
        loss: Tensor = self.loss_fn(self.head(self.network(x)), y)
        for optimizer in (self.optimizer, self.head_optimizer):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (self.optimizer, self.head_optimizer):
            optimizer.step()
        return loss


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_accum": 4},
        {"amp": True},
        {"kind": MultiOptimizer},
        {"lr_scheduler_interval": "epoch"},
        {"max_grad_norm": 0.5},
        {"metrics": {"accuracy", "loss"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sigterm_with(changes: dict[str, Any]) -> None:
    straight, counter = train([], **changes)
    resumed, again = stop_and_resume(sigterm, 4, **changes)
    assert same(weights(resumed), weights(straight))
    assert again.losses == counter.losses
    if isinstance(resumed, MultiOptimizer) and isinstance(straight, MultiOptimizer):
        assert same(resumed.head.state_dict(), straight.head.state_dict())


class EvalEachEpoch(Callback):
    def __init__(self, during: Any = None) -> None:
        self.during, self.results = during, []  # type: ignore[var-annotated]

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        model = run_context.original_args().model
        self.results.append(model.eval(make_loader(batch_size=2, shuffle=False), self.during)["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"results": list(self.results)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.results = state["results"]


class SigtermAtBatch(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_eval_step_end(self, run_context: RunContext) -> None:
        self.batch -= 1
        if self.batch == 0:
            sigterm()


def test_sigterm_during_an_evaluation_repeats_it_after_the_resume() -> None:
    ends = EvalEachEpoch()
    straight, _ = train([ends])
    with pytest.raises(GracefulExit) as leaving:
        train([ExceptionCheckpoint(directory="out"), EvalEachEpoch(SigtermAtBatch(16))])
    assert leaving.value.step == 12
    again = EvalEachEpoch()
    resumed, _ = train([ExceptionCheckpoint(directory="out"), again])
    assert same(weights(resumed), weights(straight))
    assert again.results == ends.results


def test_a_finished_training_is_not_trained_further() -> None:
    first, _ = train([ModelCheckpoint(directory="out")])
    second, counter = train([ModelCheckpoint(directory="out")])
    assert second.resumed_from_step == 18
    assert same(weights(first), weights(second))
    assert counter.steps == 18
    longer, counter = train([ModelCheckpoint(directory="out")], epochs=4)
    assert counter.steps == 24
    straight, _ = train([], epochs=4)
    assert same(weights(longer), weights(straight))


def test_two_callbacks_that_want_the_same_breakpoint_file_write_it_once() -> None:
    config = CheckpointConfig(save_checkpoint_steps=0, exception_save=True)
    callbacks = [
        ModelCheckpoint("resnet", "out", config),
        mindx_elastic.terminating_message.ExceptionCheckpoint(prefix="resnet", directory="out", config=config),
    ]
    with pytest.raises(Broken):
        train([*callbacks, At(8, explode)])
    assert [path.name for path in Path("out").glob("*.safetensors")] == ["resnet-2_2_breakpoint.safetensors"]


def test_two_model_checkpoints_need_two_prefixes() -> None:
    with pytest.raises(UsageError, match="different prefixes"):
        train([ModelCheckpoint(directory="out"), ModelCheckpoint(directory="out")])
    train([ModelCheckpoint("a", "out"), ModelCheckpoint("b", "out")], epochs=1)


@pytest.mark.parametrize(("grad_accum", "step"), [(1, 8), (1, 6), (4, 2)])
def test_epoch_begin_runs_once_and_epoch_end_once_per_epoch(
    monkeypatch: pytest.MonkeyPatch, grad_accum: int, step: int
) -> None:
    monkeypatch.setenv("MINDX_OVERLAP", "1")  # the step that is played on is none of another epoch
    calls: list[str] = []

    class Note(Callback):
        def on_train_epoch_begin(self, run_context: RunContext) -> None:
            calls.append(f"begin {run_context.original_args().cur_epoch_num}")

        def on_train_epoch_end(self, run_context: RunContext) -> None:
            calls.append(f"end {run_context.original_args().cur_epoch_num}")

    with pytest.raises(GracefulExit):
        train([ExceptionCheckpoint(directory="out"), Note(), At(step, sigterm)], grad_accum=grad_accum)
    model, _ = train([ExceptionCheckpoint(directory="out"), Note()], grad_accum=grad_accum)
    assert (model.position.epoch, model.position.step_in_epoch) == (3, 6 if grad_accum == 1 else 2)
    assert calls == ["begin 1", "end 1", "begin 2", "end 2", "begin 3", "end 3"]


def test_resume_never_and_resume_path() -> None:
    straight, _ = train([])
    with pytest.raises(GracefulExit):
        train([ExceptionCheckpoint(directory="out"), At(8, sigterm)])
    [path] = Path("out").glob("*.safetensors")
    model = make_model()
    model.train(3, make_loader(), ExceptionCheckpoint(directory="elsewhere"), resume=path)
    assert model.resumed_from_step is not None
    assert same(weights(model), weights(straight))
    model = make_model()
    model.train(3, make_loader(), ExceptionCheckpoint(directory="out"), resume="never")
    assert model.resumed_from_step is None
    assert same(weights(model), weights(straight))


def test_stateful_names_are_checked() -> None:
    for name in ("train", "callbacks", "model"):
        with pytest.raises(UsageError, match=name):
            make_model().train(1, make_loader(), ExceptionCheckpoint(directory="o"), stateful={name: nn.Linear(1, 1)})


class TestOnRequestExit:
    def test_flag_file(self, caplog: pytest.LogCaptureFixture) -> None:
        flag = Path("graceful_exit.json")
        callbacks: list[Callback] = [
            OnRequestExit(file_name="net", directory="out", config_file=flag, save_mindir=False, exit_code=0)
        ]
        caplog.set_level("INFO", "mindx_elastic")
        gate = _FlagAt(4, flag)
        with pytest.raises(GracefulExit) as leaving:
            train([*callbacks, gate], epochs=100_000)
        assert leaving.value.code == 0
        assert "Graceful exit is triggered, stop training." in caplog.text
        assert read_header(Path("out/net_train.safetensors")).info.kind == "request_exit"
        flag.unlink()
        epochs = -(-(leaving.value.step or 0) // 6) + 1
        _, counter = train(callbacks, epochs=epochs)
        assert counter.steps == 6 * epochs

    def test_signal_and_export(self, caplog: pytest.LogCaptureFixture) -> None:
        callbacks = [OnRequestExit(directory="out"), At(5, sigterm)]
        with pytest.raises(GracefulExit) as leaving:
            train([*callbacks])
        assert leaving.value.code == 143
        assert Path("out/Net_train.safetensors").is_file()
        exported = torch.export.load(Path("out/Net_train.pt2")).module()
        x = torch.randn(4, 4)
        model = make_model()
        model.train(1, make_loader(), OnRequestExit(directory="out"))
        assert exported(x).shape == (4, 3)

    def test_a_network_that_cannot_be_exported_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = make_network()

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x) * (2.0 if x.sum().item() > 0 else 1.0)  # type: ignore[no-any-return]

        with pytest.raises(GracefulExit) as leaving:
            train([OnRequestExit(directory="out"), At(5, sigterm)], network=Odd())
        assert leaving.value.code == 143
        assert "could not be exported" in caplog.text
        assert sorted(p.name for p in Path("out").iterdir()) == [
            "Net_train.safetensors",
            "events.jsonl",
            "strategy.proto",
        ]

    def test_no_time_left_means_no_export(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model()
        with pytest.raises(GracefulExit):
            model.train(3, make_loader(), [OnRequestExit(directory="out"), At(5, sigterm)], grace_s=2.0)
        assert "is not exported: only" in caplog.text

    def test_save_ckpt_false_leaves_without_a_file(self) -> None:
        with pytest.raises(GracefulExit):
            train([OnRequestExit(save_ckpt=False, save_mindir=False, directory="out"), At(5, sigterm)])
        assert not list(Path("out").glob("*.safetensors"))

    def test_in_an_evaluation_by_itself(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model()
        with pytest.raises(GracefulExit) as leaving, caplog.at_level("INFO", "mindx_elastic"):
            model.eval(make_loader(batch_size=1), [OnRequestExit(directory="out"), SigtermAtBatch(16)])
        assert "the weights of the evaluation saved in" in caplog.text and "step 0" not in caplog.text
        assert leaving.value.code == 143
        header = read_header(Path("out/Net_eval.safetensors"))
        assert (header.info.kind, header.info.resumable) == ("eval", False)
        assert [name for name in header.entries if name.startswith("model.")]
        assert not [name for name in header.entries if name.startswith("optimizer")]

    def test_the_environment_switches_the_flag_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert OnRequestExit().flag_file() is None
        assert OnRequestExit(config_file="f.json").flag_file() == Path("f.json")
        monkeypatch.setenv("MS_ENABLE_GRACEFUL_EXIT", "1")
        assert OnRequestExit(directory="d").flag_file() == Path("d/graceful_exit.json")
        assert OnRequestExit(config_file="f.json").flag_file() == Path("f.json")
        monkeypatch.setenv("MS_ENABLE_GRACEFUL_EXIT", "0")
        assert OnRequestExit(config_file="f.json").flag_file() is None

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("save_ckpt", 1),
            ("file_name", "a/b"),
            ("config_file", 3),
            ("sig", signal.SIGKILL),
            ("exit_code", 256),
        ],
    )
    def test_wrong_arguments(self, name: str, value: Any) -> None:
        with pytest.raises(UsageError, match=name):
            OnRequestExit(**{name: value})


class _FlagAt(Callback):
    """Asks for the graceful exit from step `step` on, as an operator would: by writing the file."""

    def __init__(self, step: int, flag: Path) -> None:
        self.step, self.flag = step, flag

    def on_train_step_end(self, run_context: RunContext) -> None:
        if run_context.original_args().cur_step_num == self.step:
            self.flag.write_text('{"GracefulExit": 1}')


@pytest.mark.parametrize("wrong", [{"prefix": "a/b"}, {"directory": ""}, {"config": {"save_checkpoint_steps": 1}}])
def test_wrong_callback_arguments(wrong: dict[str, Any]) -> None:
    for kind in (ExceptionCheckpoint, ModelCheckpoint):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            kind(**wrong)


def test_saved_network_must_be_the_trained_one() -> None:
    model = make_model()
    good = CheckpointConfig(saved_network=model.network)
    model.train(1, make_loader(), ModelCheckpoint(directory="out", config=good))
    bad = CheckpointConfig(saved_network=nn.Linear(1, 1))
    with pytest.raises(UsageError, match="saved_network"):
        make_model().train(1, make_loader(), ModelCheckpoint(directory="out2", config=bad))


class EvalEachSecondStep(Callback):
    """Validates in mid-epoch. `seen`: what was noted outside of any state, over all processes of a test."""

    def __init__(self, seen: list[tuple[int, float]], during: Callback | None = None, fail_at: int = 0) -> None:
        self.seen, self.during, self.fail_at, self.calls = seen, during, fail_at, 0

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        self.calls += 1
        if params.cur_step_num % 2 == 0:
            loader = DataLoader(Points(), batch_size=2, shuffle=True)  # draws its base seed from torch's stream
            loss = params.model.eval(loader, self.during)["loss"]
            if params.cur_step_num == self.fail_at:
                explode()
            self.seen.append((params.cur_step_num, loss))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


# Four evaluations of 12 batches come before that of step 8: a stop before, in and after it.
@pytest.mark.parametrize("moment", ["before", "in", "after"])
def test_an_evaluation_in_mid_epoch_comes_exactly_once(moment: str) -> None:
    whole: list[tuple[int, float]] = []
    straight, counter = train([EvalEachSecondStep(whole)])
    seen: list[tuple[int, float]] = []
    at = {"before": At(8, sigterm, "on_train_step_begin"), "in": Callback(), "after": At(9, sigterm)}[moment]
    during = SigtermAtBatch(3 * 12 + 5) if moment == "in" else None
    with pytest.raises(GracefulExit) as leaving:
        train([ExceptionCheckpoint(directory="out"), at, EvalEachSecondStep(seen, during)])
    assert leaving.value.step == (9 if moment == "after" else 8)
    last = EvalEachSecondStep(seen)
    resumed, again = train([ExceptionCheckpoint(directory="out"), last])
    assert same(weights(resumed), weights(straight))
    assert seen == whole
    assert (last.calls, again.losses) == (18, counter.losses)


def test_hooks_that_were_cut_off_run_again_from_the_state_before_them(caplog: pytest.LogCaptureFixture) -> None:
    """A callback fails after its evaluation: the whole step's hooks are done again, no counter is one short."""
    whole: list[tuple[int, float]] = []
    straight, counter = train([EvalEachSecondStep(whole), TimeMonitor()])
    seen: list[tuple[int, float]] = []
    with pytest.raises(Broken):
        train([ExceptionCheckpoint(directory="out"), EvalEachSecondStep(seen, fail_at=8)])
    last = EvalEachSecondStep(seen)
    with caplog.at_level("INFO", "mindx_elastic"):
        resumed, again = train([ExceptionCheckpoint(directory="out"), last])
    assert resumed.resumed_from_step == 8
    assert same(weights(resumed), weights(straight))
    assert seen == whole
    assert (last.calls, again.steps, again.losses) == (18, 18, counter.losses)
    assert "step 8: its on_train_step_end callbacks had not ended" in caplog.text


def test_hooks_that_were_made_good_are_not_made_good_twice() -> None:
    """A stop right after they have run again writes the step again: the old file still says that they are missing."""
    whole: list[tuple[int, float]] = []
    straight, _ = train([EvalEachSecondStep(whole)])
    seen: list[tuple[int, float]] = []
    with pytest.raises(Broken):
        train([ExceptionCheckpoint(directory="out"), EvalEachSecondStep(seen, fail_at=8)])
    with pytest.raises(GracefulExit) as leaving:
        train([ExceptionCheckpoint(directory="out"), EvalEachSecondStep(seen), At(9, explode, "on_train_step_begin"),
               At(8, sigterm)])  # fmt: skip
    last = EvalEachSecondStep(seen)
    resumed, again = train([ExceptionCheckpoint(directory="out"), last])
    assert leaving.value.step == 8
    assert same(weights(resumed), weights(straight))
    assert seen == whole and (last.calls, again.steps) == (18, 18)
