"""Where the key comes from, and which files are believed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mindx_elastic.agreement.job_key import find_key, read_key_file, write_key_file
from mindx_elastic.config import KeySettings
from mindx_elastic.errors import UsageError

SECRET = "0123456789abcdef0123"
PROGRAM = """
import sys
from mindx_elastic.agreement.job_key import find_key
from mindx_elastic.config import KeySettings
sys.stdin.readline()
print(find_key(KeySettings(local_world_size=8), 8).decode(), flush=True)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def on_one_node() -> bytes:
    key = find_key(KeySettings(local_world_size=2), 2)
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
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    try:
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        keys = {process.communicate(timeout=300)[0] for process in ranks}
        assert keys == {on_one_node().decode() + "\n"} and len(on_one_node()) == 64, "also for the next start"
        (file,) = temporary.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.parametrize("how", ["mode", "link", "folder", "empty"])
def test_a_file_that_somebody_else_may_know_is_refused(temporary: Path, how: str) -> None:
    on_one_node()
    (path,) = temporary.iterdir()
    content = path.read_text()
    path.unlink()
    if how == "mode":
        path.write_text(content)
        path.chmod(0o644)
    elif how == "link":
        (temporary / "else").write_text(content)
        (temporary / "else").chmod(0o600)
        path.symlink_to(temporary / "else")
    elif how == "folder":
        path.mkdir()
    else:
        path.touch(0o600)
    with pytest.raises(UsageError, match="MINDX_JOB_KEY"):
        on_one_node()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(temporary: Path, tmp_path: Path) -> None:
    on_one_node()
    (path,) = temporary.iterdir()
    os.chown(path, 12345, 12345)
    with pytest.raises(UsageError, match="user 12345"):
        on_one_node()
    own = tmp_path / "key"
    write_key_file(own)
    os.chown(own, 12345, 12345)
    with pytest.raises(UsageError, match="others"):
        read_key_file(own, "MINDX_JOB_KEY_FILE")


@pytest.mark.parametrize(
    "mode",
    [
        0o604,
        0o622,
        0o660,
    ],
)
def test_a_key_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET)
    file.chmod(mode)
    with pytest.raises(UsageError, match=r"--job-key-file.*key \(mode .*chmod 600"):
        read_key_file(file, "--job-key-file")


def test_a_mounted_secret_may_be_readable_for_its_group(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o440)
    assert read_key_file(file, "x") == SECRET.encode()


@pytest.mark.parametrize(
    "text",
    [
        "short",
        " " * 40,
    ],
)
def test_a_key_that_can_be_guessed_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UsageError, match="can be guessed"):
        read_key_file(file, "x")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere cannot be read: No such file"):
        read_key_file(tmp_path / "nowhere", "x")
    with pytest.raises(UsageError, match=r"is not a file|cannot be read"):
        read_key_file(tmp_path, "x")
