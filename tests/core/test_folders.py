"""The folders of steps in a checkpoint directory: told by their names alone."""

from __future__ import annotations

from pathlib import Path

from mindx_elastic.core.folders import STEP_FOLDER, UNFINISHED, step_folder, step_folders_of_rank


def test_the_names_are_those_that_are_documented() -> None:
    assert step_folder(120) == "tft_saved_checkpoints-step_120"
    others = ["tft_saved_checkpoints-step_", "xtft_saved_checkpoints-step_1"]
    steps = [step_folder(0), step_folder(7) + UNFINISHED]
    assert [name for name in [*steps, *others] if STEP_FOLDER.fullmatch(name)] == steps


def test_a_rank_finds_its_folders_in_all_steps(tmp_path: Path) -> None:
    for name in (step_folder(3), step_folder(7) + UNFINISHED, "backup-step_3"):
        (tmp_path / name / "rank_1").mkdir(parents=True)
    (tmp_path / step_folder(9)).write_text("a file has this name")
    (tmp_path / step_folder(8)).mkdir()
    assert step_folders_of_rank(tmp_path, 1) == [
        tmp_path / step_folder(3) / "rank_1",
        tmp_path / (step_folder(7) + UNFINISHED) / "rank_1",
    ]
    assert step_folders_of_rank(tmp_path, 0) == step_folders_of_rank(tmp_path / "none", 1) == []
