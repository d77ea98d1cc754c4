"""Writes what dead workers have left in shared memory to the disk, before the agent goes or starts anew."""

from __future__ import annotations

from pathlib import Path

from mindx_elastic.agent.holder import flush
from mindx_elastic.events import logger

__all__ = ["flush_arena"]


def flush_arena(arena: Path) -> list[str]:
    """Write the newest common step of a job's arenas to its checkpoint directory; the files written.

    Never raises: what cannot be written stays where it is, and a warning says so.
    """
    try:
        return flush(arena)
    except Exception as error:  # whatever it is, the agent has to come to its end
        logger.warning("%s could not be written to disk: %s: %s", arena, type(error).__name__, error)
        return []
