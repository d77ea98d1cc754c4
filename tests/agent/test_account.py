"""The agent's account of its attempts."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindx_elastic.agent.account import Account
from mindx_elastic.agent.endings import Ending
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import Status, WorkerPhase
from tests.harness import events

_NS = 1_000_000_000


def page(**fields: Any) -> Status:
    return Status(**{"pid": 1, "phase": WorkerPhase.TRAINING, "entered_ns": 1, **fields})


def attempt(statuses: dict[int, Status], *, failed_at: float | None, noticed_at: float | None) -> Any:
    workers = SimpleNamespace(last_statuses=lambda: statuses, processes=dict.fromkeys(range(2)))
    return SimpleNamespace(workers=workers, failed_at=failed_at, noticed_at=noticed_at)


FAILED = Ending(outcome="failed", code=137, cause="killed by SIGKILL", rank=1)


@pytest.fixture
def account(tmp_path: Path) -> Account:
    found = Account(EventLog(tmp_path / "events.jsonl"))
    found.start_attempt(0, world_size=2, num_workers=2, node=0, restarts=0)
    return found


def fail_first(account: Account, now: float) -> None:
    dead = page(step=8, resumed_step=-1, boundaries=8, first_boundary_ns=5)
    saved_ns = int((now + 0.5) * _NS)
    survivor = page(step=7, resumed_step=-1, boundaries=7, saved_step=7, saved_ns=saved_ns, alarm_ns=int(now * _NS))
    account.end_attempt(attempt({1: dead, 0: survivor}, failed_at=now + 0.1, noticed_at=now + 0.2), FAILED)


def test_a_failure_and_its_recovery(account: Account, tmp_path: Path) -> None:
    now = time.monotonic()
    fail_first(account, now)
    (first,) = account.ledger.records
    assert (first.outcome, first.cause, first.cause_rank) == ("failed", "killed by SIGKILL", 1)
    assert (first.step_reached, first.saved_step, first.resumed_step) == (7, 7, -1)
    assert first.detect_s == pytest.approx(0.2, abs=1e-6), "the survivor had heard of it before the agent"
    assert first.save_s == pytest.approx(0.5, abs=1e-6)
    assert first.steps_lost is None, "not known before the next start"
    account.start_attempt(1, world_size=2, num_workers=2, node=0, restarts=1)
    account.look({0: page(resumed_step=7)})
    assert first.steps_lost is None, "one rank has not said yet"
    account.look({0: page(resumed_step=7), 1: page(resumed_step=7, entered_ns=0)})
    assert first.steps_lost is None
    account.look({0: page(resumed_step=7, resumed_path="/x"), 1: page(resumed_step=7)})
    assert first.steps_lost == 0
    assert account.ledger.records[1].resumed_path == "/x"
    first_ns = int((now + 3.0) * _NS)
    account.look({0: page(first_boundary_ns=first_ns), 1: page(first_boundary_ns=first_ns - 5)})
    assert first.first_step_s == pytest.approx(3.0, abs=1e-6)
    assert first.restart_s is not None and first.restart_s >= 0
    assert account.is_eventful
    (line,) = events(tmp_path, "attempt")
    assert (line["attempt"], line["steps_lost"], line["reason"]) == (0, 0, "killed by SIGKILL")
    assert events(tmp_path, "attempt_start")[0]["pid"]


def test_steps_that_are_lost(account: Account) -> None:
    fail_first(account, time.monotonic())
    account.start_attempt(1, world_size=2, num_workers=2, node=0, restarts=1)
    account.look({0: page(resumed_step=4), 1: page(resumed_step=4)})
    assert account.ledger.records[0].steps_lost == 3


def test_a_fresh_start_loses_all(account: Account) -> None:
    fail_first(account, time.monotonic())
    account.start_attempt(1, world_size=2, num_workers=2, node=0, restarts=1)
    account.look({0: page(resumed_step=-1), 1: page(resumed_step=-1)})
    assert account.ledger.records[0].steps_lost == 7


def test_the_last_failure_lost_what_nobody_saved(account: Account) -> None:
    fail_first(account, time.monotonic())
    account.settle(FAILED)
    assert account.ledger.records[0].steps_lost == 0


def test_what_memory_may_hold_is_not_called_lost(account: Account) -> None:
    pages = {rank: page(step=9, resumed_step=2) for rank in range(2)}
    account.end_attempt(attempt(pages, failed_at=0.0, noticed_at=0.0), FAILED)
    account.settle(FAILED)
    assert account.ledger.records[0].steps_lost is None


def test_a_script_without_a_guard(account: Account) -> None:
    account.end_attempt(attempt({}, failed_at=1.0, noticed_at=1.25), FAILED)
    (record,) = account.ledger.records
    assert (record.step_reached, record.saved_step, record.detect_s) == (None, None, 0.25)
    assert not account.failure(attempt({}, failed_at=None, noticed_at=None), FAILED).guarded


def test_a_clean_run_is_not_eventful(account: Account) -> None:
    account.end_attempt(attempt({}, failed_at=None, noticed_at=None), Ending(outcome="finished", code=0))
    assert not account.is_eventful
    (record,) = account.ledger.records
    assert (record.outcome, record.cause, record.detect_s) == ("finished", None, None)


def test_what_the_crash_loop_is_told(account: Account) -> None:
    pages = {0: page(step=8, resumed_step=5, resumed_path="/x", boundaries=3), 1: page(step=7, resumed_step=5)}
    failure = account.failure(attempt(pages, failed_at=None, noticed_at=None), FAILED)
    assert (failure.step, failure.resumed_step, failure.resumed_path) == (7, 5, "/x")
    assert (failure.boundaries, failure.rank, failure.cause, failure.guarded) == (0, 1, "killed by SIGKILL", True)
    elsewhere = Ending(outcome="failed", code=75, cause="rank 3 is gone", elsewhere=True)
    assert not account.failure(attempt(pages, failed_at=None, noticed_at=None), elsewhere).guarded, "not ours to judge"
