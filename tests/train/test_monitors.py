from __future__ import annotations

import pytest
import torch

from mindx_elastic.train import LossMonitor, TimeMonitor
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
