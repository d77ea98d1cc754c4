"""The arena: names, rights, the lock, the records, and that nothing of it is left."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.errors import ArenaError
from mindx_elastic.memory import arena as arena_module
from mindx_elastic.memory.arena import ArenaFile, RankArena, SlotRecord, SlotState, bytes_of
from mindx_elastic.memory.folders import job_folder, make_private, rank_folders
from tests.fork_server import ForkedProcess
from tests.harness import start_code

_HOLD = """
import os, sys
from pathlib import Path
from mindx_elastic.memory.arena import RankArena
arena = RankArena(Path(sys.argv[1]), Path(sys.argv[2]), 0)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@contextmanager
def open_arena(base: Path, directory: Path, rank: int = 0) -> Iterator[RankArena]:
    arena = RankArena(base, directory, rank)
    try:
        yield arena
    finally:
        arena.close()


@contextmanager
def holder(base: Path, directory: Path) -> Iterator[tuple[ForkedProcess, int]]:
    """A process that has opened the arena, and the pid of a child of it that lives on, to the end of the block."""
    with start_code(_HOLD, base, directory) as (process, output):
        yield process, int(output.readline())
        process.kill()


# --- names and rights ---


def test_nobody_else_may_look_whatever_the_umask(base: Path, directory: Path) -> None:
    before = os.umask(0)
    try:
        with open_arena(base, directory) as arena:
            arena.slots[0].resize(100)
            arena.describe(directory, "run-a")
            folders = [arena.job.parent, arena.job, arena.folder]
            files = [path for path in arena.job.rglob("*") if not path.is_dir()]
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert {path.name for path in files} == {"lock", "commit", "slot_0.safetensors", "owner.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    owner = json.loads((arena.job / "owner.json").read_text())
    assert (owner["directory"], owner["run_id"]) == (str(directory), "run-a") and owner["created"] > 1e9


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("planted", ["wide", "link", "file", "stranger's"])
def test_a_place_that_others_could_read_or_plant_is_refused(
    base: Path, directory: Path, tmp_path: Path, level: int, planted: str
) -> None:
    job = job_folder(base, directory)
    path = [job.parent, job, job / "rank_0"][level]
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.relative_to(base).parents:
        (base / parent).chmod(0o700)
    if planted == "wide":
        path.mkdir()
        path.chmod(0o750)
    elif planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    elif planted == "file":
        path.write_text("")
    else:
        if os.geteuid():
            pytest.skip("only root can make a folder of another user")
        path.mkdir(mode=0o700)
        os.chown(path, 65534, -1)
    with pytest.raises(ArenaError, match=f"{path.name} is not a folder of this user's own.*MINDX_ARENA_DIR") as caught:
        RankArena(base, directory, 0)
    assert caught.value.path == path
    if planted == "link":
        assert rank_folders(job) == {}


# --- the lock ---


def test_a_second_process_is_kept_out_and_the_next_one_let_in(
    base: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a forked child of the killed one lives on, with every descriptor of its parent."""
    monkeypatch.setattr(arena_module, "_PREDECESSOR_S", 0.05)
    with holder(base, directory) as (process, child):
        with pytest.raises(ArenaError, match="is in use by another process: is a second job"):
            RankArena(base, directory, 0)
        with open_arena(base, directory, 1):  # another rank's is free
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with open_arena(base, directory):
            os.kill(child, 0)


@pytest.mark.parametrize("what", ["lock", "folder"])
def test_a_predecessor_that_removes_it_at_this_moment(
    base: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What was locked is no longer there: make it again."""
    first = RankArena(base, directory, 0)
    lock_soon, calls = arena_module._lock_soon, []

    def slow(fd: int, folder: Path, end: float) -> None:
        calls.append(fd)
        if len(calls) == 1 and what == "lock":
            first.remove()
        lock_soon(fd, folder, end)

    def make(folder: Path) -> None:
        make_private(folder)
        if folder == first.job and what == "folder":
            first.remove()

    monkeypatch.setattr(arena_module, "_lock_soon", slow)
    monkeypatch.setattr(arena_module, "make_private", make)
    with open_arena(base, directory) as arena:
        arena.slots[0].resize(10)
        assert os.path.samestat(os.fstat(arena._lock), os.stat(arena.folder / "lock"))
    assert len(calls) == (2 if what == "lock" else 1)


def test_a_failed_opening_gives_the_lock_back(base: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(ArenaError):
            RankArena(base, directory, 0)
    assert set(os.listdir("/proc/self/fd")) == opened


# --- the records ---


RECORD = SlotRecord(SlotState.SEALED, attempt=2, step=70, sequence=9, nbytes=4096, header_bytes=4096)


def test_a_torn_record_is_none_at_every_byte() -> None:
    data, other = RECORD.pack(), SlotRecord(SlotState.COPIED, 3, 71, 10, 8192, 4096).pack()
    assert SlotRecord.unpack(data) == RECORD and SlotRecord.unpack(other).step == 71
    for cut in range(len(data) + 1):
        torn = SlotRecord.unpack(other[:cut] + data[cut:])
        assert torn in (SlotRecord(), RECORD, SlotRecord.unpack(other))
        assert torn == SlotRecord() or other[:cut] + data[cut:] in (data, other)
    assert SlotRecord.unpack(b"\0" * 64) == SlotRecord()
    assert SlotRecord.unpack(b"") == SlotRecord()


@pytest.mark.parametrize("first", [0, 1])
def test_what_the_job_goes_on_from_is_overwritten_last(base: Path, directory: Path, first: int) -> None:
    older, newer = SlotRecord(SlotState.SEALED, 0, 6, 3, 1, 1), SlotRecord(SlotState.SEALED, 0, 8, 4, 1, 1)
    with open_arena(base, directory) as arena:
        arena.set_record(first, older)
        arena.set_record(1 - first, newer)
        assert arena.oldest() == first
        arena.keep(1, 6)  # another attempt's step 6 is another state
        arena.keep(0, 7)
        assert arena.oldest() == first
        arena.keep(0, 6)
        assert arena.oldest() == 1 - first
        assert (arena.newest().step, arena.newest().sequence) == (6, 5)
        arena.keep(0, 6)
        assert (arena.oldest(), arena.newest().step) == (1 - first, 6)


# --- room ---


def no_room(fd: int, offset: int, length: int) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_limit_for_the_size_of_a_file_is_no_lack_of_room(base: Path, directory: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_arena(base, directory) as arena:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(ArenaError, match="ulimit -f"):
                arena.slots[0].resize(8192)
            assert arena.slots[0].path.stat().st_size == 0, "what there was room for is given back"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("change", [lambda file: file.close(), lambda file: file.resize(1 << 22)])
def test_a_tensor_keeps_the_memory_that_it_looks_at(tmp_path: Path, change: Callable[[ArenaFile], object]) -> None:
    file = ArenaFile(tmp_path / "slot")
    tensor = bytes_of(file.resize(1 << 20))
    tensor[-1] = 7
    change(file)
    assert int(tensor[-1]) == 7
    file.close()


# --- the folders go with the last rank, and nothing else does ---


def test_the_last_rank_takes_everything_away(base: Path, directory: Path) -> None:
    arenas = [RankArena(base, directory, rank) for rank in range(2)]
    for arena in arenas:
        arena.slots[0].resize(10)
        arena.describe(directory, "run-a")
    arenas[0].remove()
    assert rank_folders(arenas[1].job) == {1: arenas[1].folder} and (arenas[1].job / "owner.json").exists()
    arenas[1].remove()
    assert not list(base.iterdir())


def test_another_job_of_the_user_stays(base: Path, directory: Path) -> None:
    with open_arena(base, directory / "other") as other:
        RankArena(base, directory, 0).remove()
        assert [path.name for path in other.job.parent.iterdir()] == [other.job.name]


@pytest.mark.parametrize("surprise", ["gone", "folder"])
def test_removing_never_raises(base: Path, directory: Path, surprise: str) -> None:
    arena = RankArena(base, directory, 0)
    if surprise == "gone":  # `mindx-elastic clean --all`
        for path in arena.folder.iterdir():
            path.unlink()
        arena.folder.rmdir()
    else:
        (arena.folder / "a").mkdir()
    arena.remove()
    RankArena(base, directory, 0).remove()  # the lock is free
