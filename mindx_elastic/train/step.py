"""One training step: the default one, and the place where a custom one is put in.

`TrainOneStep` is the counterpart of MindSpore's ``TrainOneStepCell``. Whatever a step does, the boundary, the
scheduler, the callbacks and the stop stay with the loop, so a custom step keeps every guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.errors import UsageError
from mindx_elastic.train.batch import network_arguments, split_batch

if TYPE_CHECKING:
    from typing_extensions import Self

    from mindx_elastic.train.model import Model

__all__ = [
    "CustomStep",
    "OptimizerWatch",
    "TrainOneStep",
    "check_loss",
    "detach",
    "forward",
    "loss_of_output",
]


class TrainOneStep:
    """Forward, backward and update over one accumulation window. Training thread only.

    Subclass it to change a part (`compute_loss`, `backward`, `update`) and pass the class as ``Model(train_step=...)``.
    """

    window = True
    """Takes all batches of an accumulation window at once."""

    on_loss: Callable[[Tensor | None], None] | None = None
    """Set by the loop: is told the window's loss right before the update."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, batches: Sequence[Any]) -> Tensor | None:
        """One update from the micro-batches of a window (on the device). Returns the mean of their losses, detached."""
        for optimizer in self.model.optimizers:
            optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for index, batch in enumerate(batches):
            with self._no_sync(last=index == len(batches) - 1):
                loss = self.compute_loss(batch)
                check_loss(loss)
                if len(batches) > 1:
                    loss = loss / len(batches)
                self.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        if self.on_loss is not None:
            self.on_loss(total)
        self.update()
        return total

    def compute_loss(self, batch: Any) -> Tensor:
        """The loss of one batch: a scalar with a graph."""
        return self.model.forward(batch)[0]

    def backward(self, loss: Tensor) -> None:
        """Backward, through the gradient scaler where there is one."""
        scaler = self.model.grad_scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def update(self) -> None:
        """Clip, step every optimizer, update the gradient scaler."""
        model, scaler = self.model, self.model.grad_scaler
        if model.max_grad_norm is not None:
            for optimizer in model.optimizers if scaler is not None else ():
                scaler.unscale_(optimizer)
            learned = [p for o in model.optimizers for group in o.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(learned, model.max_grad_norm)
        for optimizer in model.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()

    def _no_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """DDP reduces gradients only in the window's last backward."""
        network = self.model.network
        if last or not isinstance(network, DistributedDataParallel):
            return nullcontext()
        return network.no_sync()


class CustomStep:
    """A user's ``step(batch) -> loss or None``, called for each batch; it updates by itself."""

    window = False

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, batches: Sequence[Any]) -> Any:
        return detach(self.function(batches[0]))


class OptimizerWatch:
    """Notes whether an optimizer has stepped: a custom step may accumulate, a gradient scaler may skip."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._handles: list[Any] = []
        self.stepped = False

    def __enter__(self) -> Self:
        self._handles = [o.register_step_post_hook(self._note) for o in self._optimizers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> bool:
        """Whether one has stepped since the last call."""
        stepped, self.stepped = self.stepped, False
        return stepped

    def _note(self, *_: Any) -> None:
        self.stepped = True


def loss_of_output(output: Any) -> Tensor:
    """The loss that a network returned by itself: a tensor, ``.loss``, ``["loss"]``, or the first item of a tuple."""
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise UsageError(
            f"loss_fn is None and the network returned a {type(output).__name__} without a loss; give Model "
            "a loss_fn, let the network return its loss, or write a train_step"
        )
    return found


def forward(model: Model, network: Any, batch: Any) -> tuple[Tensor, Any, Any]:
    """(loss, outputs, targets) of one batch, under autocast when `Model` was given ``amp``."""
    with model.autocast():
        if model.loss_fn is None:
            args, kwargs = network_arguments(batch, takes_targets=True)
            outputs = network(*args, **kwargs)
            return loss_of_output(outputs), outputs, None
        args, kwargs, targets = split_batch(batch)
        outputs = network(*args, **kwargs)
        return model.loss_fn(outputs, targets), outputs, targets


def check_loss(loss: object) -> None:
    """Raise UsageError unless `loss` is a scalar tensor."""
    if not isinstance(loss, Tensor):
        raise UsageError(f"the loss is a {type(loss).__name__}; loss_fn must return a scalar tensor")
    if loss.numel() != 1:
        raise UsageError(f"the loss has shape {list(loss.shape)}; loss_fn must return a scalar (use reduction='mean')")
    if not loss.requires_grad:
        raise UsageError("the loss does not depend on any parameter that learns; check the network and loss_fn")


def detach(outputs: Any) -> Any:
    """Cut the graph off, so that what callbacks keep does not hold the activations."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(detach(value) for value in outputs)
    if isinstance(outputs, dict):
        return {key: detach(value) for key, value in outputs.items()}
    return outputs
