"""``mindx-elastic plan``: the plan of the next start, made before any process is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mindx_elastic.cli.common import EXIT_BAD, EXIT_GOOD, EXIT_NOTHING, JsonOption, fail, is_folder, say, show
from mindx_elastic.start.unused_state import find_unused_state, remarks

if TYPE_CHECKING:
    from mindx_elastic.cli.plan_inputs import Checked
    from mindx_elastic.platforms.faults import Faults
    from mindx_elastic.start.facts import Refusal, ResumePlan, World
    from mindx_elastic.start.inventory import Inventory

__all__ = ["plan_command"]

_UNASKED_WORLD = 1 << 16
"""Ranks; a larger world is planned for when it is asked for, or when the files are there."""


@dataclass(frozen=True)
class _Result:
    found: Inventory
    faults: Faults
    plan: ResumePlan | Refusal
    checked: Checked | None
    """None: digests were not looked at."""


def plan_command(
    path: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The checkpoint directory.", show_default=False, readable=False),
    ],
    faults: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The fault report; default: the mounted one, if any. none: read no report."),
    ] = None,
    fault_ranks: Annotated[str | None, typer.Option(metavar="RANKS", help="Faulty ranks: 1,3 or 0-7.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, max=1 << 18, metavar="N", help="Ranks of the new start; default: as before.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, metavar="N", help="Plan for this step, not the newest.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read the files that the plan uses and compare their digests.")
    ] = True,
    as_json: JsonOption = False,
    emit_env: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write RESTORE_RANKS and others as export lines for a shell.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write resume_plan.json into DIR.")] = False,
) -> None:
    """Show the plan of the next start: which step it would load and why, which rank reads which file, what is lost.

    Reads the headers and the fault report and plans as a start does; no process of the job needs to run. Then reads and
    checks the files of the plan (not with --no-verify); if one is damaged, plans again without it. Plans with files
    only: a start also finds what is left in the memory of its nodes, which is named for this machine.

    Writes nothing but the files asked for with --emit-env and --write. These are also written with exit codes 1 and 3,
    as RESTORE_RANKS=-1 and "restorable": false, so that no script takes yesterday's plan for today's; not with 2.

    \b
    [bold]Exit code[/bold]
    0  restorable
    1  not restorable: there are files, but no step can be resumed from them
    2  wrong usage: no such directory (with --emit-env: 3), a malformed report
    3  no checkpoint was found: a fresh start

    \b
    [bold]Examples[/bold]
    mindx-elastic plan ckpt
    mindx-elastic plan ckpt --fault-ranks 1,3
    mindx-elastic plan ckpt --emit-env resume.sh && . ./resume.sh
    mindx-elastic plan ckpt --json | jq '.step'
    """
    from mindx_elastic.cli.plan_inputs import find, gather_faults
    from mindx_elastic.platforms.plan_files import write_env_file, write_plan
    from mindx_elastic.start.facts import ResumePlan, World
    from mindx_elastic.start.planner import newest_world_size

    is_first_start = emit_env is not None and not os.path.lexists(path)  # of a start script; else a slip of the pen
    if not is_first_start and not is_folder(path):
        fail(f"{path} is a file: give the checkpoint directory (mindx-elastic inspect looks at one file)")
    found = find(path)
    largest = max((fact.world_size for fact in found.facts), default=None)
    report = gather_faults(faults, fault_ranks, largest)
    if world_size is None:
        world_size = newest_world_size(found.facts) or 1
        _refuse_if_only_claimed(found, world_size)
    result = _plan(path, found, report, World(world_size), step, verify=verify)
    if write:
        write_plan(path, result.plan)
    if emit_env is not None:
        write_env_file(emit_env, result.plan)
    document = {**_document(path, result), "asked_step": step}
    show(document, as_json, lambda console, _: _print(console, result, document))
    if isinstance(result.plan, ResumePlan):
        raise typer.Exit(EXIT_GOOD)
    raise typer.Exit(EXIT_BAD if found.facts or found.rejected else EXIT_NOTHING)


def _plan(path: Path, found: Inventory, faults: Faults, world: World, step: int | None, *, verify: bool) -> _Result:
    from mindx_elastic.cli.plan_inputs import plan_and_check
    from mindx_elastic.start.facts import KnownFaults

    known = KnownFaults.of(faults.ranks, faults.created)
    if verify:
        return _Result(found, faults, *plan_and_check(path, found, world, known, step))
    return _Result(found, faults, found.plan(world, known, step=step), None)


def _refuse_if_only_claimed(found: Inventory, size: int) -> None:
    """A plan for a million ranks takes a minute: not because one small file says that it is one of a million."""
    from mindx_elastic.errors import UsageError

    if size > _UNASKED_WORLD and size > 16 * len(found.facts):
        raise UsageError(
            f"the step that goes first says that {size} ranks wrote it, and {len(found.facts)} files are here; give "
            "the number of ranks of the new start with --world-size"
        )


def _document(path: Path, result: _Result) -> dict[str, Any]:
    """What ``--json`` prints: `plan_files.plan_to_json`, and what this command adds. The screen shows the same."""
    from mindx_elastic.core.certificate import proof_of
    from mindx_elastic.platforms.plan_files import plan_to_json
    from mindx_elastic.start.facts import ResumePlan

    plan, checked = result.plan, result.checked
    document = plan_to_json(plan, path)
    document |= {
        "directory": str(path),
        "reasons": [],
        "proof": None,
        "faults_from": result.faults.source,
        "faults_problems": _initializing(result.faults),
        "digests_checked": checked is not None,
        "checked_files": 0 if checked is None else checked.files,
        "checked_bytes": 0 if checked is None else checked.nbytes,
        **find_unused_state(path),
    }
    if isinstance(plan, ResumePlan):
        infos = [info for each in plan.ranks if (info := result.found.entries[each.file.path].info) is not None]
        document["reasons"] = list(dict.fromkeys(info.reason for info in infos))
        proof = proof_of([info.certificate for info in infos], document["inexact"])
        document |= {"exact": proof.exact, "proof": proof.words}
    return document


def _initializing(faults: Faults) -> list[str]:
    return ["the platform has not finished its report: call again before the start"] if faults.initializing else []


def _print(console: Console, result: _Result, document: dict[str, Any]) -> None:
    from mindx_elastic.cli.plan_table import print_nothing, print_plan, print_refusal
    from mindx_elastic.start.facts import Refusal, ResumePlan

    said = remarks(document, result.plan.step if isinstance(result.plan, ResumePlan) else None)
    if not (result.found.facts or result.found.rejected):
        print_nothing(console, document["directory"], is_fresh=not said)
    elif isinstance(result.plan, Refusal):
        print_refusal(console, result.plan, document)
    else:
        print_plan(console, result.plan, document)
    say(console, *said)
