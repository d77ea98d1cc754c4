"""``mindx-elastic run`` with guarded scripts: what the agent adds to a guard, and what a guard adds to the agent."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mindx_elastic.cli.app import app
from tests.harness import events, free_port, wait_until
from tests.resets import can_reset, reset_connections
from tests.system.agents import RUN, agent, attempts, nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_own_folder")]

SMALL, LOOP = "agent_guarded.py", "loop.py"
drill = pytest.mark.drill


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=drill)])
def test_a_stop_of_the_agent_is_a_graceful_stop(signum: signal.Signals) -> None:
    """The guard does not listen to SIGHUP; it gets a SIGTERM instead of dying of it."""
    with agent(LOOP, "ckpt", "--hold-at", 7, ranks=2) as job:
        job.wait_for("HOLD", 2)
        job.process.send_signal(signum)
        job.expect(143)
    saved = {match[1] for match in job.matches(r"step (\d+) saved in")}
    assert len(saved) == 1, "one step on both ranks"
    assert attempts() == [("stopped", 0)]
    assert nothing_left()


def test_a_killed_worker_costs_nothing() -> None:
    with agent(LOOP, "ckpt", "--hold-at", 7, ranks=2) as job:
        job.wait_for("HOLD", 2)
        job.signal_rank(0, signal.SIGKILL)
        job.expect(0)
    assert job.resumed() == ["None", "None", "7", "7"]
    assert attempts() == [("failed", 0), ("finished", None)]
    first = events(RUN, "attempt")[0]
    assert (first["reason"], first["cause_rank"], first["step"], first["saved_step"]) == ("killed by SIGKILL", 0, 7, 7)
    assert 0 <= first["detect_s"] < first["first_step_s"] < 60
    assert job.matches(r"^0 +2 +fresh +7 +rank 0: killed by SIGKILL"), "the table"


@drill
def test_a_rank_that_is_told_to_stop_beside_a_killed_one_stops_the_job() -> None:
    """As by a platform that signals processes, and not the agent."""
    with agent(LOOP, "ckpt", "--hold-at", 7, ranks=2) as job:
        job.wait_for("HOLD", 2)
        job.signal_rank(1, signal.SIGSTOP)  # so that there is no agreement
        job.signal_rank(0)
        job.wait_for("SIGTERM heard")
        job.signal_rank(1, signal.SIGKILL)
        job.expect(143)
    assert attempts() == [("stopped", 0)], job.report()
    assert job.matches(r"the job has stopped: SIGTERM; exit code 143"), job.report()
    with agent(LOOP, "ckpt", ranks=2) as job:
        job.expect(0)
    assert job.resumed() == ["7", "7"], job.report()


@drill
@pytest.mark.skipif(not can_reset(), reason="needs pidfd_getfd")
def test_one_node_whose_connections_are_reset_restarts() -> None:
    """One node needs nobody: its workers meet again, whatever became of the agent's own connections."""
    options = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    with agent(LOOP, "ckpt", "--hold-at", 7, ranks=2, options=options) as job:
        job.wait_for("HOLD", 2)
        for pid in (job.process.pid, *job.pids().values()):
            assert reset_connections(pid) > 0, "the fault has fired"
        job.signal_rank(1, signal.SIGKILL)  # else nobody of them would notice before the next collective
        job.expect(0)
    assert len(job.matches(r"^READY \d+ \d+ 7")) == 2, job.report()


@drill
@pytest.mark.parametrize("squatted", [False, True])
def test_shared_memory_that_was_emptied_under_the_agent_costs_no_restart(squatted: bool) -> None:
    """As systemd does it at a user's log-out (RemoveIPC). Where another one has the agent's folder, that is named."""
    base = Path("shm").absolute() / f"mindx-elastic-{os.geteuid()}"
    with agent(LOOP, "ckpt", "--hold-at", 7, ranks=2) as job:
        job.wait_for("HOLD", 2)
        shutil.rmtree(base)
        if squatted:
            base.symlink_to("elsewhere")
        job.signal_rank(0, signal.SIGKILL)
        job.expect(75 if squatted else 0)
    if squatted:
        assert job.matches(rf"the job has failed: .*{re.escape(str(base))}"), job.report()
        assert not job.matches("Traceback"), job.report()
        return
    assert job.resumed()[2:] == ["7", "7"], job.report()
    assert len(job.matches(r"agent-\d+-\w+ was emptied while the job ran")) == 1, job.report()
    assert attempts() == [("failed", None), ("finished", None)], "the pages were gone: not 0"
    assert nothing_left()


