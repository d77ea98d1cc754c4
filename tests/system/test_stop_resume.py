"""Real processes, real signals: stop, run the same command again, and end with the weights of the uninterrupted run."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import harness
from tests.harness import Job, events, run_job, start_job
from tests.system.conftest import Reference, Uninterrupted

pytestmark = pytest.mark.slow
SIZE = 90  # samples of loop.py


def assert_resumed_equal(reference: Job, stopped: Job, resumed: Job) -> None:
    """Same weights on every rank, and every sample exactly once an epoch over both runs."""
    assert resumed.hashes() == reference.hashes(), f"{stopped.report()}\n\n{resumed.report()}"
    first, second = stopped.seen(), resumed.seen()
    for epoch in reference.seen():
        together = sorted(first.get(epoch, []) + second.get(epoch, []))
        assert together == list(range(SIZE)), f"epoch {epoch}\n{stopped.report()}\n\n{resumed.report()}"


def saved_steps(directory: Path) -> dict[int, int]:
    """Step by rank, from the newest ``durable`` event of each rank."""
    return {event["rank"]: event["step"] for event in events(directory, "durable")}


def resume(directory: Path, ranks: int, *args: object, fresh: bool = False) -> Job:
    job = run_job("loop.py", directory, *args, ranks=ranks, fresh=fresh)
    assert len(job.matches(r"INFO resumed from")) == 1, job.report()
    return job


@dataclass(frozen=True)
class Stopped:
    """A job that was stopped in mid-epoch, for several tests."""

    job: Job
    directory: Path
    copy: Path
    """What the directory was then."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Stopped]:
    """``stopped(ranks, target, *args)``: a job, started as users do, whose `target` has got a SIGTERM."""
    done: dict[tuple[object, ...], Stopped] = {}

    def stop(ranks: int, target: str, *args: object) -> Stopped:
        key = (ranks, target, *args)
        if key not in done:
            directory, copy = tmp_path_factory.mktemp("stopped"), tmp_path_factory.mktemp("copy") / "ckpt"
            with start_job("loop.py", directory, "--hold-at", 7, *args, ranks=ranks, fresh=True) as job:
                job.wait_for("HOLD", count=ranks)
                if target == "torchrun":
                    job.process.send_signal(signal.SIGTERM)
                for rank in {"first": [0], "last": [ranks - 1], "all": range(ranks), "torchrun": []}[target]:
                    job.signal_rank(rank)
                job.expect(143 if ranks == 1 else 1)  # torchrun returns 1 whatever its workers return
            shutil.copytree(directory, copy)
            done[key] = Stopped(job, directory, copy)
        return done[key]

    return stop


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "target", "args"),
    [
        pytest.param(1, "first", (), marks=pytest.mark.drill),
        (1, "first", ("--num-workers", 2)),
        pytest.param(1, "first", ("--accumulate", 3), marks=pytest.mark.drill),
        pytest.param(2, "first", ("--num-workers", 2), marks=pytest.mark.drill),
        pytest.param(2, "last", (), marks=pytest.mark.drill),
        pytest.param(3, "last", ("--num-workers", 1), marks=pytest.mark.drill),
        pytest.param(4, "all", (), marks=pytest.mark.drill),
        pytest.param(2, "torchrun", ("--num-workers", 1), marks=pytest.mark.drill),
        (3, "torchrun", ()),
    ],
)
def test_sigterm_in_mid_epoch(
    reference: Reference, stopped: Callable[..., Stopped], ranks: int, target: str, args: tuple[object, ...]
) -> None:
    """All as users start it, and the very same command again."""
    before = stopped(ranks, target, *args)
    assert len(before.job.matches("Graceful exit is triggered, stop training.")) == 1
    steps = saved_steps(before.directory)
    assert sorted(steps) == list(range(ranks)), before.job.report()
    assert len(set(steps.values())) == 1, f"the ranks saved different steps: {steps}"
    resumed = resume(before.directory, ranks, *args, fresh=True)
    assert_resumed_equal(reference(ranks, *args), before.job, resumed)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.drill)])
def test_stop_at_the_last_boundary_of_an_epoch(tmp_path: Path, reference: Reference, ranks: int) -> None:
    steps_per_epoch = SIZE // 5 // ranks
    with start_job("loop.py", tmp_path, "--hold-at", steps_per_epoch - 1, ranks=ranks) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(0)
        job.expect(143 if ranks == 1 else 1)
    assert set(saved_steps(tmp_path).values()) == {steps_per_epoch}
    assert_resumed_equal(reference(ranks), job, resume(tmp_path, ranks))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.drill)])
