"""Buffers in one block: views with the same types, shapes and contents, found again from the bytes alone."""

from __future__ import annotations

import json

import pytest
import torch

from mindx_elastic.capture.buffer_block import BufferBlock, view_of
from tests.persist.states import DTYPES, bits, tensor_of


def plain_tensors() -> list[torch.Tensor]:
    shapes = [(), (1,), (3,), (2, 5), (0,), (4, 0, 2), (33,)]
    return [tensor_of(dtype, shape, seed) for seed, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in shapes)]


def test_views_have_types_shapes_and_contents() -> None:
    tensors = plain_tensors()
    block = BufferBlock(tensors)
    for tensor, view, part in zip(tensors, block.views, block.slices, strict=True):
        assert view is not None and part is not None
        assert (view.dtype, view.shape, bits(view)) == (tensor.dtype, tensor.shape, bits(tensor))
        assert part[0] % 64 == 0
        if view.numel():
            assert view.data_ptr() != tensor.data_ptr()
            assert view.data_ptr() == block.flat.data_ptr() + part[0]


def test_the_places_and_the_bytes_tell_everything() -> None:
    tensors = plain_tensors()
    block = BufferBlock(tensors)
    slices, flat = json.loads(json.dumps(block.slices)), torch.tensor(block.flat.tolist(), dtype=torch.uint8)
    for tensor, part in zip(tensors, slices, strict=True):
        again = view_of(flat, part)
        assert (again.dtype, again.shape, bits(again)) == (tensor.dtype, tensor.shape, bits(tensor))


def test_a_change_of_the_view_is_a_change_of_the_block() -> None:
    block = BufferBlock([torch.zeros(3), torch.zeros(2, dtype=torch.int64)])
    torch._foreach_copy_(block.views, [torch.ones(3), torch.tensor([7, 8])])  # type: ignore[arg-type]
    assert block.slices[1] is not None
    assert view_of(block.flat, block.slices[1]).tolist() == [7, 8]


def test_equal_buffers_are_equal_bytes() -> None:
    """The gaps between them hold nothing."""
    torch.full((1000,), 7.0)  # what freed memory may hold
    one, other = (BufferBlock([torch.ones(3), torch.ones(5)]).flat for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6.0)[::2],
        torch.ones(1).expand(4),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2)),
        torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (4,), check_invariants=True),
    ],
    ids=["transposed", "sliced", "expanded", "conjugated", "subclass", "sparse"],
)
def test_what_is_not_plain_memory_gets_a_copy_of_its_own(tensor: torch.Tensor) -> None:
    block = BufferBlock([torch.zeros(2), tensor, None])
    assert block.slices[0] is not None and block.slices[1:] == [None, None]
    assert block.flat.numel() == 64
    copied = block.views[1]
    assert copied is not None and copied is not tensor and block.views[2] is None
    assert torch.equal(copied.to_dense(), tensor.detach().to_dense())


def test_no_tensors_no_bytes() -> None:
    block = BufferBlock(())
    assert (block.flat.numel(), block.views, block.slices) == (0, [], [])
