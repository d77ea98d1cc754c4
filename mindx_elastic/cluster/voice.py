"""Says things on stderr as the package's logger does, also before there is a guard, which sets the logger up.

A console handler of our own would stay in the guard's way: it adds one only where the logger has none.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable

__all__ = ["Voice"]

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}


class Voice:
    """One per process. Any thread."""

    def __init__(self, where: str = "") -> None:
        """`where`: what stands behind the package's name, ``scheduler`` or ``rank 3``."""
        self.where = where
        self._last_death = ""

    def info(self, text: str, *args: object) -> None:
        self._say(logging.INFO, text, args)

    def warning(self, text: str, *args: object) -> None:
        self._say(logging.WARNING, text, args)

    def error(self, text: str, *args: object) -> None:
        self._say(logging.ERROR, text, args)

    def death(self, why: str, recovery: bool) -> None:
        """Of a worker; once, although every other worker is told."""
        if why != self._last_death:
            self._last_death = why
            then = "; start it again with the same variables: the others wait for it" if recovery else ""
            self.warning("%s%s", why, then)

    def _say(self, level: int, text: str, args: tuple[object, ...]) -> None:
        if logger.handlers or logging.getLogger().handlers:
            logger.log(level, text, *args)
            return
        if level < _LEVELS.get(os.environ.get("MINDX_LOG_LEVEL", "").strip().upper(), logging.INFO):
            return
        where = f"mindx_elastic {self.where}".strip()
        line = f"[{where}] {logging.getLevelName(level)} {printable(text % args)}\n"
        with suppress(OSError):
            os.write(2, line.encode("utf-8", "backslashreplace"))
