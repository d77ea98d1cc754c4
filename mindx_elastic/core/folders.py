"""Names of the folders in a checkpoint directory: those of ranks, and those of steps with a folder for each rank.

The scan, the mirror, the guard that clears up and the agent have to tell a step's folder from any other. A job that
uses `TFTRegister` makes them (`platforms.tft_tree`), and their name is that of MindSpore's tree of TTP checkpoints.
This is the one place that says it: a name that each caller had to hand in, or that a platform had to register, could be
forgotten, and a start that overlooks checkpoints begins afresh.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["STEP_FOLDER", "UNFINISHED", "rank_folder", "step_folder", "step_folders_of_rank"]

UNFINISHED = "_tmp"
_PREFIX = "tft_saved_checkpoints-step_"
STEP_FOLDER = re.compile(rf"{_PREFIX}\d+({UNFINISHED})?")
"""The name of a step's folder, whether or not all ranks have finished it."""


def rank_folder(directory: Path, rank: int, world_size: int) -> Path:
    """Where `rank` keeps its files: ``directory/rank_{rank}``, or `directory` itself when it is alone."""
    return directory / f"rank_{rank}" if world_size > 1 else directory


def step_folder(step: int) -> str:
    """The name of the folder of `step` when all ranks have finished it; until then it ends in `UNFINISHED`."""
    return f"{_PREFIX}{step}"


def step_folders_of_rank(root: Path, rank: int) -> list[Path]:
    """The folders of `rank` in all folders of steps under `root`."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    folders = [root / name / f"rank_{rank}" for name in sorted(names) if STEP_FOLDER.fullmatch(name)]
    return [folder for folder in folders if folder.is_dir()]
