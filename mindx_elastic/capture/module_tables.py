"""The tables in which a module keeps its parameters and buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["buffers_of", "parameters_of"]


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The dict itself, so that a buffer that the module puts in another's place is seen. TorchScript has its buffers in
    C++, where none is replaced: a copy."""
    table: Any = module._buffers
    return dict(table.items()) if isinstance(module, torch.jit.ScriptModule) else table


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """As `buffers_of`."""
    table: Any = module._parameters
    return dict(table.items()) if isinstance(module, torch.jit.ScriptModule) else table
