from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.alarm.peers import own_identity
from mindx_elastic.core.status_page import StatusPage, page_path
from mindx_elastic.memory.arena import RankArena, SlotRecord, SlotState
from mindx_elastic.memory.folders import MAKER_FILE, job_folder, make_own_folder, make_user_folder, user_folder
from tests.cli.conftest import Run
from tests.harness import start_code
from tests.start.arenas import HOLD_ARENA


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setenv("MINDX_ARENA_DIR", str(folder))
    return folder


def make_agent(base: Path, pid: int) -> Path:
    folder = user_folder(base) / f"agent-{pid}-x1y2"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "control.json").write_text("{}")
    return folder


def make_arena(base: Path, directory: Path, steps: list[tuple[int, int]]) -> Path:
    """The arenas of a job that was killed: for each rank the steps of its two slots."""
    for rank, pair in enumerate(steps):
        arena = RankArena(base, directory, rank)
        for index, step in enumerate(pair):
            arena.slots[index].resize(8192)
            state = SlotState.SEALED if step >= 0 else SlotState.EMPTY
            arena.set_record(index, SlotRecord(state=state, step=step, sequence=max(step, 0), nbytes=8192))
        arena.describe(directory, "run-a")
        arena.close()
    return job_folder(base, directory)


def clean(run: Run, *words: str) -> dict[str, Any]:
    result = run("clean", "--json", *words)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_the_folder_of_a_dead_proof_is_removed(run: Run, base: Path, dead_pid: int) -> None:
    living = make_own_folder(base, "prove")
    dead = living.with_name(f"prove-{dead_pid}-00ff")
    dead.mkdir(mode=0o700)
    others = [living.with_name("prove-notes"), living.with_name(f"prove-{dead_pid}-00fe")]
    others[0].mkdir()
    others[1].symlink_to(dead)
    actions = {entry["path"]: entry["action"] for entry in clean(run)["found"]}
    assert actions == {str(dead): "would remove", str(living): "in use"} and dead.exists()
    assert "would be freed by --yes" in run("clean").stdout
    entries = {entry["path"]: (entry["action"], entry["why"]) for entry in clean(run, "--yes")["found"]}
    assert entries == {
        str(dead): ("removed", f"proof {dead_pid} is gone"),
        str(living): ("in use", f"proof {os.getpid()} runs"),
    }
    assert sorted(living.parent.iterdir()) == sorted([living, *others])
    assert f"in use  {living}: proof {os.getpid()} runs" in run("clean", "--yes").stdout
    identity = living / MAKER_FILE
    identity.write_text(json.dumps({**json.loads(identity.read_text()), "started": "1"}))
    make_user_folder(living)
    make_agent(living, os.getpid())
    (entry,) = (entry for entry in clean(run, "--yes")["found"] if entry["kind"] == "proof")
    assert entry["why"] == f"proof {os.getpid()} is gone, its job is not: agent {os.getpid()} runs"


@pytest.mark.parametrize(
    ("changes", "action"),
    [({}, "in use"), ({"started": "1"}, "removed"), ({"space": "another/pid:[1]"}, "in use")],
)
def test_what_the_agent_itself_has_written(run: Run, base: Path, changes: dict[str, object], action: str) -> None:
    folder = make_agent(base, os.getpid())
    (folder / "agent.json").write_text(json.dumps({**json.loads(own_identity()), **changes}))
    (entry,) = clean(run, "--yes")["found"]
    assert entry["action"] == action
    assert ("another container" in entry["why"]) == ("space" in changes)


def test_a_worker_that_outlives_its_agent_keeps_the_folder(run: Run, base: Path, dead_pid: int) -> None:
    folder = make_agent(base, dead_pid)
    StatusPage(page_path(folder, 0)).close()
    (entry,) = clean(run, "--yes")["found"]
    assert entry["action"] == "in use" and f"its worker {os.getpid()} still runs" in entry["why"]


def test_snapshots_are_kept_while_a_job_can_go_on_from_them(run: Run, base: Path, tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    folder = make_arena(base, directory, [(16, 17), (17, 18)])
    (entry,) = clean(run, "--yes")["found"]
    assert entry.pop("size_bytes") >= 4 * 8192 and 0 <= entry.pop("age_s") < 600
    assert entry == {
        "path": str(folder),
        "kind": "job",
        "pid": None,
        "action": "kept",
        "why": "",
        "directory": str(directory),
        "directory_exists": True,
        "run_id": "run-a",
        "ranks": [0, 1],
        "newest_step": 17,
    }
    text = run("clean", "--yes").stdout
    assert f"kept  {folder}: snapshot of step 17 for {directory}, run run-a, 2 ranks, " in text
    assert "start the job again with the same command" in text and "mindx-elastic clean --all --yes" in text
    assert text.splitlines()[-1] == "0 B freed"
    (entry,) = clean(run, "--all", "--yes")["found"]
    assert entry["action"] == "removed" and entry["newest_step"] == 17 and not user_folder(base).exists()
    assert directory.exists()


def test_an_arena_in_use_is_never_removed(run: Run, base: Path, tmp_path: Path) -> None:
    folder = make_arena(base, tmp_path / "gone", [(3, 4), (3, 4)])
    with start_code(HOLD_ARENA, base, tmp_path / "gone", 1) as (_, output):
        assert output.readline() == "held\n"
        (entry,) = clean(run, "--all", "--yes")["found"]
    assert (entry["action"], entry["why"]) == ("in use", "a job runs") and (folder / "rank_0" / "commit").exists()


def test_a_job_that_is_just_starting(run: Run, base: Path, tmp_path: Path) -> None:
    folder = job_folder(base, tmp_path)
    folder.mkdir(parents=True)
    assert clean(run, "--all", "--yes")["found"][0]["action"] == "in use"
    os.utime(folder, (0, 0))
    assert clean(run, "--all", "--yes")["found"][0]["action"] == "removed"


def test_links_and_other_names_are_left_alone(run: Run, base: Path, tmp_path: Path, dead_pid: int) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    user = user_folder(base)
    user.mkdir(mode=0o700)
    (user / ("a" * 16)).symlink_to(elsewhere)
    (user / f"agent-{dead_pid}-link").symlink_to(elsewhere)
    (user / "notes").mkdir()
    (user / ("b" * 16)).touch()
    document = clean(run, "--all", "--yes")
    assert document["found"] == [] and len(document["not_ours"]) == 4
    arena = make_arena(base, tmp_path, [(3, 4)])
    (arena / "rank_0" / "link").symlink_to(elsewhere)
    (arena / "rank_7").symlink_to(elsewhere)
    assert clean(run, "--all", "--yes")["found"][0]["action"] == "removed"
    assert (elsewhere / "precious").exists() and (user / "notes").exists()


def test_a_user_folder_of_somebody_else(run: Run, base: Path, tmp_path: Path) -> None:
    user_folder(base).symlink_to(tmp_path)
    assert clean(run, "--all", "--yes")["not_ours"] == [str(user_folder(base))]
    assert list(base.iterdir()) == [user_folder(base)] and tmp_path.exists()


def test_what_cannot_be_removed_is_1(run: Run, base: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    folder = make_agent(base, dead_pid)
    monkeypatch.setattr("shutil.rmtree", refuse)
    result = run("clean", "--yes")
    assert result.exit_code == 1
    assert result.stdout.startswith(f"FAILED  {folder}: Permission denied: {folder}")
