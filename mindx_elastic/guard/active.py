"""Which guard of this process is entered: one at a time, and in the main thread if it is to hear signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindx_elastic.config import AgentInfo
from mindx_elastic.errors import UsageError

__all__ = [
    "active",
    "check_that_it_is_not_active",
    "check_that_one_may_enter",
    "entered",
    "has_been_one",
    "request_stop",
    "require_entered",
]

entered: list[Any] = []
"""The guards whose block is open: one at most."""
_count = 0  # of all guards that have been entered


@contextmanager
def active(guard: object) -> Iterator[None]:
    """`guard` is entered."""
    global _count
    _count += 1
    entered.append(guard)
    try:
        yield
    finally:
        entered.remove(guard)


def has_been_one() -> bool:
    """Whether a guard of this process is or was entered."""
    return _count > 0


def request_stop(reason: str, exit_code: int) -> bool:
    """Any thread: stop the training of this process as its program could, where a guard is open. False: none is."""
    guards = list(entered)
    for guard in guards:
        guard.stopper.request(reason, exit_code)
    return bool(guards)


def check_that_it_is_not_active(guard: object) -> None:
    """Raises UsageError: on every rank alike; the block that is open goes on."""
    if guard in entered:
        raise UsageError("this guard is active already: write `with guard:` once around the loop")


def check_that_one_may_enter(*, hears_signals: bool) -> None:
    """Raises UsageError while a guard is active, and in another thread than the main one.

    There it may be entered without signals (`hears_signals`), and where whatever runs the thread answers SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        problem = ""
        if AgentInfo.from_env() is not None:
            problem = "Under mindx-elastic run the agent stops its workers by signals. "
        if problem or (hears_signals and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
            raise UsageError(
                f"the guard must be entered in the main thread, not in {threading.current_thread().name!r}: signal "
                f"handlers can only be installed there. {problem}Start the training from the main thread"
                + ("" if problem else ", or give signals=[]: then a flag file or request_stop() stops it, no SIGTERM")
            )
    if entered:
        raise UsageError("another guard is active in this process; leave it first (Model.train enters one by itself)")


def require_entered(guard: object, what: str) -> None:
    """Raises UsageError for a call of `what` outside of the guard's block."""
    if guard not in entered:
        raise UsageError(f"guard.{what} was called outside of the block; write: with guard: ...")
