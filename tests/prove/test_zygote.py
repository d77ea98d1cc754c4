"""Forked runs are as good as new interpreters."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.prove.processes import Request, Zygote
from tests.prove.started import environment, wait_for


@pytest.mark.drill
def test_each_fork_begins_with_other_numbers(tmp_path: Path, zygote: Zygote) -> None:
    script = tmp_path / "drawing.py"
    script.write_text("import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())")
    said = []
    for number in range(2):
        request = Request(command=[str(script)], env=environment(), log=tmp_path / f"log{number}", notes=None)
        assert wait_for(zygote.start(request)) == 0
        said.append(request.log.read_text().split())
    assert all(one != other for one, other in zip(*said, strict=True)), said


def test_a_module_of_the_scripts_own_that_another_has_the_name_of(tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text("")
    made = Zygote(environment(), tmp_path / "log")
    try:
        assert "has modules of its own with the names of others: numbers" in made.problem(tmp_path)
    finally:
        made.close()
