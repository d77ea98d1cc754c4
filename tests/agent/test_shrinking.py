"""What a job with ``--min-nproc`` makes of the ends of its processes, with an attempt that only pretends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindx_elastic.agent.endings import StopKind, conclude
from mindx_elastic.agent.places import NodePlaces
from mindx_elastic.agent.shrinking import Shrinking
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import Status, WorkerPhase

Make = Callable[..., Shrinking]


def page(boundaries: int = 5, **more: Any) -> Status:
    content = {"pid": 1, "phase": WorkerPhase.TRAINING, "accumulates": 1, "entered_ns": time.monotonic_ns(), **more}
    return Status(boundaries=boundaries, **content)


def attempt_of(*exits: WorkerExit, own_failures: Sequence[WorkerExit] = ()) -> Any:
    """`own_failures`: beside the `exits`, those of processes that were replaced in place."""
    pages = {end.rank: end.status for end in exits if end.status is not None}
    workers = SimpleNamespace(exits=list(exits), last_statuses=lambda: pages)
    return SimpleNamespace(workers=workers, own_failures=list(own_failures))


def end_attempt(shrinking: Shrinking, attempt: Any) -> None:
    shrinking.end_attempt(attempt, conclude(attempt.workers.exits, StopKind.FAILURE), [])


def end_of(rank: int, code: int = 3, status: Status | None = None, **more: Any) -> WorkerExit:
    return WorkerExit(**{"rank": rank, "pid": 1, "code": code, "status": status, **more})


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("MINDX_PLACES", "")

    def make(count: int = 4, *, devices: str | None = None) -> Shrinking:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices or "")
        if devices is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        return Shrinking(NodePlaces(count, 1), EventLog(tmp_path / "events.jsonl"))

    return make


@pytest.mark.parametrize(
    ("devices", "first", "second"), [(None, "0,2,3", "0,3"), ("4,5,6,7", "4,6,7", "4,7"), ("0", "0", "0")]
)
def test_a_lost_place_keeps_its_device_at_every_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, devices: str | None, first: str, second: str
) -> None:
    """Torch counts the devices that the variable leaves, and so those of the agent's own choice."""

    def count() -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return 4 if visible is None else len(visible.split(","))

    monkeypatch.setattr(torch.cuda, "device_count", count)
    shrinking = make(devices=devices)
    shrinking.places.active = (0, 2, 3)
    for _ in range(2):
        shrinking.prepare()
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MINDX_PLACES"]) == (first, "0,2,3")
    shrinking.places.active = (0, 3)
    shrinking.prepare()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == second
    shrinking.places.active = (0, 1, 2, 3)
    shrinking.prepare()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == devices


@pytest.mark.parametrize(
    ("second", "lost"),
    [(end_of(1, pid=2), [1]), (end_of(1, -9, pid=2, sent=frozenset({9})), [1]), (None, [])],
    ids=["it fails", "it is ended because it has not come in time", "nobody was to follow"],
)
def test_the_process_that_is_to_replace_one_in_place_is_the_second_in_a_row(
    make: Make, second: WorkerExit | None, lost: list[int]
) -> None:
    shrinking, others = make(2), end_of(0, 75, page())
    first = end_of(1, status=page() if second else None)
    failures = [first] if second is None or second.code > 0 else [first, second]
    end_attempt(shrinking, attempt_of(second or first, others, own_failures=failures))
    assert list(shrinking.places.lost) == lost
    assert shrinking.places.active == ((0,) if lost else (0, 1))


def test_a_program_is_known_also_where_the_agent_has_not_looked_at_its_training(make: Make) -> None:
    """A place is lost in the first half second: the page of the first process says over how many batches it
    accumulates."""
    shrinking = make(3)
    window = {"accumulates": 2}
    first = end_of(2, status=page(**window))
    ends = [end_of(2, pid=2), end_of(0, 75, page(**window)), end_of(1, 75, page(**window))]
    end_attempt(shrinking, attempt_of(*ends, own_failures=[first]))
    assert shrinking.places.active == (0, 1)


def test_a_program_is_known_once_all_ranks_have_asked_over_how_many_batches(make: Make) -> None:
    """A place that is lost in the first step: 3 times 2 batches can be shared out among 2 ranks, 3 could not."""
    shrinking = make(3)
    asked = {"boundaries": 0, "accumulates": 2}
    for status in (page(**asked), None):
        failed = end_of(2, status=status)
        end_attempt(shrinking, attempt_of(failed, end_of(0, 75, page(**asked)), end_of(1, 75, page(**asked))))
    assert shrinking.places.active == (0, 1)
