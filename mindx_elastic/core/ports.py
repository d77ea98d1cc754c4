"""Ports: an earlier part of the package says what it needs of a later one, and imports nothing of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

__all__ = ["Risks"]


class Risks(Protocol):
    """Collects what is known against an exact resume (`guard.unmanaged.Unmanaged`). Main thread."""

    notes: tuple[str, ...]

    def risk(self, what: str, remedy: str) -> None:
        """A resumed run may differ: warns once. `what`: a sentence without its full stop. `remedy`: what to do."""

    def inherit(self, notes: Iterable[str]) -> None:
        """The run goes on from a state with these notes."""
