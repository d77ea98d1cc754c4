"""Jobs of Lightning and Accelerate, stopped by a real signal and started again: as one that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.stopping import by_seed, check, check_killed, run, written

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytestmark = pytest.mark.slow

ACCELERATE = [
    pytest.param(1, ["--stop-at", "7"], ["--evaluate", "--accumulate", "3"], id="accumulation"),
    pytest.param(2, ["--stop-at", "4", "--stop-rank", "1"], ["--evaluate"], id="2 ranks"),
    pytest.param(1, ["--stop-at", "10"], ["--evaluate"], id="end of an epoch", marks=pytest.mark.drill),
    pytest.param(1, ["--stop-at", "13"], ["--stream"], id="a stream", marks=pytest.mark.drill),
    pytest.param(2, ["--stop-at", "7"], ["--split", "--workers", "1"], id="split batches", marks=pytest.mark.drill),
    pytest.param(
        3, ["--stop-at", "3", "--stop-rank", "2"], ["--samples", "100"], id="3 ranks", marks=pytest.mark.drill
    ),
    pytest.param(
        1,
        by_seed(1, 27),
        ["--seedable", "--workers", "2", "--drop-last", "--freeze"],
        id="a sampler seeded by the epoch",
        marks=pytest.mark.drill,
    ),
    pytest.param(
        2,
        by_seed(2, 30, rank=1, apart=4),
        ["--split", "--seedable", "--workers", "1", "--accumulate", "3", "--evaluate"],
        id="2 ranks, three stops",
        marks=pytest.mark.drill,
    ),
    pytest.param(
        2,
        by_seed(4, 13, rank=1),
        ["--compile", "--drop-last", "--freeze"],
        id="2 ranks, compiled",
        marks=pytest.mark.drill,
    ),
]


@pytest.mark.parametrize(("ranks", "stop", "options"), ACCELERATE)
def test_a_loop_with_accelerate_goes_on_where_it_was_stopped(
    tmp_path: Path, ranks: int, stop: list[str] | list[list[str]], options: list[str]
) -> None:
    check("accelerate", tmp_path, ranks, stop, options)


_BEST = ["--best", "--plateau"]
LIGHTNING = [
    pytest.param(
        1, ["--stop-at", "5", "--stop-in-validation"], ["--validate", "0.5", *_BEST], id="in a validation in mid-epoch"
    ),
    pytest.param(2, ["--stop-at", "3", "--stop-rank", "1"], [], id="2 ranks"),
    pytest.param(1, ["--stop-at", "10"], _BEST[1:], id="last step of an epoch", marks=pytest.mark.drill),
    pytest.param(
        1,
        ["--stop-at", "10", "--stop-in-validation"],
        ["--validate", "1.0", *_BEST],
        id="in the validation at an epoch's end",
        marks=pytest.mark.drill,
    ),
    pytest.param(
        1, ["--stop-at", "14"], ["--accumulate", "3", "--workers", "2"], id="accumulation", marks=pytest.mark.drill
    ),
    pytest.param(
        1,
        [["--stop-at", "7"], ["--stop-at", "15"], ["--stop-at", "25", "--stop-in-validation"]],
        ["--features", "--order", "own", "--validate", "0.5"],
        id="averages, schedules, hooks, metrics",
        marks=pytest.mark.drill,
    ),
    pytest.param(
        1,
        [["--stop-at", "7"], ["--stop-at", "10"], ["--stop-at", "23"]],
        ["--order", "stream"],
        id="a stream",
        marks=pytest.mark.drill,
    ),
    pytest.param(
        2,
        [["--stop-at", "3", "--stop-rank", "1"], ["--stop-at", "9"]],
        ["--order", "own", "--features"],
        id="2 ranks, an own order",
        marks=pytest.mark.drill,
    ),
    pytest.param(
        1, by_seed(5, 30), ["--validate", "0.5", *_BEST, "--workers", "2"], id="three stops", marks=pytest.mark.drill
    ),
    pytest.param(
        2, by_seed(6, 15, rank=1), ["--validate", "1.0", *_BEST], id="2 ranks, three stops", marks=pytest.mark.drill
    ),
]


@pytest.mark.parametrize(("ranks", "stop", "options"), LIGHTNING)
def test_a_fit_of_lightning_goes_on_where_it_was_stopped(
    tmp_path: Path, ranks: int, stop: list[str] | list[list[str]], options: list[str]
) -> None:
    check("lightning", tmp_path, ranks, stop, options)


@pytest.mark.drill
@pytest.mark.parametrize("script", ["accelerate", "lightning"])
def test_a_killed_rank_costs_no_step_under_the_agent(tmp_path: Path, script: str) -> None:
    check_killed(script, tmp_path, 2, 5)


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
def test_a_fit_goes_on_with_another_number_of_ranks(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """Values of self.log are synchronised where there are several."""
    run("lightning", tmp_path, ranks[0], ["--stop-at", "3"], code=143 if ranks[0] == 1 else 1)
    resumed = run("lightning", tmp_path, ranks[1])
    assert resumed.matches(r"resumed from .*step [34] ") and len(resumed.matches("^HASH")) == ranks[1]


@pytest.mark.drill
@pytest.mark.parametrize("options", [[], ["--accumulate", "2"]], ids=["each", "accumulation"])
def test_a_rank_that_is_killed_in_its_update_comes_back_at_the_place_of_the_others(
    tmp_path: Path, options: list[str]
) -> None:
    """The others have passed the boundary; its own sums it has from memory, of an earlier one."""
    options = ["--in-update", "--validate", "0.6", *options]
    check_killed("lightning", tmp_path, 2, 4, options, named=r"may differ.*the epoch's sums of self\.log")


@pytest.mark.drill
def test_loggers_of_lightning_get_each_value_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    stop = ["--stop-at", "15", "--stop-in-validation"]
    check("lightning", tmp_path, 1, stop, ["--validate", "0.5", *_BEST, "--loggers"])


@pytest.mark.drill
def test_a_fit_that_ends_with_an_exception_goes_on_in_front_of_its_step(tmp_path: Path) -> None:
    straight = run("lightning", tmp_path / "straight", 1)
    failed = run("lightning", tmp_path / "failed", 1, ["--raise-at", "8"], code=1)
    assert failed.matches("a fault of the program")
    resumed = run("lightning", tmp_path / "failed", 1)
    assert resumed.matches(r"resumed from .*step 7")
    assert written(failed, resumed) == written(straight)


@pytest.mark.drill
def test_a_program_without_a_seed_goes_on_in_the_order_that_it_began_with(tmp_path: Path) -> None:
    run("lightning", tmp_path, 1, ["--unseeded", "--stop-at", "4"], code=143)
    resumed = run("lightning", tmp_path, 1, ["--unseeded"])
    assert resumed.matches(r"resumed from .*step \d+ ") and resumed.matches("^STEP 30 ")
