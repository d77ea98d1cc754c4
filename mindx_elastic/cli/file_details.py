"""One checkpoint file in detail, for ``mindx-elastic inspect FILE``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindx_elastic.cli.common import human_age, human_size, printable

if TYPE_CHECKING:
    from mindx_elastic.persist.catalog import CatalogEntry
    from mindx_elastic.persist.format import Header

__all__ = ["describe_file", "print_file"]


def describe_file(entry: CatalogEntry, problems: Sequence[str], *, verified: bool | None) -> dict[str, Any]:
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
        "run_id": info.run_id,
        "step": info.step,
        "epoch": info.epoch,
        "step_in_epoch": info.step_in_epoch,
        "batch_num": info.batch_num,
        "kind": info.kind,
        "reason": info.reason,
        "rank": info.rank,
        "world_size": info.world_size,
        "attempt": info.attempt,
        "resumable": info.resumable,
        "created": info.created,
        "torch_version": info.torch_version,
        "coordinates": dict(info.coordinates),
        "append_info": list(info.append_info),
        "num_tensors": len(header.entries),
        "tensor_bytes": sum(tensor.end - tensor.start for tensor in header.entries.values()),
        "parts": _parts(header),
    }


def _parts(header: Header) -> list[dict[str, Any]]:
    """The tensors summed up by the first part of their name (``model``, ``optimizer``), in file order."""
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in header.entries.items():
        top = name.partition(".")[0]
        part = parts.setdefault(top, {"name": top, "num_tensors": 0, "bytes": 0, "dtypes": []})
        part["num_tensors"] += 1
        part["bytes"] += tensor.end - tensor.start
        if tensor.dtype not in part["dtypes"]:
            part["dtypes"].append(tensor.dtype)
    return list(parts.values())


def print_file(console: Console, details: dict[str, Any]) -> None:
    """The same for a person."""
    console.print(printable(details["path"]), style="bold", soft_wrap=True)
    for problem in details["problems"]:
        console.print(Text("  BAD  ", style="bold red"), printable(problem), soft_wrap=True)
    if "run_id" not in details:
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _lines(details):
        grid.add_row(f"  {name}", printable(value))
    console.print(grid)


def _lines(details: dict[str, Any]) -> list[tuple[str, str]]:
    created = datetime.fromtimestamp(details["created"]).astimezone()
    age = human_age(time.time() - details["created"])
    reason = details["kind"] if details["reason"] == details["kind"] else f"{details['kind']}: {details['reason']}"
    verified = {None: "not checked (--verify does)", True: "right", False: "wrong"}[details["verified"]]
    lines = [
        ("run", details["run_id"]),
        ("step", str(details["step"])),
        ("epoch", f"{details['epoch']} (batch {details['step_in_epoch']} of {details['batch_num']})"),
        ("reason", reason),
        ("rank", f"{details['rank']} of {details['world_size']}"),
        ("created", f"{created:%Y-%m-%d %H:%M:%S %z} ({age} ago)"),
        ("resumable", "yes" if details["resumable"] else "NO"),
        ("attempt", str(details["attempt"])),
        ("torch", details["torch_version"] or "-"),
        ("size", human_size(details["size_bytes"])),
        ("digests", verified),
    ]
    lines += [("coordinates", str(details["coordinates"]))] if details["coordinates"] else []
    lines += [("append_info", str(details["append_info"]))] if details["append_info"] else []
    lines.append(("tensors", f"{details['num_tensors']}, {human_size(details['tensor_bytes'])}"))
    for part in details["parts"]:
        plural = "" if part["num_tensors"] == 1 else "s"
        volume = f"{part['num_tensors']} tensor{plural}, {human_size(part['bytes'])}"
        lines.append((f"  {part['name']}", f"{volume}, {' '.join(part['dtypes'])}"))
    return lines
