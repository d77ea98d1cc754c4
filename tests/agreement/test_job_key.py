"""Where the key comes from, and which files are believed."""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mindx_elastic.agreement.job_key import find_key, read_key_file, write_key_file
from mindx_elastic.config import KeySettings
from mindx_elastic.errors import UsageError

SECRET = "0123456789abcdef0123"
by_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def on_one_node() -> bytes:
    key = find_key(KeySettings(local_world_size=8), 8)
    assert key is not None
    return key


def test_the_environment_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_key_file(file)
    settings = KeySettings.from_env({"MINDX_JOB_KEY": SECRET, "MINDX_JOB_KEY_FILE": str(file), "LOCAL_WORLD_SIZE": "2"})
    assert find_key(settings, 2) == SECRET.encode()
    assert SECRET not in repr(settings)
    settings = KeySettings.from_env({"MINDX_JOB_KEY_FILE": str(file), "LOCAL_WORLD_SIZE": "2"})
    assert find_key(settings, 2) == file.read_text().strip().encode()


def test_several_nodes_have_no_key_of_their_own(temporary: Path) -> None:
    for local in (0, 1):
        assert find_key(KeySettings(local_world_size=local), 2) is None
    assert not list(temporary.iterdir())


def test_ranks_of_one_node_that_come_at_the_same_moment_have_one_key(temporary: Path) -> None:
    together = threading.Barrier(8)

    def come(_: int) -> bytes:
        together.wait(60)
        return on_one_node()

    with ThreadPoolExecutor(8) as ranks:
        keys = set(ranks.map(come, range(8)))
    assert keys == {on_one_node()} and len(on_one_node()) == 64, "also for the next start"
    (file,) = temporary.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["mode", "link", "folder", "empty", pytest.param("owner", marks=by_root)])
def test_a_file_that_somebody_else_may_know_is_refused(temporary: Path, how: str) -> None:
    on_one_node()
    (path,) = temporary.iterdir()
    other = path.rename(temporary / "else")
    if how == "mode":
        path.write_text(other.read_text())
        path.chmod(0o644)
    elif how == "link":
        path.symlink_to(other)
    elif how == "folder":
        path.mkdir()
    elif how == "empty":
        path.touch(0o600)
    else:
        other.rename(path)
        os.chown(path, 12345, 12345)
    with pytest.raises(UsageError, match="user 12345" if how == "owner" else "MINDX_JOB_KEY"):
        on_one_node()


@pytest.mark.parametrize(
    ("mode", "text", "refused"),
    [
        (0o604, SECRET, r"--job-key-file=.*key \(mode .*chmod 600"),
        (0o622, SECRET, r"could be read or changed by others"),
        (0o660, SECRET, r"could be read or changed by others"),
        (0o440, f"{SECRET}\n", ""),  # a mounted secret
        (0o600, "short", "can be guessed"),
        (0o600, " " * 40, "can be guessed"),
        pytest.param(0, SECRET, "could be read or changed by others", marks=by_root),
    ],
)
def test_what_a_key_file_has_to_be(tmp_path: Path, mode: int, text: str, refused: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(mode or 0o600)
    if not mode:
        os.chown(file, 12345, 12345)
    if not refused:
        assert read_key_file(file, "--job-key-file") == SECRET.encode()
        return
    with pytest.raises(UsageError, match=refused):
        read_key_file(file, "--job-key-file")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "nowhere", "nowhere cannot be read: No such file"), (tmp_path, "cannot be read")):
        with pytest.raises(UsageError, match=why):
            read_key_file(path, "x")
