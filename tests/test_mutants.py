"""The defects that are put back, here and in the simulation, are changes of the code as it is today."""

from __future__ import annotations

import json
from collections import Counter

from tests.mutants.__main__ import LIST, Mutant
from tests.simulation.mutants import MUTANTS, ROOT


def test_what_each_mutant_changes_is_in_the_code_and_nowhere_else() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "mindx_elastic").rglob("*.py")}
    lines = {path: Counter(map(str.strip, text.splitlines())) for path, text in texts.items()}
    of_lists = [Mutant(**json.loads(line)) for line in LIST.read_text(encoding="utf-8").splitlines()]
    gone = [m.old for m in of_lists if lines.get(ROOT / m.file, Counter())[m.old.strip()] <= m.nth]
    gone += [m.what for m in MUTANTS if texts.get(ROOT / "mindx_elastic" / m.file, "").count(m.old) != 1]
    assert not gone
    assert len({*of_lists}) == len(of_lists) and len({m.what for m in MUTANTS}) == len(MUTANTS)
