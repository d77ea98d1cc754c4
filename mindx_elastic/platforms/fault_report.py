"""What the platform knows of faults at this moment, read once for the planner (`fault_info` watches for changes).

A report may be given as a mounted ConfigMap folder, as one of its key files, as bare JSON, as a whole ConfigMap in JSON
or YAML (what ``kubectl get configmap ... -o yaml`` prints), or as ranks and node names on a command line. The forms
themselves are in `fault_forms`.

Every defect is a UsageError that names the file: a plan made from half a report could be wrong. So are ranks that the
job does not have (report and job do not belong together) and faulty nodes whose ranks nobody knows. That there is no
report at all is no defect where it is looked for by default, and is one where a person has named the file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mindx_elastic.config import FaultPaths
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.fault_forms import CHECK_KEY, DATA_KEYS, Faults, merge, parse_data, parse_text
from mindx_elastic.platforms.files import MAX_BYTES, read_mounted, read_small_file, whole_number
from mindx_elastic.platforms.rank_table import (
    NodeMap,
    nodes_from_rank_table,
    nodes_from_torchrun,
    read_rank_table,
)

__all__ = [
    "Faults",
    "NodeMap",
    "default_fault_sources",
    "default_node_map",
    "merge",
    "nodes_from_rank_table",
    "nodes_from_torchrun",
    "parse_faults",
    "parse_rank_list",
    "read_default_faults",
    "read_faults",
    "read_node_map",
    "widen",
]

_MOUNTED = ("fault-npus", "reset.json")  # into the containers of a job; the others are there for the cluster's services
_COMPANIONS = (CHECK_KEY, "restartType")  # the check code of a reset-config may cover both
_MAX_LISTED = 1 << 20


# --- text -------------------------------------------------------------------------------------------------------------


def parse_faults(text: str, source: str = "text", *, world_size: int | None = None) -> Faults:
    """The faults that `text` tells of, in any form; nodes are named and not widened yet (`Faults.widened`).

    * `source`: how a message names it.
    * `world_size`: ranks from here on are an error; None: not known.

    Raises UsageError for everything that is not understood in full.
    """
    with _named(source):
        return replace(parse_text(text, world_size=world_size), source=source)


def parse_rank_list(text: str, *, world_size: int | None = None) -> frozenset[int]:
    """``"1,3"``, ``"0-7"``, ``"0-3, 6"``; empty for no rank. Raises UsageError for anything else."""
    # Looked at by character: `str.strip` takes separators like \x1c for space.
    strange = next((c for c in text if c not in "0123456789,- "), None)
    if strange is not None:
        raise UsageError(f'rank list {text!r:.80}: {strange!r} does not belong there; give "1,3" or "0-7"')
    ranks: set[int] = set()
    listed = 0
    for part in text.split(",") if text.strip() else []:
        first_text, dash, last_text = part.partition("-")
        first = whole_number(first_text)
        last = whole_number(last_text) if dash else first
        if first is None or last is None:
            raise UsageError(f'rank list {text!r:.80}: {part.strip()!r:.40} is no rank; give "1,3" or "0-7"')
        if last < first:
            raise UsageError(f"rank list {text!r:.80}: the range {part.strip()!r:.40} counts down")
        if world_size is not None and last >= world_size:
            raise UsageError(f"rank list {text!r:.80}: rank {last}, but the job has ranks 0..{world_size - 1}")
        listed += last - first + 1
        if listed > _MAX_LISTED:
            raise UsageError(f"rank list {text!r:.80} names more than {_MAX_LISTED} ranks")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def widen(ranks: Collection[int], nodes: NodeMap, node_names: Collection[str]) -> frozenset[int]:
    """`ranks` and all ranks of the named nodes. Raises UsageError for a name that the job does not have (a person has
    typed it)."""
    return frozenset(ranks).union(*(nodes.ranks(name) for name in node_names))


# --- files ------------------------------------------------------------------------------------------------------------


def read_faults(source: Path, *, world_size: int | None, nodes: NodeMap | None = None) -> Faults:
    """The faults that a file or a mounted folder tells of, with all ranks of the nodes that it calls faulty.

    * `source`: the folder of a mounted ConfigMap; one of its key files (``fault-npus``, ``reset.json``), which is
      checked against the ``checkCode`` beside it; or any file with a report, see the module.
    * `world_size`: number of ranks of the job that has failed; ranks from here on are an error. None: not known.
    * `nodes`: which ranks a node has; needed only for a report that names nodes.

    Raises UsageError, with the path, for a file that is missing, cannot be read or is not understood in full.
    """
    with _named(source):
        faults = replace(_read(source, world_size), source=str(source))
        if not faults.nodes:
            return faults
        if nodes is None:
            names = ", ".join(faults.nodes[:8])
            raise ValueError(
                f"calls whole nodes faulty ({names}), and their ranks are not known: give the rank table "
                "(MINDX_RANK_TABLE), run under torchrun, or name the ranks yourself"
            )
        faults = faults.widened(nodes)
        if world_size is not None and max(faults.ranks, default=0) >= world_size:
            raise ValueError(
                f"calls nodes faulty that have rank {max(faults.ranks)}, but the job has ranks 0..{world_size - 1}: "
                "the rank table is that of another job"
            )
        return faults


def _read(source: Path, world_size: int | None) -> Faults:
    if source.is_dir():
        return _read_mount(source, DATA_KEYS, world_size)
    if source.name in _MOUNTED:
        return _read_mount(source.parent, (source.name,), world_size)
    text, _ = read_small_file(source)
    return parse_text(text, world_size=world_size, yaml=source.suffix.lower() in (".yaml", ".yml"))


def _read_mount(folder: Path, keys: tuple[str, ...], world_size: int | None) -> Faults:
    names = (*keys, *_COMPANIONS)
    found = read_mounted(folder, *names)
    data = {name: file[0] for name, file in zip(names, found, strict=True) if file is not None}
    if not any(key in data for key in keys):
        if len(keys) == 1:
            raise FileNotFoundError(2, "no such file")
        raise ValueError(f"is a folder with none of the files {', '.join(_MOUNTED)}: no mounted ConfigMap of faults")
    if sum(map(len, data.values())) > 2 * MAX_BYTES:
        raise ValueError(f"holds more than {MAX_BYTES >> 19} MiB")
    return parse_data(data, world_size=world_size)


# --- where the platform puts them -------------------------------------------------------------------------------------


def default_fault_sources(paths: FaultPaths) -> tuple[Path, ...]:
    """Those of the platform's files that are there; empty: there is no report."""
    files = (paths.fault_dir / "fault-npus", paths.reset_dir / "reset.json")
    return tuple(path for path in files if not _is_missing(path))


