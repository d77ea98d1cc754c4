"""The last resort: end a process whose training thread does not come back."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from contextlib import suppress

__all__ = ["end_process"]


def end_process(exit_code: int) -> None:
    """Kill the children (loader workers), flush what was printed and logged, and leave. Any thread; never returns."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe must not keep a dying process
            stream.flush()
    logging.shutdown()
    os._exit(exit_code)
