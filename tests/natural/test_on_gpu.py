"""Each loop in ``loops/on_gpu/``, stopped at random boundaries, ends with the numbers of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.natural.test_loops import check_exact, check_killed, check_told
from tests.natural.verdicts import EXACT, Loop, Told

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

_FOLDER = Path(__file__).parent / "loops" / "on_gpu"
_OF_TWO_RANKS = {"ddp_gloo", "ddp_sync_batch_norm", "fsdp2", "zero"}
_TOLD = "is not the one of the stopped process"
_DROPOUT = {"nn.LSTM(16, 16, num_layers=2": "nn.LSTM(16, 16, dropout=0.1, num_layers=2"}
_LOOPS = [
    Loop(path.stem, EXACT, ranks=2 if path.stem in _OF_TWO_RANKS else 1, folder=_FOLDER)
    for path in sorted(_FOLDER.glob("*.py"))
]


@pytest.mark.parametrize("loop", _LOOPS, ids=lambda loop: loop.name)
def test_a_stopped_run_ends_with_the_same_numbers(loop: Loop, tmp_path: Path) -> None:
    check_exact(loop, tmp_path, seed=1, stops=2)


def test_dropout_that_cudnn_draws_is_told_by_the_first_resume(tmp_path: Path) -> None:
    check_told(Loop("recurrent", Told(_TOLD), _DROPOUT, folder=_FOLDER), _TOLD, tmp_path)


@pytest.mark.parametrize("name", ["compiled_with_graphs", "graph_of_a_step", "graph_with_scheduler", "images"])
def test_a_killed_run_ends_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Its snapshots are copied beside the steps."""
    loop = next(loop for loop in _LOOPS if loop.name == name)
    check_killed(loop, tmp_path, stop=9)
