"""``mindx-elastic inspect``: the catalog as a table, or the header of one file."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindx_elastic.cli.common import (
    EXIT_BAD,
    EXIT_NOTHING,
    JSON_SCHEMA,
    JsonOption,
    PathArgument,
    human_age,
    human_size,
    is_folder,
    nothing_found,
    print_table,
    say,
    show,
)
from mindx_elastic.cli.verify import check_entries, entries_at
from mindx_elastic.core.certificate import proof_of
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.start.unused_state import find_unused_state, remarks

if TYPE_CHECKING:
    from mindx_elastic.persist.catalog import CatalogEntry
    from mindx_elastic.persist.format import CheckpointInfo, Header
    from mindx_elastic.start.inventory import Inventory, SavedStep

__all__ = ["inspect_command"]

_COLUMNS = ("attempt", "step", "epoch", "reason", "ranks", "complete?", "verified?", "size", "age")
_MOST_MISSING = 4096  # that are listed: a file of a few bytes may say that it is one of a million
_OF_A_FILE = (
    *("run_id", "step", "epoch", "step_in_epoch", "batch_num", "kind", "reason", "not_kept", "rank", "world_size"),
    *("attempt", "resumable", "created", "torch_version"),
)
_Findings = dict[Path, list[str]]  # of the files whose digests were recomputed: what is wrong


def inspect_command(
    path: PathArgument,
    as_json: JsonOption = False,
    verify: Annotated[bool, typer.Option("--verify", help="Also recompute the digests; reads every byte.")] = False,
) -> None:
    """List the checkpoints under a directory, newest run, attempt and step first; of one file show the content.

    Reads only headers (and never trusts file names) unless --verify is given; without it the column "verified?"
    shows "-". A step is complete when a start of as many ranks goes on from it exactly: every rank's file exists, or
    at least its small state next to a replica's file. Files that cannot be used are listed below the table with the
    reason.

    \b
    [bold]Exit code[/bold]
    0  something was found and shown (with --verify: and every digest is right)
    1  --verify found damage, or the one file asked for cannot be used
    2  wrong usage, for example no such path
    3  no checkpoint was found, or none that can be used

    \b
    [bold]Examples[/bold]
    mindx-elastic inspect ckpt
    mindx-elastic inspect ckpt --verify
    mindx-elastic inspect ckpt/rank_0/resnet-2_17_breakpoint.safetensors
    mindx-elastic inspect ckpt --json | jq '.newest_complete_step'
    """
    if is_folder(path):
        raise typer.Exit(_inspect_folder(path, as_json=as_json, verify=verify))
    raise typer.Exit(_inspect_file(path, as_json=as_json, verify=verify))


def _inspect_file(path: Path, *, as_json: bool, verify: bool) -> int:
    from mindx_elastic.start.findings import reader_trust

    (entry,) = entries_at(path)
    problems = [entry.problem] if entry.problem else []
    if verify:
        problems = check_entries([entry], reader_trust(path).of(path))[0]
    details = _describe_file(entry, problems, verified=not problems if verify else None)
    show({"schema": JSON_SCHEMA, "file": details}, as_json, lambda console, _: _print_file(console, details))
    return EXIT_BAD if problems else 0


def _inspect_folder(path: Path, *, as_json: bool, verify: bool) -> int:
    from mindx_elastic.start.findings import list_files, reader_trust, scan
    from mindx_elastic.start.inventory import Inventory

    trust = reader_trust(path)
    inventory = Inventory.merge([scan(list_files([path]), trust=trust)])
    good = [entry for entry in inventory.entries.values() if entry.header is not None]
    findings: _Findings | None = None
    if verify:
        verdicts = check_entries(good, trust.of(path))
        findings = {entry.path: found for entry, found in zip(good, verdicts, strict=True)}
    report = _report(path, inventory, findings, now=time.time())
    show(report, as_json, _print)
    if not good:
        return EXIT_NOTHING
    return EXIT_BAD if any((findings or {}).values()) else 0


def _report(directory: Path, inventory: Inventory, findings: _Findings | None, *, now: float) -> dict[str, Any]:
    """The JSON document; the table is printed from it, so that the two cannot disagree."""
    from mindx_elastic.persist.storage import quarantined

    steps = [_step(step, findings, now) for step in inventory.steps]
    for fact in inventory.facts:
        if problems := (findings or {}).get(Path(fact.path)):
            inventory.forget(None, fact, problems[0])
    newest = inventory.newest_complete()
    return {
        "schema": JSON_SCHEMA,
        "directory": str(directory),
        "newest_complete_step": None if newest is None else newest.moment[2],
        "newest_complete_run_id": None if newest is None else newest.moment[0],
        "newest_complete_attempt": None if newest is None else newest.moment[1],
        "digests_checked": findings is not None,
        "steps": steps,
        "problems": [_problem(entry) for entry in inventory.entries.values() if entry.problem is not None],
        "quarantined": len(quarantined(directory)),
        **find_unused_state(directory),
    }


def _step(step: SavedStep, findings: _Findings | None, now: float) -> dict[str, Any]:
    run_id, attempt, number = step.moment
    files = [_file(entry, findings) for entry in step.entries]
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
        "verified": None if findings is None else all(file["verified"] for file in files),
        "size_bytes": sum(entry.size for entry in best.values()),
        "created": created,
        "age_s": round(now - created, 3),
        "files": files,
    }


def _file(entry: CatalogEntry, findings: _Findings | None) -> dict[str, Any]:
    info = entry.info
    assert info is not None  # files of a step have a good header
    problems = [] if findings is None else findings[entry.path]
    return {
        "path": str(entry.path),
        "rank": info.rank,
        "kind": info.kind,
        "reason": info.reason,
        "resumable": info.resumable,
        "size_bytes": entry.size,
        "created": info.created,
        "verified": None if findings is None else not problems,
        "problems": problems,
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
        print_table(console, _COLUMNS, rows, left="reason|ranks|complete?|verified?", wraps="reason")
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
        _yes_no(step["complete"]),
        _yes_no(step["verified"]),
        Text(human_size(step["size_bytes"])),
        Text(human_age(step["age_s"])),
    ]


def _yes_no(value: bool | None) -> Text:
    if value is None:
        return Text("-")
    return Text("yes", style="green") if value else Text("NO", style="bold red")


def _print_remarks(console: Console, report: dict[str, Any]) -> None:
    lines = []
    for step in report["steps"]:
        if step["why_incomplete"]:
            lines.append(f"step {step['step']} (attempt {step['attempt']}) is not complete: {step['why_incomplete']}")
        for file in step["files"]:
            if file["problems"]:
                lines.append(f"{file['path']}: {'; '.join(file['problems'])}")
    lines += _notes(report)
    if report["problems"]:
        lines += ["", "cannot be used:"]
        lines += [
            f"  {_relative(entry['path'], report['directory'])}: {entry['problem']}" for entry in report["problems"]
        ]
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
        verified = " and verified" if report["digests_checked"] else ""
        number, attempt = report["newest_complete_step"], report["newest_complete_attempt"]
        lines = [f"newest complete{verified} step: {number} (attempt {attempt})"]
    if not report["digests_checked"]:
        lines[-1] += "  (digests not checked; --verify does)"
    return lines


def _relative(path: str, directory: str) -> str:
    return str(Path(path).relative_to(directory)) if path != directory else path


# --- one file ---


def _describe_file(entry: CatalogEntry, problems: Sequence[str], *, verified: bool | None) -> dict[str, Any]:
    """The JSON document of one file. `verified` is None when the digests were not recomputed."""
    described: dict[str, Any] = {
        "path": str(entry.path),
        "size_bytes": entry.size,
        "problems": list(problems),
        "foreign": entry.foreign,
        "verified": verified,
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
    for problem in details["problems"]:
        say(console, Text.assemble(("  BAD   ", "bold red"), printable(problem)))
    if "run_id" not in details:
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _lines(details):
        grid.add_row(Text(f"  {printable(name)}"), Text(printable(value)))
    console.print(grid)


def _lines(details: dict[str, Any]) -> list[tuple[str, str]]:
    try:
        created = f"{datetime.fromtimestamp(details['created']).astimezone():%Y-%m-%d %H:%M:%S %z}"
    except (OverflowError, ValueError, OSError):  # a header may hold any number
        created = "at a time that no calendar has"
    age = human_age(time.time() - details["created"])
    reason = details["kind"] if details["reason"] == details["kind"] else f"{details['kind']}: {details['reason']}"
    verified = {None: "not checked (--verify does)", True: "right", False: "wrong"}[details["verified"]]
    lines = [
        ("run", details["run_id"]),
        ("step", str(details["step"])),
        ("epoch", f"{details['epoch']} (batch {details['step_in_epoch']} of {details['batch_num']})"),
        ("reason", reason),
        ("rank", f"{details['rank']} of {details['world_size']}"),
        ("created", f"{created} ({age} ago)"),
        ("resumable", "yes" if details["resumable"] else "NO"),
        ("attempt", str(details["attempt"])),
        ("torch", details["torch_version"] or "-"),
        ("size", human_size(details["size_bytes"])),
        ("digests", verified),
    ]
    lines.append(("exact", details["proof"]))
    lines += [("", note) for note in details["unmanaged"][1:]]
    lines += [("not kept", f"{details['not_kept']} (change in the training)")] if details["not_kept"] else []
    lines += [("coordinates", str(details["coordinates"]))] if details["coordinates"] else []
    lines += [("append_info", str(details["append_info"]))] if details["append_info"] else []
    lines.append(("state", f"{_count(details['num_tensors'], 'tensor')}, {human_size(details['tensor_bytes'])}"))
    for part in details["parts"]:
        lines.append((f"  {part['name']}", _part_line(part)))
    return lines


def _part_line(part: dict[str, Any]) -> str:
    count = _count(part["num_tensors"], "tensor")
    return f"{count}, {human_size(part['bytes'])}, {' '.join(part['dtypes'])}" if part["num_tensors"] else "no tensor"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
