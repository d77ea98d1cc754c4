"""A killed rank's buffers that are on a device: here a stand-in says so of buffers in host memory (see
``jobs/outside_buffers.py``); ``test_gpu.py`` has a GPU."""

from __future__ import annotations

import pytest

from tests.system.test_in_place import IN_PLACE, Runs

pytestmark = pytest.mark.slow
drill = pytest.mark.drill

PLACES = ("start", "forward", "mid", "backward", "update", "after")
RESTART, IN_PLACES = ("--recover", "restart"), ("--recover", "in-place")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), "outside_buffers.py")


@pytest.mark.parametrize(
    ("place", "recover"),
    [
        pytest.param(place, recover, marks=() if (place, recover[1]) == ("update", "in-place") else drill)
        for recover in (RESTART, IN_PLACES)
        for place in PLACES
    ],
)
def test_rank_0_is_killed(runs: Runs, place: str, recover: tuple[str, ...]) -> None:
    job, _ = runs.run(2, "--fault", f"0:15:{place}", options=[*recover, "--snapshot-every", "0"])
    assert bool(job.matches(IN_PLACE)) == (recover is IN_PLACES), job.report()


@drill
def test_killed_twice(runs: Runs) -> None:
    faults = ("--fault", "0:10:mid", "--fault", "0:11:update", "--fault", "1:14:mid")
    runs.run(3, *faults, options=[*IN_PLACES, "--snapshot-every", "0"])


@drill
def test_accumulation_forecasts_with_each_forward(runs: Runs) -> None:
    runs.run(2, "--accumulate", 3, "--fault", "0:5:mid", options=[*RESTART, "--snapshot-every", "0"])
