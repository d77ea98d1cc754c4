"""The event log: whole lines from everybody, and never a reason to end training."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindx_elastic.core.events import (
    EventLog,
    LogOnce,
    RankFilter,
    attach_console,
    lines_backwards,
    logger,
    older_generation,
    read_events,
)
from mindx_elastic.memory.memory_files import known_runs
from tests.harness import events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_one_line_an_event_with_all_documented_keys(path: Path) -> None:
    log = EventLog(path, run_id="run", attempt=2, rank=3)
    before = time.time()
    log.emit("save", step=7, reason="SIGTERM", duration_s=0.12345678, nbytes=10, outcome="saved", path=Path("/x"))
    log.emit("end")
    first, second = events(path.parent)
    assert before - 1 <= first.pop("time") <= time.time() + 1
    assert first == {
        "run_id": "run",
        "attempt": 2,
        "rank": 3,
        "step": 7,
        "event": "save",
        "reason": "SIGTERM",
        "duration_s": 0.123457,
        "bytes": 10,
        "outcome": "saved",
        "path": "/x",
    }
    assert list(second) == ["time", *(key for key in first if key != "path")]


class FullDisk:
    """Lets every write to the log fail, or end after some bytes, while `room` says so. Counts what it has refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.room: int | None = None
        """Bytes; None: no limit."""
        self.refused = 0
        self._write, self._path = os.write, str(path.absolute())
        monkeypatch.setattr(os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        if self.room is None or os.readlink(f"/proc/self/fd/{fd}") != self._path:
            return self._write(fd, data)
        if self.room == 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(fd, data[: self.room])
        self.room -= written
        return written


def test_events_that_cannot_be_written_are_counted(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    disk = FullDisk(monkeypatch, path)
    log = EventLog(path, run_id="run")
    disk.room = 0
    log.emit("start", step=0)
    log.emit("save", step=1)
    assert disk.refused == 2 and not log.is_recorded and path.read_bytes() == b""
    disk.room = None
    log.emit("save", step=2)
    log.emit("save", step=3)
    assert [(e["event"], e["step"]) for e in events(path.parent)] == [("save", 2), ("save", 3)]
    assert log.is_recorded
    broken, mended = (record.getMessage() for record in caplog.records)
    assert "cannot append" in broken and "No space" in broken
    assert "can be written again: 2 earlier events were lost" in mended


def test_a_line_behind_half_of_another_one_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path, run_id="run")
    log.emit("start")
    disk = FullDisk(monkeypatch, path)
    disk.room = 100
    log.emit("save", step=1)
    disk.room = None
    EventLog(path, run_id="run-b", rank=1).emit("save", step=2)
    log.emit("save", step=3)
    found, num_others = read_events(path)
    assert [(e["event"], e["step"]) for e in found] == [("start", None), ("save", 2), ("save", 3)] and not num_others
    assert known_runs([path.parent]) == {"run", "run-b"}


def test_a_full_log_is_moved(path: Path) -> None:
    log = EventLog(path, run_id="run", generation_bytes=20_000)
    for step in range(600):
        log.emit("save", step=step, reason="x" * 100)
    sizes = [path.stat().st_size, older_generation(path).stat().st_size]
    assert max(sizes) < 25_000 and len(list(path.parent.iterdir())) == 2, sizes
    log.emit("end", outcome="finished")
    while path.exists() and '"end"' in path.read_text():
        EventLog(path, run_id="run", generation_bytes=20_000).emit("save", reason="x" * 100)
    assert log.has_ended(0), "it stands in the older file"


def test_several_writers_rotate_without_losing_a_line(path: Path) -> None:
    """Every process opens the file again for each line; a rotation is another writer's at any moment."""
    script = (
        "import sys; from pathlib import Path; from mindx_elastic.core.events import EventLog\n"
        "rank = int(sys.argv[2])\n"
        "log = EventLog(Path(sys.argv[1]), run_id='run', rank=rank, generation_bytes=100_000)\n"
        "log.emit('start', step=0)\n"
        "for number in range(250): log.emit('save', step=number, reason='x' * 50)\n"
    )
    ranks = range(3)
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), str(rank)]) for rank in ranks]
    assert [writer.wait(120) for writer in writers] == [0] * len(writers)
    older = older_generation(path)
    assert older.exists(), "it was rotated"
    whole = [json.loads(line) for file in (older, path) for line in file.read_text().splitlines()]
    saves = [(e["rank"], e["step"]) for e in whole if e["event"] == "save"]
    assert len(saves) == len(set(saves)) and {e["run_id"] for e in events(path.parent)} == {"run"}
    newest = {rank: max(step for r, step in saves if r == rank) for rank in ranks}
    assert newest == dict.fromkeys(ranks, 249)
    for rank in ranks:  # of each rank an unbroken row up to the newest
        steps = sorted(step for r, step in saves if r == rank)
        assert steps == list(range(250 - len(steps), 250))


