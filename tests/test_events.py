"""The event log: whole lines from everybody, and never a reason to end training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mindx_elastic.events import EventLog, RankFilter, attach_console, logger
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
    assert list(second) == [
        "time", "run_id", "attempt", "rank", "step", "event", "reason", "duration_s", "bytes", "outcome"
    ]  # fmt: skip
    assert log.counters == {"save": 1, "end": 1}


def test_several_writers_share_a_file_line_by_line(path: Path) -> None:
    logs = [EventLog(path, rank=rank) for rank in range(4)]

    def write(log: EventLog) -> None:
        for number in range(50):
            log.emit("step", step=number, reason="x" * 500)

    threads = [threading.Thread(target=write, args=(log,)) for log in logs for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(events(path.parent)) == 400
    assert [log.counters["step"] for log in logs] == [100] * 4


def test_text_that_no_encoding_likes(path: Path) -> None:
    EventLog(path).emit("alarm", reason="line\nbreak \ud800 ä")
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["reason"] == "line\nbreak \ud800 ä"


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.symlink_to(p.with_name("elsewhere"))])
def test_a_log_that_cannot_be_written_warns_once(path: Path, make: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(make)
    make(path)
    log = EventLog(path)
    for _ in range(3):
        log.emit("save")
    assert [r.getMessage() for r in caplog.records if str(path) in r.getMessage()] == [
        r.getMessage() for r in caplog.records
    ]
    assert len(caplog.records) == 1 and log.counters == {"save": 3}
    assert not path.with_name("elsewhere").exists(), "a link is not followed"


def test_no_descriptor_stays_open(path: Path) -> None:
    log = EventLog(path)
    log.emit("save")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        log.emit("save")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_prefix_says_who_speaks() -> None:
    record = logging.LogRecord("mindx_elastic", logging.INFO, "", 0, "hello", (), None)

    def prefix(one: RankFilter) -> str:
        assert one.filter(record)
        return str(record.mindx_where)  # type: ignore[attr-defined]

    assert prefix(RankFilter()) == "mindx_elastic"
    everything = RankFilter(rank=1, world_size=2, attempt=3)
    everything.step = 7
    assert prefix(everything) == "mindx_elastic rank 1 step 7 attempt 3"


def test_a_console_only_where_the_program_has_none(capfd: pytest.CaptureFixture[str]) -> None:
    assert logging.getLogger().handlers, "pytest has configured logging"
    assert attach_console(RankFilter(), "INFO") is None
    root = logging.getLogger()
    saved, level, root.handlers = root.handlers, logger.level, []
    try:
        handler = attach_console(RankFilter(rank=1, world_size=2), "INFO")
        assert handler is not None
        assert attach_console(RankFilter(), "INFO") is None, "one is enough"
        logger.info("stop %s", "training")
        logger.removeHandler(handler)
    finally:
        root.handlers = saved
        logger.setLevel(level)
    assert capfd.readouterr().err == "[mindx_elastic rank 1] INFO stop training\n"


def test_a_warning_without_any_handler_has_prefix_and_level_too(tmp_path: Path) -> None:
    """Before the guard is entered, in a program that has not configured logging."""
    program = """
import mindx_elastic as mx
from mindx_elastic.data import ResumableLoader
mx.ModelCheckpoint(directory="x", config=mx.CheckpointConfig(remove_redundancy=True))
list(ResumableLoader([1, 2, 3], rank=0, world_size=2))
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and all(line.startswith("[mindx_elastic rank 1] WARNING ") for line in lines), done.stderr
