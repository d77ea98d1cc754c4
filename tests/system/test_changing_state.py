"""State that is in no state_dict, or changes its shape in mid-run: stopped by real signals around the change, resumed,
and equal to the run that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Job, run_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Job]:
    return {}


def uninterrupted(reference: dict[tuple[str, int], Job], scenario: str, directory: Path, ranks: int = 1) -> Job:
    if (scenario, ranks) not in reference:
        reference[scenario, ranks] = run_job("changing.py", directory / "whole", scenario, ranks=ranks)
    return reference[scenario, ranks]


def stops(directory: Path, scenario: str, *steps: int) -> Job:
    """Stopped at each of `steps`, run to the end after the last."""
    for step in steps:
        run_job("changing.py", directory, scenario, "--stop-at", step, code=143)
    return run_job("changing.py", directory, scenario)


@pytest.mark.parametrize(
    ("scenario", "steps"),
    [
        ("frozen_norm", (8, 9, 10)),
        ("frozen_norm", (13,)),
        ("frozen_norm_in_epoch", (2, 3, 4)),
        ("frozen_norm_in_epoch", (10,)),
        ("left_in_eval", (5, 6, 7)),
        ("left_in_eval", (6,)),
        ("unfreezing", (7, 8, 9)),
        ("unfreezing", (12, 14)),
        ("freezing", (7, 8, 9)),
        ("generators", (1, 2, 3)),
        ("generators", (6, 7)),
    ],
)
def test_one_rank_goes_on_with_what_the_boundary_had(
    tmp_path: Path, reference: dict[tuple[str, int], Job], scenario: str, steps: tuple[int, ...]
) -> None:
    whole = uninterrupted(reference, scenario, tmp_path)
    resumed = stops(tmp_path / "ckpt", scenario, *steps)
    assert resumed.matches(r"INFO resumed from")
    assert resumed.hashes() == whole.hashes(), f"{whole.report()}\n\n{resumed.report()}"
