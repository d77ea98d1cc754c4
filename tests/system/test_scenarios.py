"""State that is in no state_dict, that changes its shape in mid-run, or that each rank has of its own: stopped and
killed around the change, resumed, and equal to the run that was never disturbed. See ``jobs/scenarios.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.persist.format import read_header
from tests.harness import Job, run_job, start_agent, start_job
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow
drill = pytest.mark.drill
JOB = "scenarios.py"
MAY_DIFFER = "so from here the run may differ from the uninterrupted one"


def drilled(*values: object) -> Any:
    return pytest.param(*values, marks=drill)


def killed_under_agent(
    folder: Path, scenario: str, *kills: str, ranks: int = 2, recover: str = "restart", every: str = "auto"
) -> Job:
    (folder / "shm").mkdir()
    options = ["--max-restarts", "1", "--recover", recover, "--snapshot-every", every]
    args: list[object] = [word for kill in kills for word in ("--kill", kill)]
    env = {"MINDX_ARENA_DIR": str(folder / "shm")}
    args = [folder / "ckpt", scenario, *args]
    with start_agent(JOB, *args, ranks=ranks, options=options, env=env, run_dir=folder / "run") as job:
        job.expect(0)
    assert len(job.matches("^KILLED ")) == len(kills), job.report()
    assert len(job.matches(r"recovery \d in place")) == (recover == "in-place"), job.report()
    return job


def killed_by_hand(folder: Path, scenario: str, kill: str, step: int | None, every: int = 0) -> tuple[Job, Job]:
    """Two ranks under torchrun, and the resumed run, which goes on from `step`."""
    (folder / "shm").mkdir()
    env = {"MINDX_ARENA_DIR": str(folder / "shm"), "MINDX_SNAPSHOT_EVERY": str(every)}
    with start_job(JOB, folder / "ckpt", scenario, "--kill", kill, ranks=2, env=env) as job:
        job.expect(1)
    assert job.matches("^KILLED "), job.report()
    resumed = run_job(JOB, folder / "ckpt", scenario, ranks=2, env=env)
    assert resumed_from(resumed) == {str(step)}, resumed.report()
    return job, resumed


def resumed_from(job: Job) -> set[str]:
    return {m[1] for m in job.matches(r"READY \d+ \d+ (\w+)")}


def said(job: Job, word: str) -> list[str]:
    return sorted({m[0] for m in job.matches(f"^{word} .*")})


def assert_same_end(job: Job, whole: Job) -> None:
    assert whole.hashes() and job.hashes() == whole.hashes(), f"{whole.report()}\n\n{job.report()}"


# --- changes ---


@drill
@pytest.mark.parametrize("step", [6, 9])
def test_a_step_whose_errors_of_power_sgd_died_with_their_rank_is_done_again(
    tmp_path: Path, uninterrupted: Uninterrupted, step: int
) -> None:
    """Each rank has its own; rank 1 is killed in front of the boundary that rank 0 has passed."""
    kills = (f"0:{step}:boundary", f"1:{step}:update")
    job = killed_under_agent(tmp_path, "power_sgd", *kills, every="1")
    assert job.matches(rf"resumed from .*: step {step - 1} "), job.report()
    assert_same_end(job, uninterrupted(JOB, 2, "power_sgd"))


@pytest.mark.parametrize(("every", "step"), [(1, 8), drilled(0, 8), drilled(0, 1)])
def test_a_peer_is_killed_behind_a_change_that_no_version_counter_shows(
    tmp_path: Path, uninterrupted: Uninterrupted, every: int, step: int
) -> None:
    """Without snapshots the job starts over, with them it loses no step: in no case it goes on from torn weights."""
    before = step if every else None
    job, resumed = killed_by_hand(tmp_path, "momentum_encoder", f"1:{step + 1}:forward", before, every)
    assert job.matches("2 parameters were changed since the boundary without torch's knowledge"), job.report()
    assert_same_end(resumed, uninterrupted(JOB, 2, "momentum_encoder"))


# --- what each rank has of its own ---


def notes(folder: Path, rank: int) -> str:
    (final,) = (folder / "ckpt" / f"rank_{rank}").glob("*_final.safetensors")
    return "; ".join(read_header(final).info.unmanaged)


@drill
def test_what_moves_before_the_forward_is_the_ranks_own_bit_for_bit(
    tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """What moves behind the update is alike on all ranks: it is the donor's."""
    _, resumed = killed_by_hand(tmp_path, "own_objects", "1:5:end", 5)
    assert resumed.matches("rank 1 has no usable file of step 5: .* are foreseen"), resumed.report()
    assert not resumed.matches(MAY_DIFFER) and not notes(tmp_path, 1), resumed.report()
    assert_same_end(resumed, uninterrupted(JOB, 2, "own_objects"))


