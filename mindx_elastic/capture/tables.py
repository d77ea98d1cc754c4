"""The tables in which a module keeps its parameters and buffers, and a quick walk through them.

A guard that is entered looks through the model some twenty times, and torch's own generators take 5 us for each module
in it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

__all__ = ["buffers_of", "named_parameters", "parameters", "parameters_of"]

_WALKS = ("named_parameters", "parameters", "_named_members", "named_modules", "modules")
"""What a class may define otherwise, and has a right to."""
_is_usual: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The dict itself, so that a buffer that the module puts in another's place is seen. TorchScript has its buffers in
    C++, where none is replaced: a copy."""
    table: Any = module._buffers
    return dict(table.items()) if isinstance(module, torch.jit.ScriptModule) else table


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """As `buffers_of`."""
    table: Any = module._parameters
    return dict(table.items()) if isinstance(module, torch.jit.ScriptModule) else table


def parameters(module: nn.Module) -> list[nn.Parameter]:
    """As ``list(module.parameters())``."""
    return [parameter for _, parameter in named_parameters(module)]


def named_parameters(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Parameter]]:
    """As ``list(module.named_parameters(remove_duplicate=...))``."""
    found: list[tuple[str, nn.Parameter]] = []
    seen: set[int] | None = set() if remove_duplicate else None
    if _add(module, "", seen, found):
        return found
    return list(module.named_parameters(remove_duplicate=remove_duplicate))


def _add(module: nn.Module, prefix: str, seen: set[int] | None, found: list[tuple[str, nn.Parameter]]) -> bool:
    """Add those of `module` and all below it. Returns False where some class walks its own way."""
    if seen is not None:
        if id(module) in seen:
            return True
        seen.add(id(module))
    if not _walks_as_usual(module):
        return False
    for name, parameter in module._parameters.items():
        if parameter is None or (seen is not None and id(parameter) in seen):
            continue
        if seen is not None:
            seen.add(id(parameter))
        found.append((prefix + name, parameter))
    for name, child in module._modules.items():
        if child is not None and not _add(child, f"{prefix}{name}.", seen, found):
            return False
    return True


def _walks_as_usual(module: nn.Module) -> bool:
    kind = type(module)
    usual = _is_usual.get(kind)
    if usual is None:
        usual = all(getattr(kind, name) is getattr(nn.Module, name) for name in _WALKS)
        usual = _is_usual[kind] = usual and not issubclass(kind, torch.jit.ScriptModule)
    return usual and vars(module).keys().isdisjoint(_WALKS)
