"""Files that others may have put there, folders of our own, processes: with real ones."""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mindx_elastic.core.posix import (
    has_ended,
    killed_by,
    members_of,
    new_map,
    open_pidfd,
    open_regular,
    read_json_object,
    read_small,
    start_ticks,
    thread_pidfds,
)
from tests.harness import wait_until


def _can_watch_threads() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid(), os.O_EXCL))
    except (OSError, AttributeError):
        return False
    return True


watches_threads = pytest.mark.skipif(not _can_watch_threads(), reason="this kernel cannot watch threads (Linux 6.9)")


def _link(path: Path) -> None:
    path.with_name("target").write_text("{}")
    path.symlink_to("target")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


@pytest.mark.parametrize(
    ("plant", "number"),
    [
        (_link, errno.ELOOP),
        (os.mkfifo, errno.EINVAL),
        (Path.mkdir, errno.EINVAL),
        (_socket, errno.ENXIO),
        (lambda path: path.symlink_to("/dev/zero"), errno.ELOOP),
    ],
)
def test_what_is_not_a_regular_file(tmp_path: Path, plant: Callable[[Path], object], number: int) -> None:
    path = tmp_path / "file"
    plant(path)
    descriptors = len(os.listdir("/proc/self/fd"))
    for look in (open_regular, read_small, read_json_object):
        with pytest.raises(OSError, match=r"Errno") as caught:
            look(path)
        assert caught.value.errno == number
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_that_is_made_is_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    assert path.stat().st_mode & 0o777 == 0o600 and os.get_blocking(fd)
    os.close(fd)
    with pytest.raises(FileExistsError):
        open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def test_reading_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}' + b" " * (1 << 20))
    assert read_small(path, 4) == b'{"a"' and len(read_small(path)) == 1 << 16
    assert read_json_object(path) == {"a": 1}


def test_what_is_not_a_json_object(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 60000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"."):
            read_json_object(path)


def test_the_end_of_a_process_is_seen_through_its_descriptor() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    started, descriptors = start_ticks(process.pid), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProcessLookupError):
        open_pidfd(process.pid, "1")
    assert has_ended(process.pid, "1"), "the number belongs to another process now"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    fd = open_pidfd(process.pid, started)
    assert not os.get_inheritable(fd)
    assert not select.select([fd], [], [], 0)[0] and not has_ended(process.pid, started)
    process.send_signal(signal.SIGKILL)
    assert select.select([fd], [], [], 60)[0]
    os.close(fd)
    assert has_ended(process.pid, started)  # not waited for yet
    process.communicate()
    assert has_ended(process.pid, started)
    with pytest.raises(ProcessLookupError):
        open_pidfd(process.pid)


def test_the_members_of_a_session() -> None:
    code = "import subprocess, sys; subprocess.Popen(['cat']); print('ready', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    members = members_of({process.pid})
    assert process.pid in members and len(members) == 2
    assert os.getpid() not in members
    process.communicate()


_WITH_THREADS = """
import os, sys, threading
go_on = threading.Event()
for _ in range(3):
    threading.Thread(target=go_on.wait, daemon=True).start()
print(flush=True)
for line in sys.stdin:
    exec(line)
"""


@pytest.fixture
def threaded() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _WITH_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def _wait_for_one(fds: list[int]) -> None:
    assert len(fds) == 2 and select.select(fds, [], [], 60.0)[0]
    for fd in fds:
        os.close(fd)


@watches_threads
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_process_shows_in_its_threads(threaded: subprocess.Popen[str], signum: int) -> None:
    fds = thread_pidfds(threaded.pid)
    assert not select.select(fds, [], [], 0.05)[0] and killed_by(threaded.pid) == 0
    started = start_ticks(threaded.pid)
    threaded.send_signal(signum)
    _wait_for_one(fds)
    # On a busy machine its main thread has not begun to end yet, and it is not known.
    wait_until(lambda: killed_by(threaded.pid, started) == signum, "the signal that ends it")
    assert killed_by(threaded.pid, "1") == 0  # the number belongs to another process now
    assert threaded.wait() == -signum


@watches_threads
@pytest.mark.parametrize("line", ["go_on.set()", "os._exit(9)"])
def test_the_end_of_a_thread_and_an_exit_are_no_death_by_a_signal(threaded: subprocess.Popen[str], line: str) -> None:
    fds = thread_pidfds(threaded.pid)
    assert threaded.stdin is not None
    threaded.stdin.write(line + "\n")
    threaded.stdin.flush()
    _wait_for_one(fds)
    assert killed_by(threaded.pid) == 0
    if line == "os._exit(9)":
        assert threaded.wait() == 9
        return
    threaded.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, threaded.pid, os.WSTOPPED)
    assert killed_by(threaded.pid) == 0  # /proc gives the number of the signal that has stopped it


def test_a_new_map_has_its_memory_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store into one that has not is a SIGBUS where the memory file system is full."""
    path = tmp_path / "page"
    path.write_text("older")
    with new_map(path, 3 * mmap.PAGESIZE) as data:
        assert path.stat().st_blocks * 512 >= len(data) == 3 * mmap.PAGESIZE
        assert data[:] == bytes(len(data))

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        new_map(path, mmap.PAGESIZE)
    assert not path.exists()
