"""One training step: what it works on, what it does, and what a batch is to it.

`TrainOneStep` is the counterpart of MindSpore's ``TrainOneStepCell``. Whatever a step does, the boundary, the
scheduler, the callbacks and the stop stay with the loop, so a custom step keeps every guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mindx_elastic.capture.components import unwrap_module
from mindx_elastic.config import RankInfo
from mindx_elastic.core.position import Position
from mindx_elastic.data.position import whole_number
from mindx_elastic.data.sampler import window_of
from mindx_elastic.errors import UsageError
from mindx_elastic.train.metrics import Metrics, MetricSet
from mindx_elastic.train.parallel import choose_device, without_ddp

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CustomStep",
    "ModelParts",
    "OptimizerWatch",
    "TrainOneStep",
    "batch_size",
    "detach",
    "evaluation_mode",
    "forward",
    "loss_of",
    "move_batch",
    "split_batch",
]


class ModelParts:
    """The network with its loss, optimizers, schedulers and metrics: what a step, the loop and an evaluation work on.

    `Model`, which describes the arguments, adds `train` and `eval`.
    """

    resumed_from_step: int | None = None
    """Step of the checkpoint that the last `train` went on from; None on a fresh start."""

    _guard: Any = None
    _last_position = Position()

    def __init__(
        self,
        network: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Any = None,
        metrics: Metrics = None,
        lr_scheduler: Any = None,
        grad_scaler: Any = None,
        device: str | torch.device | None = None,
        *,
        grad_accum: int = 1,
        amp: bool | torch.dtype = False,
        train_step: Callable[[Any, Any], Any] | type[TrainOneStep] | None = None,
        max_grad_norm: float | None = None,
        lr_scheduler_interval: str = "step",
    ) -> None:
        not_ours = set(vars(self))  # a subclass may set attributes before it calls us
        if not isinstance(network, nn.Module):
            raise UsageError(f"network is a {type(network).__name__}; give a torch.nn.Module")
        if loss_fn is not None and not callable(loss_fn):
            raise UsageError(f"loss_fn is a {type(loss_fn).__name__}; give a function (outputs, targets) or None")
        self.ranks = RankInfo.from_env()
        self.network = network
        """What a custom step calls: the network, inside DDP when there are several ranks."""
        self.loss_fn = loss_fn
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.optimizers = _listed("optimizer", optimizer, (torch.optim.Optimizer,))
        self.lr_schedulers = _listed("lr_scheduler", lr_scheduler, (LRScheduler, ReduceLROnPlateau))
        self.lr_scheduler_interval = lr_scheduler_interval
        self.metrics = MetricSet(metrics if metrics is not None or loss_fn is None else "loss")
        self.grad_accum = whole_number("grad_accum", grad_accum, low=1)
        self.max_grad_norm = _norm_limit(max_grad_norm)
        self._asked_device = device is not None
        self.device = choose_device(device, network, self.ranks)
        self._autocast = _autocast_dtype(amp, self.device)
        if grad_scaler is None and self._autocast is torch.float16 and self.device.type == "cuda":
            grad_scaler = torch.amp.GradScaler(self.device.type)
        self.grad_scaler = grad_scaler
        self._own_step: Any = train_step if not isinstance(train_step, type) else None
        self.step = self._make_step(train_step)
        self._check_schedulers()
        self._own_names = frozenset(vars(self)) - not_ours | {"_own_names"}

    @property
    def position(self) -> Position:
        """The last boundary: of the training under way, else of the last one."""
        position: Position = self._last_position if self._guard is None else self._guard.position
        return position

    def accumulation(self, batches: int = 1) -> int:
        """For custom steps that accumulate: over how many batches, see `Guard.accumulation`."""
        if self._guard is not None:
            return int(self._guard.accumulation(batches))
        return window_of(whole_number("batches", batches, low=1), self.ranks.world_size)

    @property
    def bare_network(self) -> nn.Module:
        """The network as it was given, without DDP around it; save and hash the weights of this one."""
        return unwrap_module(self.network)

    @property
    def eval_network(self) -> nn.Module:
        """What an evaluation calls: the network without DDP, whose forward waits for the other ranks."""
        return without_ddp(self.network)

    def train_step(self, batch: Any) -> Any:
        """Override it for a custom step: forward, backward and update for one batch (on the device).

        Returns the loss.
        """
        raise NotImplementedError("the default step is TrainOneStep")

    def eval_step(self, batch: Any) -> tuple[Tensor | None, Any, Any]:
        """(loss or None, outputs, targets) of one batch of an evaluation; override it for other shapes of batches."""
        return forward(self, self.eval_network, batch)

    def forward(self, batch: Any) -> tuple[Tensor, Any, Any]:
        """(loss, outputs, targets) of one training batch, under autocast: a helper for custom steps."""
        return forward(self, self.network, batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision context that ``amp`` asked for."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def _make_step(self, train_step: Any) -> TrainOneStep | CustomStep:
        overridden = type(self).train_step is not ModelParts.train_step
        if train_step is not None and overridden:
            raise UsageError("train_step was given and the subclass overrides it too; keep one of the two")
        if isinstance(train_step, type):
            if not issubclass(train_step, TrainOneStep):
                raise UsageError(f"train_step={train_step.__name__} is a class that does not derive from TrainOneStep")
            return train_step(self)
        if train_step is None and not overridden:
            return TrainOneStep(self)
        if train_step is not None and not callable(train_step):
            raise UsageError(f"train_step={train_step!r}; give a function (model, batch) -> loss")
        if self.grad_accum != 1:
            raise UsageError(
                f"grad_accum={self.grad_accum} belongs to the default step; a custom train_step decides by itself when "
                "it updates (call optimizer.step() every so many batches)"
            )
        return CustomStep(self.train_step if train_step is None else lambda batch: train_step(self, batch))

    def _check_schedulers(self) -> None:
        if self.lr_scheduler_interval not in ("step", "epoch"):
            raise UsageError(f'lr_scheduler_interval={self.lr_scheduler_interval!r}; give "step" or "epoch"')
        if self.lr_scheduler_interval == "step" and any(isinstance(s, ReduceLROnPlateau) for s in self.lr_schedulers):
            raise UsageError(
                "ReduceLROnPlateau needs the mean of a whole epoch; pass "
                'lr_scheduler_interval="epoch", and it is given the epoch\'s mean training loss'
            )


def _listed(name: str, value: Any, kinds: tuple[type, ...]) -> list[Any]:
    items: Sequence[Any] = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        if not isinstance(item, kinds):
            raise UsageError(f"{name} is a {type(item).__name__}; give a torch {kinds[0].__name__}, or a list of them")
    return list(items)


def _norm_limit(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UsageError(f"max_grad_norm={value!r}; give a positive number, or None for no clipping")
    return float(value)


def _autocast_dtype(amp: bool | torch.dtype, device: torch.device) -> torch.dtype | None:
    if isinstance(amp, torch.dtype):
        if amp not in (torch.float16, torch.bfloat16):
            raise UsageError(f"amp={amp}; give torch.float16, torch.bfloat16, True or False")
        return amp
    if not isinstance(amp, bool):
        raise UsageError(f"amp={amp!r}; give True, False or a torch.dtype")
    if not amp:
        return None
    return torch.float16 if device.type == "cuda" else torch.bfloat16


# --- the steps ---


class TrainOneStep:
    """Forward, backward and update over one accumulation window. Training thread only.

    Subclass it to change a part (`compute_loss`, `backward`, `update`) and pass the class as ``Model(train_step=...)``.
    """

    window = True
    """Takes all batches of an accumulation window at once."""

    on_loss: Callable[[Tensor | None], None] | None = None
    """Set by the loop: called with the window's loss right before the update."""

    def __init__(self, model: ModelParts) -> None:
        self.model = model

    def __call__(self, batches: Sequence[Any]) -> Tensor | None:
        """One update from the micro-batches of a window (on the device). Returns the mean of their losses, detached."""
        for optimizer in self.model.optimizers:
            optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for index, batch in enumerate(batches):
            with self._no_sync(last=index == len(batches) - 1):
                loss = self.compute_loss(batch)
                _check_loss(loss)
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
    """Records whether an optimizer has stepped: a custom step may accumulate, a gradient scaler may skip."""

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


