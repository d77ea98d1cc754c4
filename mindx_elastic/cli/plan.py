"""``mindx-elastic plan``: the plan of the next start, made before any process is started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from mindx_elastic.cli import checkpoints
from mindx_elastic.cli.common import (
    EXIT_BAD,
    EXIT_GOOD,
    EXIT_NOTHING,
    JsonOption,
    fail,
    is_folder,
    moment,
    print_table,
    say,
    show,
)
from mindx_elastic.core.moment import moment_name
from mindx_elastic.core.printable import counted, human_size, printable
from mindx_elastic.core.rank_lists import rank_list, rank_ranges
from mindx_elastic.start.unused_state import find_unused_state, remarks

if TYPE_CHECKING:
    from mindx_elastic.platforms.faults import Faults
    from mindx_elastic.start.facts import FileFact, RankPlan, Refusal, Rejected, ResumePlan
    from mindx_elastic.start.inventory import Inventory

__all__ = ["plan_command"]

_MAX_ROWS = 12
_KEY_WIDTH = 9
_COLUMNS = ("ranks", "read", "each", "from")
_UNASKED_WORLD = 1 << 16
"""Ranks; a larger world is planned for when it is asked for, or when the files are there."""


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
    archive: Annotated[
        str | None, typer.Option(metavar="URL", help="The second place of the files; default: MINDX_ARCHIVE.")
    ] = None,
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
    from mindx_elastic.config import Settings
    from mindx_elastic.platforms.plan_files import write_env_file, write_plan
    from mindx_elastic.start.facts import KnownFaults, ResumePlan, World
    from mindx_elastic.start.inventory import until_sound
    from mindx_elastic.start.planner import newest_world_size

    archive = Settings.from_env().archive if archive is None else archive
    # Of a start script, or a new machine; else a slip of the pen.
    is_first_start = bool(emit_env or archive) and not os.path.lexists(path)
    if not is_first_start and not is_folder(path):
        fail(f"{path} is a file: give the checkpoint directory (mindx-elastic inspect looks at one file)")
    found = checkpoints.look_at(path, archive)
    if found.unread_archive:
        fail(found.unread_archive)
    if not found.facts:
        found.rejected += _leftovers(path, found)
    is_nothing = not (found.facts or found.rejected)
    report = _gather_faults(faults, fault_ranks, max((fact.world_size for fact in found.facts), default=None))
    if world_size is None:
        world_size = newest_world_size(found.facts) or 1
        _refuse_if_only_claimed(found, world_size)
    world, known, digests = World(world_size), KnownFaults.of(report.ranks, report.created), _Digests(path, found)

    def make() -> ResumePlan | Refusal:
        return found.plan(world, known, step=step)

    plan = until_sound(found, make, digests.check) if verify else make()
    if write:
        write_plan(path, plan)
    if emit_env is not None:
        write_env_file(emit_env, plan)
    document = {**_document(path, found, plan, report), "asked_step": step, "digests_checked": verify}
    document |= {"checked_files": len(digests.seen), "checked_bytes": digests.nbytes}
    show(document, as_json, lambda console, _: _print(console, plan, document, is_nothing=is_nothing))
    if isinstance(plan, ResumePlan):
        raise typer.Exit(EXIT_GOOD)
    raise typer.Exit(EXIT_NOTHING if is_nothing else EXIT_BAD)


def _leftovers(directory: Path, found: Inventory) -> list[Rejected]:
    """What is no reason to plan, and keeps a start from being a fresh one."""
    from mindx_elastic.persist.storage import quarantined
    from mindx_elastic.start.facts import Rejected

    infos = {path: entry.info for path, entry in found.entries.items()}
    left = [
        Rejected(path, f"is not meant for resuming ({info.kind})")
        for path, info in infos.items()
        if info is not None and not info.resumable
    ]
    aside = checkpoints.set_aside(len(quarantined(directory)))
    return [*left, *([Rejected(f"{directory}/quarantine", aside)] if aside else [])]


def _gather_faults(report: str | None, ranks: str | None, world_size: int | None) -> Faults:
    """All that is said to be faulty. `report`: a path, or ``none``; None: what the platform has mounted, if anything.

    Raises UsageError for whatever is not understood in full, and for ranks that a job of `world_size` does not have.
    """
    from mindx_elastic.config import FaultPaths
    from mindx_elastic.platforms.faults import Faults, default_fault_sources, merge, parse_rank_list, read_faults

    sources = [] if report in (None, "none") else [Path(report)]
    faults = Faults()
    for source in default_fault_sources(FaultPaths.from_env()) if report is None else sources:
        faults = merge(faults, read_faults(source, world_size=world_size))
    if ranks is not None:
        faults = merge(faults, Faults(parse_rank_list(ranks, world_size=world_size), source="--fault-ranks"))
    return faults


def _refuse_if_only_claimed(found: Inventory, size: int) -> None:
    """A plan for a million ranks takes a minute: not because one small file says that it is one of a million."""
    from mindx_elastic.errors import UsageError

    if size > _UNASKED_WORLD and size > 16 * len(found.facts):
        raise UsageError(
            f"the step that goes first says that {size} ranks wrote it, and {len(found.facts)} files are here; give "
            "the number of ranks of the new start with --world-size"
        )


class _Digests:
    """Reads the files of plans and compares their digests, each once."""

    def __init__(self, directory: Path, found: Inventory) -> None:
        from mindx_elastic.start.findings import reader_trust

        self._entries, self._owners = found.entries, reader_trust(directory).of(directory)
        self.seen: set[str] = set()
        self.nbytes = 0

    def check(self, plan: ResumePlan | Refusal) -> Iterator[tuple[None, FileFact, str]]:
        """The files that a start with this plan could not read, as `start.inventory.until_sound` wants them."""
        from mindx_elastic.persist.catalog import read_entry

        for fact in _files_used(plan):
            if fact.path in self.seen or fact.address:  # the start checks what it fetches
                continue
            entry = self._entries[fact.path]
            self.seen.add(fact.path)
            self.nbytes += entry.size
            problem = "; ".join(checkpoints.check_digests(entry, self._owners))
            if not problem and read_entry(entry.path, entry, self._owners) is not entry:  # by a job that runs
                problem = "was replaced while it was looked at; call again"
            if problem:
                yield None, fact, problem


def _files_used(plan: ResumePlan | Refusal) -> list[FileFact]:
    """All files that a start may read: those of the ranks, then the first of each old rank for those that assemble."""
    from mindx_elastic.start.facts import Refusal

    if isinstance(plan, Refusal):
        return []
    found = {fact.path: fact for share in plan.ranks for fact in (share.file, *share.others)}
    if any(share.assembled for share in plan.ranks):
        found |= {facts[0].path: facts[0] for facts in plan.files.values()}
    return list(found.values())


def _document(path: Path, found: Inventory, plan: ResumePlan | Refusal, faults: Faults) -> dict[str, Any]:
    """What ``--json`` prints: `plan_files.plan_to_json`, and what this command adds. The screen shows the same."""
    from mindx_elastic.core.certificate import proof_of
    from mindx_elastic.platforms.plan_files import plan_to_json
    from mindx_elastic.start.facts import ResumePlan

    unfinished = "the platform has not finished its report: call again before the start"
    document = plan_to_json(plan, path)
    document |= {
        "directory": str(path),
        "reasons": [],
        "proof": None,
        "archived_files": sum(bool(fact.address) for fact in _files_used(plan)),
        "faults_from": faults.source,
        "faults_problems": [unfinished] if faults.initializing else [],
        **find_unused_state(path),
    }
    if isinstance(plan, ResumePlan):
        infos = [info for each in plan.ranks if (info := found.entries[each.file.path].info) is not None]
        document["reasons"] = list(dict.fromkeys(info.reason for info in infos))
        proof = proof_of([info.certificate for info in infos], document["inexact"])
        document |= {"exact": proof.exact, "proof": proof.words}
    return document


# --- as lines and a table: the verdict, what it costs, who reads what; ranks that do the same share a line ---


def _print(console: Console, plan: ResumePlan | Refusal, document: dict[str, Any], *, is_nothing: bool) -> None:
    from mindx_elastic.start.facts import Refusal

    said = remarks(document, None if isinstance(plan, Refusal) else plan.step)
    if is_nothing:
        _print_nothing(console, document["directory"], is_fresh=not said)
    elif isinstance(plan, Refusal):
        _print_refusal(console, plan, document)
    else:
        _print_plan(console, plan, document)
    say(console, *said)


# --- there is a plan ---


def _print_plan(console: Console, plan: ResumePlan, document: dict[str, Any]) -> None:
    """`document`: what ``--json`` prints."""
    say(console, Text.assemble(("RESTORABLE ", "bold green"), printable(f"from {moment_name(plan.moment)}")))
    _print_facts(console, _facts(plan, document))
    console.print()
    print_table(console, _COLUMNS, _rows(plan, document["directory"]), left="ranks|read|from")
    total = f"{human_size(document['total_bytes'])} to read"
    say(console, f"{counted(plan.world.size, 'rank')}, {total} in all")
    _print_rejected(console, "not used:", plan.rejected, document["directory"])


def _print_facts(console: Console, facts: Sequence[tuple[str, str, str]]) -> None:
    """Key, text and style of the text."""
    say(console, *(Text.assemble(f"  {key:<{_KEY_WIDTH}} ", (printable(text), style)) for key, text, style in facts))


def _facts(plan: ResumePlan, document: dict[str, Any]) -> list[tuple[str, str, str]]:
    causes = [text for text in document["reasons"] if text not in document["kinds"]]
    why = ", ".join(document["kinds"]) + (f" ({'; '.join(causes[:3])})" if causes else "")
    fetches = bool(document["archived_files"])
    lost, seen = plan.steps_lost or 0, plan.step + (plan.steps_lost or 0)
    return [
        ("saved", f"{moment(document['created'])}: {why}", ""),
        ("position", f"epoch {plan.epoch}, step {plan.step_in_epoch} in it", ""),
        ("exact", document["proof"], {True: "green", None: "", False: "yellow"}[document["exact"]]),
        *(("", reason, "yellow") for reason in document["inexact"][1:]),
        ("lost", f"{counted(lost, 'step')}: up to {seen} had been seen", "yellow")
        if lost
        else ("lost", "nothing that was saved later", ""),
        *([("archive", f"{document['archived_files']} of these files have to be fetched", "")] * fetches),
        ("world", _worlds(plan, document), ""),
        *_inputs(document),
        ("restore", _restore(document), ""),
    ]


def _inputs(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    if ranks := document["faults"]:
        said = f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}"
        rows.append(("faults", f"{said} ({document['faults_from']})", "yellow"))
    rows += [("", problem, "yellow") for problem in document["faults_problems"][:3]]
    if not document["digests_checked"]:
        rows.append(("digests", "NOT checked: damaged files would only be found by the start itself", "yellow"))
    elif document["checked_files"] or document["restorable"]:  # else no step got so far
        size = human_size(document["checked_bytes"])
        rows.append(("digests", f"checked: {counted(document['checked_files'], 'file')}, {size}", ""))
    return rows


def _worlds(plan: ResumePlan, document: dict[str, Any]) -> str:
    def text(size: int, mesh: dict[str, int] | None) -> str:
        names = f" ({', '.join(f'{name}={n}' for name, n in mesh.items())})" if mesh else ""
        return f"{counted(size, 'rank')}{names}"

    old = text(document["old_world_size"], document["old_mesh"])
    if not plan.resharded:
        return f"{old}, as before"
    return f"{old} become {text(document['new_world_size'], document['new_mesh'])}"


def _restore(document: dict[str, Any]) -> str:
    if not document["restore_ranks_map"]:
        return "RESTORE_RANKS=-1 (dying saves alone, taken as whole files, are not enough)"
    donors = document["restore_ranks"].split(",")
    more = f",... ({len(donors)} donors)" if len(donors) > 16 else ""
    return f"RESTORE_RANKS={','.join(donors[:16])}{more}"


# --- who reads what ---


def _rows(plan: ResumePlan, directory: str) -> Iterator[tuple[str, str, str, str]]:
    groups: dict[str, list[RankPlan]] = {}
    for each in plan.ranks:
        kind = "parts of several files" if each.assembled else "own file" if each.donor is None else "another rank's"
        groups.setdefault(kind, []).append(each)
    for kind, ranks in groups.items():
        what = f"{rank_list({each.file.rank for each in ranks})}'s file" if kind == "another rank's" else kind
        if any(each.others for each in ranks):
            what += " and parts of others'"
        low, high = (human_size(bound(map(plan.bytes_of, ranks))) for bound in (min, max))
        size = high if low == high else f"{low} to {high}"
        path = checkpoints.relative(ranks[0].file.path, directory) + (" and others" if len(ranks) > 1 else "")
        yield rank_ranges(each.rank for each in ranks), what, size, path


def _print_rejected(console: Console, title: str, rejected: Sequence[Rejected], directory: str) -> None:
    """What has the same reason shares a line."""
    if not rejected:
        return
    by_reason: dict[str, list[str]] = {}
    for each in rejected:
        by_reason.setdefault(each.reason, []).append(checkpoints.relative(each.what, directory))
    console.print()
    console.print(title, style="bold")
    for reason, names in list(by_reason.items())[:_MAX_ROWS]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(console, f"  {', '.join(names[:3])}{more}: {reason}")
    hidden = sum(len(names) for names in list(by_reason.values())[_MAX_ROWS:])
    if hidden:
        console.print(f"  and {hidden} more for other reasons (--json lists them)")


# --- there is none ---


def _print_refusal(console: Console, refusal: Refusal, document: dict[str, Any]) -> None:
    """Why nothing can be restored, and what to do about it."""
    directory = document["directory"]
    say(console, Text.assemble(("NOT RESTORABLE ", "bold red"), printable(f"from what is in {directory}")))
    _print_facts(console, _inputs(document))
    _print_rejected(console, "why:", refusal.reasons, directory)
    console.print()
    console.print("what to do:", style="bold")
    say(console, *(f"  - {line}" for line in _remedies(refusal, document)))


def _remedies(refusal: Refusal, document: dict[str, Any]) -> list[str]:
    lines = []
    if document["asked_step"] is not None:
        lines.append("leave out --step: another step may do")
    if refusal.other_worlds:
        sizes = " or ".join(map(str, refusal.other_worlds))
        lines.append(f"start with {sizes} ranks as before")
    if refusal.faults:
        lines.append("if the fault report names ranks that were well, correct it, or leave it out (--faults none)")
    if any(each.moment for each in refusal.reasons):
        lines.append("bring back files that are missing: mount the disk of their node, or copy them here")
    if any(each.moment is None for each in refusal.reasons):
        lines.append("put good copies in the place of files that cannot be used, if there are any elsewhere")
    lines.append("`mindx-elastic inspect` shows all steps, `mindx-elastic verify` every damaged file")
    lines.append('to start over on purpose give the job an empty directory, or resume="never"; nothing is deleted')
    return lines


def _print_nothing(console: Console, directory: str, *, is_fresh: bool) -> None:
    """There is no file. is_fresh: and nothing else is known of a job that was here."""
    line = f"no checkpoint found in {directory}"
    if is_fresh:
        line += ": there is nothing to restore, the job starts from the beginning"
    say(console, line)
