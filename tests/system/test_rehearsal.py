"""A job that stops itself and goes on in new processes: real processes, as users start them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import events, run_job, start_agent
from tests.system.conftest import Reference

pytestmark = pytest.mark.slow


def found(directory: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["outcome"]) for event in events(directory, "rehearsal")]


@pytest.mark.parametrize(
    ("places", "steps"), [("epoch", [19]), pytest.param("5,epoch", [5, 19], marks=pytest.mark.drill)]
)
def test_a_plain_process_begins_again_and_ends_as_without_it(
    tmp_path: Path, reference: Reference, places: str, steps: list[int]
) -> None:
    args = ("--num-workers", 1)
    job = run_job("loop.py", tmp_path, *args, env={"MINDX_REHEARSE": places}, fresh=True)
    assert job.hashes() == reference(1, *args).hashes()
    assert job.resumed() == ["None", *map(str, steps)]
    assert len({match[1] for match in job.matches(r"^READY 0 (\d+)")}) == 1, "the same process"
    assert found(tmp_path) == [(step, "verified") for step in steps]


def test_the_agent_starts_all_ranks_again_and_counts_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    monkeypatch.chdir(tmp_path)
    with start_agent("loop.py", "ckpt", ranks=2, options=("--max-restarts", "0", "--rehearse", "5")) as job:
        job.expect(0)
    assert job.hashes() == reference(2).hashes()
    assert job.resumed() == ["None", "None", "5", "5"]
    assert found(tmp_path / "ckpt") == [(5, "verified")] * 2
    (first, second) = events(tmp_path / "mindx-run", "attempt")
    assert (first["outcome"], first["steps_lost"], second["outcome"]) == ("restarted for its rehearsal", 0, "finished")


def test_what_the_new_process_begins_with_and_what_it_did_not_get_back(tmp_path: Path) -> None:
    job = run_job("rehearsed.py", tmp_path, "exact", fresh=True)
    first, second = (match[0] for match in job.matches(r"^BEGINS .*"))
    assert first == second, "pid, folder, variables and signals"
    assert len(job.matches("^ENDS$")) == 2, "what the program has registered is called"
    assert (tmp_path / "notes").read_text().split() == list("1234456"), "files are flushed"
    assert found(tmp_path / "ckpt") == [(3, "variables differ")]
    assert job.matches(r"WARNING step 4 is equal .*not got back: .*count \(4, now 1\)"), job.report()
    assert job.matches(r"rehearsal at step 3: [\d.]+ s from the save to the end of step 4; step 4 is equal, but")


@pytest.mark.drill
@pytest.mark.parametrize(("mode", "told"), [("full", "has not led to a file"), ("again", "SIGTERM again")])
def test_it_does_not_go_on_without_a_file_nor_after_a_signal(tmp_path: Path, mode: str, told: str) -> None:
    job = run_job("rehearsed.py", tmp_path, mode, code=75, fresh=True)
    assert len(job.matches("^BEGINS")) == 1 and any(re.search(told, line) for line in job.lines), job.report()
