"""``mindx-elastic clean``: remove what dead jobs have left in shared memory."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mindx_elastic.cli.common import (
    EXIT_BAD,
    JsonOption,
    fail,
    human_age,
    say,
    show,
)
from mindx_elastic.core.printable import counted, human_size

if TYPE_CHECKING:
    from mindx_elastic.memory.leftovers import Leftover

__all__ = ["clean_command"]

_SCHEMA = 2
_REMOVED, _WOULD, _KEPT, _IN_USE, _FAILED = "removed", "would remove", "kept", "in use", "FAILED"


def clean_command(
    everything: Annotated[
        bool, typer.Option("--all", help="Also remove snapshots from which a job could still resume.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove it; without, it is only listed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List what dead jobs of this user have left in shared memory, and with --yes remove it.

    A job that ends well leaves nothing there, nor does a `prove` that was not killed; folders of killed ones are
    removed. A job whose agent and workers were all killed leaves its agent's
    folder, which is removed, and its snapshots. Those may be the only copy of its newest steps, and the next start
    with the same command resumes from them. So they are listed and kept, unless their checkpoint directory is gone
    or --all is given. What a living process uses, or another user owns, is never removed. It looks in MINDX_ARENA_DIR,
    or else in /dev/shm.

    \b
    [bold]Exit code[/bold]
    0  done, also when there was nothing to remove (no checkpoint on a disk is ever removed)
    1  something could not be removed
    2  wrong usage: MINDX_ARENA_DIR is no folder

    \b
    [bold]Examples[/bold]
    mindx-elastic clean
    mindx-elastic clean --yes
    mindx-elastic clean --all --yes
    mindx-elastic clean --json | jq '.found[] | select(.action == "kept")'
    """
    from mindx_elastic.config import MemorySettings

    base = MemorySettings.from_env().base or Path("/dev/shm")
    if not base.is_dir():
        fail(f"{base} is not a folder")
    report = _clean(base, dry_run=not yes, everything=everything)
    show(report, as_json, _print)
    if any(entry["action"] == _FAILED for entry in report["found"]):
        raise typer.Exit(EXIT_BAD)


def _clean(base: Path, *, dry_run: bool, everything: bool) -> dict[str, Any]:
    from mindx_elastic.memory.leftovers import find_leftovers

    try:
        found, others = find_leftovers(base)
    except OSError as error:
        fail(str(error))
    entries = [_entry(each, dry_run=dry_run, everything=everything) for each in found]
    return {
        "schema": _SCHEMA,
        "base": str(base),
        "dry_run": dry_run,
        "freed_bytes": sum(entry["size_bytes"] for entry in entries if entry["action"] in (_REMOVED, _WOULD)),
        "found": entries,
        "not_ours": [str(path) for path in others],
    }


def _entry(found: Leftover, *, dry_run: bool, everything: bool) -> dict[str, Any]:
    """What is done with it, and why."""
    from mindx_elastic.memory.folders import remove_unused

    action, why = _WOULD, "--all" if everything else ""
    if found.kind != "job":
        why = f"{found.kind} {found.pid} is gone"
    elif found.directory and not found.directory_exists:
        why = "its checkpoint directory has gone"
    if found.in_use:
        action, why = _IN_USE, found.in_use
    elif not why:
        action = _KEPT
    elif not dry_run:
        try:
            action, why = (_REMOVED, why) if remove_unused(found.path) else (_IN_USE, "a job has begun to use it")
        except OSError as error:
            action, why = _FAILED, f"{error.strerror or error}: {os.fspath(error.filename or found.path)}"
    content = {name: value for name, value in asdict(found).items() if name not in ("in_use", "size")}
    done = {"path": str(found.path), "action": action, "why": why, "size_bytes": found.size}
    return content | done | {"age_s": round(found.age_s, 3)}


def _print(console: Console, report: dict[str, Any]) -> None:
    for each in report["found"]:
        about = _describe(each) if each["kind"] == "job" else f"{each['why']}, {human_size(each['size_bytes'])}"
        say(console, f"{each['action']}  {each['path']}: {about}")
    for path in report["not_ours"]:
        say(console, f"left alone  {path}: not a folder of ours")
    if any(each["action"] == _KEPT for each in report["found"]):
        say(console, "to go on from what was kept, start the job again with the same command")
        say(console, "to drop it: mindx-elastic clean --all --yes")
    if not report["found"]:
        say(console, f"nothing of this user's jobs in {report['base']}")
        return
    freed = human_size(report["freed_bytes"])
    say(console, f"{freed} would be freed by --yes" if report["dry_run"] else f"{freed} freed")


def _describe(arena: dict[str, Any]) -> str:
    """What is in it, or was: with --all, that is what is lost."""
    step = arena["newest_step"]
    content = "no snapshot of all ranks" if step is None else f"snapshot of step {step}"
    words = [f"{content} for {arena['directory'] or 'an unknown directory'}"]
    words += [f"run {arena['run_id']}"] if arena["run_id"] else []
    words += [counted(len(arena["ranks"]), "rank"), human_size(arena["size_bytes"])]
    words.append(f"begun {human_age(arena['age_s'])} ago")
    return ", ".join(words) + (f" ({arena['why']})" if arena["why"] else "")
