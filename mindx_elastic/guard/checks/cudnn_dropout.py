"""Recurrent layers whose dropout cuDNN draws, from a state that cannot be kept.

Torch makes that state once a process and device, with a seed drawn from the device's generator at the first forward,
and lets nobody read it. A resumed run makes a new one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mindx_elastic.core.printable import listed
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["tell_of_cudnn_dropout"]


def tell_of_cudnn_dropout(targets: Mapping[str, object], unmanaged: Unmanaged) -> None:
    """At the start of a training. Raises UnmanagedStateError where risks are refused."""
    found = [
        f"{name}.{path}" if path else name
        for name, target in targets.items()
        if isinstance(target, nn.Module)
        for path, module in target.named_modules()
        if isinstance(module, nn.RNNBase) and _draws_by_cudnn(module)
    ]
    if found:
        unmanaged.risk(
            f"{listed(found, 3)}: cuDNN draws the dropout between the layers, from a state of its own that torch keeps "
            "and shows nobody; a resumed run draws other numbers",
            "Write torch.backends.cudnn.enabled = False at the top of the program, or stack layers of one with "
            "nn.Dropout between them",
        )


def _draws_by_cudnn(module: nn.RNNBase) -> bool:
    if not (module.training and module.dropout > 0 and module.num_layers > 1):
        return False
    return any(weight.is_cuda and torch.backends.cudnn.is_acceptable(weight) for weight in module.parameters())
