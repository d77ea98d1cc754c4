"""``mindx-elastic verify``: recompute the digests of every checkpoint file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from mindx_elastic.cli.checkpoints import check_digests, entries_at, nothing_found
from mindx_elastic.cli.common import (
    EXIT_BAD,
    EXIT_GOOD,
    EXIT_NOTHING,
    JSON_SCHEMA,
    JsonOption,
    PathArgument,
    is_folder,
    say,
    show,
)
from mindx_elastic.core.printable import counted, human_size, printable

if TYPE_CHECKING:
    from mindx_elastic.persist.catalog import CatalogEntry

__all__ = ["verify_command"]


def verify_command(path: PathArgument, as_json: JsonOption = False) -> None:
    """Read every checkpoint file completely and compare its digests.

    Reports each file as ok or BAD with what is wrong: flipped bits, a cut-off end, a damaged header, a
    symbolic link (never followed), a foreign file under a name of ours. Other foreign files are skipped.
    Changes nothing; the next start of the job moves damaged files into quarantine.

    \b
    [bold]Exit code[/bold]
    0  every file is good
    1  at least one is bad
    2  wrong usage, for example no such path
    3  no checkpoint was found

    \b
    [bold]Examples[/bold]
    mindx-elastic verify ckpt
    mindx-elastic verify ckpt/rank_0
    mindx-elastic verify ckpt/rank_0/resnet-2_17_breakpoint.safetensors
    mindx-elastic verify ckpt --json | jq '.files[] | select(.ok | not)'
    """
    import mindx_elastic.persist.reader  # noqa: F401  # torch: seconds on a busy machine, and none of them verifies

    document = _check_files(path)
    show(document, as_json, _print)
    raise typer.Exit(EXIT_BAD if document["bad"] else EXIT_GOOD if document["files"] else EXIT_NOTHING)


def _check_files(path: Path) -> dict[str, Any]:
    """What is wrong with each file, as a JSON document."""
    from mindx_elastic.persist.storage import quarantined
    from mindx_elastic.start.findings import reader_trust

    started = time.monotonic()
    entries, num_aside = entries_at(path), 0
    if is_folder(path):
        num_aside = len(quarantined(path))
        entries = [entry for entry in entries if entry.header is not None or entry.looks_ours or not entry.foreign]
    owners = reader_trust(path).of(path)
    files = [_as_dict(entry, check_digests(entry, owners)) for entry in entries]
    bad = sum(not file["ok"] for file in files)
    return {
        "schema": JSON_SCHEMA,
        "path": str(path),
        "good": len(files) - bad,
        "bad": bad,
        "quarantined": num_aside,
        "bytes": sum(file["size_bytes"] for file in files),
        "duration_s": round(time.monotonic() - started, 3),
        "files": files,
    }


def _as_dict(entry: CatalogEntry, problems: Sequence[str]) -> dict[str, Any]:
    info = entry.info
    return {
        "path": str(entry.path),
        "ok": not problems,
        "problems": list(problems),
        "foreign": entry.foreign,
        "size_bytes": entry.size,
        "run_id": None if info is None else info.run_id,
        "step": None if info is None else info.step,
        "rank": None if info is None else info.rank,
    }


def _print(console: Console, summary: dict[str, Any]) -> None:
    for file in summary["files"]:
        verdict = ("ok  ", "green") if file["ok"] else ("BAD ", "bold red")
        problems = f": {'; '.join(file['problems'])}" if file["problems"] else ""
        say(console, Text.assemble(verdict, printable(f"{file['path']}{problems}")))
    if not summary["files"]:
        say(console, nothing_found(summary["path"], summary["quarantined"]))
        return
    outcome = f"{summary['bad']} bad" if summary["bad"] else "all good"
    volume = f"{human_size(summary['bytes'])} in {summary['duration_s']:.1f} s"
    say(console, f"{counted(len(summary['files']), 'file')}, {volume}: {outcome}")