def _is_missing(path: Path) -> bool:
    """A file that is there and cannot be read is not missing: reading it says why."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def read_default_faults(env: Mapping[str, str] | None = None, *, world_size: int | None) -> Faults:
    """What the mounted files say (``MINDX_FAULT_DIR``, ``MINDX_RESET_DIR``); `Faults.none` where there are none.

    Raises UsageError as `read_faults` does.
    """
    faults = Faults.none()
    for source in default_fault_sources(FaultPaths.from_env(env)):
        faults = merge(faults, read_faults(source, world_size=world_size))
    return faults


def read_node_map(rank_table: Path) -> NodeMap:
    """The nodes of a rank table. Raises UsageError, with the path, where it is missing, malformed or not complete."""
    with _named(rank_table, "rank table"):
        return nodes_from_rank_table(read_rank_table(rank_table))


def default_node_map(env: Mapping[str, str] | None = None) -> NodeMap | None:
    """From the rank table (``MINDX_RANK_TABLE``, ``RANK_TABLE_FILE``) if one is named, else from torchrun's
    environment; None: neither is there. Raises UsageError where that which is there cannot be used."""
    env = os.environ if env is None else env
    table = FaultPaths.from_env(env).rank_table
    return nodes_from_torchrun(env) if table is None else read_node_map(table)


@contextmanager
def _named(source: Path | str, kind: str = "fault report") -> Iterator[None]:
    """Every defect inside becomes a UsageError that names `source`."""
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"{kind} {source}: there is no such file") from None
    except OSError as error:
        raise UsageError(f"{kind} {source} cannot be read ({error.strerror})") from error
    except RecursionError:
        raise UsageError(f"{kind} {source} is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{kind} {source} {error}") from None
