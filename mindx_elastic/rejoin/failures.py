"""Notes that something of the training has failed as it does when another rank dies, whether the program catches it or
not: a backward, a forward of DDP, a collective of the program's own, the wait for one.

What follows from a step in which that has happened must not become a boundary: its gradients may not be the sum over
the ranks.

The functional collectives, which DTensors use, fail in the operator that waits for their result, and in that one only
once: where the result is used a second time it is taken to be there. So that operator is listened to. A program that
asks a collective whether it is over hears that it is where it has failed, and need never wait for it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["Failures", "RejoinFailed", "comes_from_failure"]

_MOST_CAUSES = 20


class RejoinFailed(Exception):
    """There is no in-place recovery this time; the text says why."""


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
        self._wrap_operator()
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
            self._wrap_questions()

    def _wrap_questions(self) -> None:
        """``while not work.is_completed():``"""
        import torch.distributed as dist

        ask, value = dist.Work.is_completed, vars(torch._C.Future)["value"]

        def is_completed(work: Any) -> bool:
            done = bool(ask(work))
            if done:
                try:
                    future = work.get_future()
                except RuntimeError:  # a send or a receive, which is over only once it was waited for
                    return done
                if future.done():
                    try:
                        value(future)
                    except RuntimeError as error:
                        self.note(error)
            return done

        setattr(dist.Work, "is_completed", is_completed)  # noqa: B010
        self._undo.append(lambda: setattr(dist.Work, "is_completed", ask))

    def _wrap_operator(self) -> None:
        """That waits for a functional collective; both ways to call it from Python. Programs and torch keep these
        objects, so they stay, and what they call is replaced."""
        if not torch.distributed.is_available():
            return
        packet: Any = torch.ops._c10d_functional.wait_tensor
        for operator in (packet, packet.default):
            run = operator._op
            operator._op = _NotingOperator(run, self.note)
            self._undo.append(partial(setattr, operator, "_op", run))

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


class _NotingOperator:
    """In place of the built-in function below an operator of torch's, whose hash is that of this function."""

    def __init__(self, run: Any, note: Callable[[BaseException], None]) -> None:
        self._run, self._note = run, note

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self._run(*arguments, **named)
        except RuntimeError as error:
            self._note(error)
            raise

    def __hash__(self) -> int:
        return hash(self._run)

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._run == other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


class _Handler(logging.Handler):
    def __init__(self, failures: Failures) -> None:
        super().__init__()
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        self._failures.note(sys.exc_info()[1])
