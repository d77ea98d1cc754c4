"""What a forked process begins with: the numbers of its own, and no action of process 1."""

from __future__ import annotations

import multiprocessing
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.core.first_process import leave, take_default_action
from mindx_elastic.core.forking import seed_at_random


def test_what_a_fresh_interpreter_draws_by_chance_is_drawn_again() -> None:
    def drawn() -> list[Any]:
        numbers = random.random(), float(np.random.rand()), float(torch.rand(1))
        return [*numbers, bytes(multiprocessing.current_process().authkey)]

    seen = []
    for _ in range(2):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        seed_at_random()
        seen.append(drawn())
    assert all(one != other for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize(
    ("before", "after"), [(leave, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN), (signal.SIG_DFL, signal.SIG_DFL)]
)
def test_a_child_of_process_1_ends_by_a_sigterm_as_any_other(before: Any, after: Any) -> None:
    own = signal.signal(signal.SIGTERM, before)
    try:
        take_default_action()
        assert signal.getsignal(signal.SIGTERM) is after
    finally:
        signal.signal(signal.SIGTERM, own)
