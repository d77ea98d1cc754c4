"""One checkpoint file in detail, for ``mindx-elastic inspect FILE``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindx_elastic.cli.common import human_age, human_size
from mindx_elastic.core.printable import printable

if TYPE_CHECKING:
    from mindx_elastic.persist.catalog import CatalogEntry
    from mindx_elastic.persist.format import Header

__all__ = ["describe_file", "described_share", "print_file", "share_text"]

_DATA_TAGS = ("$tensor", "$ndarray", "$blob")
_PAIR_TAGS = ("$map", "$odict", "$counter")
_ITEM_TAGS = ("$tuple", "$set", "$frozenset", "$deque")


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
        "unmanaged": list(info.unmanaged),
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
        **described_share(header),
    }


def described_share(header: Header) -> dict[str, Any]:
    """Which parts of a divided state the file holds (from 1), and whose small states beside its own rank's."""
    from mindx_elastic.persist.places import neighbours_in

    held = header.held
    return {
        "divided_into": None if held is None else held.division.count,
        "holds_parts": None if held is None else [part + 1 for part in held.parts],
        "small_states_of": sorted(neighbours_in(header)),
    }


def share_text(share: dict[str, Any]) -> str:
    """The same in words; empty: the file holds all of its rank's state."""
    if share["divided_into"] is None:
        return ""
    parts = share["holds_parts"]
    numbers = ", ".join(map(str, parts))
    return f"part{'' if len(parts) == 1 else 's'} {numbers} of {share['divided_into']}"


def _parts(header: Header) -> list[dict[str, Any]]:
    """The state summed up by its outermost keys (``model``, ``optimizer``, ``rng``), in the order they were saved."""
    tree = header.tree
    plain = isinstance(tree, dict) and not any(key.startswith("$") for key in tree)
    parts = []
    for name, node in tree.items() if plain else [("state", tree)]:
        names, num_values = _contents(node)
        tensors = [header.entries[tensor] for tensor in names if tensor in header.entries]
        part = {"name": name, "num_tensors": len(tensors), "num_values": num_values}
        part["bytes"] = sum(tensor.nbytes for tensor in tensors)
        parts.append({**part, "dtypes": list(dict.fromkeys(tensor.dtype for tensor in tensors))})
    return parts


def _contents(tree: Any) -> tuple[list[str], int]:
    """Names of the tensors that a tree refers to, tied ones once, and how many values it holds itself.

    The tags are those of `persist.flatten`. A stack instead of recursion: the file decides how deep it is.
    """
    names: dict[str, None] = {}
    num_values = 0
    stack = [tree]
    while stack:
        node = stack.pop()
        tag = next((key for key in node if key.startswith("$")), None) if isinstance(node, dict) else None
        if tag in _DATA_TAGS:
            names[str(node[tag])] = None
        elif tag in _PAIR_TAGS and isinstance(node[tag], list):
            stack.extend(pair[-1] for pair in reversed(node[tag]) if isinstance(pair, list) and pair)
        elif tag in _ITEM_TAGS and isinstance(node[tag], list):
            stack.extend(reversed(node[tag]))
        elif tag is None and isinstance(node, (dict, list)):
            stack.extend(reversed(list(node.values()) if isinstance(node, dict) else node))
        else:
            num_values += 1
    return list(names), num_values


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
    if share_text(details):
        lines.append(("divided", f"{share_text(details)} of the state; the rest is in the files of other ranks"))
    if details["small_states_of"]:
        ranks = ", ".join(map(str, details["small_states_of"]))
        lines.append(("also holds", f"the small state (random numbers, buffers) of rank {ranks}"))
    lines += [("not exact" if n == 0 else "", note) for n, note in enumerate(details["unmanaged"])]
    lines += [("coordinates", str(details["coordinates"]))] if details["coordinates"] else []
    lines += [("append_info", str(details["append_info"]))] if details["append_info"] else []
    lines.append(("state", f"{_count(details['num_tensors'], 'tensor')}, {human_size(details['tensor_bytes'])}"))
    for part in details["parts"]:
        lines.append((f"  {part['name']}", _part_line(part)))
    return lines


def _part_line(part: dict[str, Any]) -> str:
    words = []
    if part["num_tensors"]:
        words.append(
            f"{_count(part['num_tensors'], 'tensor')}, {human_size(part['bytes'])}, {' '.join(part['dtypes'])}"
        )
    if part["num_values"] or not words:
        words.append(_count(part["num_values"], "value"))
    return "; ".join(words)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
