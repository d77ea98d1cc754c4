"""A run as a page: what is told, what is left out, and that nothing out of a log gets into the page as markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.history import FAILED, FINISHED, NEW_NODE, AttemptRecord, last_lines_path
from mindx_elastic.report.page import make_page
from mindx_elastic.report.run_history import shares_of, tell
from tests.cli.conftest import Run
from tests.cli.conftest import run as run

EVIL = '</title><script>alert(1)</script>" onload="x\x1b[31m\u202e'
BEGIN = 1_760_000_000.0
ME = {"pid": 7, "host": "h"}


class Log:
    """Writes events as the agent and the ranks do."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, BEGIN
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines: list[str] = []

    def emit(self, event: str, **more: Any) -> None:
        fields = {"time": self.now, "attempt": 0, "rank": 0, "step": None, "event": event, "reason": None}
        self._lines.append(json.dumps({**fields, "outcome": None, **more}))

    def write(self, *foreign: str) -> Path:
        self.path.write_text("\n".join([*foreign, *self._lines]) + "\n")
        return self.path


def record_run(folder: Path, *, attempts: int = 2, steps: int = 10, ranks: int = 2, cause: str = "killed") -> Path:
    """Every attempt but the last one fails, with 2 steps lost; every fifth step is saved. The log of the RUN_DIR."""
    agent, job = Log(folder / "run" / "events.jsonl"), Log(folder / "ckpt" / "events.jsonl")
    agent.emit("agent_start", **ME)
    step, resumed = 0, -1
    for number in range(attempts):
        agent.emit("attempt_start", attempt=number, world_size=ranks, started=agent.now, **ME)
        started = agent.now
        job.now = agent.now + 1
        job.emit("resume" if number else "start", step=max(resumed, 0))
        for _ in range(steps):
            step += 1
            job.now += 1
            if step % 5 == 0:
                job.emit("save", step=step, outcome="saved", kind="periodic", duration_s=0.5, bytes=10**9)
        agent.now = job.now
        facts: dict[str, Any] = {"step": step, "resumed_step": resumed, "world_size": ranks, "started": started, **ME}
        facts["resumed_path"] = str(folder / "ckpt" / "rank_0" / "x.safetensors") if number else None
        if number == attempts - 1:
            agent.emit("attempt_end", attempt=number, outcome="finished", **facts)
            break
        for rank in range(ranks):
            outcome = "left gracefully" if rank else "failed"
            agent.emit("worker_end", attempt=number, worker_rank=rank, outcome=outcome, reason=cause, step=step)
        facts |= {"steps_lost": 2, "saved_step": step - 2, "detect_s": 0.1, "save_s": 0.5, "restart_s": 1.0}
        agent.emit("attempt_end", attempt=number, outcome="failed", reason=cause, cause_rank=0, **facts)
        agent.emit("attempt", attempt=number, outcome="failed", reason=cause, cause_rank=0, first_step_s=2.0, **facts)
        step, resumed = step - 2, step - 2
        agent.now += 1
    agent.emit("rejoin", attempt=0, outcome="in place", generation=1, cause=cause, ranks=[1], duration_s=0.2, **ME)
    agent.emit("hang", reason=cause, **ME)
    agent.emit("agent_end", outcome="finished, exit code 0", **ME)
    job.write()
    return agent.write()


def test_the_story_of_a_run(tmp_path: Path) -> None:
    story = tell(record_run(tmp_path))
    assert story is not None and story.torn == 0
    assert [path.parent.name for path in story.sources] == ["run", "ckpt"], "found by what the run resumed from"
    assert [(bar.rank, bar.attempt, bar.is_bad) for bar in story.bars] == [
        (0, 0, True),
        (1, 0, False),
        (0, 1, False),
        (1, 1, False),
    ]
    assert [mark.kind for mark in story.marks].count("save") == 4
    assert {mark.kind for mark in story.marks} == {"save", "fault", "recovery", "hang"}
    assert story.step == 18
    assert sum(share.seconds for share in story.shares) == pytest.approx(story.end - story.start)


def test_where_the_time_went() -> None:
    times: dict[str, Any] = {"detect_s": 0.5, "save_s": 2.0, "restart_s": 3.0, "first_step_s": 7.0}
    failed = AttemptRecord(attempt=0, outcome=FAILED, steps_lost=5, step_reached=50, resumed_step=-1, **times)
    done = AttemptRecord(attempt=1, outcome=FINISHED, in_place_s=1.0, paused_s=3.0)
    shares = {share.name: share.seconds for share in shares_of([failed, done], {0: 100.0}, 300.0, 4.0)}
    assert shares.pop("productive") == pytest.approx(300 - 10 - 7 - 1 - 3 - 4)
    expected = {"redone": 10, "detect": 0.5, "save": 1.5, "restart": 1, "resume": 4, "in place": 1, "paused": 3}
    assert shares == pytest.approx({**expected, "first start": 4})
    other = AttemptRecord(attempt=0, outcome=NEW_NODE, step_reached=50, **times)
    assert {share.name for share in shares_of([other, done], {}, 300.0, 4.0)} >= {"restart", "resume"}
    squeezed = shares_of([failed], {0: 100.0}, 2.0, 0.0)
    assert sum(share.seconds for share in squeezed) == pytest.approx(2.0), "logs that contradict themselves"


