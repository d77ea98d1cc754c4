"""Whether buffers are as they were."""

from __future__ import annotations

import torch

from mindx_elastic.capture.buffer_looks import look_at_buffers


def test_a_change_that_is_taken_back_is_none() -> None:
    buffer = torch.tensor([1.0, float("nan")])
    look = look_at_buffers([("mean", buffer)])["mean"]
    assert not look.is_changed(buffer)
    own = buffer.clone()
    buffer.zero_()
    assert look.is_changed(buffer)
    buffer.copy_(own)
    assert not look.is_changed(buffer)
    assert look.is_changed(own)  # another one in its place


def test_a_large_one_is_not_copied() -> None:
    buffer = torch.zeros(1 << 20)
    look = look_at_buffers([("table", buffer), ("small", torch.zeros(2))])
    assert look["table"].copy is None and look["small"].copy is not None
    buffer.add_(0)
    assert look["table"].is_changed(buffer)
