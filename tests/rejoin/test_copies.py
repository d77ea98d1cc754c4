"""Which ranks keep the boundary on which nodes, and what the donor says of its file."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.memory.arena import RankArena, SlotState
from mindx_elastic.memory.snapshots import receive_snapshot
from mindx_elastic.rejoin.copies import Parcel, sources
from mindx_elastic.rejoin.protocol import Verdict

VERDICT = Verdict(run_id="run", attempt=2, step=7, donor=1, dead=(0,), behind=(4,))


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ({1: 0, 2: 0, 3: 1, 4: 2}, {0: 1, 1: 3}),  # the only rank of node 2 is behind
        ({1: 0, 2: 1, 3: 1, 4: 1}, {0: 1, 1: 2}),
        ({1: 3}, {3: 1}),
    ],
)
def test_one_whole_rank_of_each_node_keeps_the_boundary(nodes: dict[int, int], wanted: dict[int, int]) -> None:
    assert sources(VERDICT, nodes) == wanted


def test_the_donor_is_the_source_of_its_node() -> None:
    verdict = Verdict(run_id="run", attempt=2, step=7, donor=2, dead=(3,))
    assert sources(verdict, {0: 0, 1: 0, 2: 0}) == {0: 2}


def parcel(**more: Any) -> dict[str, Any]:
    made = Parcel(Path("/ckpt"), 2, 7, nbytes=100, header_bytes=20, digest="d", ring_bytes=5, ring_digest="r")
    return {**json.loads(json.dumps(made.to_json())), **more}


def test_what_the_donor_says_of_its_file_is_understood() -> None:
    found = Parcel.from_json(parcel())
    assert (found.directory, found.attempt, found.step, found.nbytes) == (Path("/ckpt"), 2, 7, 100)


@pytest.mark.parametrize(
    "more", [{"nbytes": -1}, {"header_bytes": 101}, {"ring_bytes": -1}, {"ring_bytes": 1 << 40}, {"nbytes": "x"}]
)
def test_anything_else_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Parcel.from_json(parcel(**more))


def test_a_file_that_does_not_come_leaves_the_other_slot(tmp_path: Path) -> None:
    arena = RankArena(tmp_path, tmp_path / "ckpt", 3)

    def fill(memory: mmap.mmap) -> None:
        memory[:4] = b"good"

    def fail(memory: mmap.mmap) -> None:
        memory[:4] = b"torn"
        raise RuntimeError("the connection is gone")

    try:
        good = receive_snapshot(arena, 1, 6, 100, 20, fill)
        with pytest.raises(RuntimeError):
            receive_snapshot(arena, 1, 7, 100, 20, fail)
        records = [arena.record(index) for index in range(2)]
        assert [record.step for record in records if record.state is SlotState.COPIED] == [6]
        assert good.read_bytes()[:4] == b"good"
        assert receive_snapshot(arena, 1, 8, 100, 20, fill) != good, "the newest is kept"
    finally:
        arena.close()
