"""The agent's private folder, and what killed agents left."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mindx_elastic.agreement.job_key import read_key_file
from mindx_elastic.alarm.peers import own_identity
from mindx_elastic.core.status_page import StatusPage, page_path
from mindx_elastic.memory.agent_folder import AgentFolder
from mindx_elastic.memory.folders import remove_dead, user_folder


def test_it_is_private_and_goes_with_the_agent(tmp_path: Path) -> None:
    folder = AgentFolder(tmp_path)
    assert folder.path.parent == user_folder(tmp_path)
    assert folder.path.name.startswith(f"agent-{os.getpid()}-")
    for path in (folder.path, folder.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    folder.remove()
    assert not list(tmp_path.iterdir())
    folder.remove()


def test_the_key_of_the_workers_is_private_and_outlives_their_restarts(tmp_path: Path) -> None:
    folder = AgentFolder(tmp_path)
    path = folder.make_key()
    assert path.parent == folder.path and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_key_file(path, "x")) == 64
    folder.forget_workers()
    assert path.exists()
    folder.remove()
    assert not path.exists()


def test_orders_are_numbered_and_replace_each_other(tmp_path: Path) -> None:
    folder = AgentFolder(tmp_path)
    folder.order("peer", "rank 1 is gone", grace_s=5.0, exit_code=75)
    folder.order("fault", "x", grace_s=4.0, exit_code=75)
    content = json.loads((folder.path / "control.json").read_text())
    assert content == {"kind": "fault", "reason": "x", "grace_s": 4.0, "exit_code": 75, "seq": 2}
    page = StatusPage(page_path(folder.path, 0))
    folder.forget_workers()
    page.close()
    assert [path.name for path in folder.path.iterdir()] == ["agent.json"]


@pytest.mark.parametrize("planted", ["wide", "link", "no shared memory"])
def test_a_place_that_cannot_be_used_is_passed_over(
    tmp_path: Path, planted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`mkdir /dev/shm/mindx-elastic-0` by anybody must not stop root's agents."""
    place = user_folder(tmp_path)
    if planted == "wide":
        place.mkdir(mode=0o755)
    elif planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to("elsewhere")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    folder = AgentFolder(tmp_path / "missing" if planted == "no shared memory" else tmp_path)
    assert folder.path.parent == user_folder(tmp_path / "temporary")
    assert caplog.text.count("cannot be used") == 1
    folder.remove()


def dead_identity() -> dict[str, object]:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return {**json.loads(own_identity()), "pid": int(process.stdout)}


def make_dead(place: Path, name: str, **changes: object) -> Path:
    folder = place / name
    folder.mkdir(mode=0o700, parents=True)
    (folder / "agent.json").write_text(json.dumps({**dead_identity(), **changes}))
    return folder


def test_what_was_in_use_at_the_start_is_removed_at_the_end(tmp_path: Path) -> None:
    """An agent was killed, and the next one started while its workers were still saving."""
    place = user_folder(tmp_path)
    place.mkdir(mode=0o700)
    killed = make_dead(place, "agent-1-aa")
    StatusPage(page_path(killed, 0)).close()  # of this very process
    folder = AgentFolder(tmp_path)
    assert killed.exists()
    page_path(killed, 0).unlink()  # its worker has ended
    folder.remove()
    assert not place.exists()


def test_what_may_live_is_left_alone(tmp_path: Path) -> None:
    place = user_folder(tmp_path)
    place.mkdir(mode=0o700)
    alive = AgentFolder(tmp_path)
    other_container = make_dead(place, "agent-3-cc", space="another")
    unreadable = place / "agent-4-dd"
    unreadable.mkdir()
    (unreadable / "agent.json").write_text("{half")
    (place / "0123456789abcdef").mkdir()
    saving = make_dead(place, "agent-5-ee")
    StatusPage(page_path(saving, 0)).close()  # of this very process
    target = tmp_path / "target"
    make_dead(tmp_path, "target")
    (place / "agent-6-ff").symlink_to(target)
    assert remove_dead(place) == []
    for path in (alive.path, other_container, unreadable, saving, target / "agent.json"):
        assert path.exists()
