"""What can be found out before training starts, so that it is not found out at death."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo
from mindx_elastic.errors import SaveError
from mindx_elastic.persist.first_save import settle
from mindx_elastic.persist.format import flatten
from mindx_elastic.persist.storage import check_free_space, prepare_directory, remove_stale_temps
from mindx_elastic.persist.tft_tree import remove_stale_tft_temps

__all__ = ["check_state_and_space", "prepare_directories"]


def prepare_directories(wanted: Iterable[Path], ranks: RankInfo, *, allow_shared: bool) -> dict[Path, Path]:
    """Each wanted directory, made if need be, and what it resolves to (symbolic links are followed once, here).

    Removes what dead writers left in this rank's folder. Raises UsageError, UnsafeDirectoryError or SaveError.
    """
    resolved = {path: prepare_directory(path, allow_shared=allow_shared) for path in wanted}
    for directory in set(resolved.values()):
        settle(directory / f"rank_{ranks.rank}")  # of all directories before any file is removed
    for directory in set(resolved.values()):
        folder = directory / f"rank_{ranks.rank}" if ranks.world_size > 1 else directory
        if folder.is_dir():
            remove_stale_temps(folder)
        remove_stale_tft_temps(directory, ranks.rank)
    return resolved


def check_state_and_space(collector: Collector, directories: Sequence[Path]) -> None:
    """Raise UnsupportedStateError for what a checkpoint cannot hold, SaveError for a disk that cannot hold a
    checkpoint.

    The optimizer's state does not exist yet in a fresh start, so what is asked for is the least that a save will need.
    """
    least = sum(tensor.nbytes for tensor in flatten(collector.state())[1].values())
    for directory in directories:
        try:
            check_free_space(directory, least)
        except OSError as error:
            problem = f"{directory}: not enough room for one checkpoint: {error.strerror}"
            raise SaveError(f"{problem}; make room, or give another directory", path=directory) from error
