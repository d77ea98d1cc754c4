"""Each loop in ``loops/on_gpu/``, stopped at random boundaries, ends with the numbers of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.natural.test_loops import check_exact
from tests.natural.verdicts import EXACT, Loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

_FOLDER = Path(__file__).parent / "loops" / "on_gpu"
_OF_TWO_RANKS = {"ddp_gloo", "ddp_sync_batch_norm", "fsdp2", "zero"}
_LOOPS = [
    Loop(path.stem, EXACT, ranks=2 if path.stem in _OF_TWO_RANKS else 1, folder=_FOLDER)
    for path in sorted(_FOLDER.glob("*.py"))
]


@pytest.mark.parametrize("loop", _LOOPS, ids=lambda loop: loop.name)
def test_a_stopped_run_ends_with_the_same_numbers(loop: Loop, tmp_path: Path) -> None:
    check_exact(loop, tmp_path, seed=1, stops=2)
