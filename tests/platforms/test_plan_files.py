"""The plan as JSON, protobuf and shell lines, and read back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.errors import SaveError, UsageError
from mindx_elastic.plan.facts import FileFact, Refusal, Rejected, ResumePlan, World
from mindx_elastic.plan.planner import plan_resume
from mindx_elastic.platforms.plan_files import (
    PLAN_JSON,
    PLAN_PB,
    env_lines,
    mesh_of,
    plan_to_bytes,
    plan_to_json,
    write_env_file,
    write_plan,
)
from mindx_elastic.platforms.saved_plan import SavedRank, parse_plan, read_plan
from tests.plan.strategies import replicated

MESH = ("dp", "tp")
HSDP = Strategy(4, (TensorSpec("model.w", (8, 4), Layout((2, 2), ("R", "S(0)"), (), MESH), "F32"),))  # type: ignore[arg-type]


def fact(root: Path, rank: int, *, kind: str = "breakpoint", step: int = 9, strategy: Strategy = HSDP) -> FileFact:
    path = str(root / f"rank_{rank}" / f"x-1_{step}.safetensors")
    return FileFact(path, rank, ("run-a", 0, step), 4, strategy, kind, 1e9 + rank, 100, 1, step)


def make(root: Path, ranks: tuple[int, ...] = (0, 1, 3), **arguments: Any) -> ResumePlan:
    rejected = [Rejected(f"{root}/rank_2/x-1_9.safetensors", "damaged header")]
    plan = plan_resume([fact(root, r) for r in ranks], arguments.pop("world", World(4)), rejected=rejected, **arguments)
    assert isinstance(plan, ResumePlan)
    return plan


def test_the_document(tmp_path: Path) -> None:
    document = plan_to_json(make(tmp_path), tmp_path)
    paths = [f"rank_{r}/x-1_9.safetensors" for r in (0, 1, 0, 3)]
    donors = [None, None, 0, None]
    assert document == {
        "schema": 1,
        "restorable": True,
        "run_id": "run-a",
        "attempt": 0,
        "step": 9,
        "epoch": 1,
        "step_in_epoch": 9,
        "created": 1e9 + 3,
        "kinds": ["breakpoint"],
        "old_world_size": 4,
        "new_world_size": 4,
        "old_mesh": {"dp": 2, "tp": 2},
        "new_mesh": {"dp": 2, "tp": 2},
        "resharded": False,
        "exact": False,
        "inexact": ["rank 2 takes rank 0's file and has no random numbers of its own"],
        "steps_lost": None,
        "faults": [],
        "total_bytes": 256,
        "ranks": [{"rank": r, "path": paths[r], "donor": donors[r], "assembled": False, "bytes": 64} for r in range(4)],
        "replica_groups": [{"ranks": [0, 2], "donor": 0}, {"ranks": [1, 3], "donor": 1}],
        "restore_ranks": "0,1",
        "restore_ranks_map": {"0,2": 0, "1,3": 1},
        "found_anything": True,
        "other_worlds": [],
        "rejected": [{"what": "rank_2/x-1_9.safetensors", "reason": "damaged header"}],
    }


def test_a_refusal_has_the_same_keys(tmp_path: Path) -> None:
    refusal = plan_resume([fact(tmp_path, 0)], World(4), faults=(1,))
    assert isinstance(refusal, Refusal)
    document = plan_to_json(refusal, tmp_path)
    assert list(document) == list(plan_to_json(make(tmp_path)))
    assert (document["restorable"], document["step"], document["restore_ranks"]) == (False, None, "-1")
    assert document["faults"] == [1] and len(document["rejected"]) == 1
    document["ranks"].append(1)
    assert plan_to_json(refusal, tmp_path)["ranks"] == []


def test_written_and_read_back(tmp_path: Path) -> None:
    (tmp_path / "rank_2").mkdir()
    plan = make(tmp_path, faults=(1,))
    paths = write_plan(tmp_path, plan)
    assert [path.name for path in paths] == [PLAN_JSON, PLAN_PB]
    assert sorted(os.listdir(tmp_path)) == ["rank_2", PLAN_JSON, PLAN_PB]
    one, other = map(read_plan, paths)
    assert one == other and one.restorable
    assert (one.run_id, one.attempt, one.step, one.old_world_size, one.new_world_size) == ("run-a", 0, 9, 4, 4)
    assert one.ranks[2] == SavedRank(2, "rank_0/x-1_9.safetensors", 0, False, 64)
    assert one.restore.ranks_text == plan_to_json(plan)["restore_ranks"] and one.inexact == plan.inexact
    assert one.faults == {1} and one.steps_lost is None and one.rejected[0].what == "rank_2/x-1_9.safetensors"
    before = [path.read_bytes() for path in paths]
    write_plan(tmp_path, plan)
    assert [path.read_bytes() for path in paths] == before


def test_an_older_plan_is_replaced_by_a_refusal(tmp_path: Path) -> None:
    write_plan(tmp_path, make(tmp_path))
    refusal = Refusal((Rejected("step 9", "rank 1 missing"),), True, (2,), frozenset({3}))
    for path in write_plan(tmp_path, refusal):
        saved = read_plan(path)
        assert (saved.restorable, saved.step, saved.ranks, saved.restore.ranks_text) == (False, -1, (), "-1")
        assert saved.rejected == refusal.reasons and saved.faults == {3}


def test_the_same_document_from_both_forms(tmp_path: Path) -> None:
    from mindx_elastic.platforms.saved_plan import _parse_pb

    for plan in (make(tmp_path), make(tmp_path, world=World(2)), Refusal((), False)):
        document = plan_to_json(plan, tmp_path)
        assert _parse_pb(plan_to_bytes(document)) == document
        assert json.loads(json.dumps(document)) == document


def test_paths_outside_stay_whole(tmp_path: Path) -> None:
    plan = make(tmp_path / "ckpt")
    assert plan_to_json(plan, tmp_path / "ck")["ranks"][0]["path"] == plan.ranks[0].file.path
    assert plan_to_json(plan)["ranks"][0]["path"] == plan.ranks[0].file.path


def test_text_that_is_none(tmp_path: Path) -> None:
    """A header's run id and a file name may hold halves of characters, line breaks and quotes."""
    odd = "r\ud800'\n$(touch x)\0"
    first = FileFact(f"{tmp_path}/a\udce9.safetensors", 0, (odd, 0, 1), 1, replicated(1, {"w": (2,)}))
    plan = plan_resume([first], World(1), rejected=[Rejected("a\udce9", odd)])
    assert isinstance(plan, ResumePlan)
    saved = [read_plan(path) for path in write_plan(tmp_path, plan)]
    assert [each.ranks[0].path for each in saved] == ["a\udce9.safetensors"] * 2
    write_env_file(tmp_path / "env.sh", plan)
    script = '. ./env.sh; printf %s "$MINDX_RESUME_RUN_ID"'
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == "r\\ud800'\\n$(touch x)\\x00" and not (tmp_path / "x").exists()


