"""Ports: an earlier part of the package asks for what only a later one has, and imports nothing of it.

The package's root says who answers (`provide`); the module is loaded when it is asked for first.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Protocol

__all__ = ["Risks", "ask", "provide"]

_providers: dict[str, str] = {}


def provide(port: str, module: str) -> None:
    """Let `module`, a dotted name, answer for `port`. Any thread."""
    _providers[port] = module


def ask(port: str) -> ModuleType:
    """The module that answers for `port`. Any thread. Raises KeyError: no module does."""
    return importlib.import_module(_providers[port])


class Risks(Protocol):
    """Collects what is known against an exact resume (`guard.unmanaged.Unmanaged`). Main thread."""

    notes: tuple[str, ...]

    def risk(self, what: str, remedy: str) -> None:
        """A resumed run may differ: warns once. `what`: a sentence without its full stop. `remedy`: what to do."""

    def inherit(self, notes: Iterable[str]) -> None:
        """The run goes on from a state with these notes."""
