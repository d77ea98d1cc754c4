"""What a forked process begins with: no action of process 1."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from mindx_elastic.core.first_process import leave, take_default_action


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
