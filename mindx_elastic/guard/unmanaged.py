"""Collects what is known against an exact resume: state of the training that the guard does not keep.

What is certain to make a resumed run differ is refused (`UnmanagedStateError`), or with ``unmanaged="warn"`` a warning.
What only may is one warning. Each is recorded in every file of the run, so that `inspect` and `plan` can say it.
"""

from __future__ import annotations

from mindx_elastic.core.events import logger
from mindx_elastic.errors import UnmanagedStateError, UsageError

__all__ = ["MODES", "Unmanaged"]

MODES = ("error", "warn")


class Unmanaged:
    """One per guard. Training thread; `notes` may be read from any thread."""

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise UsageError(f'unmanaged={mode!r}: give "error" or "warn"')
        self._refuses = mode == "error"
        self.notes: tuple[str, ...] = ()
        """What is known, oldest first; only ever replaced."""

    def certain(self, what: str, remedy: str) -> None:
        """A resumed run will differ: raises UnmanagedStateError, or warns once.

        `what`: a sentence without its full stop that names the thing. `remedy`: the line to write.
        """
        if self._refuses:
            raise UnmanagedStateError(f"{what}. {remedy}")
        self.risk(what, remedy)

    def risk(self, what: str, remedy: str) -> None:
        """A resumed run may differ: warns once."""
        if what not in self.notes:
            self.notes = (*self.notes, what)
            logger.warning("%s. %s", what, remedy)
