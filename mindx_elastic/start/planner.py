"""(files, faults, own states, new world) -> a resume plan, or a refusal with its reasons. Pure: same inputs, same plan.

The newest step wins for which every part of every tensor is in some usable file of that step and attempt. Files of
several kinds (breakpoint, TTP, from memory, periodic) may complete a step together; files of several steps may not.
Files that a failing device wrote while the job was dying are not trusted: a file of a rank that the fault report names
is used unless it is a dying save of the last attempt.

Cost: linear in ranks times layouts (few) plus tensors. What a shard consists of is worked out only where it is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mindx_elastic.core.moment import Moment, moment_name
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.start.assumptions import settle_assumptions
from mindx_elastic.start.candidate import Candidate, Context
from mindx_elastic.start.facts import DYING_KINDS, FileFact, KnownFaults, Refusal, Rejected, ResumePlan, World

__all__ = ["bases_of", "newest_world_size", "order_of_moments", "plan_resume", "steps_before"]

NEAR = 2
"""Steps: an exact step that is at most so much older goes before one that is not exact. A killed rank lags by one at
most."""
_SHOWN = 3


class _Dated(Protocol):
    @property
    def moment(self) -> Moment: ...

    @property
    def generation(self) -> int: ...
    @property
    def created(self) -> float: ...


def plan_resume(
    files: Iterable[FileFact],
    world: World,
    *,
    faults: KnownFaults | Collection[int] = (),
    own_states: Mapping[Moment, Collection[int]] | None = None,
    rejected: Sequence[Rejected] = (),
    only: Collection[Moment] | None = None,
) -> ResumePlan | Refusal:
    """Choose what to resume from.

    files: usable ones; of a rank's several files of a step the one to try first in front. faults: of old ranks.
    own_states: for each step the ranks whose small state of it (random numbers, buffers) is in memory: with it and a
    replica's file they go on exactly. rejected: files that were sorted out before, for the record. only: the steps that
    may be taken; None: all.
    """
    everything = settle_assumptions(list(files))
    known = faults if isinstance(faults, KnownFaults) else KnownFaults(frozenset(faults))
    usable, distrusted = _sort_out(everything, known)
    by_moment: dict[Moment, list[FileFact]] = {}
    for fact in usable:
        by_moment.setdefault(fact.moment, []).append(fact)
    context = Context(world, known.ranks, own_states or {})
    reasons: list[Rejected] = []
    considered: dict[Moment, Candidate] = {}
    moments = [m for m in order_of_moments(everything) if only is None or m in only]
    bases = bases_of(everything)
    for moment in moments:
        candidate = considered[moment] = Candidate(moment, by_moment.get(moment, []), context)
        if candidate.problem:
            reasons.append(Rejected(moment_name(moment), _why(candidate, distrusted.get(moment)), moment))
            if (
                candidate.is_other_program
            ):  # an older step that happens to fit is of an older program, which was not asked for
                return Refusal((*reasons, *rejected), True, (), known.ranks, is_other_program=True)
            continue
        chosen = candidate
        if candidate.lacks_rank_state:  # not exact, and a step just before may be
            older = [m for m in steps_before(moment, bases) if m in by_moment and (only is None or m in only)]
            near = [Candidate(m, by_moment[m], context) for m in older]
            chosen = next((each for each in near if not each.problem and not each.inexact), candidate)
        if chosen is not candidate:
            reasons.append(Rejected(moment_name(moment), f"it would not be exact: {candidate.inexact[0]}", moment))
        newest = max(m[2] for m in moments if m[:2] == moment[:2])
        lost = newest - chosen.moment[2] if newest > chosen.moment[2] else None
        plan = chosen.plan()
        if ranks := distrusted.get(chosen.moment):
            what = f"{moment_name(chosen.moment)}, {rank_list(ranks)}"
            reasons.append(Rejected(what, _why_not_trusted(ranks)))
        return replace(plan, rejected=(*reasons, *rejected), steps_lost=lost)
    worlds = tuple(sorted({c.world_size for c in considered.values()} - {0, world.size}))
    return Refusal((*reasons, *rejected), bool(everything), worlds, known.ranks)


def order_of_moments(files: Iterable[_Dated]) -> list[Moment]:
    """All steps, the one to try first in front.

    First the run that was begun, or gone on with, last: starts are counted, since clocks may be wrong. Where files do
    not say it (of older versions), the run with the newest file. In it the last attempt, whose steps go before higher
    ones of earlier attempts because it began at a step that was chosen then; in it the highest step.
    """
    activity: dict[str, tuple[int, float]] = {}
    moments: set[Moment] = set()
    for fact in files:
        run = fact.moment[0]
        shown = fact.generation, fact.created
        activity[run] = max(shown, activity.get(run, shown))
        moments.add(fact.moment)
    return sorted(moments, key=lambda m: (*(-each for each in activity[m[0]]), m[0], -m[1], -m[2]))


def newest_world_size(files: Sequence[FileFact]) -> int | None:
    """The number of ranks that wrote the step to try first; None: there is no file."""
    first = next(iter(order_of_moments(files)), None)
    sizes = [(fact.created, fact.world_size) for fact in files if fact.moment == first]
    return max(sizes)[1] if sizes else None


def bases_of(files: Iterable[FileFact]) -> dict[tuple[str, int], Moment]:
    """The step that each attempt went on from, by run and attempt; without attempts whose files disagree about it."""
    found: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for fact in files:
        run, attempt, _ = fact.moment
        if fact.base is not None and fact.base[0] < attempt:
            found.setdefault((run, attempt), set()).add(fact.base)
    return {(run, attempt): (run, *bases.pop()) for (run, attempt), bases in found.items() if len(bases) == 1}


def steps_before(moment: Moment, bases: Mapping[tuple[str, int], Moment]) -> list[Moment]:
    """What the run passed in the `NEAR` steps before `moment`, the nearest first.

    Follows `moment` back through its own attempt to the step that it went on from, then through the attempt that passed
    that step. Attempts are branches and may have passed the same step with other weights, so those that `moment` does
    not descend from are left out. Where `moment` is the step at which its attempt began, the same step of the earlier
    attempt is included.
    """
    run, attempt, newest = moment
    found: list[Moment] = []
    for step in range(newest, max(newest - NEAR, 0) - 1, -1):
        found.append((run, attempt, step))  # the step that the attempt went on from may have been saved once more
        while (base := bases.get((run, attempt))) is not None and step <= base[2]:
            attempt = base[1]
            found.append((run, attempt, step))
    return found[1:]


def _sort_out(files: Sequence[FileFact], faults: KnownFaults) -> tuple[list[FileFact], dict[Moment, set[int]]]:
    """Files that may be used; and for each step the faulty ranks whose dying saves are not trusted."""
    # The last attempt that did not know the report is the one whose devices failed. Later ones began without them.
    last: dict[str, int] = {}
    for fact in files:
        run, attempt, _ = fact.moment
        if faults.report == 0 or fact.fault_report != faults.report:
            last[run] = max(attempt, last.get(run, attempt))
    usable: list[FileFact] = []
    distrusted: dict[Moment, set[int]] = {}
    for fact in files:
        run, attempt, _ = fact.moment
        known_then = faults.report != 0 and fact.fault_report == faults.report
        if fact.rank in faults.ranks and fact.kind in DYING_KINDS and attempt == last.get(run) and not known_then:
            distrusted.setdefault(fact.moment, set()).add(fact.rank)
        else:
            usable.append(fact)
    return usable, distrusted


def _why(candidate: Candidate, distrusted: Collection[int] | None) -> str:
    return f"{candidate.problem} ({_why_not_trusted(distrusted)})" if distrusted else candidate.problem


def _why_not_trusted(ranks: Collection[int]) -> str:
    return (
        f"the fault report names {rank_list(ranks)}, whose dying saves are not used: if that is wrong, "
        "correct the report, or start with MINDX_FAULT_DIR and MINDX_RESET_DIR naming folders that are not there"
    )
