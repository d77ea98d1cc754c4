from __future__ import annotations

import contextlib
import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mindx_elastic.convert.conversion import ConversionRequest, convert
from mindx_elastic.convert.dcp import METADATA, read_dcp, write_dcp
from mindx_elastic.convert.mapped import Scratch
from mindx_elastic.convert.state import resolved
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, ForeignCheckpointError
from tests.convert.samples import Marker

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def read(folder: Path) -> Any:
    return resolved(read_dcp(folder, Scratch(folder.parent)))


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Folder:
    """A checkpoint as several ranks write it, chunk by chunk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.metadata = Metadata({}, {}, {})

    def add(self, name: str, whole: torch.Tensor, boxes: list[Box]) -> Folder:
        chunks = []
        for number, (offsets, sizes) in enumerate(boxes):
            piece = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].clone()
            self.put(MetadataIndex(name, torch.Size(offsets), 0), f"__{number}_0.distcp", saved(piece))
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        properties = TensorProperties(dtype=whole.dtype)
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, whole.size(), chunks)
        return self.finish()

    def add_value(self, name: str, data: bytes) -> Folder:
        self.put(MetadataIndex(name), "__0_0.distcp", data)
        self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
        return self.finish()

    def put(self, index: MetadataIndex, file: str, data: bytes) -> None:
        with open(self.path / file, "ab") as stream:
            start = stream.seek(0, 2)
            stream.write(data)
        self.metadata.storage_data[index] = _StorageInfo(file, start, len(data))

    @property
    def entry(self) -> Any:
        """What the metadata says of ``w``."""
        return self.metadata.state_dict_metadata["w"]

    def finish(self) -> Folder:
        (self.path / METADATA).write_bytes(pickle.dumps(self.metadata))
        return self


WHOLE = torch.arange(48.0).reshape(8, 6)
QUARTERS: list[Box] = [((r, c), (4, 3)) for r in (0, 4) for c in (0, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "ck")


def without_a_chunk(folder: Folder) -> None:
    folder.entry.chunks.pop()


def with_a_chunk_outside(folder: Folder) -> None:
    folder.entry.chunks[0].offsets = torch.Size((7, 5))


def with_a_huge_tensor(folder: Folder) -> None:
    entry = folder.entry
    entry.size = torch.Size((1 << 40, 1 << 20))
    entry.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), entry.size)]


def with_a_path_outside(folder: Folder) -> None:
    for info in folder.metadata.storage_data.values():
        info.relative_path = "../secret"


def with_another_type(folder: Folder) -> None:
    folder.entry.properties.dtype = torch.float64


def beyond_the_file(folder: Folder) -> None:
    for info in folder.metadata.storage_data.values():
        info.offset += 1 << 30


def with_a_pipe(folder: Folder) -> None:
    import os

    (folder.path / "__1_0.distcp").unlink()
    os.mkfifo(folder.path / "__1_0.distcp")


def with_a_file_cut_off(folder: Folder) -> None:
    path = folder.path / "__3_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: list[Callable[[Folder], None]] = [
    *(without_a_chunk, with_a_chunk_outside, with_a_huge_tensor, with_a_path_outside, with_another_type),
    *(beyond_the_file, with_a_pipe, with_a_file_cut_off),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_one_is_a_named_error(folder: Folder, damage: Callable[[Folder], None]) -> None:
    folder.add("w", WHOLE, QUARTERS)
    damage(folder)
    folder.finish()
    with pytest.raises(CheckpointError, match=str(folder.path)):
        read(folder.path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_runs_nothing(tmp_path: Path, folder: Folder, protocol: int) -> None:
    mark = tmp_path / "mark"
    folder.add("w", WHOLE, QUARTERS)
    for value in (Marker(mark), Metadata({"w": Marker(mark)}, {}, {}), Metadata({}, {}, {}, Marker(mark))):  # type: ignore[dict-item, arg-type]
        (folder.path / METADATA).write_bytes(pickle.dumps(value, protocol))
        with contextlib.suppress(CorruptCheckpointError):  # storage_meta is of no interest and not looked at
            read(folder.path)
        assert not mark.exists()


def test_values_run_nothing(tmp_path: Path, folder: Folder) -> None:
    folder.add("w", WHOLE, QUARTERS).add_value("v", saved(Marker(tmp_path / "mark")))
    with pytest.raises(ForeignCheckpointError, match=r"mkdir.*Nothing of it was run"):
        read(folder.path)
    assert not (tmp_path / "mark").exists()


def test_what_is_not_wanted_is_not_read(tmp_path: Path, folder: Folder) -> None:
    folder.add("model.w", WHOLE, QUARTERS).add_value("extra", saved(Marker(tmp_path / "mark")))
    folder.metadata.planner_data = {"model.w": ("model", "w"), "extra": ("extra",)}
    folder.finish()
    convert(ConversionRequest(source=folder.path, destination=tmp_path / "m.pt"))
    assert torch.equal(torch.load(tmp_path / "m.pt", weights_only=True)["w"], WHOLE)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_flipped_bytes_never_give_more_than_an_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Folder(tmp_path_factory.mktemp("x") / "ck").add("w", WHOLE, QUARTERS)
    raw = bytearray((folder.path / METADATA).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(raw), random.Random(0).randrange(len(raw))]))
    (folder.path / METADATA).write_bytes(raw[:end])
    try:
        found = read(folder.path)
    except CheckpointError:
        return
    for tensor in found.values():
        assert isinstance(tensor, torch.Tensor)


def test_the_optimizer_in_a_folder_of_torchtitan_is_not_the_model(tmp_path: Path) -> None:
    state = {
        "layers.0.weight": torch.ones(2),
        "optimizer": {"state.layers.0.weight.exp_avg": torch.zeros(2)},
        "train_state": {"step": torch.tensor(3)},
    }
    write_dcp(tmp_path / "step-3", state)
    made = tmp_path / "w.pt"
    convert(ConversionRequest(source=tmp_path / "step-3", destination=made))
    assert list(torch.load(made, weights_only=True)) == ["layers.0.weight"]
    convert(ConversionRequest(source=tmp_path / "step-3", destination=made, everything=True, force=True))
    assert set(torch.load(made, weights_only=True)) == {"model", "optimizer", "train_state"}
