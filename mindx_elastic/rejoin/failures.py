"""Notes that something of the training has failed as it does when another rank dies, whether the program catches it or
not: a backward, a forward of DDP or of a sharded module, a collective of the program's own, the wait for one.

What follows from a step in which that has happened must not become a boundary: its gradients may not be the sum over
the ranks. The functional collectives of DTensors fail wherever their result is used first, which is not seen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

__all__ = ["Failures", "comes_from_failure"]

_MOST_CAUSES = 20


def comes_from_failure(error: BaseException | None) -> bool:
    """Whether it is an error as a collective raises it, or has been made of one: ``raise Failed() from error``."""
    for _ in range(_MOST_CAUSES):
        if error is None or isinstance(error, RuntimeError):
            break
        error = error.__cause__ or error.__context__
    return isinstance(error, RuntimeError)


class Failures:
    """One per entered guard."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """From here on failures are seen, until `close`. `modules`: those with collectives in their forward."""
        self.seen = False
        """Since the last boundary."""
        self.has_waited = False
        """Since then it was waited for the news of a death."""
        self._undo: list[Callable[[], None]] = []
        for module in modules:
            handle = module.register_forward_hook(self._at_forward, always_call=True)
            self._undo.append(handle.remove)
        self._wrap_backward()
        self._wrap_waits()
        self._listen_to_collectives()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def note(self, error: BaseException | None) -> None:
        if isinstance(error, RuntimeError):
            self.seen, self.has_waited = True, False

    def _at_forward(self, *_: object) -> None:
        error = sys.exc_info()[1]
        if error is not None:  # a hook runs in the handler of what the forward has raised
            self.note(error)

    def _wrap_backward(self) -> None:
        """All ways into a backward call one function of torch's."""
        for owner in (torch.autograd, torch.autograd.graph):
            self._wrap(owner, "_engine_run_backward")

    def _wrap_waits(self) -> None:
        """In which a collective with ``async_op=True`` fails, and what has been made of its future."""
        import torch.distributed as dist

        if dist.is_available():
            self._wrap(dist.Work, "wait")
            self._wrap(dist.Work, "synchronize")
            self._wrap(torch._C.Future, "wait")
            self._wrap(torch._C.Future, "value")

    def _wrap(self, owner: Any, name: str) -> None:
        run = vars(owner).get(name)
        if run is not None:
            setattr(owner, name, self._noting(getattr(owner, name)))
            self._undo.append(lambda: setattr(owner, name, run))

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