def test_the_env_file(tmp_path: Path) -> None:
    write_env_file(tmp_path / "env.sh", make(tmp_path))
    assert (tmp_path / "env.sh").read_text().splitlines() == [
        "export RESTORE_RANKS=0,1",
        'export RESTORE_RANKS_MAP=\'{"0,2": 0, "1,3": 1}\'',
        "export MINDX_RESUME_RUN_ID=run-a",
        "export MINDX_RESUME_ATTEMPT=0",
        "export MINDX_RESUME_STEP=9",
    ]
    lines = env_lines(Refusal((), False))
    assert lines[:2] == ["export RESTORE_RANKS=-1", "export RESTORE_RANKS_MAP='{}'"]
    assert lines[2:] == [f"export MINDX_RESUME_{name}=''" for name in ("RUN_ID", "ATTEMPT", "STEP")]
    assert os.listdir(tmp_path) == ["env.sh"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(SaveError, match="folder"):
        write_env_file(tmp_path / "folder", make(tmp_path))
    assert os.listdir(tmp_path) == ["folder"]


def test_mesh_of() -> None:
    assert mesh_of(HSDP) == {"dp": 2, "tp": 2}
    assert mesh_of(replicated(2, {"w": (1,)})) is None
    tp = TensorSpec("b", (4,), Layout((4,), ("S(0)",), (), ("tp",)))  # type: ignore[arg-type]
    assert mesh_of(Strategy(4, (*HSDP.tensors, tp))) is None


# --- malformed ---

Spoil = Callable[[dict[str, Any]], object]
SPOILS: dict[str, Spoil] = {
    "schema": lambda d: d.update(schema=2),
    "no key": lambda d: d.pop("step"),
    "text for a number": lambda d: d.update(step="9"),
    "true for a number": lambda d: d.update(attempt=True),
    "negative": lambda d: d.update(step=-1),
    "a rank twice": lambda d: d["ranks"].append(d["ranks"][0]),
    "a rank missing": lambda d: d["ranks"].pop(),
    "donor outside": lambda d: d["ranks"][2].update(donor=4),
    "path upwards": lambda d: d["ranks"][0].update(path="../../etc/passwd"),
    "no path": lambda d: d["ranks"][0].update(path=""),
    "null in a path": lambda d: d["ranks"][0].update(path="a\0b"),
    "fault outside": lambda d: d.update(faults=[4]),
    "exact and not": lambda d: d.update(exact=True),
    "donors disagree": lambda d: d.update(restore_ranks="1,0"),
    "donor of the map outside": lambda d: d.update(restore_ranks="0,9", restore_ranks_map={"0,2": 0, "1,3": 9}),
    "huge world": lambda d: d.update(new_world_size=1 << 60),
    "rejected is text": lambda d: d.update(rejected=["x"]),
    "restorable is 1": lambda d: d.update(restorable=1),
}


@pytest.mark.parametrize("name", SPOILS)
def test_documents_that_contradict_themselves(tmp_path: Path, name: str) -> None:
    document = plan_to_json(make(tmp_path), tmp_path)
    assert parse_plan(document).restorable
    SPOILS[name](document)
    with pytest.raises(UsageError):
        parse_plan(document)


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"[]", b"{}", b"null", b"[" * 200_000, b'{"schema": 1}'])
@pytest.mark.parametrize("name", [PLAN_JSON, PLAN_PB])
def test_files_that_are_no_plan(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"resume plan {tmp_path / name}"):
        read_plan(tmp_path / name)


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    write_plan(tmp_path, make(tmp_path))
    (tmp_path / "link.json").symlink_to(tmp_path / PLAN_JSON)
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("link.json", "pipe.json", "none.json"):
        with pytest.raises(UsageError, match=name):
            read_plan(tmp_path / name)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_pb_is_an_error_or_a_sound_plan(data: st.DataObject) -> None:
    """Protobuf has no digest, so a flipped bit may give another plan; it never gives another exception."""
    good = plan_to_bytes(plan_to_json(make(Path("/ckpt")), "/ckpt"))
    place = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(st.sampled_from([good[:place], good[:place] + bytes([good[place] ^ 0x41]) + good[place + 1 :]]))
    from mindx_elastic.platforms.saved_plan import _parse_pb

    try:
        saved = parse_plan(_parse_pb(bad))
    except UsageError:
        return
    assert not saved.restorable or [each.rank for each in saved.ranks] == list(range(saved.new_world_size))


def test_many_ranks_are_quick(tmp_path: Path) -> None:
    size = 16_384
    layout = Layout((16, 1024), ("R", "S(0)"), (), MESH)  # type: ignore[arg-type]
    strategy = Strategy(size, tuple(TensorSpec(f"model.{n}", (4096, 64), layout, "F32") for n in range(20)))
    facts = [replace(fact(tmp_path, r, strategy=strategy), world_size=size) for r in range(size) if r % 500]
    plan = plan_resume(facts, World(size))
    assert isinstance(plan, ResumePlan)
    paths = write_plan(tmp_path, plan)
    assert read_plan(paths[0]) == read_plan(paths[1])
