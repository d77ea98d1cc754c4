"""Buffers in one block: views with the same types, shapes and contents, found again from the bytes alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from mindx_elastic.capture.buffer_block import BufferBlock, BufferReader
from mindx_elastic.capture.module_component import ModuleComponent


def block_of(tensors: Sequence[torch.Tensor | None]) -> BufferBlock:
    block = BufferReader(tensors).read()
    assert block is not None
    return block


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(2).to_sparse(),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(1).expand(4),
        torch.full((2,), 1j).conj(),
    ],
    ids=["parameter", "sparse", "transposed", "expanded", "conjugated"],
)
def test_what_is_not_plain_memory_gets_a_copy_of_its_own(tensor: torch.Tensor) -> None:
    block = block_of([torch.zeros(2), tensor, None])
    assert block.slices[0] is not None and block.slices[1:] == [None, None]
    assert len(block.raw) == 8
    copied = block.views[1]
    assert copied is not None and copied is not tensor and block.views[2] is None
    assert torch.equal(copied.to_dense(), tensor.detach().to_dense())
    assert block_of(()).raw == b"" and block_of(()).views == []
    plain = torch.zeros(2)
    assert block_of([plain]).views and plain.resize_(1000).numel() == 1000, "it can be resized still"


@pytest.mark.parametrize("name", ["running_mean", "running_var", "num_batches_tracked"])
def test_other_memory_of_such_a_buffer_of_all_batch_norms_is_seen_at_once(name: str) -> None:
    network = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(4)))
    component = ModuleComponent("model", network)
    for child in network:
        child.get_buffer(name).data = torch.full_like(child.get_buffer(name), 7)
    component.copy(closely=False)
    assert all(bool((t == 7).all()) for place, t in component.copied_buffers().items() if place.endswith(name))
