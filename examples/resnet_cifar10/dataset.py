"""The pictures: CIFAR-10 in its binary layout, or scikit-learn's digits, with random crop and flip.

The binary layout (described on the data set's home page): records of 3,073 bytes, one label byte 0..9, then
1,024 red, 1,024 green and 1,024 blue bytes, row by row. ``data_batch_*.bin`` are for training,
``test_batch.bin`` for testing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = [
    "NUM_CLASSES",
    "ArrayRecords",
    "BinaryRecords",
    "DataError",
    "DataSplit",
    "Pictures",
    "load_cifar10",
    "load_digits_split",
]

Bytes = npt.NDArray[np.uint8]

NUM_CLASSES = 10
SHAPE = (3, 32, 32)  # channels, rows, columns
RECORD_BYTES = 1 + 3 * 32 * 32
REMEDY = "give a CIFAR-10 binary directory, or add --download"
CROP_PADDING = 4  # pixels on each side, black, before a 32x32 window is cut out


class DataError(ValueError):
    """The data directory cannot be used; the message names the file and what to do."""


class Records(Protocol):
    """Raw pictures by number; reading one draws no random numbers."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Bytes, int]:
        """The picture as ``uint8`` of shape (3, 32, 32), and its label."""
        ...


class ArrayRecords:
    """Records that are in memory: `images` of shape (N, 3, 32, 32) ``uint8``, `labels` of shape (N,)."""

    def __init__(self, images: Bytes, labels: Bytes) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Bytes, int]:
        return self.images[index], int(self.labels[index])


class BinaryRecords:
    """Records of several CIFAR-10 binary files, one after the other, memory mapped.

    A map costs no extra memory: all ranks and loader workers of a machine share the page cache. Only the
    paths are pickled, so that workers started with ``spawn`` map the files again in place of receiving a
    copy.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [Path(path) for path in paths]
        self._open()

    def _open(self) -> None:
        self._files = [_map_records(path) for path in self.paths]
        self._ends = np.cumsum([len(file) for file in self._files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> tuple[Bytes, int]:
        file = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[file - 1]) if file else 0
        record = self._files[file][index - start]
        return record[1:].reshape(SHAPE), int(record[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.paths = state["paths"]
        self._open()


def _map_records(path: Path) -> Bytes:
    """Map one file as (N, 3073) bytes after checking its size and its labels."""
    try:
        size = path.stat().st_size
        if size == 0 or size % RECORD_BYTES:
            whole, rest = divmod(size, RECORD_BYTES)
            raise DataError(
                f"{path} has {size} bytes: {whole} whole records of {RECORD_BYTES} bytes and {rest} more. It "
                "is truncated or is not a CIFAR-10 binary file; fetch it again."
            )
        records: Bytes = np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, RECORD_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    wrong = np.flatnonzero(records[:, 0] >= NUM_CLASSES)
    if len(wrong):
        raise DataError(
            f"{path}: record {wrong[0]} has label {records[wrong[0], 0]}, labels are 0..{NUM_CLASSES - 1} "
            f"({len(wrong)} such records). It is not a CIFAR-10 binary file (CIFAR-100 has two label bytes)."
        )
    return records


class Pictures(Dataset[tuple[Tensor, int]]):
    """Normalised pictures: a float tensor (3, 32, 32) and its label, by number.

    With `augment` the picture is cropped at a random place (4 black pixels around it) and flipped at random.
    The draws come from torch's global generator inside ``__getitem__``; `mindx_elastic.data.ResumableLoader`
    seeds that generator for each sample, which is why the same sample of the same epoch is cropped alike in
    every run.
    """

    def __init__(
        self,
        records: Records,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool,
        limit: int | None = None,
    ) -> None:
        self.records, self.augment = records, augment
        self.num_pictures = len(records) if limit is None else min(limit, len(records))
        self._scale = 1.0 / (255.0 * torch.tensor(std).reshape(3, 1, 1))
        self._shift = -torch.tensor(mean).reshape(3, 1, 1) / torch.tensor(std).reshape(3, 1, 1)

    def __len__(self) -> int:
        return self.num_pictures

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.num_pictures:
            raise IndexError(f"picture {index} of {self.num_pictures}")
        picture, label = self.records.read(index)
        if self.augment:
            picture = _crop_and_flip(picture)
        return torch.from_numpy(picture.astype(np.float32)) * self._scale + self._shift, label


def _crop_and_flip(picture: Bytes) -> Bytes:
    _, height, width = picture.shape
    # Always the same number of draws, used or not: the stream of one sample never depends on an earlier
    # outcome.
    top, left, flip = (
        int(torch.randint(2 * CROP_PADDING + 1, ())),
        int(torch.randint(2 * CROP_PADDING + 1, ())),
        int(torch.randint(2, ())),
    )
    padded = np.zeros((3, height + 2 * CROP_PADDING, width + 2 * CROP_PADDING), dtype=np.uint8)
    padded[:, CROP_PADDING : CROP_PADDING + height, CROP_PADDING : CROP_PADDING + width] = picture
    crop = padded[:, top : top + height, left : left + width]
    return crop[:, :, ::-1] if flip else crop


class DataSplit(NamedTuple):
    """A training and a test set, and one line that says what they are."""

    train: Pictures
    test: Pictures
    description: str


def load_cifar10(directory: Path, *, limit_train: int | None = None) -> DataSplit:
    """CIFAR-10 from `directory`, or from the ``cifar-10-batches-bin`` folder in it (as the archive unpacks).

    Any number of ``data_batch_<n>.bin`` files of any number of records is taken. `limit_train` keeps the
    first so many. Raises `DataError`, naming the file, for a missing or damaged one.
    """
    directory = find_batches(directory)
    batches = training_files(directory)
    if not batches:
        if (directory / "data_batch_1").exists():
            raise DataError(
                f"{directory} holds the Python version of CIFAR-10 (pickle files, never loaded here); "
                "give the binary version (data_batch_1.bin ...), or add --download"
            )
        raise DataError(f"no data_batch_*.bin in {directory}; {REMEDY}")
    test_file = directory / "test_batch.bin"
    if not test_file.is_file():
        raise DataError(f"{test_file} is missing (the training files are there); fetch it, or add --download")
    train, test = BinaryRecords(batches), BinaryRecords([test_file])
    return _split(
        train,
        test,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        limit_train,
        f"CIFAR-10 from {directory}",
    )


def find_batches(directory: Path) -> Path:
    """The folder of the batches: `directory` or the archive's own folder in it. Raises `DataError`."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise DataError(f"data directory {directory} {what}; {REMEDY}")
    inner = directory / "cifar-10-batches-bin"
    if not inner.is_dir() or (training_files(directory) and (directory / "test_batch.bin").is_file()):
        return directory
    return inner if training_files(inner) or not training_files(directory) else directory


