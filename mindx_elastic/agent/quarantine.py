"""Puts a checkpoint from which several attempts have gone on and died into the quarantine."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from mindx_elastic.agent.holder import flush, trust_in
from mindx_elastic.core.events import logger
from mindx_elastic.core.folders import STEP_FOLDER
from mindx_elastic.core.owners import Trust
from mindx_elastic.errors import MindxError
from mindx_elastic.memory.folders import read_owner
from mindx_elastic.persist.catalog import read_entries, read_entry
from mindx_elastic.persist.storage import quarantine

__all__ = ["set_checkpoint_aside"]


def set_checkpoint_aside(path: Path, reason: str, arenas: list[Path]) -> list[Path]:
    """Move all files of the step that `path` belongs to into the quarantine of their directory.

    arenas: the job's folders in shared memory. They are brought to disk first, which removes them, so that the next
    attempt goes on from what is on disk, and nothing of other steps is lost. Returns the files moved. Never raises: a
    file that cannot be moved is a warning.
    """
    directory = _directory_of(path, arenas)
    trust = Trust()
    if directory is not None and directory.is_dir():
        try:
            trust = trust_in(directory)
        except MindxError as error:
            logger.warning("%s; a file of another user may not be recognized", error)
    entry = read_entry(path, owners=trust.of(path))
    moment = None if entry is None or entry.info is None else entry.info.moment
    for arena in arenas:
        for line in flush(arena).lines:
            logger.info("%s", line)
    if moment is None or directory is None:
        logger.warning("%s is not there any more; nothing to set aside", path)
        return []
    moved = []
    for other in read_entries(directory, owners=trust.of(directory)):
        if other.info is not None and other.info.moment == moment:
            try:
                moved.append(quarantine(other.path, reason, directory))
            except OSError as error:
                logger.warning("%s cannot be set aside: %s", other.path, error)
    logger.warning("set aside: %d files of step %d, now below %s", len(moved), moment[2], directory / "quarantine")
    return moved


def _directory_of(path: Path, arenas: list[Path]) -> Path | None:
    """The checkpoint directory: above the rank's folder, or named by the arena's owner."""
    for arena in arenas:
        if path.is_relative_to(arena):
            with suppress(OSError, ValueError, KeyError, TypeError):
                return Path(read_owner(arena)["directory"])
            return None
    folder = path.parent
    if re.fullmatch(r"rank_\d+", folder.name):
        folder = folder.parent
    return folder.parent if STEP_FOLDER.fullmatch(folder.name) else folder
