"""Progress on the screen: MindSpore's monitors."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from mindx_elastic.data.position import whole_number
from mindx_elastic.train.callbacks import Callback, RunContext
from mindx_elastic.train.step import loss_of

__all__ = ["LossMonitor", "TimeMonitor", "loss_value"]


class LossMonitor(Callback):
    """Prints ``epoch: 1 step: 10, loss is 0.53`` every `per_print_times` steps of the whole training, on rank 0.

    The step is that inside the epoch, the loss that of rank 0's last step. Each print waits for the device. Unlike
    MindSpore's, it does not end the training at a loss that is nan or infinite: with a gradient scaler that is normal.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        self.per_print_times = whole_number("per_print_times", per_print_times, low=1)

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        if params.rank == 0 and params.cur_step_num % self.per_print_times == 0:
            loss = loss_value(params.net_outputs)
            print(f"epoch: {params.cur_epoch_num} step: {params.cur_step_in_epoch}, loss is {loss}", flush=True)


class TimeMonitor(Callback):
    """Prints ``epoch time: 812.1 ms, per step time: 20.3 ms`` at the end of each epoch, on rank 0.

    `data_size`: steps to divide by; None: those that this process has made in the epoch.
    """

    def __init__(self, data_size: int | None = None) -> None:
        self.data_size = None if data_size is None else whole_number("data_size", data_size, low=1)
        self._began: float | None = None
        self._steps = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        self._start()

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._start()

    def on_train_step_end(self, run_context: RunContext) -> None:
        self._steps += 1

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        if run_context.original_args().rank != 0 or self._began is None or not self._steps:
            return
        took_ms = (time.perf_counter() - self._began) * 1000
        step_ms = took_ms / (self.data_size or self._steps)
        print(f"epoch time: {took_ms:.1f} ms, per step time: {step_ms:.1f} ms", flush=True)

    def _start(self) -> None:
        self._began, self._steps = time.perf_counter(), 0


def loss_value(outputs: Any) -> float:
    """The loss in what a step returned; nan where there is none."""
    loss = loss_of(outputs)
    if isinstance(loss, torch.Tensor):
        return float(loss.detach().double().mean().item())
    return math.nan if loss is None else float(loss)
