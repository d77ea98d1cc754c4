"""The loops in docs/your-loop.md, from the page: each is exact after a stop. `loops/` has those that are not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.natural.test_loops import check_exact
from tests.natural.verdicts import EXACT, Loop

pytestmark = pytest.mark.slow

_PAGE = (Path(__file__).parents[2] / "docs" / "your-loop.md").read_text(encoding="utf-8").partition("## Ten loops")[2]
_BLOCKS = re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL)
_HEADINGS = re.findall(r"^### (.*)$", _PAGE, re.MULTILINE)


@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(1, len(_BLOCKS)))
def test_the_loop_on_the_page_is_exact(number: int, tmp_path: Path) -> None:
    end = "from tests.natural.tools import done\n\ndone(model)\n"
    (tmp_path / "page.py").write_text("\n".join([_BLOCKS[0], _BLOCKS[number], end]), encoding="utf-8")
    loop = Loop(f"block {number}", EXACT, of="page", folder=tmp_path)
    check_exact(loop, tmp_path, seed=1, stops=1)


def test_there_are_ten() -> None:
    assert len(_HEADINGS) == 10
    assert len(_BLOCKS) == 12  # what all begin with, and two for a batch fetched ahead