def test_all_events_of_both_files_are_read_in_order(path: Path) -> None:
    def line(time: float, event: str) -> str:
        return json.dumps({"time": time, "event": event}) + "\n"

    older_generation(path).write_text(line(1.0, "start") + line(2.0, "save") + "no event\n" + "[]\n")
    path.write_text("\n" + '{"time": 2.5, "ev' + line(3.0, "alarm") + line(4.0, "end") + '{"time": 5.0, "e')
    found, num_others = read_events(path)
    assert [(event["time"], event["event"]) for event in found] == [
        *((1.0, "start"), (2.0, "save"), (3.0, "alarm"), (4.0, "end")),
    ]
    assert num_others == 3, "two lines of another program, one that is cut off"
    with pytest.raises(FileNotFoundError):
        read_events(path.with_name("other.jsonl"))


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 200_000])
def test_lines_backwards_are_the_lines(path: Path, size: int) -> None:
    content = b"".join(b"%d %s\n" % (n, b"x" * (n % 97)) for n in range(5000))[:size]
    path.write_bytes(content)
    assert list(lines_backwards(path, 1 << 20)) == [line for line in reversed(content.split(b"\n")) if line]
    assert b"".join(reversed(list(lines_backwards(path, 1000)))) == content[-1000:].replace(b"\n", b"")


def test_a_line_of_all_ranks_comes_once_and_as_often_as_a_rank_says_it(tmp_path: Path) -> None:
    """What differs by the rank's folder or a measured time is the same line; what names a rank, and errors, is not."""
    log = EventLog(tmp_path / "events.jsonl", run_id=f"run-{tmp_path}", attempt=1)
    ranks = [RankFilter(rank=rank, world_size=3) for rank in range(3)]
    for each in ranks:
        each.said = LogOnce()  # as in processes of their own

    def said(text: str, level: int = logging.WARNING) -> int:
        return sum(
            each.filter(logging.LogRecord("mindx_elastic", level, "", 0, text.format(each.rank), (), None))
            for each in ranks
        )

    assert said("too early to know the run") == 3
    for each in ranks:
        each.events = log
    assert said("resumed from /c/rank_{0}/a.safetensors, 0.{0}1 s ago") == 1
    assert said("step 3 saved in /c/rank_{0}/a.safetensors") == 3
    assert said("SIGTERM heard") == said("SIGTERM heard") == 1
    assert said("rank {0} has no file") == said("failed", logging.ERROR) == 3
    log.attempt = 2
    assert said("SIGTERM heard") == 1


@pytest.mark.parametrize(("world_size", "where"), [(1, "step 7"), (2, "rank 1 step 7 attempt 3")])
def test_a_console_only_where_the_program_has_none(
    world_size: int, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its lines say who speaks."""
    assert logging.getLogger().handlers, "pytest has configured logging"
    assert attach_console(RankFilter(), "INFO") is None
    root = logging.getLogger()
    saved, level, root.handlers = root.handlers, logger.level, []
    try:
        speaker = RankFilter(rank=1, world_size=world_size, attempt=3 * (world_size == 2))
        speaker.step = 7
        handler = attach_console(speaker, "INFO")
        assert handler is not None
        assert attach_console(RankFilter(), "INFO") is None, "one is enough"
        logger.info("stop %s", "training")
        logger.removeHandler(handler)
    finally:
        root.handlers = saved
        logger.setLevel(level)
    assert capfd.readouterr().err == f"[mindx_elastic {where}] INFO stop training\n"


def test_during_a_stop_no_thread_waits_for_a_line(path: Path) -> None:
    """The log hangs until it may be written; then all of it is there, in order."""
    log = EventLog(path, run_id="r")
    log.write_aside()
    log.hurry = True
    with log._lock:
        for number in range(500):  # half a second for each would be more than this test has
            log.emit("alarm", step=number)
        assert not path.exists()
    log.close()
    assert [event["step"] for event in read_events(path)[0]] == list(range(500))
