"""Nothing that hangs stands between an alarm and its deadline: real processes, real signals, things that never come

back. What does not end in time here does not end at all, so there is nothing to measure.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mindx_elastic.persist.format import read_header
from tests.harness import events, start_job
from tests.system.conftest import Reference
from tests.system.test_stop_resume import resume, saved_steps

pytestmark = pytest.mark.slow


@pytest.mark.drill
def test_a_save_does_not_wait_for_the_copy_of_a_snapshot(tmp_path: Path, reference: Reference) -> None:
    env = {"LOOP_HANGS": "copy", "MINDX_SNAPSHOT_EVERY": "6", "MINDX_ARENA_DIR": str(tmp_path / "arena")}
    (tmp_path / "arena").mkdir()
    with start_job("hanging.py", tmp_path / "job", "--grace-s", 3, env=env) as job:
        job.wait_for("HANGS copy")  # the training thread waits at optimizer.step() of the seventh
        job.signal_rank(0)
        job.expect(143)
        assert job.matches("step 6 saved in"), job.report()
    (durable,) = events(tmp_path / "job", "durable")
    assert durable["reason"] == "SIGTERM"
    assert saved_steps(tmp_path / "job") == {0: 6}
    resumed = resume(tmp_path / "job", 1)
    assert resumed.hashes() == reference(1).hashes(), resumed.report()


@pytest.mark.drill
@pytest.mark.parametrize(
    "what", ["flag", pytest.param("log", marks=pytest.mark.drill), pytest.param("stderr", marks=pytest.mark.drill)]
)
def test_what_hangs_does_not_hold_up_the_stop(tmp_path: Path, reference: Reference, what: str) -> None:
    env = {"LOOP_HANGS": what, "MINDX_ARENA_DIR": "none"}
    flag = tmp_path / "graceful_exit.json"
    with start_job("hanging.py", tmp_path, "--hold-at", 7, "--grace-s", 4, "--flag-file", flag, env=env) as job:
        job.wait_for(f"HANGS {what}")
        job.wait_for("HOLD")
        job.signal_rank(0)
        job.expect(143)
    if what == "log":
        log = tmp_path / "events.jsonl"
        assert log.is_fifo()
        os.replace(log.with_suffix(".kept"), log)
    (saved,) = tmp_path.glob("*.safetensors")  # the log, of all things, need not know
    assert read_header(saved).info.step in (7, 8), job.report()
    resumed = resume(tmp_path, 1)
    assert resumed.hashes() == reference(1).hashes(), resumed.report()


@pytest.mark.drill
def test_a_frozen_host_of_the_store_holds_up_no_rank(tmp_path: Path) -> None:
    env = {"MINDX_ARENA_DIR": "none"}
    with start_job("loop.py", tmp_path, "--hold-at", 7, "--grace-s", 6, ranks=2, env=env) as job:
        job.wait_for("HOLD", count=2)
        job.signal_launcher(signal.SIGSTOP)  # torchrun hosts the store
        for rank in (0, 1):
            job.signal_rank(rank)
        job.wait_for(r"step \d+ saved in", count=2)
        job.signal_launcher(signal.SIGCONT)
        job.wait()
    assert set(saved_steps(tmp_path)) == {0, 1}, job.report()


@pytest.mark.drill
@pytest.mark.parametrize(
    ("spare_mib", "ranks"),
    [(8, 1), pytest.param(8, 2, marks=pytest.mark.drill), pytest.param(1, 1, marks=pytest.mark.drill)],
)
def test_a_dying_save_needs_no_new_thread_and_little_memory(
    tmp_path: Path, reference: Reference, spare_mib: int, ranks: int
) -> None:
    env = {"SCARCE_MIB": str(spare_mib), "MINDX_ARENA_DIR": "none"}
    with start_job("scarce.py", tmp_path, "--hold-at", 7, ranks=ranks, env=env, fresh=True) as job:
        job.wait_for(f"SCARCE {spare_mib}", count=ranks)
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(0)
        job.expect(143 if ranks == 1 else 1)
        assert not job.matches("can't start new thread|MemoryError|Cannot allocate"), job.report()
    assert saved_steps(tmp_path) == dict.fromkeys(range(ranks), 8), job.report()
    resumed = resume(tmp_path, ranks)
    assert resumed.hashes() == reference(ranks).hashes(), resumed.report()
