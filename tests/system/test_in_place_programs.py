"""Recoveries in place of programs that catch errors, clean up, retry: exact in place, or restarted with the
reason; what survivors and the new process do not have alike is named. See ``jobs/programs.py``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.system.test_in_place import IN_PLACE, PATIENT, WHY, Runs, check_in_place, faults, victims

pytestmark = pytest.mark.slow
drill = pytest.mark.drill

ORDERS = ("1:5:forward", "0:8:mid", "1:11:backward")
INSIDE = ("1:5:forward", "0:8:inside", "1:11:inside")
"""In front of the wait for a collective that runs already."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("programs"), "programs.py")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=drill)])
@pytest.mark.parametrize(
    ("form", "orders"),
    [
        pytest.param("suppresses_a_failed_wait", INSIDE, marks=drill),
        pytest.param("suppresses_a_failed_functional_collective", INSIDE, marks=drill),
        pytest.param("asks_whether_collectives_are_over", INSIDE, marks=drill),
        *(
            pytest.param(form, ORDERS, marks=drill)
            for form in (
                "closes_a_named_generator_with_a_collective",
                "catches_what_backward_raises",
                "tries_again",
                "catches_everything_in_a_step",
                "catches_everything_around_the_loop",
                "translates_errors",
                "ends_each_step_with_a_collective",
            )
        ),
    ],
)
def test_whatever_a_program_does_with_errors_it_goes_on_in_place(
    runs: Runs, form: str, orders: Sequence[str], ranks: int
) -> None:
    words = ["--form", form, "--size", 48 * ranks]
    job, _ = runs.run(ranks, *words, *faults(*orders), options=PATIENT)
    check_in_place(job, victims(orders))


@drill
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_that_are_averaged_by_hand_in_no_sync(runs: Runs, ranks: int) -> None:
    """Each rank has batch norm statistics of its own. The first death restarts the job, which lays out the buckets."""
    words = ["--form", "averages_by_hand_and_suppresses", "--size", str(48 * ranks)]
    orders = (*INSIDE, "0:14:backward")
    job = runs.start(runs.new_folder(), ranks, [*words, *faults(*orders)], PATIENT)
    assert len(job.matches("^FAULT ")) == len(orders), job.report()
    assert job.hashes() == runs.undisturbed(ranks, words)[0], job.report()
    assert len(job.matches(IN_PLACE)) == len(orders) - 1, job.report()
    assert job.matches("not laid out its buckets"), job.report()


@drill
def test_a_program_that_leaves_after_an_error_is_restarted_and_says_why(runs: Runs) -> None:
    job, _ = runs.run(2, "--form", "leaves_the_process_after_an_error", *faults(*ORDERS), options=PATIENT)
    assert job.matches("^CAUGHT"), job.report()
    restarts = len(job.matches(r"restart \d+ of"))
    # A death that is heard before the program has caught its error takes the survivor out first.
    assert restarts + len(job.matches(r"recovery \d+ in place: rank")) == len(ORDERS), job.report()
    assert restarts and len(job.matches(WHY)) >= restarts, job.report()


@drill
def test_tensors_that_only_survivors_have_are_named(runs: Runs) -> None:
    """The training depends on them, so that it is another one: a restart would start them over on all ranks."""
    folder = runs.new_folder()
    job = runs.start(folder, 2, ["--form", "keeps_tensors_outside", *faults("1:5:forward")], PATIENT)
    assert job.matches("^FAULT 1 5 forward"), job.report()
    assert job.matches(r'the length of "HISTORY" .*the ranks that live on and the new one differ in this'), job.report()


FOURS = ("1:6:forward", "0:10:backward", "1:14:mid", "0:20:update")
THREES = ("1:5:forward", "0:7:backward", "1:10:start", "0:15:update")
"""One in each window: the ranks meet at its end only."""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=drill)])
@pytest.mark.parametrize(
    ("more", "orders"),
    [
        (("--accumulate", 4, "--amp", "--clip"), FOURS),
        pytest.param(("--accumulate", 3, "--clip"), THREES, marks=drill),
    ],
)
def test_in_a_window_of_accumulation_with_clipping(
    runs: Runs, ranks: int, more: Sequence[object], orders: Sequence[str]
) -> None:
    """All ranks go back to the window's beginning, also from the parts of it in which they do not meet."""
    job, _ = runs.run(ranks, "--form", "plain", "--size", 48 * ranks, *more, *faults(*orders), options=PATIENT)
    check_in_place(job, victims(orders))


@drill
@pytest.mark.parametrize("what", ["model", "ddp", "loss", "step"])
def test_what_is_compiled_is_compiled_again_by_a_restart(runs: Runs, what: str) -> None:
    orders = ("1:5:forward", "0:9:mid")
    job, _ = runs.run(2, "--form", "plain", "--compile", what, *faults(*orders), options=PATIENT)
    said = [match[1] for match in job.matches(WHY)]
    assert said and all("only a restart compiles it the same again" in each for each in said), job.report()
    assert len(job.matches(r"restart \d+ of")) == len(orders), job.report()
