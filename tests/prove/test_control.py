"""The control file, and where a run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.errors import UsageError
from mindx_elastic.prove.control import Control, read_control


def test_the_length_of_a_run(tmp_path: Path) -> None:
    def last(num_batches: int, *, before: int = 0, **more: object) -> int:
        control = Control(folder=tmp_path, directories=tmp_path, **more)  # type: ignore[arg-type]
        return next(n for n in range(1, 1000) if control.is_last(0, n, num_batches, passed=n + before))

    assert last(0, steps=7) == 7
    assert last(0, last=(0, 9)) == 9
    assert last(0, steps=-1) == 30, "where the length of an epoch is not known"
    assert last(50, steps=-1) == 55, "into the second epoch"
    assert last(500, steps=-1) == 30, "which is too far"
    assert last(6, steps=-1) == 30
    assert last(6, steps=40) == 40
    assert last(6, before=5, steps=40) == 35, "the steps of all guards count"
    assert last(6, before=5, steps=-1) == 25


def test_a_control_file_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"steps": 3}')
    for name in ("none.json", "other.json"):
        with pytest.raises(UsageError, match="names no control file of mindx-elastic prove"):
            read_control(tmp_path / name)
