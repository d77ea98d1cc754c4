"""PYTHONHASHSEED: recorded where it is fixed, and a start under another one says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindx_elastic.guard.hash_seed import own_hash_seed, tell_of_hash_seed
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.persist.format import read_header
from tests.harness import run_job, start_agent


@pytest.mark.drill
def test_a_fixed_seed_is_in_the_file_and_another_one_is_a_risk(tmp_path: Path) -> None:
    job = ("changing.py", tmp_path, "plain")
    run_job(*job, "--stop-at", 2, env={"PYTHONHASHSEED": "5"}, code=143, fresh=True)
    (file,) = tmp_path.glob("*_breakpoint.safetensors")
    assert read_header(file).info.coordinates["hash_seed"] == 5
    same = run_job(*job, "--stop-at", 4, env={"PYTHONHASHSEED": "5"}, code=143, fresh=True)
    assert not same.matches("PYTHONHASHSEED")
    other = run_job(*job, env={"PYTHONHASHSEED": "random"}, fresh=True)
    said = other.matches(
        r"WARNING the run had PYTHONHASHSEED=5 and this process has none, so sets of strings .*Start it"
    )
    assert len(said) == 1, other.report()
    (final,) = tmp_path.glob("*_final.safetensors")
    info = read_header(final).info
    assert "hash_seed" not in info.coordinates and "PYTHONHASHSEED=5" in info.unmanaged[0]


@pytest.mark.drill
def test_the_agent_keeps_one_for_its_workers(tmp_path: Path) -> None:
    with start_agent("changing.py", tmp_path / "ckpt", "plain", run_dir=tmp_path / "run", plain=True) as job:
        job.expect(0)
    (file,) = (tmp_path / "ckpt").glob("*_final.safetensors")
    assert read_header(file).info.coordinates["hash_seed"] == 0


def test_what_a_program_sets_itself_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_hash_seed()
    monkeypatch.setitem(os.environ, "PYTHONHASHSEED", "123")
    assert own_hash_seed() == before


def test_a_run_that_had_none_is_told_nothing() -> None:
    unmanaged = Unmanaged("error")
    tell_of_hash_seed({}, unmanaged)
    assert unmanaged.notes == ()
