"""What a batch is to the default step: ``(inputs..., targets)``, a dict, or one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindx_elastic.errors import UsageError

__all__ = ["batch_size", "move_batch", "network_arguments", "split_batch"]


def move_batch(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; tuples, lists and dicts are rebuilt, other values kept."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: move_batch(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move_batch(value, device) for value in batch)
    return batch


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(positional inputs, named inputs, targets) for ``loss_fn(network(*inputs, **named), targets)``.

    The last item of a tuple or list is the target; a dict goes in by name and is the target as a whole.
    Raises UsageError for a batch without targets.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return tuple(batch[:-1]), {}, batch[-1]
    raise UsageError(
        f"a batch is a {type(batch).__name__} without targets; the default step needs (inputs, targets). Let the "
        "data set give both, use loss_fn=None and a network that returns its loss, or write a train_step"
    )


def network_arguments(batch: Any, *, takes_targets: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call of the network; with `takes_targets` (loss_fn=None) the whole batch goes in."""
    if takes_targets:
        if isinstance(batch, Mapping):
            return (), dict(batch)
        return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})
    args, kwargs, _ = split_batch(batch)
    return args, kwargs


def batch_size(batch: Any) -> int:
    """Length of the first tensor's first dimension; 1 where there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    for value in values:
        if isinstance(value, (torch.Tensor, Mapping, tuple, list)):
            return batch_size(value)
    return 1
