"""The defects that are put back are changes of the code as it is today."""

from __future__ import annotations

import json
from collections import Counter

from tests.mutants.__main__ import LIST, ROOT, Mutant
from tests.mutants.defects import defects


def test_what_each_mutant_changes_is_in_the_code_and_nowhere_else() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "mindx_elastic").rglob("*.py")}
    lines = {path: Counter(map(str.strip, text.splitlines())) for path, text in texts.items()}
    of_list = [Mutant(**json.loads(line)) for line in LIST.read_text(encoding="utf-8").splitlines()]
    gone = [m.old for m in of_list if lines.get(ROOT / m.file, Counter())[m.old.strip()] <= m.nth]
    gone += [each.what for each in defects() if texts.get(ROOT / each.file, "").count(each.old) != 1]
    assert not gone
    assert len({*of_list}) == len(of_list) and len({each.what for each in defects()}) == len(defects())
