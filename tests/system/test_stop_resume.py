"""Real processes, real signals: stop, run the same command again, and end with the weights of the uninterrupted run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.persist.format import read_header
from tests.harness import Job, events, run_job, start_agent, start_job, wait_until
from tests.system.conftest import Reference, Uninterrupted

pytestmark = pytest.mark.slow
drill = pytest.mark.drill
SIZE = 90  # samples of loop.py
NO_MEMORY = {"MINDX_ARENA_DIR": "none"}


def drilled(*values: object) -> Any:
    return pytest.param(*values, marks=drill)


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


def stop(directory: Path, *args: object, ranks: int = 1, target: int = 0, **more: Any) -> Job:
    """A job that has got a SIGTERM where it holds."""
    with start_job("loop.py", directory, *args, ranks=ranks, **more) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(target)
        return job.expect(143 if ranks == 1 else 1)  # torchrun returns 1 whatever its workers return


# --- where the signal comes ---


@pytest.mark.parametrize(
    ("ranks", "targets", "args"),
    [
        (1, [0], ("--num-workers", 2)),
        drilled(1, [0], ()),
        drilled(1, [0], ("--accumulate", 3)),
        drilled(2, [0], ("--num-workers", 2)),
        drilled(2, [1], ()),
        drilled(3, [2], ("--num-workers", 1)),
        drilled(4, [0, 1, 2, 3], ()),
        drilled(2, [], ("--num-workers", 1)),
        drilled(3, [], ()),
    ],
)
def test_sigterm_in_mid_epoch(
    tmp_path: Path, reference: Reference, ranks: int, targets: list[int], args: tuple[object, ...]
) -> None:
    """All as users start it, and the very same command again. No target: the signal is torchrun's."""
    with start_job("loop.py", tmp_path, "--hold-at", 7, *args, ranks=ranks, fresh=True) as job:
        job.wait_for("HOLD", count=ranks)
        for rank in targets:
            job.signal_rank(rank)
        if not targets:
            job.signal_launcher(signal.SIGTERM)
        job.expect(143 if ranks == 1 else 1)
    assert len(job.matches("Graceful exit is triggered, stop training.")) == 1
    steps = saved_steps(tmp_path)
    assert sorted(steps) == list(range(ranks)), job.report()
    assert len(set(steps.values())) == 1, f"the ranks saved different steps: {steps}"
    assert_resumed_equal(reference(ranks, *args), job, resume(tmp_path, ranks, *args, fresh=True))


@pytest.mark.parametrize(
    ("ranks", "hold", "epochs"),
    [
        drilled(1, "--hold-at", 1),
        drilled(2, "--hold-at", 1),
        (1, "--hold-at", 3),
        drilled(2, "--hold-at", 3),
        (1, "--hold-in-eval", 1),
        drilled(3, "--hold-in-eval", 1),
    ],
)
def test_a_stop_at_the_end_of_an_epoch_or_of_the_training_or_in_an_evaluation(
    tmp_path: Path, reference: Reference, ranks: int, hold: str, epochs: int
) -> None:
    per_epoch = SIZE // 5 // ranks
    before = per_epoch * epochs - (epochs == 1)  # held at the step in front of the epoch's last one
    job = stop(tmp_path, hold, before if hold == "--hold-at" else epochs, ranks=ranks, target=ranks - 1)
    assert set(saved_steps(tmp_path).values()) == {per_epoch * epochs}
    resumed = resume(tmp_path, ranks)
    assert_resumed_equal(reference(ranks), job, resumed)
    assert bool(resumed.seen()) == (epochs < 3), "nothing is trained twice"


def test_a_second_signal_while_saving_changes_nothing(tmp_path: Path, reference: Reference) -> None:
    with start_job("loop.py", tmp_path, "--hold-at", 7, "--inject", "save-held") as job:
        job.wait_for("HOLD")
        job.signal_rank(0)
        job.wait_for("SAVING")  # the save waits until it has been signalled again
        job.signal_rank(0)
        job.expect(143)
        assert job.matches("SIGTERM again; the stop is under way")
    assert_resumed_equal(reference(1), job, resume(tmp_path, 1))


