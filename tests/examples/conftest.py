"""The example is a folder of scripts, not a package: its modules are found as when `train.py` is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "resnet_cifar10"
if str(EXAMPLE) not in sys.path:
    sys.path.insert(0, str(EXAMPLE))

WriteBatch = Callable[[Path, int], Path]


@pytest.fixture
def write_batch() -> WriteBatch:
    """Writes well-formed records: record i has label i % 10 and every pixel equal to i % 256."""

    def write(path: Path, num_records: int) -> Path:
        numbers = np.arange(num_records, dtype=np.uint32)
        records = np.repeat((numbers % 256).astype(np.uint8)[:, None], 3073, axis=1)
        records[:, 0] = numbers % 10
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(records.tobytes())
        return path

    return write


@pytest.fixture
def environment() -> dict[str, str]:
    """For child processes: they find the package in this working tree, whether it is installed or not."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def cifar_directory(tmp_path: Path, write_batch: WriteBatch) -> Path:
    """A tiny data directory: 30 training records in two files, 10 test records."""
    directory = tmp_path / "cifar"
    write_batch(directory / "data_batch_1.bin", 20)
    write_batch(directory / "data_batch_2.bin", 10)
    write_batch(directory / "test_batch.bin", 10)
    return directory
