"""`mindx-elastic audit` beside living jobs: what is found, what is not taken for a fault, and what is left alone."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindx_elastic.agent.history import AgentRun, AttemptRecord
from mindx_elastic.core.status_page import Status, StatusPage, page_path
from mindx_elastic.errors import UsageError
from mindx_elastic.memory import one_step
from mindx_elastic.memory.arena import SlotRecord, SlotState, read_records
from mindx_elastic.prove import audit as auditor
from mindx_elastic.prove.audit import find_job
from tests.harness import Job, events, job_status, run_command, start_agent

_STEPS = 40
"""In which each fault of ``jobs/audited.py`` happens once."""


@contextmanager
def living_job(folder: Path, kind: str = "network", ranks: int = 1, **env: str) -> Iterator[Job]:
    options = ("--snapshot-every", "8")
    place: dict[str, Any] = {
        "env": {f"AUDITED_{name.upper()}": value for name, value in env.items()},
        "run_dir": folder / "run",
    }
    # A process of its own: one that was forked has the environment of the process that has forked it.
    with start_agent("audited.py", kind, folder / "ckpt", ranks=ranks, options=options, under=["env"], **place) as job:
        job.wait_for("TRAINS")
        yield job
        job.signal_launcher(signal.SIGTERM)  # a job that is killed leaves its memory
        job.expect(143)


def audit(folder: Path, code: int, *words: object) -> dict[str, Any]:
    text = run_command("audit", folder / "run", "--steps", _STEPS, "--json", *words, code=code)
    return dict(json.loads(text[text.index("{") :]))


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.drill
@pytest.mark.parametrize(
    ("kind", "ranks"), [("natural", 1), ("shards", 2), ("network", 2), ("network", 3), ("shards", 3)]
)
def test_a_healthy_job_is_verified_and_none_of_its_files_is_touched(tmp_path: Path, kind: str, ranks: int) -> None:
    with living_job(tmp_path, kind, ranks):
        before = tree(tmp_path)
        found = audit(tmp_path, 0)
        assert tree(tmp_path) == before
    assert (found["outcome"], found["unlike"], found["ranks"]) == ("verified", [], ranks)
    assert found["last"] - found["first"] >= _STEPS


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fault", "kind", "ranks", "hit"),
    [
        ("weights", "network", 2, 1),
        ("moments", "shards", 2, 1),
        ("gradient", "network", 1, 0),
        ("batch", "network", 2, 0),
        ("gradient", "shards", 3, 2),
        ("weights", "shards", 3, 1),
        ("moments", "network", 1, 0),
        ("batch", "network", 3, 2),
    ],
)
def test_a_bit_that_flips_in_the_job_is_found_and_named_and_nothing_is_written_that_may_not_be(
    tmp_path: Path, fault: str, kind: str, ranks: int, hit: int
) -> None:
    own = tmp_path / "ckpt.csv"
    with living_job(tmp_path, kind, ranks, fault=fault, rank=str(hit), writes="1"):
        before = tree(tmp_path)
        refused = audit(tmp_path, 4)
        assert own.read_text() == "a line\n" and tree(tmp_path) == before
        assert str(own) in refused["reason"] and "--may-write PATH" in refused["reason"]
        found = audit(tmp_path, 1, "--may-write", own)
        assert own.read_text() == "a line\n" * 3, "by the job and by both audits"
        status = job_status(tmp_path / "run")
    assert "an audit needs a job that runs" in run_command("audit", tmp_path / "run", code=2)
    event = events(tmp_path / "run", "audit")[-1]
    assert (event["step"], event["from_step"], event["outcome"]) == (found["last"], found["first"], "differs")
    assert status["audit"]["reason"] == event["reason"]
    assert found["outcome"] == "differs"
    assert "two audits agree with each other and not with the job" in found["reason"]
    first = found["unlike"][0]
    assert first["step"] <= found["first"] + _STEPS + 20
    assert first["before"] != first["again"]
    if fault == "batch":  # its own loss is another one
        assert (first["rank"], first["what"], first["step"] % 40) == (hit, "scalar loss", 20)
    if fault != "weights" or kind == "shards":  # a replica that differs stays so
        assert first["step"] > found["first"]
    assert any("weight" in each["what"] for each in found["unlike"])


@pytest.mark.drill
@pytest.mark.parametrize(
    ("fault", "code", "outcome", "reason"),
    [
        ("hidden", 1, "differs", "does not get back, such as own"),
        ("chance", 3, "not deterministic", "two audits differ from each other"),
    ],
)
def test_what_is_no_flipped_bit_is_told_apart(tmp_path: Path, fault: str, code: int, outcome: str, reason: str) -> None:
    with living_job(tmp_path, fault=fault):
        found = audit(tmp_path, code)
    assert (found["outcome"], reason in found["reason"]) == (outcome, True), found


def test_a_snapshot_that_is_overtaken_while_it_is_copied_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, rank = tmp_path / "job", tmp_path / "job" / "rank_0"
    for folder in (job, rank):
        folder.mkdir(mode=0o700)
    commit = rank / "commit"
    commit.write_bytes(SlotRecord(SlotState.SEALED, 0, 8, 1, 4, 0).pack())
    (rank / "slot_0.safetensors").write_bytes(b"step")
    copy = shutil.copyfile

    def overtaken(source: Path, target: Path) -> None:
        copy(source, target)
        commit.write_bytes(SlotRecord(SlotState.SEALED, 0, 16, 3, 4, 0).pack())

    monkeypatch.setattr(shutil, "copyfile", overtaken)
    assert one_step.copy_newest(job, tmp_path / "copy") is None
    monkeypatch.undo()
    assert one_step.copy_newest(job, tmp_path / "copy") == (0, 16)
    (record,) = read_records(tmp_path / "copy" / "rank_0")
    assert (record.state, record.step) == (SlotState.COPIED, 16)
    assert one_step.copy_newest(job, tmp_path / "copy", after=16) is None


def test_ranks_on_other_machines_and_an_unknown_command_are_refused(tmp_path: Path) -> None:
    page = StatusPage(page_path(tmp_path, 0))
    page.set(entered_ns=1)
    run = AgentRun(pid=os.getpid(), agent_dir=str(tmp_path), by_number={0: AttemptRecord(attempt=0, world_size=4)})
    with pytest.raises(UsageError, match="4 ranks run, 1 of them on this machine"):
        find_job(run)
    run.by_number[0].world_size = 1
    page.set_text("arena", str(tmp_path))
    with pytest.raises(UsageError, match="the command of the job is not known"):
        find_job(run)


@pytest.mark.parametrize(
    ("every", "said"), [(1, "sooner than they can be copied"), (0, "keeps no snapshots in memory")]
)
def test_a_job_whose_snapshots_cannot_be_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, said: str
) -> None:
    """Else the audit would wait for them, or copy them again and again, for as long as the job trains."""
    page = Status(pid=os.getpid(), snapshot_every=every)
    steps = itertools.count()
    monkeypatch.setattr(auditor, "_LOOK_S", 0)
    monkeypatch.setattr(auditor, "read_pages", lambda folder: {0: page._replace(boundaries=next(steps))})
    monkeypatch.setattr(auditor, "copy_newest", lambda *_, **__: None)
    monkeypatch.setattr(auditor, "newest_kept", lambda job: (0, next(steps)) if every else None)
    job: Any = SimpleNamespace(arenas=tmp_path, ranks=1, agent=AgentRun())
    runs: Any = SimpleNamespace(memory=tmp_path)
    with pytest.raises(UsageError, match=f"{said}.*start it with"):
        auditor.audit(job, runs, steps=1, timeout_s=60)
