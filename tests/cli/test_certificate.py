"""What the resumes of a job have shown: in the headers of its files, and in what `peek` and the commands say of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mindx_elastic as mx
from mindx_elastic.core.certificate import MOST, NOT_COMPARED, Entry, added, entries_of, proof_of
from mindx_elastic.start.remains import proof_in_events
from tests.guarded import no_traces, plain_environment, stop_at, stopped
from tests.prove.test_overlap import STOP, Quiet, scaled_by, stop


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


def entry(after: int, outcome: str = "verified", why: str = "") -> Entry:
    return Entry(after=after, last=after + 1, outcome=outcome, why=why, ranks=2, date=1e9)


def chain_of(number: int) -> tuple[str, ...]:
    chain: tuple[str, ...] = ()
    for step in range(10, 10 * (number + 1), 10):
        chain = added(chain, entry(step))
    return chain


def resume_until(directory: Path, step: int, *, middle: Callable[[Any, int], object] = lambda job, step: None) -> None:
    """A resumed job that is stopped in `step`."""
    signals = stop_at(step)

    def both(job: Any, step: int) -> None:
        middle(job, step)
        signals(job, step)

    assert stopped(Quiet(directory, seed=1), middle=both).step == step


def test_entries_are_bounded_and_what_is_none_is_left_out() -> None:
    assert [each.after for each in entries_of(chain_of(MOST + 3))][:: MOST - 1] == [40, 10 * (MOST + 3)]
    odd = added((), entry(1, NOT_COMPARED, '"\\\ud800\n\U0001f600' * 400))
    assert len(odd[0]) < 1024 and len(entries_of(odd)) == 1, "whatever the words are, a header takes it"
    of_older_version = ['{"left_out": 3, "digest": ""}', chain_of(1)[0].replace("{", '{"before": "", "torch": "2", ')]
    assert entries_of([*of_older_version, "{", "[]", '{"after": -1}']) == [entry(10)]
    assert added(chain_of(2), entry(20, "differs"))[:1] == chain_of(1), "no step lies between"


def test_ranks_prove_together() -> None:
    bad = added(chain_of(1), entry(20, "differs", "weights"))
    assert proof_of([chain_of(1), chain_of(1)], ()).words == "proved: step 11 (2 ranks, 2001-09-09)"
    assert proof_of([chain_of(1), ()], ()).exact is None
    assert "after step 20: differs: weights" in proof_of([chain_of(2), bad], ()).words


def test_a_resume_is_proved_and_one_that_was_not_compared_is_said(tmp_path: Path) -> None:
    stop(tmp_path)
    fresh = mx.peek(tmp_path)
    assert fresh is not None and fresh.exact is None and fresh.proof.startswith("not proved yet")
    resume_until(tmp_path, 12)
    proved, words = mx.peek(tmp_path), f"proved: step {STOP + 1} (1 rank, "
    assert proved is not None and proved.exact is True
    assert proved.proof.startswith(words) and proof_in_events(tmp_path).startswith(words)
    max(tmp_path.glob("*.witness.jsonl"), key=lambda path: path.stat().st_mtime_ns).unlink()
    resume_until(tmp_path, 13)
    again = mx.peek(tmp_path)
    assert again is not None
    assert again.proof.endswith("; after step 12: not compared: it left no step to compare with")


def test_a_difference_is_against_all_later_files(tmp_path: Path, run: Callable[..., Any]) -> None:
    stop(tmp_path)
    resume_until(tmp_path, 12, middle=scaled_by(-1.0))
    seen = mx.peek(tmp_path)
    assert seen is not None and seen.exact is False and seen.proof.startswith(f"no: since step {STOP + 1}, ")
    assert proof_in_events(tmp_path).startswith(f"no: since step {STOP + 1}: ")
    assert f"no: since step {STOP + 1}" in run("plan", tmp_path).stdout.replace("\n", " ")
    document = json.loads(run("plan", tmp_path, "--json").stdout)
    assert document["exact"] is False and "weights differ" in document["inexact"][0]
