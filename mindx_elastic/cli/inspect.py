"""``mindx-elastic inspect``: the catalog as a table, or the header of one file."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from mindx_elastic.cli.checkpoints import entries_at, look_at, nothing_found, relative
from mindx_elastic.cli.common import (
    EXIT_BAD,
    EXIT_GOOD,
    EXIT_NOTHING,
    JsonOption,
    PathArgument,
    human_age,
    is_folder,
    moment,
    print_table,
    say,
    show,
)
from mindx_elastic.core.certificate import proof_of
from mindx_elastic.core.printable import human_size, listed, printable
from mindx_elastic.start.unused_state import find_unused_state, remarks

if TYPE_CHECKING:
    from mindx_elastic.persist.catalog import CatalogEntry
    from mindx_elastic.persist.format import CheckpointInfo, Header
    from mindx_elastic.start.inventory import Inventory, SavedStep

__all__ = ["inspect_command"]

_COLUMNS = ("attempt", "step", "epoch", "reason", "ranks", "complete?", "size", "age")
_MOST_MISSING = 4096  # that are listed: a file of a few bytes may say that it is one of a million
_OF_A_FILE = (
    *("run_id", "step", "epoch", "step_in_epoch", "batch_num", "kind", "reason", "not_kept", "rank", "world_size"),
    *("attempt", "resumable", "created", "torch_version"),
)
_SCHEMA = 2


def inspect_command(
    path: PathArgument,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints under a directory, newest run, attempt and step first; of one file show the content.

    Reads only headers, and never trusts file names; `mindx-elastic verify` reads every byte. A step is complete when a
    start of as many ranks goes on from it exactly: every rank's file exists, or at least its small state next to a
    replica's file. Files that cannot be used are listed below the table with the reason.

    \b
    [bold]Exit code[/bold]
    0  something was found and shown
    1  the one file asked for cannot be used
    2  wrong usage, for example no such path
    3  no checkpoint was found, or none that can be used

    \b
    [bold]Examples[/bold]
    mindx-elastic inspect ckpt
    mindx-elastic inspect ckpt/rank_0/resnet-2_17_breakpoint.safetensors
    mindx-elastic inspect ckpt --json | jq '.newest_complete_step'
    """
    if not is_folder(path):
        (entry,) = entries_at(path)
        details = _describe_file(entry)
        show({"schema": _SCHEMA, "file": details}, as_json, lambda console, _: _print_file(console, details))
        raise typer.Exit(EXIT_BAD if entry.problem else EXIT_GOOD)
    inventory = look_at(path)
    show(_report(path, inventory, now=time.time()), as_json, _print)
    is_any = any(entry.header is not None for entry in inventory.entries.values())
    raise typer.Exit(EXIT_GOOD if is_any else EXIT_NOTHING)


def _report(directory: Path, inventory: Inventory, *, now: float) -> dict[str, Any]:
    """The JSON document; the table is printed from it, so that the two cannot disagree."""
    from mindx_elastic.persist.storage import quarantined

    newest = inventory.newest_complete()
    return {
        "schema": _SCHEMA,
        "directory": str(directory),
        "newest_complete_step": None if newest is None else newest.moment[2],
        "newest_complete_run_id": None if newest is None else newest.moment[0],
        "newest_complete_attempt": None if newest is None else newest.moment[1],
        "steps": [_step(step, now) for step in inventory.steps],
        "problems": [_problem(entry) for entry in inventory.entries.values() if entry.problem is not None],
        "quarantined": len(quarantined(directory)),
        **find_unused_state(directory),
    }


def _step(step: SavedStep, now: float) -> dict[str, Any]:
    run_id, attempt, number = step.moment
    files = [_file(entry) for entry in step.entries]
    best: dict[int, CatalogEntry] = {}
    for entry, file in zip(step.entries, files, strict=True):
        best.setdefault(file["rank"], entry)
    infos = [entry.info for entry in best.values() if entry.info is not None]
    created = max(file["created"] for file in files)
    return {
        "run_id": run_id,
        "attempt": attempt,
        "step": number,
        "epoch": infos[0].epoch,
        "step_in_epoch": infos[0].step_in_epoch,
        "batch_num": infos[0].batch_num,
        "kind": infos[0].kind,
        "reasons": list(dict.fromkeys(info.reason for info in infos)),
        "unmanaged": list(dict.fromkeys(note for info in infos for note in info.unmanaged)),
        "proof": _proof_of(infos),
        "world_size": step.world_size,
        "ranks": sorted(best),
        "missing_ranks": list(step.missing_ranks[:_MOST_MISSING]),
        "num_missing_ranks": len(step.missing_ranks),
        "complete": step.is_complete,
        "why_incomplete": step.why_incomplete,
        "resumable": bool(step.facts),
        "size_bytes": sum(entry.size for entry in best.values()),
        "created": created,
        "age_s": round(now - created, 3),
        "files": files,
    }


def _file(entry: CatalogEntry) -> dict[str, Any]:
    info = entry.info
    assert info is not None  # files of a step have a good header
    return {
        "path": str(entry.path),
        "rank": info.rank,
        "kind": info.kind,
        "reason": info.reason,
        "resumable": info.resumable,
        "size_bytes": entry.size,
        "created": info.created,
    }


def _problem(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "problem": entry.problem,
        "foreign": entry.foreign,
        "looks_ours": entry.looks_ours,
        "size_bytes": entry.size,
    }


def _print(console: Console, report: dict[str, Any]) -> None:
    runs: dict[str, list[dict[str, Any]]] = {}
    for step in report["steps"]:
        runs.setdefault(step["run_id"], []).append(step)
    for run_id, steps in runs.items():
        say(console, f"run {run_id}", style="bold")
        rows = map(_cells, steps)
        print_table(console, _COLUMNS, rows, left="reason|ranks|complete?")
    _print_remarks(console, report)