@drill
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    job = stop(tmp_path, "--hold-at", 7, "--num-workers", 2, ranks=2)
    workers = {int(m[1]) for m in job.matches(r"WORKER (\d+)")}
    assert workers, job.report()
    wait_until(lambda: not [p for p in workers if Path(f"/proc/{p}").exists()], "the loader workers ending")
    assert set(Path("/dev/shm").iterdir()) <= before
    assert not list(tmp_path.rglob("*.mindx-tmp*"))


@drill
def test_a_resumed_run_adds_gradients_in_the_same_order(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    """DDP that the guard was not given, on three ranks: two add up the same in any order."""
    options = ("--ddp", "hidden", "--epochs", 2)
    run_job("loop.py", tmp_path, *options, "--ask-stop-at", 4, ranks=3, env=NO_MEMORY)
    again = run_job("loop.py", tmp_path, *options, ranks=3, env=NO_MEMORY)
    # A request leads to a stop at one of the next boundaries: its own step's, or that of one which a rank has begun.
    assert set(again.resumed()) <= {"4", "5"}, again.report()
    assert again.hashes() == uninterrupted("loop.py", 3, *options).hashes(), again.report()
    assert not again.matches("could not be restored|no DDP"), again.report()


@drill
def test_a_static_graph_is_told_from_three_ranks_on(tmp_path: Path) -> None:
    job = run_job("loop.py", tmp_path, "--ddp", "static", "--epochs", 1, ranks=3, env=NO_MEMORY)
    assert job.matches("is DDP with static_graph=True, whose order of gradients no checkpoint has"), job.report()


# --- the deadline: what hangs does not end at all, so there is nothing to measure ---


@drill
@pytest.mark.parametrize("what", ["flag", "log", "stderr"])
def test_what_hangs_does_not_hold_up_the_stop(tmp_path: Path, reference: Reference, what: str) -> None:
    args = ("--hold-at", 7, "--grace-s", 4, "--flag-file", tmp_path / "graceful_exit.json", "--inject", f"hang-{what}")
    with start_job("loop.py", tmp_path, *args, env=NO_MEMORY) as job:
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


@drill
@pytest.mark.parametrize(("spare_mib", "ranks"), [(8, 1), (8, 2), (1, 1)])
def test_a_dying_save_needs_no_new_thread_and_little_memory(
    tmp_path: Path, reference: Reference, spare_mib: int, ranks: int
) -> None:
    args = ("--hold-at", 7, "--inject", f"scarce-mib:{spare_mib}")
    job = stop(tmp_path, *args, ranks=ranks, env=NO_MEMORY, fresh=True)
    assert len(job.matches(f"SCARCE {spare_mib}")) == ranks, job.report()
    assert not job.matches("can't start new thread|MemoryError|Cannot allocate"), job.report()
    assert saved_steps(tmp_path) == dict.fromkeys(range(ranks), 8), job.report()
    resumed = resume(tmp_path, ranks)
    assert resumed.hashes() == reference(ranks).hashes(), resumed.report()


# --- a stop plays on one step, whatever happens in it ---


def witnesses(directory: Path) -> int:
    return len(list(directory.rglob("*.witness.jsonl")))


@pytest.mark.parametrize(
    ("ranks", "fault"), [(2, ""), drilled(2, "kill"), drilled(1, ""), drilled(2, "raise"), drilled(2, "hang")]
)
def test_the_stop_is_the_same_and_the_next_start_compares(
    tmp_path: Path, reference: Reference, ranks: int, fault: str
) -> None:
    args = ("--hold-at", 7, "--grace-s", 8 if fault == "hang" else 30, "--inject", f"played:{fault}")
    start = start_job if ranks == 1 else start_agent
    with start("loop.py", tmp_path, *args, ranks=ranks, env=NO_MEMORY) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(0)
        job.expect(143)
    assert len(job.matches("PLAYS")) >= 1, job.report()
    assert saved_steps(tmp_path) == dict.fromkeys(range(ranks), 8), job.report()
    assert not job.matches("attempt 1"), job.report()
    assert witnesses(tmp_path) == (0 if fault else ranks)
    resumed = resume(tmp_path, ranks)
    assert resumed.hashes() == reference(ranks).hashes(), resumed.report()
    compared = [event["outcome"] for event in events(tmp_path, "compared")]
    assert compared == ([] if fault else ["verified"] * ranks), resumed.report()