@drill
def test_a_restart_in_another_directory_is_told_with_both_names() -> None:
    """As with a name that has the time of the start. Where the name is the same, nothing is said."""
    with agent(SMALL, "ckpt", "--own-name", "--steps", 20, "--step-s", 0.2, options=["--snapshot-every", "0"]) as job:
        job.wait_for("READY")
        job.signal_rank(0, signal.SIGKILL)
        job.expect(0)
    first, second = [f"ckpt-{match[1]}" for match in job.matches(r"^READY 0 (\d+) None")]
    words = rf"this restart saves in \S+{second}, and the job had saved in \S+{first}: "
    assert len(job.matches(f"WARNING {words}")) == 1, job.report()
    status = CliRunner().invoke(app, ["status", str(RUN)], env={"COLUMNS": "1000"}).output
    assert re.search(f"directory: {words}", status), status
    (told,) = events(RUN, "directory")
    assert re.search(words, told["reason"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(disk: Path) -> None:
    with suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(disk).f_bavail == 0, "the fault has fired"


@drill
def test_a_stop_on_a_full_disk_says_that_its_step_is_in_memory_and_why(small_disk: Path) -> None:
    with agent(SMALL, small_disk / "ckpt", "--steps", 1000, "--step-s", 0.2) as job:
        job.wait_for("READY")
        fill(small_disk)
        job.process.terminate()
        job.expect(143)
    result = json.loads((RUN / "result.json").read_text())
    assert result["saved_step"] >= 0 and result["retry"], result
    assert "No space left on device" in result["reason"] and "in this machine's shared memory" in result["reason"]
    for arguments in (["status", str(RUN)], ["plan", str(small_disk / "ckpt")], ["inspect", str(small_disk / "ckpt")]):
        shown = CliRunner().invoke(app, arguments, env={"MINDX_ARENA_DIR": str(Path("shm").absolute())}).output
        assert "No space left on device" in shown and "in this machine's shared memory" in shown, shown
    (small_disk / "fill").unlink()
    with agent(SMALL, small_disk / "ckpt", "--steps", result["saved_step"] + 1) as job:
        job.expect(0)
    assert job.resumed() == [str(result["saved_step"])], job.report()


@drill
def test_a_rank_that_is_killed_on_a_full_disk_goes_on_from_memory(small_disk: Path) -> None:
    """Each restart refused the directory, until none was left."""
    with agent(SMALL, small_disk / "ckpt", "--steps", 150, "--step-s", 0.1) as job:
        job.wait_for("a snapshot in memory every")
        fill(small_disk)
        job.signal_rank(0, signal.SIGKILL)
        job.wait_for("READY", 2)
        (small_disk / "fill").unlink()
        job.expect(0)
    assert int(job.resumed()[1]) > 0, job.report()
    assert job.matches("WARNING .*No space left on device.*the training goes on, and saves fail until there is room")


def test_a_fault_report_ends_in_a_checkpoint(tmp_path: Path) -> None:
    with agent(SMALL, "ckpt", "--steps", 10**6, "--step-s", 0.01, env={"MINDX_FAULT_DIR": str(tmp_path / "f")}) as job:
        job.wait_for("READY")
        (tmp_path / "f").mkdir()
        (tmp_path / "f" / "fault-npus").write_text('{"FaultRankIds": ["0"], "CreatTime": 1690000000}')
        job.expect(75)
    assert len(job.matches("READY")) == 1
    assert list(Path("ckpt").glob("*_breakpoint.safetensors"))
    assert attempts()[0][0] == "stopped"


# --- steps that are done again after a SIGKILL are compared with what the killed process has kept of them in memory ---


def compared() -> list[tuple[int, str]]:
    return [(event["step"], event["outcome"]) for event in events(Path("ckpt"), "compared")]


@drill
def test_steps_that_are_done_again_exactly_are_compared_on_all_ranks() -> None:
    """Its loop counts by a plain `enumerate`, so that is no proof."""
    with agent(LOOP, "ckpt", "--hold-at", 8, ranks=2, options=["--snapshot-every", "5"]) as job:
        job.wait_for("HOLD", 2)
        job.process.send_signal(signal.SIGSTOP)  # or it would ask the second rank to save
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for rank in (0, 1):
                job.signal_rank(rank, signum)
        job.process.send_signal(signal.SIGCONT)
        job.expect(0)
    assert job.resumed() == ["None", "None", "5", "5"], job.report()
    (line,) = job.matches(r"INFO steps 6 to 8, done again, are what they were before (.*)")
    assert "losses" in line[1] and not job.matches("is not what it was"), job.report()
    assert compared() == [(8, "variables differ")] * 2 and not list(Path("shm").iterdir()), job.report()


def test_a_step_that_is_done_again_and_differs_is_told_with_both_values() -> None:
    options = ["--snapshot-every", "5"]
    with agent(SMALL, "ckpt", "--kill-at", 13, "--steps", 16, "--own-count", options=options) as job:
        job.expect(0)
    assert job.resumed() == ["None", "10"], job.report()
    (line,) = job.matches(r"WARNING step 11, done again, is not what it was before: (.*)")
    values = re.match(r"loss differs at step 11: (\S+), and (\S+) in the resumed run; usual cause: ", line[1])
    assert values and float(values[1]) != float(values[2]), job.report()
    assert not job.matches("verified: ") and compared() == [(11, "differs")], job.report()


# --- mindx-elastic run --metrics-port ---


def test_a_running_job_says_where_it_stands_and_what_is_on_disk() -> None:
    pytest.importorskip("prometheus_client")
    with agent(SMALL, "ckpt", "--save-at", 3, "--spin-at", 5, options=["--metrics-port", "0"]) as job:
        (url,) = (match[1] for match in job.wait_for(r"metrics: (http://127\.0\.0\.1:\d+/metrics)"))

        def asked() -> str:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return str(answer.read().decode())

        wait_until(lambda: 'mindx_step{rank="0"} 4.0' in asked(), "the fourth step")
        text = asked()
    assert 'mindx_steps_total{rank="0"} 4.0' in text and 'mindx_durable_step{rank="0"} 3.0' in text, text
    assert "mindx_workers 1.0" in text and "mindx_attempts_total 1.0" in text, text
    written = next(line for line in text.splitlines() if line.startswith("mindx_durable_bytes_total{"))
    assert float(written.rsplit(" ", 1)[1]) == sum(f.stat().st_size for f in Path("ckpt").glob("*.safetensors"))
