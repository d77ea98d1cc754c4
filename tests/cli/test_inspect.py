from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoint_files import flip_bit_in_header, write
from tests.cli.conftest import Run

BREAKPOINT = Path("rank_0") / "resnet-2_7_breakpoint.safetensors"


def table_rows(stdout: str) -> list[list[str]]:
    """Cells of the lines that begin with a step number; cells are two spaces or more apart."""
    rows = (line.split("  ") for line in stdout.splitlines() if line.strip()[:1].isdigit())
    return [[cell.strip() for cell in row if cell.strip()] for row in rows]


def test_the_table(run: Run, tree: Path) -> None:
    result = run("inspect", tree)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "run run-a"
    assert lines[1].split() == ["attempt", "step", "epoch", "reason", "ranks", "complete?", "size", "age"]
    rows = table_rows(result.stdout)
    assert [row[:6] for row in rows] == [
        ["0", "20", "2 (10/10)", "periodic", "1/2", "NO"],
        ["0", "17", "2 (7/10)", "breakpoint: SIGTERM", "2/2", "yes"],
        ["0", "10", "1 (10/10)", "periodic", "2/2", "yes"],
    ]
    assert "step 20 (attempt 0) is not complete: rank 1 of 2 missing" in lines
    assert lines[-1] == "newest complete step: 17 (attempt 0)  (digests not checked; mindx-elastic verify does)"


def test_json(run: Run, tree: Path) -> None:
    (tree / "rank_1" / "odd-3_3.safetensors").write_bytes(b"")
    result = run("inspect", tree, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert (document["newest_complete_attempt"], document["quarantined"]) == (0, 0)
    assert (document["schema"], document["directory"]) == (2, str(tree))
    assert (document["newest_complete_step"], document["newest_complete_run_id"]) == (17, "run-a")
    step = document["steps"][1]
    assert step["age_s"] > 0 and step["size_bytes"] == sum(file["size_bytes"] for file in step["files"])
    expected = {"step": 17, "attempt": 0, "epoch": 2, "step_in_epoch": 7, "batch_num": 10, "reasons": ["SIGTERM"]}
    expected |= {"ranks": [0, 1], "missing_ranks": [], "num_missing_ranks": 0, "complete": True, "resumable": True}
    expected |= {"kind": "breakpoint", "created": 1_700_000_017.0, "world_size": 2, "why_incomplete": None}
    assert step.items() >= expected.items()
    file, path = step["files"][0], tree / BREAKPOINT
    assert (file["path"], file["rank"], file["size_bytes"]) == (str(path), 0, path.stat().st_size)
    (problem,) = document["problems"]
    assert problem["path"] == str(tree / "rank_1" / "odd-3_3.safetensors") and problem["looks_ours"]


def test_one_file_in_detail(run: Run, tmp_path: Path) -> None:
    path = write(
        tmp_path / "x-2_7.safetensors",
        coordinates={"dp": 1},
        append_info=[{"epoch_num": 3}],
        reason="flag file",
        not_kept="best, self.count",
    )
    result = run("inspect", path)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == str(path)
    for line in (
        "run_id run-a",
        "epoch 2",
        "reason flag file",
        "not_kept best, self.count",
        "append_info [{'epoch_num': 3}]",
        "model 2 tensors, 3.9 KiB F32 BF16",
        "empty 0 tensors, 0 B",
    ):
        assert line in lines
    document = json.loads(run("inspect", path, "--json").stdout)
    assert document["schema"] == 2
    file = document["file"]
    assert (file["num_tensors"], file["tensor_bytes"]) == (3, 8006)
    assert file["parts"][1] == {
        "name": "optimizer",
        "num_tensors": 1,
        "bytes": 4000,
        "dtypes": ["F32"],
    }
    assert [part["name"] for part in file["parts"]] == ["model", "optimizer", "rng", "empty"]
    flip_bit_in_header(path)
    result = run("inspect", path)
    assert result.exit_code == 1 and "BAD" in result.stdout
