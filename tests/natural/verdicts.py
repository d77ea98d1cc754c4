"""What the package must say about each loop, and about the loop with a line of its state taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LOOPS", "Cut", "Exact", "Found", "Loop", "Refused", "Verdict"]

_FOLDER = Path(__file__).parent / "loops"


@dataclass(frozen=True)
class Exact:
    """The resumed run ends with the same numbers."""


@dataclass(frozen=True)
class Refused:
    """The first run ends with an error that has these words."""

    words: str


@dataclass(frozen=True)
class Found:
    """`mindx-elastic prove` finds it, with these words; a run by itself ends without an error."""

    words: str
    warns: str = ""
    """What the run itself says about it, if anything."""


Verdict = Exact | Refused | Found


@dataclass(frozen=True)
class Cut:
    """The loop with `old` replaced by `new`."""

    old: str
    verdict: Verdict
    new: str = ""


@dataclass(frozen=True)
class Loop:
    """One file in ``loops/``."""

    name: str
    verdict: Verdict
    cuts: Sequence[Cut] = ()
    ranks: int = 1

    @property
    def path(self) -> Path:
        return _FOLDER / f"{self.name}.py"

    def source(self, cut: Cut) -> str:
        """The text with the cut made. Raises ValueError unless its place is there exactly once."""
        text = self.path.read_text(encoding="utf-8")
        if text.count(cut.old) != 1:
            raise ValueError(f"{self.name}: {cut.old!r} is there {text.count(cut.old)} times")
        return text.replace(cut.old, cut.new)


LOOPS: Sequence[Loop] = ()
