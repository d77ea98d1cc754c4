"""A trial: whether a rank can run in a place where one has failed.

A process of its own runs the program up to its guard, with the rank and the devices of that place. It takes part in
nothing: its process groups have no peers (see `joiner`), and it ends where it would meet other ranks, at a collective
or at the guard. Having got there, it has shown that its device can be used.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mindx_elastic.config import RankInfo, ShrinkSettings
from mindx_elastic.core.leaving import flush_output
from mindx_elastic.core.looks import table_of
from mindx_elastic.core.script import run
from mindx_elastic.rejoin import joiner

__all__ = ["WORKS", "end_trial", "main", "pass_trial", "prepare"]

WORKS = 79
"""Exit code of a process that has got as far as it can go alone."""


def pass_trial() -> None:
    """The program is about to train: the end, if this is a trial."""
    if ShrinkSettings.from_env().is_trial:
        end_trial()


def end_trial(*_: object) -> NoReturn:
    """It works. Nothing of the program runs any more: no `finally`, no `atexit`."""
    flush_output()
    os._exit(WORKS)


def prepare() -> None:
    """Before the program runs."""
    from torch.distributed import distributed_c10d as c10d

    joiner.prepare(refuse=end_trial)
    original, alone = c10d.init_process_group, _alone(c10d.init_process_group)
    for module in [m for m in sys.modules.values() if (table_of(m) or {}).get("init_process_group") is original]:
        module.init_process_group = alone  # type: ignore[attr-defined]


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` without a store that others know."""

    @functools.wraps(function)
    def init_process_group(backend: Any = None, *_: Any, **named: Any) -> None:
        import torch.distributed as dist

        ranks = RankInfo.from_env()
        kept = {
            name: value for name, value in named.items() if name not in ("init_method", "store", "rank", "world_size")
        }
        function(backend, store=dist.HashStore(), rank=ranks.rank, world_size=ranks.world_size, **kept)

    return init_process_group


def main() -> None:
    """``python -m mindx_elastic.rejoin.trial SCRIPT ARGUMENTS``."""
    if not ShrinkSettings.from_env().is_trial:
        sys.exit("this module is started by mindx-elastic run")
    prepare()
    run(sys.argv[1:])


if __name__ == "__main__":
    from mindx_elastic.rejoin import trial  # noqa: PLW0406 - under its own name

    trial.main()
