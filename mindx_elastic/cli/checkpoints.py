"""How the commands find checkpoint files and read them: `inspect`, `verify`, `plan`, `status`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mindx_elastic.cli.common import is_folder
from mindx_elastic.core.printable import counted, printable

if TYPE_CHECKING:
    from mindx_elastic.core.owners import Owners
    from mindx_elastic.persist.catalog import CatalogEntry
    from mindx_elastic.start.inventory import Inventory

__all__ = ["check_digests", "entries_at", "look_at", "nothing_found", "relative", "set_aside"]


def look_at(directory: Path, archive: str = "") -> Inventory:
    """Read every header under `directory`, and the small states next to the checkpoints. `archive`: its URL."""
    from mindx_elastic.start.findings import add_archived, list_files, reader_trust, scan
    from mindx_elastic.start.inventory import Inventory

    found = scan(list_files([directory]), trust=reader_trust(directory))
    if archive:
        from mindx_elastic.archive.archive import Archive
        from mindx_elastic.config import RankInfo

        place = Archive(archive, RankInfo(), [directory])
        add_archived(found, place, counts=True)
        place.close()
    return Inventory.merge([found])


def entries_at(path: Path) -> list[CatalogEntry]:
    """Everything that a scan finds at `path`; for a file its own entry, whatever it is."""
    from mindx_elastic.persist.catalog import CatalogEntry, looks_ours, read_entries, read_entry
    from mindx_elastic.start.findings import reader_trust

    owners = reader_trust(path).of(path)
    if is_folder(path):
        return list(read_entries(path, owners=owners))
    entry = read_entry(path, owners=owners)
    if entry is None:  # the user named this file, so it is not passed over as a scan would do
        link = path.is_symlink()
        problem = "is a symbolic link; checkpoint files are never followed" if link else "is not a checkpoint file"
        status = path.lstat()
        entry = CatalogEntry(path, None, problem, not link, looks_ours(path), status.st_size, status.st_mtime)
    return [entry]


def check_digests(entry: CatalogEntry, owners: Owners) -> list[str]:
    """What is wrong with a file, which is read for it; an empty list when it is good."""
    from mindx_elastic.persist.reader import verify_file

    if entry.header is None or entry.info is None:
        return [entry.problem or "unreadable"]
    # Without the path in front: every place that shows them has named the file already.
    prefix = printable(f"{entry.path}: ")
    return [printable(problem).removeprefix(prefix) for problem in verify_file(entry.path, owners)]


def set_aside(number: int) -> str:
    """So many files are in quarantine, in words; empty: none."""
    return f"{counted(number, 'file')} that could not be used (the .reason.txt next to each says why)" if number else ""


def nothing_found(directory: str, quarantined: int, *, usable: str = "") -> str:
    """The line for a directory without checkpoints; whether there had been any makes a difference."""
    line, aside = f"no {usable}checkpoint found in {directory}", set_aside(quarantined)
    return f"{line}; its quarantine holds {aside}" if aside else line


def relative(path: str, directory: str) -> str:
    """`path` as it is shown next to the name of `directory`."""
    found = Path(path)
    return str(found.relative_to(directory)) if path != directory and found.is_relative_to(directory) else path
