"""``mindx-elastic verify``: recompute the digests of every checkpoint file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from mindx_elastic.cli.common import (
    EXIT_BAD,
    EXIT_GOOD,
    EXIT_NOTHING,
    JSON_SCHEMA,
    JsonOption,
    PathArgument,
    is_folder,
    nothing_found,
    say,
    show,
)
from mindx_elastic.core.printable import human_size, printable

if TYPE_CHECKING:
    from mindx_elastic.core.owners import Owners
    from mindx_elastic.persist.catalog import CatalogEntry

__all__ = ["check_entries", "entries_at", "verify_command"]


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

    raise typer.Exit(_check_files(path, as_json=as_json))


def _check_files(path: Path, *, as_json: bool) -> int:
    """Prints what is wrong with each file; returns the exit code."""
    from mindx_elastic.start.findings import reader_trust

    started = time.monotonic()
    entries = entries_at(path)
    in_quarantine = 0
    if is_folder(path):
        from mindx_elastic.persist.storage import quarantined

        in_quarantine = len(quarantined(path))
        entries = [entry for entry in entries if entry.header is not None or entry.looks_ours or not entry.foreign]
    verdicts = check_entries(entries, reader_trust(path).of(path))
    files = [_as_dict(entry, problems) for entry, problems in zip(entries, verdicts, strict=True)]
    bad = sum(not file["ok"] for file in files)
    summary = {
        "schema": JSON_SCHEMA,
        "path": str(path),
        "good": len(files) - bad,
        "bad": bad,
        "quarantined": in_quarantine,
        "bytes": sum(file["size_bytes"] for file in files),
        "duration_s": round(time.monotonic() - started, 3),
        "files": files,
    }
    show(summary, as_json, _print)
    return EXIT_BAD if bad else EXIT_GOOD if files else EXIT_NOTHING


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


def check_entries(entries: Sequence[CatalogEntry], owners: Owners) -> list[list[str]]:
    """For each entry what is wrong with it, digests included; an empty list when it is good."""
    from mindx_elastic.persist.reader import verify_file

    verdicts = []
    for entry in entries:
        if entry.header is None or entry.info is None:
            verdicts.append([entry.problem or "unreadable"])
        else:
            # Without the path in front: every place that shows them has named the file already.
            prefix = printable(f"{entry.path}: ")
            problems = map(printable, verify_file(entry.path, owners))
            verdicts.append([problem.removeprefix(prefix) for problem in problems])
    return verdicts


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
        problems = "".join(f": {text}" for text in ["; ".join(file["problems"])] if text)
        say(console, Text.assemble(verdict, printable(f"{file['path']}{problems}")))
    count = len(summary["files"])
    if not count:
        say(console, nothing_found(summary["path"], summary["quarantined"]))
        return
    outcome = f"{summary['bad']} bad" if summary["bad"] else "all good"
    volume = f"{human_size(summary['bytes'])} in {summary['duration_s']:.1f} s"
    say(console, f"{count} file{'s' if count > 1 else ''}, {volume}: {outcome}")
