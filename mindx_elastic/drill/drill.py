"""Decides which runs a drill makes, and what they show.

First the script runs twice without a fault, as for a proof. Then each fault is a separate job, from its first step to
the last one: a run with the fault, and the same command again as long as the job has not ended, as a person
or an orchestrator would give it. Every step of all its processes is compared with the uninterrupted run.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mindx_elastic.core.events import EVENTS_FILE, read_events
from mindx_elastic.core.posix import is_alive
from mindx_elastic.core.values import real
from mindx_elastic.drill.faults import KINDS, NOTE, Fault
from mindx_elastic.errors import UsageError
from mindx_elastic.prove.causes import Explained, explain
from mindx_elastic.prove.compare import earliest
from mindx_elastic.prove.proof import Baseline, ProofReport, Show, count_steps, failure
from mindx_elastic.prove.records import ProcessRecord
from mindx_elastic.prove.runs import RunChain, RunOutcome, Runs

__all__ = [
    "COLUMNS",
    "GOOD",
    "Drill",
    "DrillResult",
    "Driller",
    "cells",
    "draw_faults",
    "summary",
    "trained_again",
]

COLUMNS = ("fault", "exit codes", "reached", "resumed", "lost", "again s", "result")

GOOD = ("exact", "inexact as said")
"""Outcomes after which the exit code is 0."""
_MOST_STARTS = 4
_MOST_REPLACED = 100
_GONE_S = 60.0
"""How long the ranks of a run may take to end once its first process has: a grace period, and more."""
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class DrillResult:
    """What became of one fault."""

    fault: Fault
    outcome: str
    """One of `GOOD`; ``not fired``, ``failed`` or ``differs``."""
    explained: Explained | None = None
    """What is wrong, or what the run itself has said against an exact resume; None: exact."""
    rank: int | None = None
    step: int | None = None
    """The step of the first difference."""
    codes: Sequence[int] = ()
    """Exit codes of all starts."""
    reached: int | None = None
    """The last step that all ranks had passed when it fired."""
    resumed: int | None = None
    """The step that the job went on from; None: from the beginning."""
    lost: int | None = None
    """Steps that were done again; None: it did not go on."""
    compared: int = 0
    again_s: float | None = None
    """Seconds from the fault until every rank had passed a step again; None: it did not come to that."""
    lines: Sequence[str] = ()
    """The end of what the run has printed, where it failed."""

    @property
    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        found = None if self.explained is None else self.explained._asdict()
        return {**vars(self), "fault": str(self.fault), "explained": found}


@dataclass
class Drill:
    """Everything that is reported."""

    proof: ProofReport = field(default_factory=ProofReport)
    """The proof of the runs without a fault."""
    results: list[DrillResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        if self.proof.exit_code:
            return self.proof.exit_code
        return int(not self.results or any(result.outcome not in GOOD for result in self.results))

    @property
    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        faults = [result.document for result in self.results]
        proof = {"uninterrupted": self.proof.document, "faults": faults}
        return {"exit_code": self.exit_code, "summary": summary(self), "notes": self.notes, **proof}


def draw_faults(places: Sequence[tuple[int, int]], *, ranks: int, agent: bool, seed: int) -> Iterator[Fault]:
    """Faults by `seed`, of all kinds that `--random` draws, without an end. `places`: guard and step of each boundary
    but the last. A job may have no workers there: then the fault does not fire."""
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS.values() if kind.by_chance and (agent or not kind.agent)]
    while True:
        kind = chance.choice(kinds)
        guard, step = chance.choice(places)
        fault = Fault(
            kind=kind.name, rank=chance.randrange(ranks), step=step, guard=guard, at=chance.choice(kind.places)
        )
        yield fault


class Driller(Baseline):
    """Makes all runs. Main thread."""

    def __init__(
        self,
        runs: Runs,
        *,
        faults: Sequence[Fault],
        number: int = 0,
        seed: int = 0,
        steps: int = 0,
        show: Show = lambda done, planned, what: None,
        into: Drill,
    ) -> None:
        """The `faults`, and `number` others by `seed`, each in a separate job. `into`: gets each result at once, so
        that an interrupted drill has them."""
        super().__init__(runs, steps=steps, show=show, planned=2 + 2 * (len(faults) + number))
        self._command = runs.command
        self._faults, self._number, self._seed = list(faults), number, seed
        self.result, into.proof = into, self.proof

    def drill(self) -> None:
        """Raises UsageError for a fault that the script cannot have: a rank or a step that does not exist."""
        first = self.first_run()
        if first is None:
            return
        for fault in self._faults:
            self._check(fault)
        if not self.is_deterministic(first):
            return
        places = [step.place for step in self.steps][:-1]
        if self._number and not places:
            raise UsageError("--random: the runs have no boundary before the last one; give --steps 2 or more")
        for fault in self._faults:
            self.result.results.append(self._job(fault))
        self._by_chance(places)

    def _by_chance(self, places: Sequence[tuple[int, int]]) -> None:
        """As many as are asked for; one that the job cannot have is replaced by the next one that is drawn."""
        agent, ranks = self._command.agent is not None, self.proof.num_ranks
        drawn = draw_faults(places, ranks=ranks, agent=agent, seed=self._seed)
        results = self.result.results
        wanted, replaced = len(results) + self._number, list[str]()
        while len(results) < wanted:
            result = self._job(next(drawn))
            if result.outcome == "not fired" and result.fault.needs_more and len(replaced) < _MOST_REPLACED:
                replaced.append(str(result.fault))
            else:
                results.append(result)
        if replaced:
            self.result.notes.append(f"drawn, cannot happen in this job, and replaced: {'; '.join(replaced)}")

    def _check(self, fault: Fault) -> None:
        ranks = sorted(self.reference.by_rank)
        if fault.rank not in ranks:
            raise UsageError(f"--fault {fault}: the script has {len(ranks)} rank{'s' * (len(ranks) != 1)}, from 0")
        last = [number for series, number in self.reference.places(fault.rank) if series == fault.guard]
        if not last:
            raise UsageError(f"--fault {fault}: the script enters no guard number {fault.guard}; the first one is 0")
        latest = last[-1] - (fault.at == "boundary")
        latest -= fault.about.stops and len(ranks) > 1
        if fault.step > latest:
            raise UsageError(
                f"--fault {fault}: the runs have {last[-1]} steps, so this fault needs a step up to {latest}; "
                "give a smaller one, or longer runs with --steps"
            )

    # --- one fault ---

    def _job(self, fault: Fault) -> DrillResult:
        """One job with this fault, started again until it has ended."""
        chain, codes, offset = self.runs.chain(), list[int](), time.time() - time.monotonic()
        first, fruitless = 0, 0
        while fruitless < _MOST_STARTS - 1:
            had_fired = bool(_note_of(chain))
            what = f"{fault}, until it fires" if not had_fired and not fruitless else f"{fault}, again"
            outcome = self.run(chain, what, fault=asdict(fault), last=self.last, hashes=len(codes))
            _wait_for_end(outcome.lives)
            has_just_fired = not had_fired and bool(_note_of(chain))
            first = len(codes) if has_just_fired else first
            codes.append(outcome.code)
            if outcome.hung_s or self._is_over(chain):
                break
            fruitless = 0 if has_just_fired else fruitless + 1
            if has_just_fired and fault.kind == "lose-node":
                self._clear_memory()
        result = self._judge(fault, chain, codes[first:], offset)
        self.runs.drop(chain)
        self._clear_memory()
        return result

    def _is_over(self, chain: RunChain) -> bool:
        """The job has ended: no other start would do anything."""
        return chain.runs[-1].code == 0 and self.length(_together(chain)) is None

    def _clear_memory(self) -> None:
        """What a fault has left in shared memory must not be found by the next job."""
        if self.runs.memory is not None:
            for path in self.runs.memory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)

    def _judge(self, fault: Fault, chain: RunChain, codes: Sequence[int], offset: float) -> DrillResult:
        """`codes`: of all starts from the one in which it happened."""
        fired = _note_of(chain)
        result = DrillResult(fault=fault, outcome="exact", codes=codes)
        if not fired or "missed" in fired:
            why = fired.get("missed", "the run has not come to its place")
            return replace(result, outcome="not fired", explained=Explained(what=f"not fired: {why}"))
        lives = [life for run in chain.runs for life in run.lives]
        result = replace(result, compared=count_steps(lives))
        result = self._with_loss(result, lives, fired["clock"])
        events = _events_since(fired["clock"] + offset, [chain.directories, *(run.folder for run in chain.runs)])
        result = replace(result, again_s=trained_again(lives, fired["clock"]))
        return self._failed(result, chain) or self._differs(result, lives, chain, events) or result

    def _with_loss(self, result: DrillResult, lives: Sequence[ProcessRecord], fired: float) -> DrillResult:
        """`fired`: when. Guards before the fault's one have lost nothing, later ones have not begun."""
        guard, ranks = result.fault.guard, sorted(self.reference.by_rank)
        own = [life for life in lives if life.series == guard]
        before, after = ([life for life in own if (life.clock > fired) is late] for late in (False, True))
        passed, done = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        for rank, step in ((life.rank, step) for life in before if life.rank in done for step in life.steps):
            done[rank] = max(done[rank], step.number)  # a stop lets the ranks run to the step that they agree on
            if step.clock <= fired:
                passed[rank] = max(passed[rank], step.number)
        reached = min(passed.values())
        if not after:
            return replace(result, reached=reached)
        resumed = min(life.resumed or 0 for life in after[: len(ranks)])
        return replace(result, reached=reached, resumed=resumed or None, lost=max(0, min(done.values()) - resumed))

    # --- what can be wrong; None: it is not ---

    def _failed(self, result: DrillResult, chain: RunChain) -> DrillResult | None:
        last = chain.runs[-1]
        verdict = failure(last, "the run after the fault" if len(result.codes) > 1 else "the run")
        verdict = verdict or self.length(_together(chain))
        if verdict is None:
            return None
        return replace(result, outcome="failed", explained=verdict.explained, lines=last.last_lines)

    def _differs(
        self, result: DrillResult, lives: Sequence[ProcessRecord], chain: RunChain, events: Sequence[Mapping[str, Any]]
    ) -> DrillResult | None:
        found = earliest(self.reference, lives)
        if found is None:
            return None
        said = _said(events, lives, self.reference.lives)
        if said and found.life.resumed is not None:
            what = f"from step {found.step} on it is not bit for bit: {said}"
            return replace(
                result,
                outcome="inexact as said",
                explained=Explained(what=what),
                rank=found.life.rank,
                step=found.step,
            )
        explained = explain(found)
        lines = chain.runs[-1].last_lines
        return replace(
            result, outcome="differs", explained=explained, rank=found.life.rank, step=found.step, lines=lines
        )


