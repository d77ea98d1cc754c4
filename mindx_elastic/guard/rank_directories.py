"""Where the ranks keep their files: usually all in one directory, or each in its own (``ckpt_of_rank/{rank}``).

A start must see the files of all ranks, because one that was killed takes its weights from another one's file. And the
ranks of a machine keep one folder in shared memory, named by a directory, because one of them copies a state that all
share. So the ranks tell each other their directories before anything is looked for. Where they differ, each rank looks
into all that it can see, in the order of the ranks, and the first of them names the folder in memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.core.owners import Trust

__all__ = ["RankDirectories"]

_MOST = 64
_LONGEST = 4096


class RankDirectories(Part):
    """The meeting's topic; after it, what this rank looks into."""

    name = "directories"

    def __init__(self, own: Sequence[Path], trust: Trust, *, apart: bool) -> None:
        """`own`: this rank's directories, resolved and made. `trust` learns the others'. `apart`: each node has a disk
        of its own, and the ranks send each other copies of their files."""
        self._own, self._trust, self._apart = list(own), trust, apart
        self.all: list[Path] = list(own)
        """The directories with files of this job that this process can see."""

    @property
    def home(self) -> Path:
        """The one that names the folder in shared memory, the same for all ranks of this machine."""
        return self.all[0]

    def say(self) -> Any:
        return [self._apart, [[str(path), os.stat(path).st_ino] for path in self._own]]

    def merge(self, said: Sequence[Any]) -> Merged:
        paths = [[str(path) for path, _ in places] for _, places in said]
        if any(apart for apart, _ in said) or all(each == paths[0] for each in paths):
            return Merged(None)  # also where each node has a disk of its own under that path
        found = {(str(path), int(number)): None for _, places in said for path, number in places[:_MOST]}
        return Merged([list(each) for each in found])

    def hear(self, answer: Answer) -> None:
        if answer.common is None:
            return
        found = []
        for text, number in answer.common:
            if not isinstance(text, str) or len(text) > _LONGEST or type(number) is not int:
                raise ValueError("no directory")
            path = Path(text)
            if path in self._own:
                found.append(path)
            elif path.is_absolute() and ".." not in path.parts and _is(path, number):
                self._trust.add(path)
                found.append(path)
        self.all = list(dict.fromkeys(found)) or self._own


def _is(path: Path, number: int) -> bool:
    """Whether this machine sees that very directory, and not another one of its name on a disk of its own."""
    try:
        return path.is_dir() and not path.is_symlink() and os.stat(path).st_ino == number
    except OSError:
        return False
