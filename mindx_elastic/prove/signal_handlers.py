"""A block of code that the program's own signal handlers do not break off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["handlers_held"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handlers_held() -> Iterator[None]:
    """Handlers of SIGINT, SIGTERM and SIGHUP run at the end of the block, once each. What the block starts inherits
    nothing of it, as it would a mask. Signals without a handler of Python act as ever. In other threads than the main
    one no handler runs anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    handlers = {}
    try:
        for number in _ENDING:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda signum, frame: heard.append(signum))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signum in dict.fromkeys(heard):
            signal.raise_signal(signum)
