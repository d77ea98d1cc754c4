"""Buffers in one block: views with the same types, shapes and contents, found again from the bytes alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
import torch

from mindx_elastic.capture import descriptions
from mindx_elastic.capture.buffer_block import BufferBlock, BufferReader, view_of
from tests.persist.states import DTYPES, bits, tensor_of


def block_of(tensors: Sequence[torch.Tensor | None]) -> BufferBlock:
    return BufferReader(tensors).read()


def plain_tensors() -> list[torch.Tensor]:
    shapes = [(), (1,), (3,), (2, 5), (0,), (4, 0, 2), (33,)]
    return [tensor_of(dtype, shape, seed) for seed, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in shapes)]


def test_views_have_types_shapes_and_contents() -> None:
    tensors = plain_tensors()
    block = block_of(tensors)
    for tensor, view, part in zip(tensors, block.views, block.slices, strict=True):
        assert view is not None and part is not None
        assert (view.dtype, view.shape, bits(view)) == (tensor.dtype, tensor.shape, bits(tensor))
        assert part[0] % 16 == 0
        if view.numel():
            assert view.data_ptr() != tensor.data_ptr()


def test_the_places_and_the_bytes_tell_everything() -> None:
    tensors = plain_tensors()
    block = block_of(tensors)
    slices, flat = json.loads(json.dumps(block.slices)), torch.tensor(block.flat.tolist(), dtype=torch.uint8)
    for tensor, part in zip(tensors, slices, strict=True):
        again = view_of(flat, part)
        assert (again.dtype, again.shape, bits(again)) == (tensor.dtype, tensor.shape, bits(tensor))


def test_a_reader_reads_what_there_is_now() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.bool)]
    reader = BufferReader(tensors)
    before = reader.read()
    tensors[0].add_(1)
    tensors[1].copy_(torch.tensor([7, 8]))
    tensors[2].data.fill_(True)  # moves no version counter
    assert reader.fits(tensors)
    block = reader.read(before)
    assert [view.tolist() for view in block.views if view is not None] == [[1, 1, 1], [7, 8], True]
    assert [view.tolist() for view in before.views if view is not None] == [[0, 0, 0], [0, 0], False]
    assert reader.read_raw() == block.raw != before.raw


def _assign_data(tensors: list[torch.Tensor]) -> None:
    tensors[1].data = torch.ones(2, 2)


def _replace(tensors: list[torch.Tensor]) -> None:
    tensors[1] = tensors[1].clone()


def _resize(tensors: list[torch.Tensor]) -> None:
    tensors[1].resize_(1, 2)


def _reshape(tensors: list[torch.Tensor]) -> None:
    tensors[1].resize_(4)


def _transpose(tensors: list[torch.Tensor]) -> None:
    tensors[1].t_()


def _free(tensors: list[torch.Tensor]) -> None:
    tensors[1].untyped_storage().resize_(0)


def _remove(tensors: list[torch.Tensor]) -> None:
    tensors[1] = None  # type: ignore[call-overload]


@pytest.mark.parametrize("change", [_assign_data, _replace, _resize, _reshape, _transpose, _free, _remove])
@pytest.mark.parametrize("beside", [[], [None], [torch.ones(4)[::2]]], ids=["alone", "none", "uneven"])
def test_other_memory_does_not_fit(
    change: Callable[[list[torch.Tensor]], None], beside: list[torch.Tensor | None]
) -> None:
    """And what is read all the same is memory that is kept."""
    tensors: list[torch.Tensor] = [torch.zeros(3), torch.zeros(2, 2), *beside]  # type: ignore[list-item]
    reader = BufferReader(tensors)
    assert reader.fits(tensors)
    change(tensors)
    assert not reader.fits(tensors)
    if change is not _free:  # that memory is gone, so it must not be read
        assert len(reader.read_raw()) == 32 + 16 * len([one for one in beside if one is not None])


def _assign(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], object]:
    def change(tensor: torch.Tensor) -> None:
        tensor.data = make(tensor.data)

    return change


_OTHER_MEANINGS: dict[str, Callable[[torch.Tensor], object]] = {
    "retyped": _assign(lambda data: data.view(torch.int64)),
    "parts": _assign(lambda data: data.view(torch.float32)[:4]),
    "spread": _assign(lambda data: data.as_strided((4,), (2,))),
    "spread in place": lambda tensor: tensor.as_strided_((4,), (2,)),
    "conjugated": _assign(lambda data: data.conj()),
    "negated": _assign(torch._neg_view),
    "shorter": _assign(lambda data: data[:3]),
    "a table": _assign(lambda data: data.view(2, 2)),
}


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("layout", ["plain", "uneven"])
@pytest.mark.parametrize("change", _OTHER_MEANINGS.values(), ids=_OTHER_MEANINGS)
def test_memory_that_means_something_else_does_not_fit(
    change: Callable[[torch.Tensor], object], layout: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same object at the same address. An uneven one is read through the tensor each time, so only what its piece
    is made for counts."""
    if not fast:
        monkeypatch.setattr(descriptions, "_fast_check", lambda: None)
    room = torch.ones(16, dtype=torch.complex64)
    tensor = room[:4] if layout == "plain" else room[:8:2]
    reader = BufferReader([torch.zeros(3), tensor])
    address, kind = tensor.data_ptr(), (tensor.dtype, tensor.shape)
    assert reader.fits(reader.tensors)
    with torch.no_grad():
        try:
            change(tensor)
        except RuntimeError:  # a spread tensor has no such view
            pytest.skip("not of this tensor")
    assert tensor.data_ptr() == address
    is_same_piece = (tensor.dtype, tensor.shape) == kind and (layout == "uneven") is not tensor.is_contiguous()
    assert reader.fits(reader.tensors) is (layout == "uneven" and is_same_piece)
    again = BufferReader(reader.tensors).read().views[1]
    assert again is not None
    assert torch.equal(again.resolve_conj().resolve_neg(), tensor.resolve_conj().resolve_neg())


def test_this_torch_compares_in_one_call() -> None:
    """As far as known. Where it does not, the slow way is right as well: see the tests above."""
    assert descriptions._fast_check() is not None


def test_other_surroundings_are_no_other_tensors() -> None:
    """A forward under autocast, a boundary without; then the fast way knows both."""
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    reader = BufferReader(tensors)
    for _ in range(3):
        with torch.autocast("cpu"):
            assert reader.fits(tensors)
        with torch.inference_mode():
            assert reader.fits(tensors)
        assert reader.fits(tensors)
    with torch.autocast("cpu"):
        tensors[0].data = tensors[0].data.view(torch.int32)
        assert not reader.fits(tensors)


def test_a_reader_leaves_a_tensor_resizable() -> None:
    tensor = torch.zeros(2)
    BufferReader([tensor]).read()
    assert tensor.resize_(1000).numel() == 1000


def test_equal_buffers_are_equal_bytes() -> None:
    """The gaps between them hold nothing."""
    torch.full((1000,), 7.0)  # what freed memory may hold
    one, other = (block_of([torch.ones(3), torch.ones(5)]).raw for _ in range(2))
    assert one == other


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6.0)[::2],
        torch.ones(1).expand(4),
        torch.arange(0).view(0, 3).t(),
        torch.full((2,), 1j).conj(),
        torch.full((2,), 1j).conj().imag,
    ],
    ids=["transposed", "sliced", "expanded", "empty", "conjugated", "negated"],
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


def test_no_tensors_no_bytes() -> None:
    block = block_of(())
    assert (block.raw, block.flat.numel(), block.views, block.slices) == (b"", 0, [], [])
