"""What the agent keeps of a failed rank's stderr: passed on at once, bounded, also where there was no guard yet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from mindx_elastic.agent.history import read_last_lines
from mindx_elastic.agent.last_lines import LastLines, exception_in
from tests.harness import job_status, run_command, start_agent, wait_until

TRACEBACK = "Traceback (most recent call last):\n"
EARLY = """
import os, sys
for number in range(300):
    print("line", number, file=sys.stderr)
print("bar 1\\rbar 2\\rbar 3", file=sys.stderr)
if os.environ["RANK"] == "1":
    raise ValueError("no such sample: 7")
"""


def write(stderr: str, text: str) -> None:
    """As a rank does."""
    with open(stderr, "w") as file:
        subprocess.run([sys.executable, "-c", f"import sys; sys.stderr.write({text!r})"], stderr=file, check=True)


def test_the_end_is_kept_once_and_forgotten_for_the_next_process(tmp_path: Path) -> None:
    lines = LastLines(tmp_path, tmp_path / "run", 2)
    (tmp_path / "run").mkdir()
    dest = lines.specs(DefaultLogsSpecs(str(tmp_path / "logs"))).reify({0: {}, 1: {}})
    write(dest.stderrs[1], "".join(f"line {n}\n" for n in range(500)) + "bar 1\rbar 2")
    kept = lines.keep(5, 1, dest.stderrs[1], "exit code 1").split("\n")
    assert (len(kept), kept[0], kept[-1]) == (200, "line 301", "bar 2")
    head, *rest = read_last_lines(tmp_path / "run")[5]
    assert head.startswith("# rank 5: exit code 1, ") and rest == kept
    assert lines.keep(5, 1, dest.stderrs[1], "exit code 1") == ""
    assert read_last_lines(tmp_path / "run")[5] == [head, *rest]
    file = tmp_path / "stderr.log"  # where the user sends it
    file.write_text("x" * 200_000 + "\nlast\n")
    assert lines.keep(0, 0, str(file), "exit code 1").endswith("\nlast")
    assert lines.keep(0, 0, "", "exit code 1") == ""
    keeper = lines.finish()
    assert keeper is not None and keeper.wait(60) == 0, "no rank has its pipe open"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{TRACEBACK}  File x\n    f()\nValueError: bad\n", "ValueError: bad"),
        (
            f"{TRACEBACK}  a\nKeyError: 1\n\n{TRACEBACK}  b\nproject.errors.Bad: two\nlines",
            "project.errors.Bad: two",
        ),
        ("a line\n", ""),
        (
            "".join(f"[rank1]: {line}\n" for line in [TRACEBACK.strip(), '  File "a.py", line 1, in <module>', "E: x"]),
            "E: x",
        ),
    ],
)
def test_the_exception_of_the_last_traceback(text: str, found: str) -> None:
    assert exception_in(text) == found


def test_an_exception_before_any_guard_is_told_everywhere(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "early.py", tmp_path / "run"
    script.write_text(EARLY)
    with start_agent(str(script), ranks=2, run_dir=run_dir, options=["--max-restarts", "0"], plain=True) as job:
        job.expect(1)
    assert job.matches("ValueError: no such sample: 7"), "the rank's own traceback is passed on"
    cause = "exit code 1: ValueError: no such sample: 7"
    status = job_status(run_dir)
    assert status["attempts"][0]["cause"] == cause
    assert json.loads((run_dir / "result.json").read_text())["reason"] == cause
    kept = read_last_lines(run_dir)
    assert len(kept[1]) == 201, "of rank 0, which was ended for it, there may be lines as well"
    assert kept[1][-1] == "ValueError: no such sample: 7" and "bar 3" in kept[1]
    said = run_command("logs", run_dir)
    assert said.rstrip().endswith("ValueError: no such sample: 7") and "rank 1: attempt 0" in said


SURVIVOR = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
print("READY", os.getpid(), flush=True)
signal.pause()
for number in range(20000):
    print("still here", number, file=sys.stderr)
print("SAID", flush=True)
"""


def test_ranks_can_go_on_saying_things_when_the_agent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "survivor.py"
    script.write_text(SURVIVOR)
    with start_agent(str(script), run_dir=tmp_path / "run", plain=True) as job:
        pid = int(job.wait_for(r"READY (\d+)")[0][1])
        os.kill(job.process.pid, signal.SIGKILL)
        job.wait_for("SAID")
        job.wait_for("still here 19999")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the rank")
