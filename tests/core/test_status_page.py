"""The status page: one process writes, another reads, at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindx_elastic.core.status_page import NUM_STEPS, PAGE_BYTES, Status, StatusPage, WorkerPhase, page_path, read_page

_WRITER = """
import sys
from pathlib import Path
from mindx_elastic.core.status_page import StatusPage
page = StatusPage(Path(sys.argv[1]))
page.set_text("reason", "an alarm")
print("WRITING", flush=True)
step = 0
while True:
    step += 1
    page.pass_boundary(step)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return page_path(tmp_path, 3)


def test_every_field_comes_through(path: Path) -> None:
    page = StatusPage(path)
    assert read_page(path) == Status(pid=os.getpid(), phase=WorkerPhase.STARTING), "nothing is known yet"
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (PAGE_BYTES, 0o600)
    names = [name for name, value in Status._field_defaults.items() if value in (0, -1)]
    numbers = {name: (1 << 61) + number for number, name in enumerate(names)}
    texts = {"reason": "SIGTERM", "resumed_path": "/a/b", "run_id": "run-a", "arena": "/dev/shm/x"}
    page.set(**numbers)
    for name, text in texts.items():
        page.set_text(name, text)
    told = read_page(path)
    assert told is not None and len(told.waits_ns) == len(told.steps_ns) == NUM_STEPS
    assert told._replace(waits_ns=(), steps_ns=()) == Status(**numbers, **texts)  # type: ignore[arg-type]
    page.set_text("reason", "")
    found = read_page(path)
    assert found is not None and (found.reason, found.arena) == ("", "/dev/shm/x")
    page.close()


def test_the_waits_of_the_last_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that follow one of 10 ms, once of each boundary, with all that was waited for since the one before."""
    clock = 0

    def at(ms: int) -> None:
        nonlocal clock
        clock += ms * 1_000_000

    monkeypatch.setattr("mindx_elastic.core.status_page.time.monotonic_ns", lambda: clock)
    page = StatusPage(path)
    waits = [(10, 3, True), (20, 5, False), (20, 2, True), (9, 9, True), (11, 4, True), (12, None, True), (30, 8, True)]
    for step, (ms, wait, cut) in enumerate(waits, start=1):
        at(ms)
        if wait is not None:
            page.note_wait(wait)
        page.pass_boundary(step, cut=cut)
    page.pass_boundary(len(waits))
    found = read_page(path)
    assert found is not None and (found.timed, found.waits_ns) == (4, (7, 9, -1, 8))
    assert [each // 1_000_000 for each in found.steps_ns] == [40, 9, 12, 30]
    for step in range(8, 8 + NUM_STEPS):
        page.note_wait(step)
        at(15)
        page.pass_boundary(step)
    found = read_page(path)
    assert found is not None and sorted(found.waits_ns) == [*range(8, 8 + NUM_STEPS)]
    page.close()


def test_boundaries(path: Path) -> None:
    page = StatusPage(path)
    assert not page.started
    before = time.monotonic_ns()
    page.pass_boundary(41)
    first = read_page(path)
    page.pass_boundary(42)
    second = read_page(path)
    assert first is not None and second is not None and page.started
    assert (first.step, first.boundaries, second.step, second.boundaries) == (41, 1, 42, 2)
    assert before <= first.boundary_ns == first.first_boundary_ns <= second.boundary_ns <= time.monotonic_ns()
    assert second.first_boundary_ns == first.first_boundary_ns
    page.close()


def test_long_texts_are_cut_off_and_touch_nothing_else(path: Path) -> None:
    page, rooms = StatusPage(path), {"reason": 1023, "resumed_path": 1023, "run_id": 127, "arena": 895}
    for name in rooms:
        page.set_text(name, "é" * 10_000)
    found = read_page(path)
    assert found is not None and (found.pid, found.step) == (os.getpid(), -1)
    for name, room in rooms.items():
        assert getattr(found, name).rstrip("\ufffd") == "é" * (room // 2)
    page.close()


@pytest.mark.parametrize("content", [None, b"", b"\0" * PAGE_BYTES, b"x" * PAGE_BYTES])
def test_anything_else_is_no_page(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    assert read_page(path) is None


def test_a_reader_sees_whole_fields_that_only_grow_and_all_after_a_kill(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "WRITING\n"
        last = 0
        while last < 5000:
            found = read_page(path)
            assert found is not None and found.pid == process.pid and found.reason == "an alarm"
            assert last <= max(0, found.step) < 1 << 40
            last = max(0, found.step)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    found = read_page(path)
    assert found is not None and found.step >= last
