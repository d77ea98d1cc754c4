"""``mindx-elastic drill`` as a command: real scripts, real faults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.test_prove_command import assert_refused, run
from tests.harness import JOBS


def drill(
    *words: object, cwd: Path, code: int = 0, script: Sequence[object] = (JOBS / "proved.py", "exact")
) -> list[dict[str, Any]]:
    """The results of the faults that `words` name, on a small job of the tests. `code`: the exit code."""
    memory = cwd / "memory"
    memory.mkdir()
    end = ("--", *script, cwd / "ckpt")
    result = run("--json", *words, *end, cwd=cwd, command="drill", MINDX_ARENA_DIR=str(memory))
    assert result.returncode == code, result.stdout + result.stderr
    assert not list(memory.iterdir()) and not (cwd / "ckpt").exists()
    found: list[dict[str, Any]] = json.loads(result.stdout)["faults"]
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "s.py"], "name a fault (--fault kill:step=7), or a number of them (--random 20); --list names all"),
        (["--fault", "kil", "--", "s.py"], "--fault kil: no such fault (did you mean kill?)"),
        (["--fault", "kill-agent", "--", "s.py"], "only under mindx-elastic run"),
        (["--fault", "kill", "--stops", "3", "--", "s.py"], "neither of drill nor of mindx-elastic run"),
    ],
)
def test_wrong_usage(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    assert_refused(run, tmp_path, monkeypatch, ["drill", *words], said)


@pytest.mark.slow
def test_faults_of_one_process_with_all_reports(tmp_path: Path) -> None:
    faults = ["kill:step=2", "exception:step=2"]
    words = [*(word for fault in faults for word in ("--fault", fault)), "--steps", 4]
    killed, raised = drill(*words, cwd=tmp_path)
    assert [each["outcome"] for each in (killed, raised)] == ["exact"] * 2
    assert (killed["codes"], killed["reached"], killed["resumed"]) == ([-9, 0], 2, None)
    assert killed["lost"] == 2, "nothing had been saved, and no agent keeps memory"
    assert (raised["codes"], raised["reached"], raised["lost"]) == ([1, 0], 1, 0)
    assert raised["resumed"] == 1, "the step with the exception is done again"
    assert raised["again_s"] > 0


@pytest.mark.drill
@pytest.mark.slow
def test_a_fault_that_does_not_come_about_is_a_failure(tmp_path: Path) -> None:
    (found,) = drill("--fault", "kill-worker:step=2", "--steps", 4, cwd=tmp_path, code=1)
    assert found["outcome"] == "not fired" and "has no loader workers" in found["explained"]["what"]


@pytest.mark.drill
@pytest.mark.slow
def test_a_script_that_is_not_the_same_after_a_fault(tmp_path: Path) -> None:
    script = (JOBS / "proved.py", "gentler")
    (found,) = drill("--fault", "terminate:step=2", "--steps", 5, cwd=tmp_path, code=1, script=script)
    assert found["outcome"] == "differs" and found["step"] == 3
    assert "lr differs at step 3" in found["explained"]["what"]


@pytest.mark.drill
def test_two_ranks_under_the_agent(tmp_path: Path) -> None:
    kinds = [
        "kill",
        "kill-all",
        "terminate",
        "kill-agent",
        "terminate-agent",
        "lose-node",
    ]
    words = [word for kind in kinds for word in ("--fault", f"{kind}:step=3,rank=1")]
    found = drill(*words, "--steps", 6, "--nproc-per-node", 2, "--snapshot-every", 1, cwd=tmp_path)
    outcomes = {kind: each["outcome"] for kind, each in zip(kinds, found, strict=True)}
    assert set(outcomes.values()) == {"exact"}
    lost = {kind: each["lost"] for kind, each in zip(kinds, found, strict=True)}
    assert lost.pop("lose-node") > 0, "memory is gone, and nothing was on the disk"
    assert lost.pop("kill-all") <= 1 and set(lost.values()) == {0}
