"""All parts, by package, and how the table's rows are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.packages import averages, data, modules, optimizers, schedulers, trainers
from tests.packages.part import Part
from tests.packages.runs import Result

__all__ = ["PARTS", "by_package", "rows"]

PARTS: tuple[Part, ...] = (
    *optimizers.PARTS,
    *averages.PARTS,
    *schedulers.PARTS,
    *modules.PARTS,
    *data.PARTS,
    *trainers.PARTS,
)
_LONGEST = 170


def by_package() -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in PARTS:
        found.setdefault(part.package, []).append(part)
    return found


def rows(parts: Sequence[Part], results: Sequence[Result]) -> Iterator[str]:
    """The table's rows of one package: parts of which the same is to be said share one."""
    by_id = {part.id: part for part in parts}
    groups: dict[tuple[str, str], list[str]] = {}
    for result in results:
        part = by_id[result.id]
        text = " ".join(result.text.split()).replace("|", "\\|").replace("<", "&lt;")
        text = part.note or (text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...")
        groups.setdefault((result.verdict, text), []).append(part.name)
    for (verdict, text), names in groups.items():
        yield f"| {parts[0].package} | {results[0].version} | {'; '.join(dict.fromkeys(names))} | {verdict} | {text} |"
