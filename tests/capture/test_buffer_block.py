"""Buffers in one block: views with the same types, shapes and contents, found again from the bytes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from mindx_elastic.capture.buffer_block import BufferBlock, BufferReader


def block_of(tensors: Sequence[torch.Tensor | None]) -> BufferBlock:
    return BufferReader(tensors).read()


def _assign(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], object]:
    def change(tensor: torch.Tensor) -> None:
        tensor.data = make(tensor.data)

    return change


_OTHER_MEANINGS: dict[str, Callable[[torch.Tensor], object]] = {
    "parts": _assign(lambda data: data.view(torch.float32)[:4]),
    "spread": _assign(lambda data: data.as_strided((4,), (2,))),
    "spread in place": lambda tensor: tensor.as_strided_((4,), (2,)),
    "conjugated": _assign(lambda data: data.conj()),
    "negated": _assign(torch._neg_view),
    "shorter": _assign(lambda data: data[:3]),
    "a table": _assign(lambda data: data.view(2, 2)),
}


@pytest.mark.parametrize("layout", ["plain", "uneven"])
@pytest.mark.parametrize("change", _OTHER_MEANINGS.values(), ids=_OTHER_MEANINGS)
def test_memory_that_means_something_else_does_not_fit(change: Callable[[torch.Tensor], object], layout: str) -> None:
    """The same object at the same address. An uneven one is read through the tensor each time, so only what its piece
    is made for counts."""
    room = torch.ones(16, dtype=torch.complex64)
    tensor = room[:4] if layout == "plain" else room[:8:2]
    reader = BufferReader([torch.zeros(3), tensor])
    address, kind = tensor.data_ptr(), (tensor.dtype, tensor.shape)
    assert reader.fits(reader.tensors) and reader.means_the_same()
    with torch.no_grad():
        try:
            change(tensor)
        except RuntimeError:  # a spread tensor has no such view
            pytest.skip("not of this tensor")
    assert tensor.data_ptr() == address
    is_same_piece = (tensor.dtype, tensor.shape) == kind and (layout == "uneven") is not tensor.is_contiguous()
    assert (reader.fits(reader.tensors) and reader.means_the_same()) is (layout == "uneven" and is_same_piece)
    again = BufferReader(reader.tensors).read().views[1]
    assert again is not None
    assert torch.equal(again.resolve_conj().resolve_neg(), tensor.resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(1).expand(4),
        torch.arange(0).view(0, 3).t(),
        torch.full((2,), 1j).conj(),
    ],
    ids=["transposed", "expanded", "empty", "conjugated"],
)
def test_what_is_dense_and_uneven_is_in_the_block_too(tensor: torch.Tensor) -> None:
    """So the log of a DDP rank has it. It is read as it is now, wherever it lies."""
    tensors = [torch.zeros(2), tensor, None]
    reader = BufferReader(tensors)
    for _ in range(2):
        block = reader.read()
        assert block.slices[1] is not None and block.slices[2] is None
        copied = block.views[1]
        assert copied is not None and reader.read_raw() == block.raw
        assert torch.equal(copied, tensor) and copied.dtype == tensor.dtype
        if tensor.stride() != (0,):
            tensor.mul_(3)
            assert reader.fits(tensors)


@pytest.mark.parametrize("tensor", [torch.nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse()])
def test_what_is_not_plain_memory_gets_a_copy_of_its_own(tensor: torch.Tensor) -> None:
    block = block_of([torch.zeros(2), tensor, None])
    assert block.slices[0] is not None and block.slices[1:] == [None, None]
    assert len(block.raw) == 16
    copied = block.views[1]
    assert copied is not None and copied is not tensor and block.views[2] is None
    assert torch.equal(copied.to_dense(), tensor.detach().to_dense())
    assert block_of(()).raw == b"" and block_of(()).views == []
    plain = torch.zeros(2)
    assert block_of([plain]).views and plain.resize_(1000).numel() == 1000, "it can be resized still"