@drill
def test_what_moves_behind_the_update_is_told_and_recorded(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    _, resumed = killed_by_hand(tmp_path, "own_losses", "1:5:end", 5)
    told = resumed.matches(rf"WARNING rank 1 has no usable .*{MAY_DIFFER}: losses \(differs from rank to rank; this")
    assert len(told) == 1 and "losses" in notes(tmp_path, 1), resumed.report()
    assert_same_end(resumed, uninterrupted(JOB, 2, "own_losses"))  # all else is the rank's own
    assert said(resumed, "LOSSES 1") == ["LOSSES 1 17"], "one of its 18 is lost, and none is rank 0's"


@drill
def test_an_object_of_the_killed_rank_alone_is_its_last_copy(tmp_path: Path) -> None:
    _, resumed = killed_by_hand(tmp_path, "rank_zero_dict", "0:5:end", 5)
    told = rf"WARNING rank 0 has no usable file .*{MAY_DIFFER}: ema \(.*this rank's last known"
    assert resumed.matches(told) and "ema" in notes(tmp_path, 0), resumed.report()


@drill
def test_an_average_that_rank_0_alone_updates_is_told_behind_its_death(tmp_path: Path) -> None:
    job = killed_under_agent(tmp_path, "rank_zero_averages", "0:5:boundary")
    told = r"rank 0 has no usable file of .* had not kept all .* the weights of (\w+) \(only some ranks change them"
    assert {m[1] for m in job.matches(told)} == {"average"}, job.report()


def test_local_sgd_that_a_collective_hides_is_told_behind_a_death(tmp_path: Path) -> None:
    _, resumed = killed_by_hand(tmp_path, "local_sgd", "1:7:end", 7)
    told = rf"WARNING rank 1 has no usable file .*{MAY_DIFFER}: the weights and .* \(each rank has its own"
    assert resumed.matches(told) and "local SGD" in notes(tmp_path, 1), resumed.report()


@drill
def test_an_average_of_each_ranks_own_first_weights_is_told_and_one_that_is_made_behind_ddp_is_not(
    tmp_path: Path,
) -> None:
    job = run_job(JOB, tmp_path / "ckpt", "own_averages", ranks=2)
    found = job.matches(r'the weights of module "(\w+)" are not the same on all ranks')
    assert [match[1] for match in found] == ["early"], job.report()


@pytest.mark.parametrize(
    ("ranks", "victim", "step", "recover"),
    [
        (2, 1, 4, "in-place"),
        drilled(2, 1, 4, "restart"),
        drilled(2, 0, 7, "in-place"),
        drilled(2, 1, 1, "restart"),
        drilled(2, 1, 5, "in-place"),
        drilled(2, 0, 6, "restart"),
        drilled(3, 1, 4, "in-place"),
    ],
)
def test_a_rank_killed_in_an_update_keeps_the_order_of_its_own_sampler(
    uninterrupted: Uninterrupted, tmp_path: Path, ranks: int, victim: int, step: int, recover: str
) -> None:
    """Steps 1, 4 and 7 are an epoch's first: what its order arises from is in the ring before they have ended."""
    whole = uninterrupted(JOB, ranks, "own_order")
    job = killed_under_agent(tmp_path, "own_order", f"{victim}:{step}:backward", ranks=ranks, recover=recover)
    assert len(job.matches(rf"READY \d \d+ {step}\b")) == ranks, job.report()
    made_again = f"ORDER {victim} {step} "  # that step is the others' by then, and is not trained again
    assert said(job, "ORDER") == [line for line in said(whole, "ORDER") if not line.startswith(made_again)]
    assert_same_end(job, whole)
    # After an epoch's last step comes code that may read what the step has set.
    assert step % 3 == 0 or not job.matches("WARNING.*had not kept all"), job.report()
    assert not job.matches("gives other samples"), job.report()


@drill
@pytest.mark.parametrize(
    ("ranks", "kill", "recover", "scenario"),
    [
        (2, "1:10:late", "in-place", "set_data_of_workers"),
        (2, "0:13:update", "in-place", "set_data"),
        (2, "0:11:update", "in-place", "set_data"),
        (2, "1:6:update", "restart", "set_data_of_workers"),
        (2, "0:15:late", "restart", "set_data"),
        (3, "1:13:update", "in-place", "set_data_of_workers"),
        (3, "2:10:late", "in-place", "set_data"),
    ],
)
def test_what_the_program_sets_on_its_data_set_is_set_when_a_rank_was_killed(
    uninterrupted: Uninterrupted, tmp_path: Path, ranks: int, kill: str, recover: str, scenario: str
) -> None:
    job = killed_under_agent(tmp_path, scenario, kill, ranks=ranks, recover=recover)
    assert_same_end(job, uninterrupted(JOB, ranks, scenario))
    assert not job.matches("WARNING.*(had not kept all|not kept|the guard does not keep)"), job.report()


@pytest.mark.parametrize(
    ("ranks", "kill", "recover"),
    [
        (2, "0:6:late", "in-place"),
        drilled(2, "1:6:late", "restart"),
        drilled(2, "1:6:tail", "in-place"),
        drilled(2, "0:6:tail", "restart"),
        drilled(3, "2:6:late", "restart"),
        drilled(4, "0:6:late", "in-place"),
    ],
)
def test_all_run_the_code_behind_an_epoch_again_where_one_had_not_come_to_its_end(
    uninterrupted: Uninterrupted, tmp_path: Path, ranks: int, kill: str, recover: str
) -> None:
    """The collective is done by all ranks or by none, and each rank reads its own last loss of the epoch."""
    whole = uninterrupted(JOB, ranks, "epoch_tail")
    job = killed_under_agent(tmp_path, "epoch_tail", kill, ranks=ranks, recover=recover)
    assert len(job.matches(r"READY \d \d+ 6")) == ranks, job.report()
    assert said(job, "LOSS") == said(whole, "LOSS") and len(said(whole, "LOSS")) == 4 * ranks, job.report()
    assert_same_end(job, whole)
    assert bool(job.matches("the code after epoch 2 runs again on all ranks")) == kill.endswith("late"), job.report()
