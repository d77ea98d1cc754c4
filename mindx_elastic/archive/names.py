"""Names of the objects in an archive.

``{run}/{attempt}-{step}/{writers}/{rank}-of-{size}/{root}-{digest}/{file}``, and next to it ``{file}.header``: the
header of the file, which is written last and says that it is whole. The digest is that of the header, and `writers` is
another number in every start: so no two writers give different bytes one name, and none replaces an object that counts.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from mindx_elastic.core.layout import MAX_RANKS
from mindx_elastic.core.moment import Moment

__all__ = ["MARKER", "ArchivedName", "folder_of", "run_folder"]

MARKER = ".header"
_NAME = re.compile(
    r"([^/]+)/(\d{1,9})-(\d{1,15})/([0-9a-f]{1,16})/(\d{1,9})-of-(\d{1,9})/(\d{1,4})-([0-9a-f]{32})/([^/]+)"
)
_FILE = re.compile(r"(?:[^./\x00-\x1f][^/\x00-\x1f]{0,200}/){0,2}[^./\x00-\x1f][^/\x00-\x1f]{0,200}")


class ArchivedName(NamedTuple):
    """What the name of an object says."""

    run_id: str
    attempt: int
    step: int
    writers: int
    rank: int
    world_size: int
    root: int
    """Number of the guard's directory."""
    digest: str
    file: str
    """The file's path in that directory."""

    @property
    def moment(self) -> Moment:
        return self.run_id, self.attempt, self.step

    @property
    def folder(self) -> str:
        """The folder of this file alone, relative to the archive."""
        who = f"{self.writers:x}/{self.rank}-of-{self.world_size}"
        return f"{folder_of(self.moment)}/{who}/{self.root}-{self.digest}"

    @property
    def path(self) -> str:
        """Relative to the archive."""
        return f"{self.folder}/{_quoted(self.file)}"

    @classmethod
    def parse(cls, path: str) -> ArchivedName | None:
        """None: not a name that `path` gives, or one of a marker."""
        found = _NAME.fullmatch(path)
        if found is None or path.endswith(MARKER):
            return None
        run, attempt, step, writers, rank, size, root, digest, file = found.groups()
        name = cls(
            unquote(run),
            int(attempt),
            int(step),
            int(writers, 16),
            int(rank),
            int(size),
            int(root),
            digest,
            unquote(file),
        )
        is_ours = _FILE.fullmatch(name.file) and name.rank < name.world_size <= MAX_RANKS
        return name if is_ours else None


def run_folder(run_id: str) -> str:
    return _quoted(run_id)


def folder_of(moment: Moment) -> str:
    """The folder of all files of a step, relative to the archive."""
    run, attempt, step = moment
    return f"{run_folder(run)}/{attempt}-{step}"


def _quoted(text: str) -> str:
    """A dot in front would be a hidden file, or a way up."""
    return quote(text, safe="") if not text.startswith(".") else f"%2E{quote(text[1:], safe='')}"
