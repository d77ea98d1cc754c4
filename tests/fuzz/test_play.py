"""Some of the seeds of ``make fuzz``: one dies by two signals, one by fault reports: the second start refuses the first
one, until what it says is done. In drills one dies by an exception, and one by a flag file."""

from __future__ import annotations

import pytest

from tests.fuzz.play import play


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("system", "seed", "faults"),
    [
        ("", 33, 2),
        ("model", 22, 1),  # on a loaded machine its training may end before the second report is heard
        ("", 21, 1),
        ("model", 6, 1),
    ],
)
def test_a_script_that_dies_and_goes_on_ends_with_the_numbers_of_its_run_without_a_death(
    system: str, seed: int, faults: int
) -> None:
    outcome = play(seed, system=system)
    assert outcome.verdict == "equal", outcome.said
    assert outcome.num_fired >= faults, "not reached"
