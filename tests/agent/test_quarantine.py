"""Setting a checkpoint aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.agent.holder import Flushed
from mindx_elastic.agent.quarantine import set_checkpoint_aside
from mindx_elastic.persist.catalog import read_entries
from tests.checkpoint_files import write, write_step


def left(directory: Path) -> list[str]:
    return sorted(str(entry.path.relative_to(directory)) for entry in read_entries(directory))


def test_all_ranks_files_of_the_step_move(tmp_path: Path) -> None:
    write_step(tmp_path, 4)
    write_step(tmp_path, 6)
    write_step(tmp_path, 6, name="resnet-1_6_breakpoint.safetensors", kind="breakpoint")
    moved = set_checkpoint_aside(tmp_path / "rank_1" / "resnet-1_6.safetensors", "crashed 3 times", [])
    assert len(moved) == 4
    assert left(tmp_path) == ["rank_0/resnet-1_4.safetensors", "rank_1/resnet-1_4.safetensors"]
    note = tmp_path / "quarantine" / "rank_0" / "resnet-1_6.safetensors.reason.txt"
    assert "crashed 3 times" in note.read_text()


def test_a_job_of_one_rank(tmp_path: Path) -> None:
    path = write(tmp_path / "resnet-1_6.safetensors", step=6)
    write(tmp_path / "resnet-1_4.safetensors", step=4)
    assert set_checkpoint_aside(path, "x", []) == [tmp_path / "quarantine" / "resnet-1_6.safetensors"]
    assert left(tmp_path) == ["resnet-1_4.safetensors"]


def test_a_tft_tree(tmp_path: Path) -> None:
    folder = tmp_path / "tft_saved_checkpoints-step_6"
    for rank in range(2):
        write(folder / f"rank_{rank}" / f"ttp_rank_{rank}-1_6.safetensors", step=6, rank=rank, world_size=2)
    moved = set_checkpoint_aside(folder / "rank_0" / "ttp_rank_0-1_6.safetensors", "x", [])
    assert len(moved) == 2 and not left(tmp_path)


def test_another_run_s_files_of_that_step_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "a-1_6.safetensors", step=6)
    write(tmp_path / "b-1_6.safetensors", step=6, run_id="run-b")
    set_checkpoint_aside(path, "x", [])
    assert left(tmp_path) == ["b-1_6.safetensors"]


def test_memory_is_brought_to_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint in question lies in shared memory; what is flushed is it."""
    arena, directory = tmp_path / "arena", tmp_path / "ckpt"
    path = write(arena / "rank_0" / "slot_1.safetensors", step=6)
    (arena / "owner.json").write_text(f'{{"directory": "{directory}"}}')
    write(directory / "a-1_4.safetensors", step=4)
    flushed: list[Path] = []

    def flush(where: Path) -> Flushed:
        flushed.append(where)
        write(directory / "memory-1_6_breakpoint.safetensors", step=6)
        return Flushed(["step 6 is written from memory"], 6)

    monkeypatch.setattr("mindx_elastic.agent.quarantine.flush", flush)
    moved = set_checkpoint_aside(path, "x", [arena])
    assert flushed == [arena]
    assert [each.name for each in moved] == ["memory-1_6_breakpoint.safetensors"]
    assert left(directory) == ["a-1_4.safetensors"]


def test_a_file_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert set_checkpoint_aside(tmp_path / "gone-1_2.safetensors", "x", []) == []
    assert "nothing to set aside" in caplog.text
