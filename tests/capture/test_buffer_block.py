"""Buffers in one block: views with the same types, shapes and contents, found again from the bytes alone."""

from __future__ import annotations

import json

import pytest
import torch

from mindx_elastic.capture.buffer_block import block_of, view_of


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(3),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6.0)[::2],
        torch.ones(1).expand(4),
        torch.arange(0).view(0, 3).t(),
        torch.full((2,), 1j).conj(),
        torch.full((2,), 1j).conj().imag,
    ],
    ids=["plain", "scalar", "transposed", "sliced", "expanded", "empty", "conjugated", "negated"],
)
def test_what_is_dense_is_in_the_block(tensor: torch.Tensor) -> None:
    """So the log of a DDP rank has it. It is read as it is now, wherever it lies, and stays resizable."""
    for _ in range(2):
        block = block_of([torch.zeros(2), tensor, None])
        assert block.slices[1] is not None and block.slices[2] is None
        places = dict(json.loads(block.describe(["first", "it", "none"])))
        for copied in (
            block.views[1],
            view_of(torch.frombuffer(bytearray(block.raw), dtype=torch.uint8), places["it"]),
        ):
            assert copied is not None and torch.equal(copied, tensor) and copied.dtype == tensor.dtype
        if tensor.stride() != (0,):
            tensor.mul_(3)
            assert tensor.numel() == 0 or block_of([torch.zeros(2), tensor, None]).raw != block.raw
    small = torch.zeros(2)
    block_of([small])
    assert small.resize_(1000).numel() == 1000


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.ones(2)),
        torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (4,), check_invariants=True),
    ],
    ids=["subclass", "sparse"],
)
def test_what_is_not_plain_memory_gets_a_copy_of_its_own(tensor: torch.Tensor) -> None:
    block = block_of([torch.zeros(2), tensor, None])
    assert block.slices[0] is not None and block.slices[1:] == [None, None]
    assert len(block.raw) == 16
    copied = block.views[1]
    assert copied is not None and copied is not tensor and block.views[2] is None
    assert torch.equal(copied.to_dense(), tensor.detach().to_dense())
