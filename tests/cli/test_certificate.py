"""The chain of comparisons in the headers of a job's files, and what the commands say of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.core.certificate import MOST, NOT_COMPARED, added, proof_of
from mindx_elastic.core.events import EventLog
from mindx_elastic.start.unused_state import proof_in_events
from tests.cli.conftest import Run
from tests.guarded import stop_at, stopped
from tests.prove.test_overlap import STOP, Quiet, scaled_by, stop

FACTS: dict[str, Any] = {"ranks": 2, "date": 1e9}


pytestmark = pytest.mark.usefixtures("clean")


def chain_of(number: int) -> tuple[str, ...]:
    chain: tuple[str, ...] = ()
    for step in range(10, 10 * (number + 1), 10):
        chain = added(chain, after=step, last=step + 1, outcome="verified", **FACTS)
    return chain


def resume_until(directory: Path, step: int, *, middle: Callable[[Any, int], object] = lambda job, step: None) -> None:
    """A resumed job that is stopped in `step`."""
    signals = stop_at(step)

    def both(job: Any, step: int) -> None:
        middle(job, step)
        signals(job, step)

    assert stopped(Quiet(directory, seed=1), middle=both).step == step


def test_a_chain_is_bounded_and_what_is_no_entry_proves_nothing() -> None:
    chain = chain_of(MOST + 3)
    assert len(chain) == MOST and '"after": 40,' in chain[0]
    odd = added((), after=1, last=1, outcome=NOT_COMPARED, why='"\\\ud800\n\U0001f600' * 400, **FACTS)
    assert len(odd[0]) < 1024 and "not compared: " in proof_of([odd], ()).words, "whatever the words are"
    assert proof_of([(chain[0][:40], "[]", '{"after": 1}')], ()).exact is None
    assert proof_of([chain_of(2), (*chain_of(1), "{")], ()).words.endswith("after step 20: not on all ranks")


def test_ranks_prove_together() -> None:
    bad = added(chain_of(1), after=20, last=21, outcome="differs", why="weights", **FACTS)
    assert proof_of([chain_of(1), chain_of(1)], ()).words == "proved: step 11 (2 ranks, 2001-09-09)"
    assert proof_of([chain_of(1), ()], ()).exact is None
    assert "after step 20: differs: weights" in proof_of([chain_of(2), bad], ()).words


def test_a_resume_is_proved_and_a_kill_of_nothing_is_said(tmp_path: Path, run: Run) -> None:
    def planned() -> Any:
        return json.loads(run("plan", tmp_path, "--json").stdout)

    stop(tmp_path)
    fresh = planned()
    assert fresh["exact"] is None and fresh["proof"].startswith("not proved yet")
    resume_until(tmp_path, 12)
    proved = planned()
    assert proved["exact"] is True and proved["proof"].startswith(f"proved: step {STOP + 1} (1 rank, ")
    assert proof_in_events(tmp_path).startswith("proved")
    witness_in_newest = max(tmp_path.glob("*.witness.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    witness_in_newest.unlink()
    resume_until(tmp_path, 13)
    assert planned()["proof"].endswith("; after step 12: not compared: it left no step to compare with")


def test_what_a_resume_says_against_itself_is_against_the_run(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    events.emit("resume", step=3, outcome="resumed", unmanaged=["random numbers are new"])
    assert proof_in_events(tmp_path) == "no: random numbers are new"


def test_a_difference_is_against_all_later_files(tmp_path: Path, run: Run) -> None:
    stop(tmp_path)
    resume_until(tmp_path, 12, middle=scaled_by(-1.0))
    assert proof_in_events(tmp_path).startswith(f"no: since step {STOP + 1}: ")
    assert f"no: since step {STOP + 1}" in run("plan", tmp_path).stdout.replace("\n", " ")
    document = json.loads(run("plan", tmp_path, "--json").stdout)
    assert document["exact"] is False and "weights differ" in document["inexact"][0]
