"""A stranger on the store's port: whatever it plants, a SIGTERM saves one step on every rank and ends with 143."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import JOBS, Job, events, run_job, start_job

pytestmark = [pytest.mark.slow, pytest.mark.drill]
RINGS = {"exit-0", "not-json", "huge"}  # what a listener notices at once


@contextmanager
def planted(directory: Path, what: str, *args: object) -> Iterator[Job]:
    """A job of two ranks that hold, in whose store something was planted; it has torchrun's exit code then."""
    # Fresh: a forked process shows the environment of the one that it is forked from.
    with start_job("loop.py", directory, "--hold-at", 7, *args, ranks=2, fresh=True) as job:
        job.wait_for("HOLD", count=2)
        environment = Path(f"/proc/{job.pids()[0]}/environ").read_bytes().decode().split("\0")
        known = dict(item.partition("=")[::2] for item in environment)
        # MASTER_ADDR may be the machine's name, which need not lead to it here.
        command = [sys.executable, str(JOBS / "stranger.py"), "127.0.0.1", known["MASTER_PORT"], what]
        env = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=env)
        assert done.stdout.split() == [word for each in what.split(",") for word in ("PLANTED", each)], done.stderr
        yield job
        job.expect(1)
        assert "\x1b" not in job.report()


def codes(directory: Path) -> dict[int, str]:
    """How each rank's process has left."""
    return {event["rank"]: event["outcome"] for event in events(directory, "exit")}


def durable(directory: Path) -> dict[int, int]:
    return {event["rank"]: event["step"] for event in events(directory, "durable")}


def wait_for_notice(job: Job, what: str) -> None:
    if RINGS & set(what.split(",")):
        job.wait_for(r"'request' in the store .* not obeyed")


@pytest.mark.parametrize(
    "what", ["exit-0,finished,offers", "exit-0", "not-json", "huge", "far-step", "finished", "offers", "count"]
)
def test_with_a_key_nothing_planted_counts(tmp_path: Path, what: str) -> None:
    """Under plain torchrun the ranks of a node have a key by themselves."""
    with planted(tmp_path, what) as job:
        wait_for_notice(job, what)
        assert not events(tmp_path, "alarm"), job.report()
        job.signal_rank(0)
    assert codes(tmp_path) == {0: "143", 1: "143"} and durable(tmp_path) == {0: 8, 1: 8}, job.report()


@pytest.mark.parametrize("what", ["not-json,finished", "huge", "far-step", "finished", "offers", "count"])
def test_without_a_key_a_stop_is_never_ignored(tmp_path: Path, what: str) -> None:
    with planted(tmp_path, what, "--inject", "no-key") as job:
        wait_for_notice(job, what)
        job.signal_rank(0)
    assert codes(tmp_path) == {0: "143", 1: "143"}, job.report()
    steps = durable(tmp_path)
    if what == "offers":  # no offer can be told from a planted one: each rank saves the last boundary it has
        assert sorted(steps) == [0, 1] and set(steps.values()) <= {7, 8}, job.report()
    else:
        assert steps == {0: 8, 1: 8}, job.report()
    assert len(run_job("loop.py", tmp_path, ranks=2).matches("INFO resumed from")) == 1


def test_without_a_key_a_planted_request_never_looks_like_a_finished_training(tmp_path: Path) -> None:
    with planted(tmp_path, "exit-0", "--inject", "no-key") as job:
        pass
    assert codes(tmp_path) == {0: "75", 1: "75"} and durable(tmp_path) == {0: 8, 1: 8}, job.report()


def test_a_stop_that_the_program_asks_for_on_one_rank_ends_all_with_its_code(tmp_path: Path) -> None:
    """With a key 0 is believed, on ranks that only hear of it too."""
    job = run_job("loop.py", tmp_path, "--ask-stop-at", 7, ranks=2, fresh=True)
    assert codes(tmp_path) == {0: "0", 1: "0"}, job.report()


def test_different_keys_are_named_at_the_start(tmp_path: Path) -> None:
    job = run_job("loop.py", tmp_path, "--inject", "own-key", ranks=2, code=1)
    assert job.matches("UntrustedMessageError.*was not written by this job.*MINDX_JOB_KEY"), job.report()
