"""Files of a boundary: names, periodic saves beside training, failures that training survives, and retention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.position import Position
from mindx_elastic.errors import SaveError
from mindx_elastic.guard import saver as saving_module
from mindx_elastic.guard.guard import Guard
from mindx_elastic.guard.policy import ExitPolicy, breakpoint_name
from mindx_elastic.guard.saver import Saver
from mindx_elastic.persist.format import read_header
from tests import checkpoint_files
from tests.capture.round_trip import assert_same
from tests.guarded import Job, stop_and_wait, stop_at, stopped, weights_of_uninterrupted
from tests.harness import events, unshared_mappings
from tests.jobs.kit import Every

pytestmark = pytest.mark.usefixtures("clean")


def steps_in(directory: Path) -> list[int]:
    return sorted(read_header(path).info.step for path in directory.glob("*.safetensors"))


# --- periodic saves ---


@pytest.mark.parametrize("asynchronous", [False, True])
def test_periodic_saves_do_not_change_training_and_can_be_resumed_from(tmp_path: Path, asynchronous: bool) -> None:
    expected = weights_of_uninterrupted(tmp_path)
    every = Every(tmp_path, 2, asynchronous, append_info=[{"epoch_num": 3}])
    assert_same(Job(tmp_path, periodic=[every]).run(), expected)
    assert steps_in(tmp_path) == [2, 4, 6, 8, 10, 12, 14, 15], "and the end"
    for step, name in ((2, "every-1_2"), (8, "every-2_3"), (14, "every-3_4")):
        path = tmp_path / f"{name}.safetensors"
        info = read_header(path).info
        assert (info.step, info.kind, info.reason) == (step, "periodic", "periodic")
        assert list(info.append_info) == [{"epoch_num": 3}]
        resumed = Job(tmp_path / f"from {step}", seed=99, resume=path)
        assert_same(resumed.run(), expected)
        assert resumed.guard.resumed_from_step == step


def fail(*args: Any, **options: Any) -> Any:
    raise SaveError("injected: disk full")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_periodic_save_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    expected = weights_of_uninterrupted(tmp_path)
    monkeypatch.setattr(saving_module, "write_checkpoint", fail)
    assert_same(Job(tmp_path, periodic=[Every(tmp_path, 5, asynchronous)]).run(), expected)
    outcomes = [e["outcome"] for e in events(tmp_path, "save")]
    assert outcomes == ["failed: injected: disk full"] * 4, "three periodic ones, and the end is tried once more"
    assert sum("training goes on" in record.getMessage() for record in caplog.records) == 3


class Turning:
    """State that a checkpoint can hold at first, and later not."""

    def __init__(self) -> None:
        self.value: object = 1

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_state_that_becomes_unsupported_does_not_end_training(tmp_path: Path, asynchronous: bool) -> None:
    turning = Turning()

    def turn(job: Job, step: int) -> None:
        turning.value = object() if step == 3 else 1

    Job(tmp_path, periodic=[Every(tmp_path, 1, asynchronous)], stateful={"turning": turning}).run(epochs=1, middle=turn)
    outcomes = [e["outcome"] for e in events(tmp_path, "save")]
    assert [o[:6] for o in outcomes] == ["saved", "saved", "failed", "saved", "saved"]
    assert "turning.value" in outcomes[2]


# --- retention ---


def test_retention_leaves_everything_else_alone(tmp_path: Path) -> None:
    """Also what another policy has saved in the same directory."""
    stopped(Job(tmp_path), middle=stop_at(2))
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint_files.write(tmp_path / "other-1_5.safetensors", step=5, run_id="an older run")
    policies = [Every(tmp_path, 1, keep_max=2), Every(tmp_path, 4, keep_max=3, prefix="every-4")]
    Job(tmp_path, periodic=policies).run()
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {
        "job-1_2_breakpoint.safetensors",
        "other-1_5.safetensors",
        *("every-3_4.safetensors", "every-3_5.safetensors"),
        *("every-4-1_4.safetensors", "every-4-2_3.safetensors", "every-4-3_2.safetensors"),
        *("notes.txt", "events.jsonl", "resume_plan.json", "strategy.proto"),
    }


def test_the_policys_older_files_of_another_attempt_are_counted(tmp_path: Path) -> None:
    """Attempt 0 saved steps 1 to 5, attempt 1 starts from 2: what it replaces is kept beside, then goes too."""
    Job(tmp_path, periodic=[Every(tmp_path)]).run(epochs=1)
    Job(tmp_path, periodic=[Every(tmp_path, keep_max=2)], resume=tmp_path / "every-1_2.safetensors").run(epochs=1)
    left = {p.name: read_header(p).info.attempt for p in tmp_path.glob("*.safetensors")}
    assert left == {"every-1_4.safetensors": 1, "every-1_5.safetensors": 1}


@pytest.mark.parametrize(
    ("asynchronous", "others", "left"),
    [
        (False, [], [4, 5]),  # node-local disks: the other ranks' files cannot be seen
        (True, [], [2, 3, 4, 5]),  # they may be three saves behind
        (False, [1, 2], [2, 4, 5]),
        (True, [1, 2], [2, 3, 4, 5]),
        (True, [1, 2, 3], [3, 4, 5]),
        (True, [1, 2, 3, 4, 5], [5]),
    ],
)
def test_what_may_become_whole_is_kept(tmp_path: Path, asynchronous: bool, others: list[int], left: list[int]) -> None:
    saver = make_saver(tmp_path, rank=1, world_size=2)
    for rank, steps in ((0, others), (1, [1, 2, 3, 4, 5])):
        for step in steps:
            path = tmp_path / f"rank_{rank}" / f"every-1_{step}.safetensors"
            checkpoint_files.write(path, step=step, rank=rank, world_size=2, run_id="run")
    saver.prune(Every(tmp_path, asynchronous=asynchronous, keep_max=1))
    assert steps_in(tmp_path / "rank_1") == left
    assert steps_in(tmp_path / "rank_0") == others


# --- saves at the end ---


def test_only_policies_that_answer_the_alarm_and_want_a_file_write_one(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"directory": tmp_path, "kind": "breakpoint", "name": breakpoint_name("job")}
    of_signal = {**fields, "alarms": frozenset({"signal"}), "signals": (15,)}
    other = {"kind": "request_exit", "alarms": frozenset({"flag"}), "name": lambda p: "never.safetensors"}
    of_flag = ExitPolicy(**{**fields, **other})
    silent = ExitPolicy(**of_signal, save=False, exit_codes={"signal": 3})
    left = stopped(Job(tmp_path, policies=[of_flag, silent]), middle=stop_at(2))
    assert (left.code, left.path) == (3, None) and not list(tmp_path.glob("*.safetensors"))
    stopped(Job(tmp_path, policies=[of_flag, ExitPolicy(**of_signal)]), middle=stop_at(2))
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["job-1_2_breakpoint.safetensors"]


# --- the saver alone ---


def make_saver(tmp_path: Path, **ranks: int) -> Saver:
    collector = Collector({"model": nn.Linear(2, 2)})
    collector.copy(Position(step=5, epoch=1, step_in_epoch=5))
    return Saver(collector, RankInfo(**ranks), EventLog(tmp_path / "events.jsonl", run_id="run"))


def test_every_file_says_where_its_attempt_began(tmp_path: Path) -> None:
    base = ("base_attempt", "base_step")
    for _ in range(3):
        stopped(Job(tmp_path), after=lambda job, step: stop_and_wait(job) if len(job.steps) == 2 else None)
    infos = sorted((read_header(path).info for path in tmp_path.glob("*.safetensors")), key=lambda info: info.attempt)
    began = [tuple(info.coordinates.get(name) for name in base) for info in infos]
    assert began == [(None, None), (0, infos[0].step), (1, infos[1].step)]

    module = nn.Linear(2, 2)
    collector = Collector({"model": module})
    collector.copy(Position(step=infos[1].step))
    saver = Saver(collector, RankInfo(), EventLog(tmp_path / "events.jsonl", run_id=infos[1].run_id, attempt=2))
    saver.go_on_from(infos[1])
    assert saver.describe("snapshot").coordinates == {"base_attempt": 1, "base_step": infos[1].step}


def test_a_dying_save_has_room_for_the_state_that_the_optimizer_makes_in_its_first_step(tmp_path: Path) -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(500))
    optimizer = torch.optim.AdamW(model.parameters())
    before = sum(unshared_mappings().values())
    room_kib = []
    with Guard(model=model, optimizer=optimizer, directory=tmp_path, final_save=False) as guard:
        for _ in guard.steps(1):
            room_kib.append(sum(unshared_mappings().values()) - before)
            torch.stack([layer(torch.ones(1)) for layer in model]).sum().backward()
            optimizer.step()
            guard.step_end()
        room_kib.append(sum(unshared_mappings().values()) - before)
    assert room_kib[0] >= 1000 * 2 and room_kib[1] >= 4000 * 2, room_kib
    assert sum(unshared_mappings().values()) == before


def test_a_dying_save_has_the_memory_for_layers_that_are_trained_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []
    monkeypatch.setattr(Saver, "make_room", lambda _, num_tensors: rooms.append(num_tensors))
    network = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(network.parameters())
    guard = Guard(model=network, optimizer=optimizer, directory=tmp_path)
    with guard:
        for step in guard.steps(3, start=1):
            network[0].requires_grad_(step > 1)
            optimizer.zero_grad()
            network(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            guard.step_end()
    assert rooms == [rooms[0], rooms[0] + 6], "each of two parameters has two averages and a count"