def _wait_for_end(lives: Iterable[ProcessRecord]) -> None:
    """Ranks that have lost their agent save, and end by themselves: nobody starts the job again before."""
    end = time.monotonic() + _GONE_S
    while any(is_alive(life.pid, None) for life in lives) and time.monotonic() < end:
        time.sleep(_LOOK_S)


def _note_of(chain: RunChain) -> dict[str, Any]:
    """What a rank has noted of the fault; empty: no rank has come to its place."""
    try:
        note: dict[str, Any] = json.loads((chain.directories / NOTE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return note


def trained_again(lives: Iterable[ProcessRecord], fired: float) -> float | None:
    """Seconds until every rank had passed a step again; None: one of them has not. `fired`: on the clock of `lives`."""
    firsts: dict[int, float | None] = {}
    for life in lives:
        if life.clock > fired and firsts.get(life.rank) is None:
            firsts[life.rank] = min((step.clock for step in life.steps), default=None)
    known = [at for at in firsts.values() if at is not None]
    return max(known) - fired if known and len(known) == len(firsts) else None


def _events_since(time_s: float, folders: Iterable[Path]) -> list[dict[str, Any]]:
    """All events below these folders from then on (unix seconds), by time."""
    logs = [path for folder in folders for path in sorted(folder.rglob(EVENTS_FILE))]
    events = [event for path in logs for event in read_events(path)[0]]
    found = [event for event in events if (at := real(event.get("time"))) is not None and at >= time_s - 0.001]
    return sorted(found, key=lambda event: float(event["time"]))


def _together(chain: RunChain) -> RunOutcome:
    """All starts of a job as one run."""
    return replace(chain.runs[-1], lives=[life for run in chain.runs for life in run.lives])


def _said(events: Sequence[Mapping[str, Any]], lives: Sequence[ProcessRecord], known: Sequence[ProcessRecord]) -> str:
    """What the resumed processes have said against bit for bit; empty: nothing. `known`: of the uninterrupted run,
    whose notes are no news."""
    resumes = [event for event in events if event["event"] == "resume"]
    old = {note for life in known for note in life.notes}
    notes = [note for life in lives if life.resumed is not None for note in life.notes if note not in old]
    if not notes and all(event.get("exact") is not False for event in resumes):
        return ""
    notes += [str(note) for event in resumes for note in event.get("unmanaged") or ()]
    return "; ".join(dict.fromkeys(notes)) or "its resume says so (exact: false)"


# --- the result as rows ---


def cells(result: DrillResult) -> Sequence[str]:
    """One line of the table, as `COLUMNS`."""
    outcome = result.outcome
    if outcome == "differs" and result.step is not None:
        outcome = f"differs at step {result.step}"
    went_on = result.lost is not None
    return (
        str(result.fault),
        " ".join(map(str, result.codes)),
        "-" if result.reached is None else str(result.reached),
        "-" if not went_on else "fresh" if result.resumed is None else str(result.resumed),
        "-" if result.lost is None else str(result.lost),
        "-" if result.again_s is None else f"{result.again_s:.2f}",
        outcome,
    )


def summary(drill: Drill) -> str:
    """One line: how many faults fired, and what became of them."""
    counts = Counter(result.outcome for result in drill.results)
    fired = sum(result.outcome != "not fired" for result in drill.results)
    lost = [result.lost for result in drill.results if result.lost is not None]
    parts = [f"{counts[name]} {name}" for name in (*GOOD, *sorted(set(counts) - set(GOOD))) if counts[name]]
    return f"{fired} of {len(drill.results)} faults fired: {', '.join(parts) or 'none'}; {sum(lost)} steps done again"