def test_the_top_says_what_happened_and_what_to_do(tmp_path: Path) -> None:
    log = record_run(tmp_path, cause="exit code 1: ValueError: bad <sample>")
    lines = log.read_text().splitlines()
    first = json.dumps({**json.loads(lines[0]), "command_line": "mindx-elastic run --nproc-per-node 2 train.py"})
    gone_on = [line for line in lines[1:] if '"attempt": 1' not in line and '"agent_end"' not in line]
    end = json.dumps({**json.loads(lines[-1]), "outcome": "failed, exit code 1"})
    log.write_text("\n".join([first, *gone_on, end]) + "\n")
    last_lines_path(log.parent, 0).parent.mkdir()
    last_lines_path(log.parent, 0).write_text("# rank 0: attempt 0, exit code 1\nTraceback\nValueError: bad <sample>\n")
    story = tell(log)
    assert story is not None
    top = make_page(story).partition("<h1>")[2].partition("<h2>")[0]
    assert "<b>failed, exit code 1</b>" in top and "Attempt 0 failed, after step 10" in top
    assert "<code>exit code 1: ValueError: bad &lt;sample&gt;</code>" in top
    assert "mindx-elastic run --nproc-per-node 2 train.py" in top
    assert "start the same command again; it goes on from the newest good checkpoint" in top
    assert "rank 0: attempt 0, exit code 1:</p><pre>Traceback<br>ValueError: bad &lt;sample&gt;" in top
    finished = tell(record_run(tmp_path / "finished"))
    assert finished is not None and "nothing, the training has finished" in make_page(finished)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")


def test_nothing_out_of_a_log_is_markup(tmp_path: Path) -> None:
    log = record_run(tmp_path, cause=EVIL)
    log.write_text(log.read_text() + '{"time": 1.0, "event"\n<script>\n[]\n{"time": "x", "event": "save"}\n')
    story = tell(log)
    assert story is not None and story.torn == 4
    page = make_page(story)
    found = Tags()
    found.feed(page)
    assert "script" not in found.tags and "onload" not in found.attributes
    assert "\x1b" not in page and "\u202e" not in page and "&lt;script&gt;" in page
    links = {*found.attributes.get("href", set()), *found.attributes.get("src", set())}
    assert links == {"data:,"}, "nothing from a network"
    assert "4 torn or foreign lines were left out" in page


@pytest.mark.parametrize("number", ["1e308", str(10**30), "-5", '"7"', "null"])
def test_absurd_numbers_are_unknown(tmp_path: Path, number: str) -> None:
    log = record_run(tmp_path, attempts=3)
    lines = log.read_text().splitlines()
    fields = ("step", "detect_s", "first_step_s", "world_size", "steps_lost", "started", "duration_s", "worker_rank")
    spoilt = [re.sub(rf'"({"|".join(fields)})": [^,}}\[]+', rf'"\1": {number}', line) for line in lines]
    assert spoilt != lines
    spoilt += [re.sub(r'"time": [^,]+', f'"time": {number}', line) for line in lines]
    log.write_text("\n".join(spoilt) + "\n")
    story = tell(log)
    assert story is not None
    page = make_page(story)
    assert "nan" not in page and "inf " not in page and len(page) < 500_000


def test_a_crash_loop_of_thousands_of_attempts_makes_a_small_page(tmp_path: Path) -> None:
    log = record_run(tmp_path)
    line = '{"time": %d, "event": "attempt_start", "attempt": %d, "started": %d}\n'
    log.write_text("".join(line % (10**9 + n, n, 10**9 + n) for n in range(20_000)))
    story = tell(log)
    assert story is not None and len(story.run.records) == 20_000
    assert len(make_page(story)) < 2_000_000


def test_the_command(run: Run, tmp_path: Path) -> None:
    record_run(tmp_path)
    page = tmp_path / "r.html"
    result = run("report", tmp_path / "run", "-o", page)
    assert result.exit_code == 0 and "2 attempts" in result.stdout and page.read_text().startswith("<!doctype html>")
    assert run("report", tmp_path / "run", "-o", tmp_path / "no" / "r.html").exit_code == 2
    (tmp_path / "empty").mkdir()
    log = tmp_path / "run" / "events.jsonl"
    before = log.read_bytes()
    for name, said in ((log, "is a log"), (tmp_path / "empty", "a folder"), (Path("/dev/null"), "not a regular file")):
        result = run("report", tmp_path / "run", "-o", name)
        assert result.exit_code == 2 and said in result.stderr
    assert log.read_bytes() == before and Path("/dev/null").is_char_device()
    assert run("report", tmp_path / "empty", "-o", page).exit_code == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "empty", "r.html", "run"]
