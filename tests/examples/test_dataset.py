from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import dataset


def test_planes_are_red_green_blue_row_by_row(tmp_path: Path) -> None:
    record = np.zeros(3073, dtype=np.uint8)
    record[0] = 7
    record[1 + 33] = 10  # red, row 1, column 1
    record[1 + 1024 + 2] = 20  # green, row 0, column 2
    record[1 + 2048 + 1023] = 30  # blue, row 31, column 31
    path = tmp_path / "one.bin"
    path.write_bytes(record.tobytes())
    picture, label = dataset.BinaryRecords([path]).read(0)
    assert label == 7
    assert (picture[0, 1, 1], picture[1, 0, 2], picture[2, 31, 31]) == (10, 20, 30)
    assert picture.astype(int).sum() == 60


def test_load_counts_limits_and_normalises(cifar_directory: Path) -> None:
    split = dataset.load_cifar10(cifar_directory, limit_train=25)
    assert (len(split.train), len(split.test)) == (25, 10)
    assert "25 of 30 training and 10 test pictures" in split.description
    assert str(cifar_directory) in split.description
    picture, label = split.test[3]
    assert (picture.dtype, tuple(picture.shape), label) == (torch.float32, (3, 32, 32), 3)
    assert picture[0, 0, 0].item() == pytest.approx((3 / 255 - 0.4914) / 0.2470, rel=1e-5)
    with pytest.raises(IndexError):
        split.train[25]


def test_a_label_that_is_too_large_names_file_and_record(cifar_directory: Path) -> None:
    path = cifar_directory / "data_batch_1.bin"
    content = bytearray(path.read_bytes())
    content[4 * 3073] = 99
    path.write_bytes(content)
    with pytest.raises(dataset.DataError, match=r"data_batch_1\.bin: record 4 has label 99"):
        dataset.load_cifar10(cifar_directory)


def test_missing_files_are_named(cifar_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(dataset.DataError, match=r"nowhere does not exist.*--download"):
        dataset.load_cifar10(tmp_path / "nowhere")
    with pytest.raises(dataset.DataError, match="is not a directory"):
        dataset.load_cifar10(cifar_directory / "test_batch.bin")
    (cifar_directory / "test_batch.bin").unlink()
    with pytest.raises(dataset.DataError, match=r"test_batch\.bin is missing"):
        dataset.load_cifar10(cifar_directory)
    for path in dataset.training_files(cifar_directory):
        path.unlink()
    with pytest.raises(dataset.DataError, match=r"no data_batch_\*\.bin"):
        dataset.load_cifar10(cifar_directory)
