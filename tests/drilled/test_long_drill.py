"""What `tests.drill --again` makes once more of a log."""

from __future__ import annotations

from pathlib import Path

from tests.drill import SETTINGS, read_bad_rows

LOG = """\
# a line about what follows
words 1 kill:rank=0,step=5,at=forward -9 4 exact
words 1 exception:rank=0,step=9,at=update 1,0 8 lost
words 1 terminate:rank=0,step=2,at=boundary 143,0 0 exact
words-2 1 kill:rank=1,step=3,at=copy 0 - not-fired
words-2 1 bit-flip:rank=0,step=7 143 0 inexact-as-said
words-2 2 full-memory:rank=0,step=20  1 differs
words-2 2 kill:rank=1,step=26,at=boundary  0 exact
words-2 2 full-memory:rank=0,step=30  1 exact
"""


def test_the_faults_that_went_wrong_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(LOG)
    assert [(name, seed, str(fault)) for name, seed, fault in read_bad_rows(tmp_path / "log.txt")] == [
        ("words", 1, "exception:rank=0,step=9,at=update"),  # a death in a copy: it is made by rank 0
        ("words-2", 2, "full-memory:rank=0,step=20"),
    ]


def test_two_thirds_of_the_faults_are_for_several_ranks() -> None:
    several = sum(setting.weight for setting in SETTINGS.values() if setting.ranks > 1)
    assert several >= 0.6 * sum(setting.weight for setting in SETTINGS.values())
    assert {setting.ranks for setting in SETTINGS.values()} == {1, 2, 3, 4}
