"""Notices that modules or parameters were added, replaced or removed in mid-run, or buffers added or removed.

A registration shows at once, through torch's global registration hooks; a removal, and what ``ModuleList.insert`` or a
program puts in by hand, in the sizes of the modules' tables, at close boundaries (`close_looks`). Only then is the
module walked through again. A resumed program builds the first model once more, so what counts is how the model differs
from the one that the guard was entered with.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from mindx_elastic.core.looks import text_of
from mindx_elastic.core.printable import listed

__all__ = ["Structure", "Watch", "buffers_of", "parameters_of"]


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The dict itself, so that a buffer that the module puts in another's place is seen. TorchScript has its buffers in
    C++, where none is replaced: a copy."""
    table: Any = module._buffers
    return dict(table.items()) if isinstance(module, torch.jit.ScriptModule) else table


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """As `buffers_of`."""
    table: Any = module._parameters
    return dict(table.items()) if isinstance(module, torch.jit.ScriptModule) else table


class Structure:
    """The structure of one module. `parameters`: by name, tied ones under each, as `original_names` would have them."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        self._module = module
        self._built = _shapes(parameters)
        self._objects = dict(module.named_modules(remove_duplicate=False))
        self._kinds = {name: type(child) for name, child in self._objects.items()}
        self.follow()

    def follow(self) -> None:
        """Notice changes from here on."""
        children = list(self._module.modules())
        self._ids = {id(child) for child in children}
        self._tables: list[Any] = [t for child in children for t in (child._modules, child._parameters) if t]
        self._tables += [child._buffers for child in children]  # also the empty ones: a new buffer shows here only
        self._tables += [n for child in children if (n := child._non_persistent_buffers_set)]  # one may become saved
        self._sizes = [*map(len, self._tables)]  # not their sum: a parameter may become a buffer
        self._registered = False
        self.is_touched = self.has_new_buffers = False
        """Something has been registered; a buffer, which may have been one of the same name before. The latter is reset
        by who reads it."""

    def has_changed(self) -> bool:
        """Whether something may have changed since `follow`."""
        return self._registered or [*map(len, self._tables)] != self._sizes

    def note(self, owner: nn.Module) -> None:
        """A module or a parameter is being registered in `owner`."""
        if id(owner) in self._ids:
            self._registered = self.is_touched = True

    def note_buffer(self, owner: nn.Module) -> None:
        """A buffer is being registered in `owner`, or put in another one's place."""
        if id(owner) in self._ids:
            self.is_touched = self.has_new_buffers = True

    def problems(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        """How the module differs from the one that was built, in words; empty: a start can load its state."""
        now = _shapes(parameters)
        found = []
        if gone := [name for name in self._built if name not in now]:
            found.append(f"{listed(gone, 3)} {_are(gone)} gone")
        if new := [name for name in now if name not in self._built]:
            found.append(f"{listed(new, 3)} {_are(new)} new")
        for name, shape in now.items():
            if self._built.get(name, shape) != shape:
                found.append(f"{name} is now {_text(shape)} and was {_text(self._built[name])}")
        return found or self._other_modules()

    def _other_modules(self) -> list[str]:
        """Modules that compute something else, with the same parameters."""
        found, now = [], dict(self._module.named_modules(remove_duplicate=False))
        for name, module in now.items():
            old = self._objects.get(name)
            if old is None:
                found.append(f"{name} is new")
            elif old is not module and text_of(old) != text_of(module):
                found.append(f"{name} is now {_short(module)} and was {_short(old)}")
            elif type(module) is not self._kinds[name]:
                found.append(f"{name} is now a {type(module).__name__} and was a {self._kinds[name].__name__}")
        found += [f"{name} is gone" for name in self._objects if name not in now]
        return found


class Watch:
    """Tells structures of what is registered in their modules, until it is closed. One per guard."""

    def __init__(self, structures: list[Structure]) -> None:
        self._structures = structures
        own = weakref.ref(self)  # torch keeps the hooks for ever if nothing removes them

        def note(owner: nn.Module, *_: object) -> None:
            if (watch := own()) is not None:
                for structure in watch._structures:
                    structure.note(owner)

        def note_buffer(owner: nn.Module, *_: object) -> None:
            if (watch := own()) is not None:
                for structure in watch._structures:
                    structure.note_buffer(owner)

        self._handles = [
            register_module_parameter_registration_hook(note),
            register_module_module_registration_hook(note),
            register_module_buffer_registration_hook(note_buffer),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _shapes(parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(p.shape), p.dtype) for name, p in parameters.items()}


def _text(shape: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{list(shape[0])} {str(shape[1]).removeprefix('torch.')}"


def _short(module: nn.Module) -> str:
    text = text_of(module)
    return text if "\n" not in text and len(text) <= 80 else f"another {type(module).__name__}"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
