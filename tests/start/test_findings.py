"""What one process finds: in shares, on the wire, and without touching anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from mindx_elastic.core.owners import Trust
from mindx_elastic.start.findings import Findings, list_files, put_aside, scan
from tests.checkpoint_files import cut_off_end, write, write_step
from tests.start.arenas import Machine
from tests.start.looks import Carrier, look, sent


def find(directory: Path, **options: Any) -> Findings:
    return scan(list_files([directory]), trust=Trust(), **options)


def test_everything_survives_the_wire(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    write_step(machine.directory, 3, coordinates={"base_attempt": 0, "base_step": 1, "replicas": 2})
    write(machine.directory / "rank_0" / "cut-1_4.safetensors", step=4, world_size=2)
    cut_off_end(machine.directory / "rank_0" / "cut-1_4.safetensors")
    machine.know("run-a")
    machine.snapshot(5, coordinates={"foreseen": 0})
    machine.boundary(1, 6, forecast=True, trusted=False)
    machine.snapshot(6, ranks=[0], coordinates={"foreseen": 1})
    found = look([machine.directory] * 2, [machine.job] * 2, transport=Carrier(), attempt=4)
    for before, after in zip(found, sent(found), strict=True):
        after.own = {
            rank: {moment: before.own[rank][moment] for moment in states} for rank, states in after.own.items()
        }
        after.entries = before.entries
        assert after == before
    assert [len(one.facts) + len(one.in_memory) for one in found]
    assert any(one.rejected for one in found) and found[1].own and found[0].unforeseen | found[1].unforeseen
    assert {("run-a", (0, 6))} == {*found[0].foreseen.items(), *found[1].foreseen.items()}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("facts", [["run-a", 0, 3]]),
        ("own", [[-1, "run-a", 0, 3, False, True]]),
        ("foreseen", {"run-a": [0]}),
        ("attempts", {"run-a": 1.5}),
        ("odd", [{"run_id": "run-a", "attempt": 0, "step": -1, "rank": 0, "what": "", "verdict": "open"}]),
    ],
)
def test_what_no_rank_says_is_refused(tmp_path: Path, name: str, value: object) -> None:
    write_step(tmp_path, 3)
    found = find(tmp_path)
    text = json.dumps({**json.loads(found.encode()), name: value})
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        Findings.decode(text, found.strategies)


def test_damage_is_said_and_only_a_start_moves_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_step(tmp_path, 3)
    victim = write(tmp_path / "rank_0" / "cut-1_4.safetensors", step=4, world_size=2)
    cut_off_end(victim)
    save_file({}, tmp_path / "bert.safetensors")
    caplog.set_level("INFO", "mindx_elastic")
    found = find(tmp_path)
    assert [one.what for one in found.rejected] == [str(victim)] and victim.exists()
    assert found.anything and found.other
    assert not caplog.records
    put_aside(found, list_files([tmp_path]))
    assert not victim.exists() and list((tmp_path / "quarantine").rglob("cut-1_4.safetensors"))
    assert (tmp_path / "bert.safetensors").exists()
    assert {"is damaged and now in" in m or "is left alone" in m for m in caplog.messages} == {True}
    assert find(tmp_path).other, "what lies in quarantine may have been anything"
