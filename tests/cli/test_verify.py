from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindx_elastic.persist.storage import quarantine
from tests.checkpoint_files import flip_bit_in_data, write

VICTIM = Path("rank_1") / "resnet-1_10.safetensors"


def test_good_files(run: Callable[..., Any], tree: Path) -> None:
    result = run("verify", tree)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 5
    assert lines[-1].startswith("5 files, ") and lines[-1].endswith(": all good")


def test_each_damage_is_found_and_the_others_are_good(
    run: Callable[..., Any], tree: Path, damage: Callable[[Path], None]
) -> None:
    damage(tree / VICTIM)
    result = run("verify", tree)
    assert result.exit_code == 1
    bad = [line for line in result.stdout.splitlines() if line.startswith("BAD")]
    assert len(bad) == 1 and str(tree / VICTIM) in bad[0]
    assert len(bad[0]) > len(f"BAD {tree / VICTIM}: ")  # says what is wrong
    assert result.stdout.splitlines()[-1].endswith(": 1 bad")


def test_each_damage_of_a_single_file(
    run: Callable[..., Any], tree: Path, damage: Callable[[Path], None], request: pytest.FixtureRequest
) -> None:
    damage(tree / VICTIM)
    result = run("verify", tree / VICTIM)
    if (tree / VICTIM).is_dir() and not (tree / VICTIM).is_symlink():
        assert result.exit_code == 3  # it is a folder now, with nothing in it
    else:
        assert result.exit_code == 1 and result.stdout.startswith("BAD")


def test_flipped_data_names_the_tensor(run: Callable[..., Any], tree: Path) -> None:
    flip_bit_in_data(tree / VICTIM)
    line = run("verify", tree / VICTIM).stdout.splitlines()[0]
    assert line.startswith(f"BAD {tree / VICTIM}: tensor model.bias ") and line.count(str(tree)) == 1


def test_json(run: Callable[..., Any], tree: Path) -> None:
    flip_bit_in_data(tree / VICTIM)
    result = run("verify", tree, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert set(document) == {"schema", "path", "good", "bad", "quarantined", "bytes", "duration_s", "files"}
    assert (document["schema"], document["good"], document["bad"]) == (1, 4, 1)
    assert document["bytes"] == sum(path.stat().st_size for path in tree.rglob("*.safetensors"))
    (bad,) = [file for file in document["files"] if not file["ok"]]
    assert set(bad) == {"path", "ok", "problems", "foreign", "size_bytes", "run_id", "step", "rank"}
    assert (bad["path"], bad["step"], bad["rank"]) == (str(tree / VICTIM), 10, 1) and bad["problems"]


def test_nothing_found_is_3(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run("verify", tmp_path)
    assert result.exit_code == 3 and result.stdout == f"no checkpoint found in {tmp_path}\n"
    result = run("verify", tmp_path, "--json")
    assert result.exit_code == 3 and json.loads(result.stdout)["files"] == []


def test_only_a_quarantine_is_mentioned(run: Callable[..., Any], tree: Path) -> None:
    for path in list(tree.rglob("*.safetensors")):
        quarantine(path, "moved by a test", tree)
    result = run("verify", tree)
    assert result.exit_code == 3
    assert result.stdout.startswith(
        f"no checkpoint found in {tree}; its quarantine holds 5 files that could not be used"
    )
    assert json.loads(run("verify", tree, "--json").stdout)["quarantined"] == 5


def test_foreign_files_outside_our_places_are_passed_over(run: Callable[..., Any], tree: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tree / "bert.safetensors")
    assert run("verify", tree).exit_code == 0
    named = run("verify", tree / "bert.safetensors")
    assert named.exit_code == 1 and named.stdout.startswith("BAD")


def test_a_rank_folder_and_one_file(run: Callable[..., Any], tree: Path) -> None:
    assert run("verify", tree / "rank_1").stdout.splitlines()[-1].startswith("2 files, ")
    assert run("verify", tree / VICTIM).stdout.splitlines()[-1].startswith("1 file, ")


def test_any_other_file_is_bad_not_a_crash(run: Callable[..., Any], tree: Path) -> None:
    result = run("verify", tree / "events.jsonl")
    assert result.exit_code == 1 and "is not a checkpoint file" in result.stdout


def test_names_that_a_terminal_would_obey(run: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "\x1b[31m[red]\n-1_1.safetensors")
    result = run("verify", tmp_path)
    assert result.exit_code == 0 and "\x1b" not in result.stdout
    assert "\\x1b[31m[red]\\n-1_1.safetensors" in result.stdout
