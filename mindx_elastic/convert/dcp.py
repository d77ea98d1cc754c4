"""Folders of ``torch.distributed.checkpoint``, written with torch's own writer.

They are not read: their metadata is a pickle, and torch's own reader runs what it names. torch has the command that
makes one file of a folder, and a program loads such a folder by itself.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["METADATA", "TO_TORCH", "write_dcp"]

METADATA = ".metadata"
TO_TORCH = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
"""The command of torch; what comes after it: the folder, and the file to make."""


def write_dcp(temp: Path, state: Mapping[str, Any]) -> None:
    """Write `state` to the folder `temp`; torch's writer flushes every file. The caller renames."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is one process; that is intended
        alone = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}  # torch 2.6 sees it itself
        save(dict(state), storage_writer=FileSystemWriter(temp), **alone)
