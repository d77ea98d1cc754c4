"""The scheduler's table on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindx_elastic.cluster.scheduler import TABLE_FILE, TableFile
from mindx_elastic.errors import UsageError
from mindx_elastic.persist import directory_lock


def test_what_was_written_is_read_by_the_next_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which waits for the end of the first one, but not for long."""
    first = TableFile(tmp_path / "recovery")
    assert first.read() is None
    first.write({"job": "a"})
    first.write({"job": "b"})
    monkeypatch.setattr(directory_lock, "_MARGIN_S", 0.1)
    is_held = rf"MS_RECOVERY_PATH: .* is in use by another scheduler, process {os.getpid()} on host"
    with pytest.raises(UsageError, match=is_held):
        TableFile(tmp_path / "recovery")
    first.close()
    second = TableFile(tmp_path / "recovery")
    assert second.read() == {"job": "b"}
    second.close()
    assert os.listdir(tmp_path / "recovery") == [TABLE_FILE]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_damaged_table_is_refused_with_the_way_out(content: bytes, tmp_path: Path) -> None:
    records = TableFile(tmp_path)
    (tmp_path / TABLE_FILE).write_bytes(content)
    with pytest.raises(UsageError, match=r"not the table of a scheduler .* when the workers of the old one have ended"):
        records.read()
    records.close()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match="MS_RECOVERY_PATH"):
        TableFile(shared)
