"""Recoveries in place where the ranks hold different parts of the state: all go back to snapshots in memory, or a rank
takes its part from its replica; the survivors keep their processes, and the end is that of the undisturbed run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.harness import Job, events
from tests.system.test_in_place import IN_PLACE, WHY, Runs, check_in_place, faults, victims

pytestmark = pytest.mark.slow
drill = pytest.mark.drill
CAN_RESET = hasattr(FSDPModule, "reset_iter_state")
needs_reset = pytest.mark.skipif(not CAN_RESET, reason="before torch 2.13 FSDP cannot be taken up again: a restart")

EVERY_STEP = ("--snapshot-every", "1", "--rejoin-timeout", "100")
"""The first death may come before the zygote is ready, and this program imports much."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("sharded"), "sharded.py")


def rejoins(folder: Path) -> list[dict[str, object]]:
    return events(folder / "run", "rejoin")


def check(runs: Runs, ranks: int, orders: Sequence[str], *words: object, options: Sequence[str] = EVERY_STEP) -> Path:
    job, folder = runs.run(ranks, *words, *faults(*orders), options=options)
    check_in_place(job, victims(orders))
    assert not any((folder / "shm").rglob("*.safetensors")), "shared memory is given back"
    return folder


def check_restart(job: Job, reason: str) -> None:
    assert any(reason in match[1] for match in job.matches(WHY)), job.report()
    assert job.matches(r"restart 1 of"), job.report()


TWO = ("1:3:start", "0:4:inside", "1:6:mid", "0:8:backward", "1:10:update", "0:12:after")
FOUR = ("1:3:start", "2:4:inside", "0:6:mid", "3:7:backward", "1:9:update", "2:10:after")


@drill
@needs_reset
def test_fsdp_is_killed_in_turn_at_every_place_of_a_step(runs: Runs) -> None:
    folder = check(runs, 2, TWO, "--layout", "fsdp")
    told = rejoins(folder)
    assert [event["outcome"] for event in told] == ["in place"] * len(TWO)
    assert [event["steps_lost"] for event in told] == [0] * len(TWO)


@drill
@pytest.mark.parametrize(
    ("ranks", "layout", "more"),
    [
        pytest.param(3, "fsdp", ("--clip",), marks=needs_reset),
        pytest.param(4, "fsdp", ("--num-workers", 1), marks=needs_reset),
        pytest.param(4, "hsdp", (), marks=needs_reset),
        (2, "tp", ()),
        (4, "tp", ()),
        pytest.param(4, "fsdp_tp", (), marks=needs_reset),
        (2, "zero", ()),
        (3, "zero", ()),
        (4, "zero", ()),
    ],
)
def test_other_layouts_are_killed_in_turn(runs: Runs, ranks: int, layout: str, more: Sequence[object]) -> None:
    orders = TWO if ranks == 2 else FOUR[: 6 if ranks == 4 else 3]
    check(runs, ranks, orders, "--layout", layout, "--epochs", 3, *more)


@drill
@needs_reset
def test_a_rank_takes_its_part_from_its_replica(runs: Runs) -> None:
    """HSDP, without snapshots: rank 0 has what rank 2 has, rank 1 what rank 3 has."""
    orders = ("1:3:start", "2:5:mid")
    folder = check(runs, 4, orders, "--layout", "hsdp", options=EVERY_STEP[2:])
    told = rejoins(folder)
    assert [event["behind"] for event in told] == [[], []]
    assert all("donated" in event["stages"] for event in told)  # type: ignore[operator]


@drill
@needs_reset
def test_a_survivor_that_is_behind_takes_its_part_from_its_replica(runs: Runs) -> None:
    """Rank 1 waits for rank 2, which is killed, while ranks 0 and 3 pass the boundary: they have both parts."""
    orders = ("2:5:share", "2:9:share", "1:11:mid")
    folder = check(runs, 4, orders, "--layout", "hsdp", "--pair", "--epochs", 3, options=EVERY_STEP[2:])
    assert [event["behind"] for event in rejoins(folder)] == [[1], [1], []]


@drill
@needs_reset
def test_three_replicas(runs: Runs) -> None:
    orders = ("1:3:start", "0:5:mid", "2:7:update", "1:9:backward")
    check(runs, 3, orders, "--layout", "hsdp_replicas", "--epochs", 3, options=EVERY_STEP[2:])


@drill
@needs_reset
def test_snapshots_as_often_as_they_pay(runs: Runs) -> None:
    orders = ("1:7:mid", "0:15:start")
    options = ("--snapshot-every", "auto", *EVERY_STEP[2:])
    job, _ = runs.run(2, "--layout", "fsdp", "--epochs", 3, *faults(*orders), options=options)
    assert job.matches(IN_PLACE), job.report()


@drill
@needs_reset
def test_a_part_of_which_no_replica_lives_restarts_the_job(runs: Runs) -> None:
    orders = ("1:5:start", "3:5:start")
    job, _ = runs.run(4, "--layout", "hsdp", *faults(*orders), options=EVERY_STEP[2:])
    check_restart(job, "no living rank holds the part of the state")


@drill
def test_a_survivor_that_is_cut_off_in_its_update_goes_back_to_the_dead_ranks_snapshot(runs: Runs) -> None:
    """DDP: replicas share one snapshot, which is the dead one's or the living one's."""
    orders = ("1:3:share", "0:6:share", "1:9:mid")
    folder = check(runs, 2, orders, "--layout", "ddp", "--share")
    assert [event["behind"] for event in rejoins(folder)] == [[0], [1], []]


@drill
@pytest.mark.skipif(CAN_RESET, reason="from torch 2.13 on FSDP is taken up again")
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of torch 2.6 does not train on CPUs")
def test_a_torch_that_cannot_take_fsdp_up_again_says_so_and_restarts_the_job(runs: Runs) -> None:
    job, _ = runs.run(2, "--layout", "fsdp", *faults("1:6:mid"), options=EVERY_STEP)
    assert job.matches(r"FSDP of this torch .* lacks .*reset_iter_state: when a rank dies, the whole job"), job.report()
    assert job.matches(r"restart 1 of"), job.report()
