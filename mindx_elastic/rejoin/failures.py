"""Notes that something of the training has failed as it does when another rank dies, whether the program catches it or
not: a backward, a forward of DDP or of a sharded module, a collective of the program's own.

What follows from a step in which that has happened must not become a boundary: its gradients may not be the sum over
the ranks. Asynchronous collectives (``async_op=True``) fail in their ``wait()``, which is not seen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

__all__ = ["Failures"]


class Failures:
    """One per entered guard."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """From here on failures are seen, until `close`. `modules`: those with collectives in their forward."""
        self.seen = False
        """Since the last boundary."""
        self._undo: list[Callable[[], None]] = []
        for module in modules:
            handle = module.register_forward_hook(self._at_forward, always_call=True)
            self._undo.append(handle.remove)
        self._wrap_backward()
        self._listen_to_collectives()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def note(self, error: BaseException | None) -> None:
        self.seen = self.seen or isinstance(error, RuntimeError)

    def _at_forward(self, *_: object) -> None:
        error = sys.exc_info()[1]
        if error is not None:  # a hook runs in the handler of what the forward has raised
            self.note(error)

    def _wrap_backward(self) -> None:
        """All ways into a backward call one function of torch's."""
        for owner in (torch.autograd, torch.autograd.graph):
            run = getattr(owner, "_engine_run_backward", None)
            if run is not None:
                setattr(owner, "_engine_run_backward", self._noting(run))  # noqa: B010
                self._undo.append(lambda owner=owner, run=run: setattr(owner, "_engine_run_backward", run))  # type: ignore[misc]

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_noting(*arguments: Any, **named: Any) -> Any:
            try:
                return run(*arguments, **named)
            except RuntimeError as error:
                self.note(error)
                raise

        return run_noting

    def _listen_to_collectives(self) -> None:
        """Torch logs the failures of its collectives, and nothing else, to this logger."""
        with suppress(ImportError):
            from torch.distributed.c10d_logger import _c10d_logger

            handler = _Handler(self)
            _c10d_logger.addHandler(handler)
            self._undo.append(lambda: _c10d_logger.removeHandler(handler))


class _Handler(logging.Handler):
    def __init__(self, failures: Failures) -> None:
        super().__init__()
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        self._failures.note(sys.exc_info()[1])
