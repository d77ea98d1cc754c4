"""Recoveries in place: what else may die, and when: the spare, the zygote, the agent; at random moments; with much
state, and without room for it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import Job, events, wait_until
from tests.system.test_agent_zygote import wait_for_zygote
from tests.system.test_in_place import IN_PLACE, WHY, Runs, check_in_place, faults, job_folder, processes

pytestmark = pytest.mark.slow
drill = pytest.mark.drill
PATIENT = ("--rejoin-timeout", "100")
"""The first death may come before the zygote is ready."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("others"))


def go(job: Job) -> None:
    (job_folder(job) / "go").touch()


@drill
def test_before_the_first_boundary_the_job_is_restarted_and_says_why(runs: Runs) -> None:
    job, _ = runs.run(2, "--epochs", 1, *faults("1:1:forward"))
    assert any("which is too early" in match[1] for match in job.matches(WHY)), job.report()
    assert len(job.matches(r"restart \d+ of")) == 1, job.report()


@pytest.mark.parametrize("order", ["1:1:update", pytest.param("0:1:backward", marks=drill)])
def test_in_its_first_step_which_the_other_rank_can_end(runs: Runs, order: str) -> None:
    """The dead rank's forecast is the first one: that of the other rank has come true, so this one counts, too."""
    job, _ = runs.run(2, "--epochs", 1, *faults(order), options=PATIENT)
    assert job.matches(IN_PLACE) or len(job.matches(r"restart \d+ of")) == 1, job.report()
    assert not job.matches(r"READY \d \d+ 0$"), job.report()


@drill
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_killed_at_random_moments(runs: Runs, ranks: int) -> None:
    """From outside, wherever it is: in a step, an evaluation, a save, between two steps, during a recovery."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draws = random.Random(seed)

    def kill(job: Job) -> None:
        wait_for_zygote(job)
        job.wait_for(r"SEEN \d+ \S+ \d+ 3$", ranks)
        for turn in range(2 * ranks):
            rank, known = turn % ranks, len(job.matches(IN_PLACE)) + len(job.matches(r"restart \d+ of"))
            time.sleep(draws.uniform(0.05, 1.0))
            if job.matches(r"^DONE"):
                break
            os.kill(processes(job)[rank][-1], signal.SIGKILL)
            wait_until(
                lambda known=known: (
                    len(job.matches(IN_PLACE)) + len(job.matches(r"restart \d+ of")) > known
                    or job.process.poll() is not None
                ),
                "the recovery or the restart",
            )

    words = ["--epochs", 6, "--evaluate", "no_grad", "--save-every", 5, "--step-s", 0.05]
    job, _ = runs.run(ranks, *words, options=[*PATIENT, "--max-restarts", "20"], meanwhile=kill)
    assert job.matches(IN_PLACE), job.report()


@drill
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loader_worker_that_is_killed_is_an_error_of_its_rank(runs: Runs, ranks: int) -> None:
    words = ("--epochs", 2, "--size", 48 * ranks, "--num-workers", 2)
    job, _ = runs.run(ranks, *words, *faults("1:13:worker:loader"), options=PATIENT)
    assert len(job.matches(r"restart \d+ of")) == 1, job.report()
    assert job.matches(r"DataLoader worker .* (killed|exited)"), job.report()


@drill
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "orders",
    [
        ("1:5:save", "0:10:save"),
        ("0:5:save:next", "1:10:save:next", "0:15:save:next-now"),
    ],
    ids=["the dead rank's", "a survivor's"],
)
def test_while_a_save_is_written_beside_the_training(runs: Runs, ranks: int, orders: Sequence[str]) -> None:
    """The survivor's save ends, whatever the recovery does meanwhile."""
    words = ("--epochs", 3, "--size", 48 * ranks, "--save-every", 5, "--save-beside")
    job, folder = runs.run(ranks, *words, *faults(*orders), options=PATIENT)
    dead = [(rank + 1) % ranks if len(more) > 1 else rank for rank, more in map(_killed, orders)]
    check_in_place(job, dead)
    assert len(list((folder / "ckpt").rglob("every-*.safetensors"))) == 2 * ranks


def _killed(order: str) -> tuple[int, Sequence[str]]:
    rank, _, _, *what = order.split(":")
    return int(rank), ["save", *what]


@drill
def test_a_spare_that_is_killed_is_replaced(runs: Runs) -> None:
    def kill(job: Job) -> None:
        (spare,) = job.wait_for(r"a spare \(pid (\d+)\) waits")
        os.kill(int(spare[1]), signal.SIGKILL)
        (_, second) = job.wait_for(r"a spare \(pid (\d+)\) waits", 2)
        spares.append(int(second[1]))
        go(job)

    spares: list[int] = []
    words = ["--epochs", 2, "--late-rank", "--hold-at", 5, *faults("1:8:forward")]
    job, _ = runs.run(2, *words, options=["--spares", "1", *PATIENT], meanwhile=kill)
    check_in_place(job, [1])
    assert processes(job)[1][1] == spares[0]


@drill
def test_the_agent_is_killed_in_the_middle_of_a_recovery(runs: Runs) -> None:
    """The survivors save what they have, and the next start goes on from there."""
    words = ["--epochs", "2", "--step-s", "0.02"]
    folder = runs.new_folder()
    expected = runs.undisturbed(2, words)[0]

    def kill(job: Job) -> None:
        job.wait_for("takes the place of rank 1")
        os.kill(job.process.pid, signal.SIGKILL)
        job.wait()
        pids = [pid for of_rank in processes(job).values() for pid in of_rank]
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "end of all ranks")

    first = runs.start(folder, 2, [*words, *faults("1:6:forward")], PATIENT, meanwhile=kill, code=None)
    assert first.matches("FAULT 1 6 forward")
    assert first.matches("step 5 saved in"), first.report()
    again = runs.start(folder, 2, words, PATIENT)
    assert again.hashes() == expected, again.report()


@drill
def test_without_room_for_the_donors_state_the_job_is_restarted(runs: Runs, tmp_path: Path) -> None:
    """Shared memory has room for the small state of each rank, and not for the weights."""
    small = tmp_path / "shm"
    small.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=2M tmpfs {small}") != 0:
        pytest.skip("a file system of a given size needs root")
    try:
        env = {"MINDX_ARENA_DIR": str(small)}
        job, folder = runs.run(2, "--epochs", 1, "--megabytes", 4, *faults("1:6:forward"), options=PATIENT, env=env)
    finally:
        os.system(f"umount {small}")
    assert any("does not fit into shared memory" in match[1] for match in job.matches(WHY)), job.report()
    assert events(folder / "run", "rejoin")[0]["outcome"] == "restart"
