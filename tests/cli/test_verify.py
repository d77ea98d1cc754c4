from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mindx_elastic.persist.storage import quarantine
from tests.checkpoint_files import flip_bit_in_data
from tests.cli.conftest import Run

VICTIM = Path("rank_1") / "resnet-1_10.safetensors"


def test_each_damage_is_found_and_the_others_are_good(run: Run, tree: Path, damage: Callable[[Path], None]) -> None:
    damage(tree / VICTIM)
    result = run("verify", tree)
    assert result.exit_code == 1
    bad = [line for line in result.stdout.splitlines() if line.startswith("BAD")]
    assert len(bad) == 1 and str(tree / VICTIM) in bad[0]
    assert len(bad[0]) > len(f"BAD {tree / VICTIM}: ")  # says what is wrong
    assert result.stdout.splitlines()[-1].endswith(": 1 bad")


def test_flipped_data_names_the_tensor(run: Run, tree: Path) -> None:
    flip_bit_in_data(tree / VICTIM)
    line = run("verify", tree / VICTIM).stdout.splitlines()[0]
    assert line.startswith(f"BAD {tree / VICTIM}: tensor model.bias ") and line.count(str(tree)) == 1


def test_only_a_quarantine_is_mentioned(run: Run, tree: Path) -> None:
    for path in list(tree.rglob("*.safetensors")):
        quarantine(path, "moved by a test", tree)
    result = run("verify", tree)
    assert result.exit_code == 3
    assert result.stdout.startswith(
        f"no checkpoint found in {tree}; its quarantine holds 5 files that could not be used"
    )
    assert json.loads(run("verify", tree, "--json").stdout)["quarantined"] == 5


def test_any_other_file_is_bad_not_a_crash(run: Run, tree: Path) -> None:
    result = run("verify", tree / "events.jsonl")
    assert result.exit_code == 1 and "is not a checkpoint file" in result.stdout
