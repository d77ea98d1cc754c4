"""All parts, by package, and how a row of the table is written."""

from __future__ import annotations

from tests.packages import averages, data, modules, optimizers, schedulers, trainers
from tests.packages.part import Part
from tests.packages.runs import Result

__all__ = ["PARTS", "by_package", "row"]

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


def row(part: Part, result: Result) -> str:
    text = " ".join(result.text.split()).replace("|", "\\|")
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    named = f"{part.name}{', ' * bool(part.named)}{f'`{part.named}`' if part.named else ''}"
    return f"| {part.package} | {result.version} | {named} | {result.verdict} | {part.note or text} |"
