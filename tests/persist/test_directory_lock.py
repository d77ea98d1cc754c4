"""One job a directory: real processes hold the lock, die with it, and leave children behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.config import RankInfo
from mindx_elastic.core.owners import find_owners
from mindx_elastic.errors import DirectoryInUseError, UsageError
from mindx_elastic.persist import directory_lock as lock_module
from mindx_elastic.persist.directory_lock import DirectoryLock, hold_directory, hold_ranks
from mindx_elastic.persist.storage import LOCK_FILE

HOLDER = """
import os, sys, time
from pathlib import Path
from mindx_elastic.config import RankInfo
from mindx_elastic.core.owners import find_owners
from mindx_elastic.persist.directory_lock import hold_directory
directory, rank, world, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
job = os.environ.get("JOB", "")
lock = hold_directory(directory, RankInfo(rank=rank, world_size=world), find_owners(directory), grace_s=0.5, job=job)
assert lock is not None
child = 0
if how == "fork":
    child = os.fork()
    if not child:
        time.sleep(600)
if how == "walk":
    (directory / ".mindx-lock").read_bytes()
print(os.getpid(), child, flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(directory: Path, rank: int = 0, world_size: int = 1, how: str = "") -> Iterator[tuple[Any, int]]:
    """A process that holds the directory until its stdin ends: it, and its child's process id."""
    command = [sys.executable, "-c", HOLDER, str(directory), str(rank), str(world_size), how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        assert line, "the holder failed"
        child = int(line[1])
        yield process, child
    finally:
        process.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def hold(directory: Path, rank: int = 0, world_size: int = 1, grace_s: float = 0.5) -> DirectoryLock | None:
    ranks = RankInfo(rank=rank, world_size=world_size, local_rank=rank)
    return hold_directory(directory, ranks, find_owners(directory), grace_s=grace_s)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_MARGIN_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_second_job_is_refused_and_told_who_holds_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also when the holder has opened and closed the file meanwhile, which would end a POSIX lock."""
    began = time.time()
    with holder(tmp_path, how="walk") as (process, _):
        with pytest.raises(DirectoryInUseError, match=f"in use by rank 0 of another job, process {process.pid}") as e:
            hold(tmp_path)
        assert isinstance(e.value, UsageError)
        assert (e.value.path, e.value.host, e.value.pid) == (tmp_path, socket.gethostname(), process.pid)
        assert began <= e.value.since <= time.time()
        assert str(tmp_path / LOCK_FILE) in str(e.value)
    assert caplog.text.count("waiting for its end") == 1


def test_the_lock_ends_with_a_killed_holder_though_its_child_lives(tmp_path: Path) -> None:
    with holder(tmp_path, how="fork") as (process, child):
        process.send_signal(signal.SIGKILL)
        process.wait()
        lock = hold(tmp_path, grace_s=60.0)  # at once, or the test's watchdog
        assert lock is not None
        os.kill(child, 0)
        lock.close()


def test_a_start_waits_for_a_predecessor_that_is_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holder(tmp_path) as (process, _):
        waited: list[float] = []

        def end_it(pause: float) -> None:
            waited.append(pause)
            if len(waited) == 3:
                process.stdin.close()
                process.wait()

        monkeypatch.setattr("time.sleep", end_it)
        monkeypatch.setattr(lock_module, "_MARGIN_S", 600.0)
        lock = hold(tmp_path)
        assert lock is not None and len(waited) == 3
        lock.close()
        monkeypatch.undo()
        process.stdin = open(os.devnull)  # noqa: SIM115  # closed by `holder`


def test_the_ranks_of_a_job_do_not_meet_and_leave_nothing_to_the_next(tmp_path: Path) -> None:
    locks = [hold(tmp_path, rank, 4) for rank in range(4)]
    assert all(locks)
    lines = (tmp_path / LOCK_FILE).read_text().splitlines()
    assert [json.loads(line)["rank"] for line in lines] == [0, 1, 2, 3]
    assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o600
    for lock in locks:
        assert lock is not None
        lock.close()
        lock.close()
    assert not (tmp_path / LOCK_FILE).exists()  # the last one takes it away
    again = hold(tmp_path, 0, 2)
    assert again is not None
    (tmp_path / LOCK_FILE).rename(tmp_path / "moved")
    (tmp_path / LOCK_FILE).write_text("another job's")
    again.close()
    assert (tmp_path / LOCK_FILE).exists()


@pytest.mark.usefixtures("impatient")
def test_a_byte_that_stays_taken_keeps_no_rank_out_but_rank_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a machine that is gone a file server may keep the lock for a while; byte 0 tells that no other job lives."""
    with holder(tmp_path, 5, 8) as (process, _):
        lock = hold(tmp_path, 0, 2)  # a job of fewer ranks, which waits for the predecessor's
        assert lock is not None
        lock.close()
        assert f"in use by rank 5 of another job, process {process.pid}" in caplog.text
        assert hold(tmp_path, 5, 8) is None
    assert "rank 5 goes on, though" in caplog.text


def test_rank_0_goes_on_without_its_byte_where_its_own_job_holds_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of this job stands still. Its process may hold the byte for ever."""
    monkeypatch.setenv("JOB", "0123456789abcdef")
    monkeypatch.setattr(lock_module, "_MARGIN_S", 0.2)
    ranks, owners = RankInfo(rank=0, world_size=2), find_owners(tmp_path)
    with holder(tmp_path):
        assert hold_directory(tmp_path, ranks, owners, grace_s=600.0, joins=True) is None, "recovery in place"
        assert caplog.text.count("rank 0 goes on, though") == 1
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        assert hold_directory(tmp_path, ranks, owners, grace_s=600.0, job="0123456789abcdef") is None, "a restart"
        assert caplog.text.count("rank 0 goes on, though") == 2
        monkeypatch.setattr(lock_module, "_LEASE_S", 1.7)
        with pytest.raises(DirectoryInUseError, match="did not end in 2 s"):
            hold_directory(tmp_path, ranks, owners, grace_s=600.0, job="another one")


def test_the_file_that_goes_with_its_last_holder_lets_nobody_in_beside_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the file away when it leaves, while the others try to get it."""
    monkeypatch.setattr(lock_module, "_POLL_S", (0.0005, 0.001))
    inside: list[int] = []
    most: list[int] = []

    def come_and_go(number: int) -> None:
        for _ in range(25):
            lock = hold(tmp_path, grace_s=600.0)
            assert lock is not None
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)
            lock.close()

    with ThreadPoolExecutor(6) as pool:  # the lock is of the descriptor, so threads keep each other out too
        list(pool.map(come_and_go, range(6)))
    assert len(most) == 150 and max(most) == 1
    assert not (tmp_path / LOCK_FILE).exists()


def test_without_locks_one_line_and_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> bytes:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    assert hold(tmp_path) is None
    (record,) = caplog.records
    assert "a second job in this directory will not be noticed" in record.message


@pytest.mark.parametrize("planted", ["link", "hard link", "stranger's", "pipe"])
def test_a_planted_lock_file_is_named_and_neither_followed_nor_written(
    tmp_path: Path, planted: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, victim = tmp_path / LOCK_FILE, tmp_path / "victim"
    victim.write_text("precious")
    if planted == "link":
        path.symlink_to(victim)
    elif planted == "hard link":
        path.hardlink_to(victim)
    elif planted == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("theirs")
        if os.geteuid():
            pytest.skip("only root can make a file of another user")
        os.chown(path, 65534, -1)
    assert hold(tmp_path) is None and victim.read_text() == "precious"
    assert len(caplog.records) == 1 and "will not be noticed" in caplog.text
    if planted == "stranger's":
        assert path.read_text() == "theirs"


@pytest.mark.usefixtures("impatient")
def test_a_label_that_cannot_be_read(tmp_path: Path) -> None:
    with holder(tmp_path):
        for content in (b"\xff" * 256, b'{"host": 1, "pid": 1, "since": 0, "grace_s": 0}', b"[" * 256):
            (tmp_path / LOCK_FILE).write_bytes(content)
            with pytest.raises(DirectoryInUseError, match="its record cannot be read") as caught:
                hold(tmp_path)
            assert (caught.value.pid, caught.value.host) == (0, "")


def test_bytes_of_several_ranks_at_once_and_what_is_in_the_way(tmp_path: Path) -> None:
    owners = find_owners(tmp_path)
    with holder(tmp_path, 1, 3) as (process, _):
        lock, problem = hold_ranks(tmp_path, [0, 1, 2], owners, patience_s=0.0, lasts_s=1.0)
        assert lock is not None and f"in use by rank 1 of another job, process {process.pid}" in problem
        labels = (tmp_path / LOCK_FILE).read_text().splitlines()
        assert [json.loads(line)["pid"] for line in labels] == [os.getpid(), process.pid, os.getpid()]
        for rank in (0, 2):
            _, busy = hold_ranks(tmp_path, [rank], owners, patience_s=0.0, lasts_s=1.0)
            assert "is in use by" in busy
        lock.close()
        free, problem = hold_ranks(tmp_path, [0, 2], owners, patience_s=0.0, lasts_s=1.0)
        assert free is not None and problem == ""
        free.close()
    (tmp_path / LOCK_FILE).unlink(missing_ok=True)
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "victim")
    lock, problem = hold_ranks(tmp_path, [0], owners, patience_s=0.0, lasts_s=1.0)
    assert lock is None and "is a symbolic link" in problem and not (tmp_path / "victim").exists()