def _proof_of(infos: Sequence[CheckpointInfo]) -> str:
    against = [note for info in infos for note in info.unmanaged]
    return proof_of([info.certificate for info in infos], against).words


def _cells(step: dict[str, Any]) -> list[Text]:
    reason = step["kind"]
    reasons = [text for text in step["reasons"] if text != step["kind"]]
    if reasons:
        reason += f": {'; '.join(reasons)}"
    epoch = f"{step['epoch']} ({step['step_in_epoch']}/{step['batch_num']})"
    return [
        Text(str(step["attempt"])),
        Text(str(step["step"]), style="bold"),
        Text(epoch),
        Text(printable(reason)),
        Text(f"{len(step['ranks'])}/{step['world_size']}"),
        Text("yes", style="green") if step["complete"] else Text("NO", style="bold red"),
        Text(human_size(step["size_bytes"])),
        Text(human_age(step["age_s"])),
    ]


def _print_remarks(console: Console, report: dict[str, Any]) -> None:
    lines = []
    for step in report["steps"]:
        if step["why_incomplete"]:
            lines.append(f"step {step['step']} (attempt {step['attempt']}) is not complete: {step['why_incomplete']}")
    lines += _notes(report)
    if report["problems"]:
        lines += ["", "cannot be used:"]
        lines += [f"  {relative(each['path'], report['directory'])}: {each['problem']}" for each in report["problems"]]
    lines += ["", *_proof(report), *_conclusion(report), *remarks(report, report["newest_complete_step"])]
    say(console, *lines)


def _notes(report: dict[str, Any]) -> list[str]:
    """What is known against an exact resume, each with the steps whose files say it."""
    steps: dict[str, list[str]] = {}
    for step in reversed(report["steps"]):
        for note in step["unmanaged"]:
            steps.setdefault(note, []).append(str(step["step"]))
    return [
        f"not exact from step{'s' if len(numbers) > 1 else ''} {listed(list(dict.fromkeys(numbers)), 8)}: {note}"
        for note, numbers in steps.items()
    ]


def _proof(report: dict[str, Any]) -> list[str]:
    """What the newest complete step says of resumes; what is against it stands above."""
    newest = [report[f"newest_complete_{key}"] for key in ("run_id", "attempt", "step")]
    proofs = [step["proof"] for step in report["steps"] if [step["run_id"], step["attempt"], step["step"]] == newest]
    return [f"exact: {proof}" for proof in proofs if not proof.startswith("no: ")]


def _conclusion(report: dict[str, Any]) -> list[str]:
    directory = report["directory"]
    if not report["steps"]:
        return [nothing_found(directory, report["quarantined"], usable="usable " if report["problems"] else "")]
    if report["newest_complete_step"] is None:
        lines = ["no step is complete"]
        if re.fullmatch(r"rank_\d+", Path(directory).absolute().name):
            lines[0] += "; only one rank's folder was looked at, give the folder above it"
    else:
        step, attempt = report["newest_complete_step"], report["newest_complete_attempt"]
        lines = [f"newest complete step: {step} (attempt {attempt})"]
    lines[-1] += "  (digests not checked; mindx-elastic verify does)"
    return lines


# --- one file ---


def _describe_file(entry: CatalogEntry) -> dict[str, Any]:
    """The JSON document of one file."""
    described: dict[str, Any] = {
        "path": str(entry.path),
        "size_bytes": entry.size,
        "problem": entry.problem,
        "foreign": entry.foreign,
    }
    header = entry.header
    if header is None:
        return described
    info = header.info
    return {
        **described,
        **{name: getattr(info, name) for name in _OF_A_FILE},
        "unmanaged": list(info.unmanaged),
        "proof": _proof_of([info]),
        "coordinates": dict(info.coordinates),
        "append_info": list(info.append_info),
        "num_tensors": len(header.entries),
        "tensor_bytes": sum(tensor.end - tensor.start for tensor in header.entries.values()),
        "parts": _parts(header),
    }


def _parts(header: Header) -> list[dict[str, Any]]:
    """The state summed up by its outermost keys (``model``, ``optimizer``, ``rng``), in the order they were saved."""
    from mindx_elastic.persist.flatten import tensor_names

    tree = header.tree
    plain = isinstance(tree, dict) and not any(key.startswith("$") for key in tree)
    parts = []
    for name, node in tree.items() if plain else [("state", tree)]:
        tensors = [header.entries[tensor] for tensor in tensor_names(node) if tensor in header.entries]
        part = {"name": name, "num_tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors)}
        parts.append({**part, "dtypes": list(dict.fromkeys(tensor.dtype for tensor in tensors))})
    return parts


def _print_file(console: Console, details: dict[str, Any]) -> None:
    """The same for a person."""
    say(console, details["path"], style="bold")
    if details["problem"]:
        say(console, Text.assemble(("  BAD   ", "bold red"), printable(details["problem"])))
        return
    for name, value in details.items():
        if name not in ("path", "parts") and value not in (None, "", [], {}):
            say(console, f"  {name:<13} {_SHOWN.get(name, str)(value)}")
    for part in details["parts"]:
        words = [str(part["num_tensors"]), f"tensors, {human_size(part['bytes'])}", *part["dtypes"]]
        say(console, f"  {part['name']:<13} {' '.join(words)}")


_SHOWN: dict[str, Callable[[Any], str]] = {"created": moment, "size_bytes": human_size, "tensor_bytes": human_size}
"""How values of a file are shown that are not shown as they are."""