def test_a_signal_in_the_very_last_step_is_not_lost(tmp_path: Path, reference: Reference, ranks: int) -> None:
    last = 3 * SIZE // 5 // ranks
    with start_job("loop.py", tmp_path, "--hold-at", last, ranks=ranks) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(0)
        job.expect(143 if ranks == 1 else 1)
    assert set(saved_steps(tmp_path).values()) == {last}
    resumed = resume(tmp_path, ranks)
    assert resumed.hashes() == reference(ranks).hashes(), resumed.report()
    assert not resumed.seen(), "nothing is trained twice"


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.drill)])
def test_stop_between_two_epochs_in_an_evaluation(tmp_path: Path, reference: Reference, ranks: int) -> None:
    with start_job("loop.py", tmp_path, "--hold-in-eval", 1, ranks=ranks) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(ranks - 1)
        job.expect(143 if ranks == 1 else 1)
    assert set(saved_steps(tmp_path).values()) == {SIZE // 5 // ranks}
    assert_resumed_equal(reference(ranks), job, resume(tmp_path, ranks))


def test_a_second_signal_while_saving_changes_nothing(tmp_path: Path, reference: Reference) -> None:
    with start_job("loop.py", tmp_path, "--hold-at", 7, env={"LOOP_HOLD_SAVE": "1"}) as job:
        job.wait_for("HOLD")
        job.signal_rank(0)
        job.wait_for("SAVING")  # the save waits until it has been signalled again
        job.signal_rank(0)
        job.expect(143)
        assert job.matches("SIGTERM again; the stop is under way")
    assert_resumed_equal(reference(1), job, resume(tmp_path, 1))


@pytest.mark.drill
def test_a_signal_at_once_after_a_resume_does_not_write_the_step_again(tmp_path: Path, reference: Reference) -> None:
    with start_job("loop.py", tmp_path, "--hold-in-eval", 1) as job:
        job.wait_for("HOLD")
        job.signal_rank(0)
        job.expect(143)
    with start_job("loop.py", tmp_path, "--hold-in-eval", 1) as again:
        again.wait_for("HOLD")
        again.signal_rank(0)
        again.expect(143)
        assert again.matches("is already durable in")
    assert len(events(tmp_path, "durable")) == 1
    assert_resumed_equal(reference(1), job, resume(tmp_path, 1))


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.drill), 2])
def test_the_flag_file(tmp_path: Path, reference: Reference, ranks: int) -> None:
    flag = tmp_path / "graceful_exit.json"
    flag.write_text('{"GracefulExit": 0}')
    args = ("--flag-file", flag)
    with start_job("loop.py", tmp_path, "--hold-at", 7, *args, ranks=ranks) as job:
        job.wait_for("HOLD", count=ranks)
        flag.write_text('{"GracefulEx')  # half-written: a warning, then a retry
        job.wait_for("is not readable JSON yet")
        flag.write_text(json.dumps({"GracefulExit": 1}))
        job.expect(75 if ranks == 1 else 1)
        assert len(job.matches("Graceful exit is triggered, stop training.")) == 1
        assert len(job.matches("is not readable JSON yet")) == 1, "a warning once, not one a poll"
    # The flag is still set: the restart goes on all the same.
    resumed = resume(tmp_path, ranks, *args)
    assert len(resumed.matches("has stopped this run before")) == 1, resumed.report()
    assert_resumed_equal(reference(ranks), job, resumed)


@pytest.mark.drill
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    with start_job("loop.py", tmp_path, "--hold-at", 7, "--num-workers", 2, ranks=2) as job:
        job.wait_for("HOLD", count=2)
        workers = {int(m[1]) for m in job.matches(r"WORKER (\d+)")}
        job.signal_rank(0)
        job.expect(1)
    assert workers, job.report()
    harness.wait_until(lambda: not [p for p in workers if Path(f"/proc/{p}").exists()], "the loader workers ending")
    assert set(Path("/dev/shm").iterdir()) <= before
    assert not list(tmp_path.rglob("*.mindx-tmp*"))


@pytest.mark.drill
def test_fsdp2_shards_come_back_to_their_ranks(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    whole = uninterrupted("fsdp.py", 2)
    with start_job("fsdp.py", tmp_path / "stopped", "--hold-at", 5, ranks=2) as job:
        job.wait_for("HOLD", count=2)
        job.signal_rank(1)
        job.expect(1)
    resumed = run_job("fsdp.py", tmp_path / "stopped", "--hold-at", 5, ranks=2)
    assert len(resumed.matches(r"READY \d \d+ 6")) == 2, resumed.report()
    assert resumed.hashes() == whole.hashes(), resumed.report()
