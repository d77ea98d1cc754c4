from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindx_elastic.train import LossMonitor, TimeMonitor, monitors
from mindx_elastic.train.callbacks import CallbackParams, RunContext
from tests.train.small_job import make_loader, make_model


def test_loss_monitor_and_time_monitor_print(capsys: pytest.CaptureFixture[str]) -> None:
    make_model().train(1, make_loader(), [LossMonitor(3), TimeMonitor()])
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.partition(",")[0] for line in lines[:2]] == ["epoch: 1 step: 3", "epoch: 1 step: 6"]
    assert lines[2].startswith("epoch time: ")
    assert captured.err == ""


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    context = RunContext(CallbackParams(rank=1, cur_step_num=1, cur_epoch_num=1, net_outputs=torch.ones(())))
    LossMonitor().on_train_step_end(context)
    monitor = TimeMonitor()
    monitor.on_train_epoch_begin(context)
    monitor.on_train_step_end(context)
    monitor.on_train_epoch_end(context)
    assert capsys.readouterr().out == ""


def test_each_epoch_has_its_own_time_and_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 1.0, 5.0, 5.3))
    monkeypatch.setattr(monitors, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monitor, context = TimeMonitor(), RunContext(CallbackParams(rank=0))
    for begin, steps in ((monitor.on_train_begin, 2), (monitor.on_train_epoch_begin, 1)):
        begin(context)
        for _ in range(steps):
            monitor.on_train_step_end(context)
        monitor.on_train_epoch_end(context)
    assert capsys.readouterr().out.splitlines() == [
        "epoch time: 1000.0 ms, per step time: 500.0 ms",
        "epoch time: 300.0 ms, per step time: 300.0 ms",
    ]


def test_the_loss_may_be_a_number_none_or_one_of_each_sample() -> None:
    assert monitors.loss_value(torch.tensor([1.0, 2.0])) == 1.5
    assert monitors.loss_value(2) == 2.0
    assert monitors.loss_value(None) != monitors.loss_value(None), "nan"
