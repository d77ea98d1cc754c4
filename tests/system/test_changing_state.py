"""State that is in no state_dict, or changes its shape in mid-run: stopped by real signals around the change, resumed,
and equal to the run that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Job, run_job, start_agent
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow


def stops(directory: Path, scenario: str, *steps: int) -> Job:
    """Stopped at each of `steps`, run to the end after the last."""
    for step in steps:
        run_job("changing.py", directory, scenario, "--stop-at", step, code=143)
    return run_job("changing.py", directory, scenario)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("scenario", "steps"),
    [
        ("added_group", (7, 8, 9)),
        ("added_group", (13,)),
        ("unfreezing", (7, 8, 9)),
        ("unfreezing", (12, 14)),
        ("head_of_loop", (3, 8)),
        ("head_of_loop", (12, 15)),
        ("replaced_head", (7, 8, 9)),
        ("replaced_head", (13,)),
    ],
)
def test_one_rank_goes_on_with_what_the_boundary_had(
    tmp_path: Path, uninterrupted: Uninterrupted, scenario: str, steps: tuple[int, ...]
) -> None:
    whole = uninterrupted("changing.py", 1, scenario)
    resumed = stops(tmp_path / "ckpt", scenario, *steps)
    assert resumed.matches(r"INFO resumed from")
    assert resumed.hashes() == whole.hashes(), f"{whole.report()}\n\n{resumed.report()}"


@pytest.mark.drill
@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("forgotten_head", r"optimizer: it holds 2 parameters .* model\.head\.bias, model\.head\.weight were replaced"),
        ("wider_head", r"model: head\.weight is now \[5, 16\] float32 and was \[4, 16\] float32"),
        ("shrunk", r"model: spare\.weight, spare\.bias are gone"),
        ("late_parametrization", r"model: head\.weight is gone since .*Build all parts before"),
    ],
)
def test_what_a_start_cannot_make_again_is_refused_at_the_boundary_after_it(
    tmp_path: Path, scenario: str, words: str
) -> None:
    job = run_job("changing.py", tmp_path, scenario, code=1)
    assert job.matches(rf"UnmanagedStateError: .*{words}"), job.report()
    assert not job.matches("DONE")


def test_a_model_that_is_made_ready_for_an_export_in_the_block_is_saved_as_it_was_at_the_last_boundary(
    tmp_path: Path,
) -> None:
    first = run_job("changing.py", tmp_path, "left_for_export")
    assert first.matches("the end of the training, saved in")
    again = run_job("changing.py", tmp_path, "left_for_export")
    assert again.matches("INFO resumed from") and again.hashes() == first.hashes()


def test_buffers_that_no_state_dict_has(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    """One is made at random in each process: the first process's goes on."""
    whole = uninterrupted("changing.py", 1, "buffers", NOISE="0.25")
    run_job("changing.py", tmp_path / "ckpt", "buffers", "--stop-at", 1, env={"NOISE": "0.25"}, code=143)
    run_job("changing.py", tmp_path / "ckpt", "buffers", "--stop-at", 8, env={"NOISE": "0.75"}, code=143)
    resumed = run_job("changing.py", tmp_path / "ckpt", "buffers")
    assert resumed.hashes() == whole.hashes(), resumed.report()


@pytest.mark.drill
@pytest.mark.parametrize(
    ("scenario", "ranks", "step"),
    [
        pytest.param("powersgd", 2, 2, marks=pytest.mark.drill),
        ("powersgd", 2, 8),
        pytest.param("powersgd", 3, 8, marks=pytest.mark.drill),
        ("sharded", 2, 5),
        pytest.param("sharded", 2, 8, marks=pytest.mark.drill),
        pytest.param("unfreezing", 2, 7, marks=pytest.mark.drill),
        pytest.param("unfreezing", 2, 9, marks=pytest.mark.drill),
        pytest.param("added_group", 2, 9, marks=pytest.mark.drill),
    ],
)
def test_several_ranks(tmp_path: Path, uninterrupted: Uninterrupted, scenario: str, ranks: int, step: int) -> None:
    whole = uninterrupted("changing.py", ranks, scenario)
    run_job("changing.py", tmp_path / "ckpt", scenario, "--stop-at", step, ranks=ranks, code=1)
    resumed = run_job("changing.py", tmp_path / "ckpt", scenario, ranks=ranks)
    assert len(resumed.matches(r"INFO resumed from")) == 1
    assert resumed.hashes() == whole.hashes(), f"{whole.report()}\n\n{resumed.report()}"


@pytest.mark.drill
def test_an_unfrozen_parameter_that_only_another_ddp_knows_is_told_by_the_first_resume(tmp_path: Path) -> None:
    run_job("changing.py", tmp_path, "rewrapped", "--stop-at", 9, ranks=2, code=1)
    resumed = run_job("changing.py", tmp_path, "rewrapped", ranks=2)
    assert resumed.matches(r"WARNING step \d+ is not the one of the stopped process"), resumed.report()


@pytest.mark.drill
@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("unnamed_powersgd", r"model: its DDP has a communication hook with state \(PowerSGDState\) that is not named"),
        ("unnamed_own_hook", r"model: its DDP has a communication hook with state \(OwnHookState\) that is not named"),
    ],
)
def test_a_communication_hook_with_state_is_named_or_refused(tmp_path: Path, scenario: str, words: str) -> None:
    job = run_job("changing.py", tmp_path, scenario, ranks=2, code=1)
    assert job.matches(rf"UnmanagedStateError: .*{words}"), job.report()


@pytest.mark.parametrize("step", [6, pytest.param(9, marks=pytest.mark.drill)])
def test_a_step_whose_errors_of_powersgd_died_with_their_rank_is_done_again(
    tmp_path: Path, uninterrupted: Uninterrupted, step: int
) -> None:
    """Each rank has its own from step 6 on; rank 1 is killed in front of the boundary that rank 0 has passed."""
    whole = uninterrupted("compressed.py", 2)
    options = ("--snapshot-every", "1")
    with start_agent(
        "compressed.py", tmp_path / "job", step, ranks=2, options=options, run_dir=tmp_path / "run"
    ) as job:
        job.expect(0)
    assert (tmp_path / "job.killed0").exists() and (tmp_path / "job.killed1").exists()
    assert job.matches(rf"resumed from .*: step {step - 1} "), job.report()
    assert job.hashes() == whole.hashes(), job.report()