def loss_of(outputs: Any) -> Any:
    """The loss in what a network or a step has returned: a tensor or a number, ``.loss``, ``["loss"]``, or the first
    item of a tuple; None: there is none."""
    if isinstance(outputs, (Tensor, int, float)):
        return outputs
    found = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, (tuple, list)) and outputs:
        found = outputs[0]
    return found if isinstance(found, (Tensor, int, float)) else None


def forward(model: ModelParts, network: Any, batch: Any) -> tuple[Tensor, Any, Any]:
    """(loss, outputs, targets) of one batch, under autocast when `Model` was given ``amp``."""
    with model.autocast():
        args, kwargs, targets = split_batch(batch, takes_targets=model.loss_fn is None)
        outputs = network(*args, **kwargs)
        if model.loss_fn is None:
            if not isinstance(loss := loss_of(outputs), Tensor):
                raise UsageError(
                    f"loss_fn is None and the network returned a {type(outputs).__name__} without a loss; give Model "
                    "a loss_fn, let the network return its loss, or write a train_step"
                )
            return loss, outputs, None
        return model.loss_fn(outputs, targets), outputs, targets


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Put `network` into evaluation mode inside the block; afterwards each module has the mode that it had before."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _check_loss(loss: object) -> None:
    """Raise UsageError unless `loss` is a scalar tensor."""
    if not isinstance(loss, Tensor):
        raise UsageError(f"the loss is a {type(loss).__name__}; loss_fn must return a scalar tensor")
    if loss.numel() != 1:
        raise UsageError(f"the loss has shape {list(loss.shape)}; loss_fn must return a scalar (use reduction='mean')")
    if not loss.requires_grad:
        raise UsageError("the loss does not depend on any parameter that learns; check the network and loss_fn")


def detach(outputs: Any) -> Any:
    """Drop the graph, so that what callbacks keep does not hold the activations."""
    return _rebuilt(outputs, Tensor.detach)


# --- batches: ``(inputs..., targets)``, a dict, or one tensor ---


def move_batch(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; tuples, lists and dicts are rebuilt, other values kept."""
    return _rebuilt(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _rebuilt(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        made = {key: _rebuilt(item, change) for key, item in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuilt(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_rebuilt(item, change) for item in value)
    return value


def split_batch(batch: Any, *, takes_targets: bool = False) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(positional inputs, named inputs, targets) for ``loss_fn(network(*inputs, **named), targets)``.

    The last item of a tuple or list is the target; a dict goes in by name and is the target as a whole. With
    `takes_targets` (loss_fn=None) the whole batch goes in. Raises UsageError for a batch without targets.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if takes_targets:
        return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}, None
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return tuple(batch[:-1]), {}, batch[-1]
    raise UsageError(
        f"a batch is a {type(batch).__name__} without targets; the default step needs (inputs, targets). Let the "
        "data set give both, use loss_fn=None and a network that returns its loss, or write a train_step"
    )


def batch_size(batch: Any) -> int:
    """Length of the first tensor's first dimension; 1 where there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    for value in values:
        if isinstance(value, (torch.Tensor, Mapping, tuple, list)):
            return batch_size(value)
    return 1
