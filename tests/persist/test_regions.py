"""Boxes of stored tensors: the same elements as numpy's slicing, few bytes more than they take, damage named."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import Box
from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.persist import regions
from mindx_elastic.persist.format import Header, open_checkpoint
from mindx_elastic.persist.regions import read_box
from mindx_elastic.persist.writer import write_checkpoint
from tests.persist.states import bits, tensor_of
from tests.persist.test_reader import INFO

SHAPES = [(), (1,), (17,), (5, 7), (4, 1, 6), (3, 4, 5), (2, 3, 2, 3), (0,), (3, 0, 2), (64, 33), (300,)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2]
STATE = {
    f"{number}": tensor_of(dtype, shape, number)
    for number, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES))
}
Opened = tuple[int, Header, Path]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    path = tmp_path_factory.mktemp("regions") / "x.safetensors"
    write_checkpoint(path, STATE, INFO)
    with open_checkpoint(path) as (fd, header):
        yield fd, header, path


def boxes(shape: Sequence[int]) -> st.SearchStrategy[Box]:
    intervals = [
        st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda ends: (min(ends), max(ends))) for n in shape
    ]
    return st.tuples(*intervals)


def expected(tensor: torch.Tensor, box: Box) -> bytes:
    """By numpy, on the raw bytes of each element."""
    raw: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    raw = raw.reshape(*tensor.shape, tensor.dtype.itemsize)
    return raw[tuple(slice(start, stop) for start, stop in box)].tobytes()


def read(opened: Opened, name: str, box: Box, out: torch.Tensor | None = None) -> tuple[torch.Tensor, int]:
    fd, header, path = opened
    entry = header.entries[name]
    if out is None:
        out = torch.empty([stop - start for start, stop in box], dtype=entry.torch_dtype)
    return out, read_box(fd, header, entry, box, out, path)


@settings(deadline=None)
@given(data=st.data(), piece=st.sampled_from([1, 40, 1 << 20]))
def test_any_box_is_what_numpy_slices(opened: Opened, data: st.DataObject, piece: int) -> None:
    name = data.draw(st.sampled_from(list(STATE)))
    box = data.draw(boxes(STATE[name].shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "_PIECE_BYTES", piece)
        out, num_bytes = read(opened, name, box)
    assert bits(out) == expected(STATE[name], box)
    assert num_bytes == out.nbytes


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_into_memory_of_any_strides(opened: Opened, data: st.DataObject) -> None:
    """The target is a window of a larger tensor, or turned around: nothing beside it is touched."""
    name = data.draw(st.sampled_from([n for n, t in STATE.items() if t.ndim]))
    tensor = STATE[name]
    box = data.draw(boxes(tensor.shape))
    sizes = [stop - start for start, stop in box]
    around = torch.zeros([n + 3 for n in reversed(sizes)], dtype=tensor.dtype)
    window = around[tuple(slice(1, 1 + n) for n in reversed(sizes))].permute(*reversed(range(len(sizes))))
    assert list(window.shape) == sizes
    read(opened, name, box, window)
    assert bits(window) == expected(tensor, box)
    outside = (
        around.reshape(-1).view(torch.uint8).count_nonzero()
        - torch.empty(sizes, dtype=tensor.dtype).copy_(window).reshape(-1).view(torch.uint8).count_nonzero()
    )
    assert outside == 0


@pytest.fixture
def large(tmp_path: Path) -> Iterator[tuple[torch.Tensor, Opened]]:
    """256 rows of 40 KB."""
    tensor = torch.arange(256 * 10_000, dtype=torch.float32).reshape(256, 10_000)
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, {"w": tensor}, INFO)
    with open_checkpoint(path) as (fd, header):
        yield tensor, (fd, header, path)


def test_a_file_that_was_cut_off_meanwhile_is_named(large: tuple[torch.Tensor, Opened]) -> None:
    _, (fd, header, path) = large
    os.truncate(path, header.data_start + 100_000)
    assert torch.equal(read((fd, header, path), "w", ((0, 2), (0, 10_000)))[0].flatten(), torch.arange(20_000.0))
    for box in (((2, 3), (0, 10_000)), ((200, 201), (0, 10))):
        with pytest.raises(CorruptCheckpointError, match=f"{path}: tensor w is cut off") as caught:
            read((fd, header, path), "w", box)
        assert (caught.value.path, caught.value.tensor) == (path, "w")
