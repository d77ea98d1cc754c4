"""An evaluation, inside a training or by itself, that can be stopped like a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindx_elastic.agreement.connect import open_exchange
from mindx_elastic.agreement.gather import all_or_none
from mindx_elastic.capture.rng import kept_rng
from mindx_elastic.config import RankInfo
from mindx_elastic.data.position import num_batches
from mindx_elastic.guard.guard import Guard
from mindx_elastic.train.callbacks import Callback, CallbackList, CallbackParams, RunContext
from mindx_elastic.train.loop import GuardPort, Unguarded
from mindx_elastic.train.parallel import all_sum
from mindx_elastic.train.policies import check_alike
from mindx_elastic.train.request_exit import OnRequestExit
from mindx_elastic.train.step import ModelParts, batch_size, detach, evaluation_mode, move_batch

__all__ = ["evaluate", "open_eval_guard"]


def evaluate(
    model: ModelParts, loader: Any, callbacks: CallbackList, guard: GuardPort, *, rank: int, world_size: int
) -> dict[str, Any]:
    """Compute the metrics over `loader`. Training thread.

    Restores the network's mode and all random streams afterwards: an evaluation between two steps must not change the
    training.
    """
    params = CallbackParams(
        mode="eval", model=model, network=model.bare_network, eval_network=model.eval_network, loss_fn=model.loss_fn,
        optimizer=model.optimizer, list_callback=callbacks, device_number=world_size, rank=rank, valid_dataset=loader,
        batch_num=num_batches(loader), cur_step_num=0, cur_step_in_epoch=0, cur_epoch_num=1, epoch_num=1,
        net_outputs=None, metrics={},
    )  # fmt: skip
    context = RunContext(params)
    metrics = model.metrics
    with guard.outside_step(), evaluation_mode(model.bare_network), kept_rng(), torch.no_grad():
        callbacks.call("on_eval_begin", context)
        callbacks.call("on_eval_epoch_begin", context)
        metrics.clear()
        for index, batch in enumerate(loader, start=1):
            guard.poll()
            params.update(cur_step_num=index, cur_step_in_epoch=index)
            callbacks.call("on_eval_step_begin", context)
            loss, outputs, targets = model.eval_step(move_batch(batch, model.device))
            metrics.add(loss, outputs, targets, batch_size(batch))
            params.net_outputs = detach((loss, outputs, targets))
            callbacks.call("on_eval_step_end", context)
            if context.get_stop_requested() and world_size == 1:
                break
        guard.poll()  # not into the all-reduce when the others have left
        params.metrics = metrics.results(all_sum if world_size > 1 else None)
        callbacks.call("on_eval_epoch_end", context)
        callbacks.call("on_eval_end", context)
    return dict(params.metrics)


def open_eval_guard(
    model: ModelParts, callbacks: Sequence[Callback], loader: Any, *, rank: int, world_size: int
) -> GuardPort:
    """A guard for an evaluation outside a training when its callbacks include an OnRequestExit, else `Unguarded`.

    Main thread, all ranks together. Raises UsageError where only some ranks were given one.
    """
    asked = [c for c in callbacks if isinstance(c, OnRequestExit)]
    if world_size > 1:
        exchange = open_exchange(RankInfo(rank=rank, world_size=world_size, attempt=RankInfo.from_env().attempt))
        try:
            with all_or_none(exchange):
                check_alike(asked, exchange)
        finally:
            exchange.close()
    policies = [c.eval_policy() for c in asked]
    if not policies:
        return Unguarded(loader, rank=rank, world_size=world_size)
    return Guard(directory=policies[0].directory, model=model.bare_network, policies=policies, resume="never")
