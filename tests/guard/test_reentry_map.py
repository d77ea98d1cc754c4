"""A snapshot that is mapped while its own process puts digests into its header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.core.owners import Trust
from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.guard import reentry


@pytest.mark.parametrize(("torn", "comes"), [(0, True), (1, True), (4, True), (5, False)])
def test_a_header_that_is_being_written_is_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torn: int, comes: bool
) -> None:
    reads: list[Path] = []

    def read(path: Path, **more: Any) -> str:
        reads.append(path)
        if len(reads) <= torn:
            raise CorruptCheckpointError("damaged header", path=path)
        return "content"

    monkeypatch.setattr(reentry, "map_checkpoint", read)
    monkeypatch.setattr(reentry, "_PAUSE_S", 0.0)
    if comes:
        found: Any = reentry._map(tmp_path / "slot", Trust())
        assert found == "content"
    else:
        with pytest.raises(CorruptCheckpointError):
            reentry._map(tmp_path / "slot", Trust())
