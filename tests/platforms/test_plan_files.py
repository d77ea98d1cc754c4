"""The plan as JSON, protobuf and shell lines, and what a start script is told of it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.platforms.plan_files import (
    PLAN_JSON,
    env_lines,
    export_restore_ranks,
    plan_to_json,
    restore_ranks,
    write_env_file,
    write_plan,
)
from mindx_elastic.start.facts import FileFact, Refusal, Rejected, ResumePlan, World
from mindx_elastic.start.planner import plan_resume
from tests.start.strategies import replicated

MESH = ("dp", "tp")
MOMENT = ("run", 0, 9)
DDP = replicated(4, {"model.w": (8,)}, "F32")
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
        "inexact": ["rank 2 takes rank 0's file and has no own random numbers"],
        "steps_lost": None,
        "faults": [],
        "total_bytes": 400,
        "ranks": [
            {"rank": r, "path": paths[r], "donor": donors[r], "assembled": False, "bytes": 100} for r in range(4)
        ],
        "replica_groups": [{"ranks": [0, 2], "donor": 0}, {"ranks": [1, 3], "donor": 1}],
        "restore_ranks": "0,1",
        "restore_ranks_map": {"0,2": 0, "1,3": 1},
        "found_anything": True,
        "other_worlds": [],
        "rejected": [{"what": "rank_2/x-1_9.safetensors", "reason": "damaged header"}],
    }


def test_the_same_plan_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "rank_2").mkdir()
    layout = Layout((2, 1), ("R", "S(0)"), (), MESH)  # type: ignore[arg-type]
    other = Strategy(2, (replace(HSDP.tensors[0], layout=layout),))
    for plan in (make(tmp_path, faults=(1,)), make(tmp_path, world=World(2, other)), Refusal((), False)):
        path = write_plan(tmp_path, plan)
        assert sorted(os.listdir(tmp_path)) == ["rank_2", PLAN_JSON]
        before = path.read_bytes()
        assert json.loads(before) == plan_to_json(plan, tmp_path)
        assert write_plan(tmp_path, plan).read_bytes() == before


def test_text_that_is_none(tmp_path: Path) -> None:
    """A header's run id and a file name may hold halves of characters, line breaks and quotes."""
    odd = "r\ud800'\n$(touch x)\0"
    first = FileFact(f"{tmp_path}/a\udce9.safetensors", 0, (odd, 0, 1), 1, replicated(1, {"w": (2,)}))
    plan = plan_resume([first], World(1), rejected=[Rejected("a\udce9", odd)])
    assert isinstance(plan, ResumePlan)
    saved = json.loads(write_plan(tmp_path, plan).read_text())
    assert saved["ranks"][0]["path"] == "a\udce9.safetensors"
    write_env_file(tmp_path / "env.sh", plan)
    script = '. ./env.sh; printf %s "$MINDX_RESUME_RUN_ID"'
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
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


# --- RESTORE_RANKS ---


def fact_of(
    rank: int,
    strategy: Strategy = DDP,
    *,
    kind: str = "breakpoint",
    moment: tuple[str, int, int] = MOMENT,
    visible_to: frozenset[int] | None = None,
) -> FileFact:
    path = f"rank_{rank}/x-{moment[1]}_{moment[2]}_{kind}.safetensors"
    return FileFact(path, rank, moment, strategy.world_size, strategy, kind, 1e9, 100, visible_to=visible_to)


def test_where_no_dying_save_of_a_healthy_rank_can_be_named_the_map_says_so() -> None:
    """A faulty rank's is the last resort; none can be loaded whole where each new rank reads several."""
    groups = Strategy(4, (TensorSpec("model.w", (8,), Layout((2, 2), ("R", "S(0)")), "F32"),))  # type: ignore[arg-type]
    newer = fact_of(0, groups, moment=("run", 1, 12), kind="periodic")
    plan = plan_resume([*(fact_of(rank, groups) for rank in (1, 2, 3)), newer], World(4), faults=(1, 3))
    assert isinstance(plan, ResumePlan) and restore_ranks(plan) == {(0, 2): 2, (1, 3): 1}
    healthier = plan_resume([*(fact_of(rank, groups) for rank in range(4)), newer], World(4), faults=(0, 1))
    assert isinstance(healthier, ResumePlan) and restore_ranks(healthier) == {(0, 2): 2, (1, 3): 3}
    split = Strategy(4, (TensorSpec("model.w", (8,), Layout((4,), ("S(0)",)), "F32"),))  # type: ignore[arg-type]
    resharded = plan_resume([fact_of(rank, split) for rank in range(4)], World(2))
    assert isinstance(resharded, ResumePlan) and resharded.resharded and restore_ranks(resharded) == {}


def test_a_map_that_no_environment_can_hold_is_left_out_and_said_to_be() -> None:
    lines = export_restore_ranks({tuple(range(40_000)): 0})
    assert lines[0] == "export RESTORE_RANKS=0" and lines[1].startswith("# ") and lines[2].endswith("=''")
    assert all(len(line) < 131_072 for line in export_restore_ranks({tuple(range(16_384)): 0}))


@given(st.integers(1, 3), st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_donors_are_the_lowest_healthy(dp: int, tp: int, data: st.DataObject) -> None:
    size = dp * tp
    layout = Layout((dp, tp), ("R", "S(0)"), ())  # type: ignore[arg-type]
    strategy = Strategy(size, (TensorSpec("model.w", (8 * tp,), layout, "F32"),))
    there = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    faults = tuple(data.draw(st.sets(st.integers(0, size - 1))))
    plan = plan_resume([fact_of(r, strategy) for r in sorted(there)], World(size), faults=faults)
    if isinstance(plan, Refusal):
        return
    groups = strategy.replica_groups()
    donors = restore_ranks(plan)
    assert list(donors) == list(groups)
    for group, donor in donors.items():
        assert donor == min(set(group) & set(plan.files), key=lambda rank: (rank in faults, rank))
        assert donor in there