def training_files(directory: Path) -> list[Path]:
    """``data_batch_<n>.bin`` by number, so that batch 10 comes after batch 9 on every file system."""
    numbers = {p: re.fullmatch(r"data_batch_(\d+)\.bin", p.name) for p in directory.iterdir()}
    found = [(int(match[1]), path) for path, match in numbers.items() if match]
    return [path for _, path in sorted(found)]


def load_digits_split(*, limit_train: int | None = None) -> DataSplit:
    """scikit-learn's bundled digits (8x8, 1,797 of them) as pictures of 3x32x32; needs no download.

    Each pixel becomes 4x4 equal ones in three equal channels. Every fifth digit of each class is for testing:
    the same split every time, with no random draw. Raises `DataError` when scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise DataError(
            "without --data-url the digits of scikit-learn are used, and scikit-learn is not installed: "
            "`pip install scikit-learn`, or give --data-url"
        ) from error
    pixels, labels = load_digits(return_X_y=True)  # (1797, 64) of 0..16, (1797,)
    small = np.asarray(pixels * 255.0 / 16.0).astype(np.uint8).reshape(-1, 1, 8, 8)
    images = np.broadcast_to(small.repeat(4, axis=2).repeat(4, axis=3), (len(small), *SHAPE))
    labels = np.asarray(labels, dtype=np.uint8)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(NUM_CLASSES):
        is_test[np.flatnonzero(labels == label)[::5]] = True
    train = ArrayRecords(images[~is_test], labels[~is_test])
    test = ArrayRecords(images[is_test], labels[is_test])
    name = "scikit-learn's digits as 3x32x32 (no --data-url given)"
    return _split(train, test, (0.305,) * 3, (0.376,) * 3, limit_train, name)


def _split(
    train: Records, test: Records, mean: Sequence[float], std: Sequence[float], limit: int | None, name: str
) -> DataSplit:
    train_set = Pictures(train, mean=mean, std=std, augment=True, limit=limit)
    test_set = Pictures(test, mean=mean, std=std, augment=False)
    counts = f"{len(train_set)} of {len(train)} training and {len(test_set)} test pictures"
    return DataSplit(train_set, test_set, f"data: {name}, {counts}")
