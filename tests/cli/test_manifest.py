"""``mindx-elastic manifest``: the options, and what cannot be."""

from __future__ import annotations

import pytest
import yaml

from tests.cli.conftest import Run


def test_what_stands_behind_the_dashes_is_the_program(run: Run) -> None:
    words = ("--state", "1GiB", "--nproc", "2", "--run-options", "--notice aws", "--", "train.py", "--lr", "1")
    result = run("manifest", "kubernetes", *words)
    assert result.exit_code == 0, result.stderr
    (job,) = yaml.safe_load_all(result.stdout)
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:4] == ["mindx-elastic", "run", "--nproc-per-node", "2"]
    assert command[-5:] == ["--notice", "aws", "train.py", "--lr", "1"]


@pytest.mark.parametrize(
    "words",
    [
        ("nomad", "--state", "1GiB", "--", "train.py"),
        ("jobset", "--", "train.py"),
        ("jobset", "--state", "1GiB"),
        ("jobset", "--state", "1GiB", "--run-options", "'", "--", "train.py"),
    ],
)
def test_wrong_usage(run: Run, words: tuple[str, ...]) -> None:
    assert run("manifest", *words).exit_code == 2
