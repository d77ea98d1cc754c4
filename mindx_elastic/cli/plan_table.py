"""Prints a plan, or the reasons why there is none, as a table and lines for a person.

The verdict comes first, then what it costs, then who reads what; ranks that do the same share a line, so that 16,384 of
them fit on a screen. Everything in full is in ``--json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from mindx_elastic.cli.checkpoints import relative
from mindx_elastic.cli.common import moment, print_table, say
from mindx_elastic.core.moment import moment_name
from mindx_elastic.core.printable import counted, human_size, printable
from mindx_elastic.core.rank_lists import rank_list, rank_ranges
from mindx_elastic.start.facts import RankPlan, Refusal, Rejected, ResumePlan

__all__ = ["print_nothing", "print_plan", "print_refusal"]

_MAX_ROWS = 12
_KEY_WIDTH = 9
_COLUMNS = ("ranks", "read", "each", "from")


# --- there is a plan ---


def print_plan(console: Console, plan: ResumePlan, document: dict[str, Any]) -> None:
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
    lost, seen = plan.steps_lost or 0, plan.step + (plan.steps_lost or 0)
    return [
        ("saved", f"{moment(document['created'])}: {why}", ""),
        ("position", f"epoch {plan.epoch}, step {plan.step_in_epoch} in it", ""),
        ("exact", document["proof"], {True: "green", None: "", False: "yellow"}[document["exact"]]),
        *(("", reason, "yellow") for reason in document["inexact"][1:]),
        ("lost", f"{counted(lost, 'step')}: up to {seen} had been seen", "yellow")
        if lost
        else ("lost", "nothing that was saved later", ""),
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
        path = relative(ranks[0].file.path, directory) + (" and others" if len(ranks) > 1 else "")
        yield rank_ranges(each.rank for each in ranks), what, size, path


def _print_rejected(console: Console, title: str, rejected: Sequence[Rejected], directory: str) -> None:
    """What has the same reason shares a line."""
    if not rejected:
        return
    by_reason: dict[str, list[str]] = {}
    for each in rejected:
        by_reason.setdefault(each.reason, []).append(relative(each.what, directory))
    console.print()
    console.print(title, style="bold")
    for reason, names in list(by_reason.items())[:_MAX_ROWS]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(console, f"  {', '.join(names[:3])}{more}: {reason}")
    hidden = sum(len(names) for names in list(by_reason.values())[_MAX_ROWS:])
    if hidden:
        console.print(f"  and {hidden} more for other reasons (--json lists them)")


# --- there is none ---


def print_refusal(console: Console, refusal: Refusal, document: dict[str, Any]) -> None:
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


def print_nothing(console: Console, directory: str, *, is_fresh: bool) -> None:
    """There is no file. is_fresh: and nothing else is known of a job that was here."""
    line = f"no checkpoint found in {directory}"
    if is_fresh:
        line += ": there is nothing to restore, the job starts from the beginning"
    say(console, line)
