"""The ResNet example as it is, with a line for each update: ``TOOK rank step S epoch E: picture,...``.

``RANKS FLAG...``: so many ranks, see `tests.jobs.forked`; the flags are the example's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from mindx_elastic.train import Callback, RunContext
from tests.jobs.forked import run_ranks
from tests.jobs.kit import say

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "resnet_cifar10"))

import train
from dataset import DataSplit, Pictures

_taken: list[int] = []


class Counted(Pictures):
    """Remembers which pictures the loader has fetched; it fetches none ahead without worker processes."""

    def __getitem__(self, index: int) -> Any:
        _taken.append(index)
        return super().__getitem__(index)


class Tell(Callback):
    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        where = f"step {params.cur_step_num} epoch {params.cur_epoch_num}"
        say(f"TOOK {os.environ.get('RANK', '0')} {where}: {','.join(map(str, _taken))}")
        _taken.clear()


def load_data(args: Any) -> DataSplit:
    split: DataSplit = _load_data(args)
    split.train.__class__ = Counted
    return split


def make_callbacks(*args: Any) -> list[Callback]:
    return [*_make_callbacks(*args), Tell()]


if __name__ == "__main__":
    _load_data, _make_callbacks = train.load_data, train.make_callbacks
    train.__dict__.update(load_data=load_data, make_callbacks=make_callbacks)
    sys.exit(run_ranks(int(sys.argv[1]), lambda: train.main(sys.argv[2:])))
