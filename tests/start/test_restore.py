"""What a start resumes from: the newest step that every rank can read, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindx_elastic.errors import (
    CorruptCheckpointError,
    ForeignCheckpointError,
    MismatchError,
    NoUsableCheckpointError,
    UsageError,
)
from mindx_elastic.persist.storage import QUARANTINE
from mindx_elastic.start.restore import Resumed
from tests import checkpoint_files as files
from tests.checkpoint_files import write, write_step
from tests.start.finding import find, find_on, found_on, step_of


def steps_on(world_size: int, directory: Path, resume: Any = "auto") -> set[int]:
    """The step that all ranks took; raises the first rank's error."""
    found = found_on(world_size, directory, resume=resume)
    assert [one.checkpoint.info.rank for one in found] == list(range(world_size))
    return {step_of(one) for one in found}


# --- one rank ---


def test_a_damaged_newest_file_is_quarantined_and_the_older_step_used(tmp_path: Path) -> None:
    write(tmp_path / "a-1_5.safetensors", step=5)
    bad = write(tmp_path / "a-1_9.safetensors", step=9)
    files.overwrite_header(bad)
    content = bad.read_bytes()
    found = find(tmp_path)
    assert step_of(found) == 5
    assert found is not None and any("a-1_9" in line for line in found.rejected)
    assert not bad.exists()
    moved = [p for p in (tmp_path / QUARANTINE).rglob("*") if p.suffix != ".txt" and p.is_file()]
    assert [p.read_bytes() for p in moved] == [content], "nothing on disk is lost"


@pytest.mark.parametrize("damage", files.DAMAGES)
def test_nothing_usable_is_an_error_again_and_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(write(tmp_path / "a-1_9.safetensors", step=9))
    names = sorted(tmp_path.rglob("*"))
    assert find(tmp_path, resume="never") is None and sorted(tmp_path.rglob("*")) == names, "nothing is moved"
    for _ in range(3):
        with pytest.raises(NoUsableCheckpointError, match='pass resume="never"') as caught:
            find(tmp_path)
        assert caught.value.path == tmp_path
    assert find(tmp_path, resume="never") is None


# --- resume=path ---


def test_a_path_to_a_file_takes_that_step(tmp_path: Path) -> None:
    for step in (3, 5, 9):
        write_step(tmp_path, step, name=f"a-1_{step}.safetensors")
    for rank in range(2):  # any rank's
        assert steps_on(2, tmp_path / "new", tmp_path / f"rank_{rank}" / "a-1_5.safetensors") == {5}
    assert steps_on(2, tmp_path, str(tmp_path / "rank_0" / "a-1_3.safetensors")) == {3}


def test_a_damaged_file_that_was_asked_for_is_an_error_not_another_step(tmp_path: Path) -> None:
    write(tmp_path / "a-1_5.safetensors", step=5)
    bad = write(tmp_path / "a-1_9.safetensors", step=9)
    files.flip_bit_in_data(bad)
    with pytest.raises(
        NoUsableCheckpointError, match=r"run run-a step 9 cannot be resumed: .*model\.bias.*; give"
    ) as caught:
        find(tmp_path, resume=bad)
    assert str(bad) in str(caught.value)


def test_files_that_are_none_of_ours_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a-1_5.safetensors")
    files.leave_empty(path)
    remedy = "give another checkpoint, or a directory"
    with pytest.raises(CorruptCheckpointError, match=remedy) as corrupt:
        find(tmp_path, resume=path)
    assert str(corrupt.value).count(str(path)) == 1 and corrupt.value.path == path
    files.replace_by_foreign_file(path)
    with pytest.raises(ForeignCheckpointError, match=remedy):
        find(tmp_path, resume=path)
    assert path.exists(), "what was asked for by name is not moved"


@pytest.mark.parametrize("resume", ["atuo", "", None, True])
def test_anything_else_is_refused(tmp_path: Path, resume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a-1_5.safetensors")
    with pytest.raises(UsageError, match="resume="):
        find(tmp_path, resume=resume)


# --- several ranks ---


def test_another_world_size_is_said_with_the_way_out(tmp_path: Path) -> None:
    write_step(tmp_path, 9, world_size=4)
    with pytest.raises(MismatchError, match=r"written by 4 ranks.* over the 2 of this job: .*start it with 4 ranks"):
        steps_on(2, tmp_path)


kept = st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=5, unique_by=lambda pair: pair[0])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(kept, min_size=2, max_size=3))
def test_whatever_was_lost_all_ranks_take_one_step(
    tmp_path_factory: pytest.TempPathFactory, held: list[list[tuple[int, bool]]]
) -> None:
    """Any files on any rank, any of them damaged: the newest step that all hold undamaged, or an error on all."""
    directory = tmp_path_factory.mktemp("ranks")
    for rank, steps in enumerate(held):
        for step, sound in steps:
            path = directory / f"rank_{rank}" / f"a-1_{step}.safetensors"
            write(path, step=step, rank=rank, world_size=len(held))
            if not sound:
                files.flip_bit_in_data(path)
    usable = set.intersection(*({step for step, sound in steps if sound} for steps in held))
    results = find_on(len(held), directory)
    if usable:
        assert [r.checkpoint.info.step for r in results if isinstance(r, Resumed)] == [max(usable)] * len(held)
    elif any(held):
        assert all(isinstance(r, NoUsableCheckpointError) for r in results), results
    else:
        assert results == [None] * len(held)
