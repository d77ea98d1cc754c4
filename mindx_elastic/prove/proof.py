"""Decides which runs of a script are made and what they show.

First the script runs twice without a stop: what must each step be, and is that the same each time? `prove` and `drill`
both begin so (`Baseline`). Then `prove` stops and resumes it again and again in one chain of runs, each from the
checkpoint of the one before; a chain that has once differed starts over for the next stop. Kills are for `drill`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindx_elastic.core.printable import counted, listed
from mindx_elastic.prove.causes import Explained, explain, explain_chance
from mindx_elastic.prove.compare import Reference, VariableNotRestored, earliest, lost_variables, unequal
from mindx_elastic.prove.control import PlannedStop
from mindx_elastic.prove.records import ProcessRecord, WitnessedStep, of_kinds, split_kind
from mindx_elastic.prove.runs import RunChain, RunOutcome, Runs

__all__ = [
    "EXIT_CODES",
    "Baseline",
    "ProofReport",
    "Row",
    "Show",
    "choose_stops",
    "count_steps",
    "failure",
    "prove",
]

EXIT_CODES = {"equal": 0, "differs": 1, "not deterministic": 3, "refused": 4, "fails": 4}
"""Exit codes by `Row.outcome` of the whole proof."""
_TOO_MANY = 8
_TOLD = ("scalar", "stateful", "exit")
Show = Callable[[int, int, str], None]
"""Runs made, runs planned, what the present one is."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a run has shown: one line of the table."""

    name: str = ""
    """``uninterrupted, again``, ``stopped after step 7``."""
    outcome: str = "equal"
    """``equal``, ``differs``, ``not deterministic``, ``refused`` or ``fails``."""
    explained: Explained | None = None
    """None: equal."""
    rank: int | None = None
    step: int | None = None
    lines: Sequence[str] = ()
    """The end of what the run has printed, where it failed."""
    resumed: int | None = None
    """The step that it went on from."""
    compared: int = 0
    """Steps that were compared."""
    lost: Sequence[VariableNotRestored] = ()
    """Variables of the program that the resumed run did not get back, though its steps are equal."""

    @property
    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        found = None if self.explained is None else self.explained._asdict()
        return {**vars(self), "explained": found, "lost": list(map(vars, self.lost))}


@dataclass
class ProofReport:
    """Everything that is reported."""

    steps: int = 0
    """Steps of the uninterrupted run."""
    has_ended: bool = False
    """They were the whole training."""
    num_ranks: int = 0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a user should know besides."""

    @property
    def verdict(self) -> Row:
        """The first row that is not equal; an empty one: all are."""
        return next((row for row in self.rows if row.outcome != "equal"), Row())

    @property
    def lost(self) -> list[VariableNotRestored]:
        """The variables of all rows, each once."""
        return list({lost.name: lost for row in reversed(self.rows) for lost in reversed(row.lost)}.values())[::-1]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict.outcome]

    @property
    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        verdict = {"outcome": self.verdict.outcome, "exit_code": self.exit_code}
        runs = [row.document for row in self.rows]
        return {**verdict, "steps": self.steps, "ranks": self.num_ranks, "notes": self.notes, "runs": runs}


class Baseline:
    """Makes the uninterrupted runs and knows what they did. Main thread."""

    def __init__(self, runs: Runs, *, steps: int, show: Show, planned: int) -> None:
        """`steps`: of the run; 0: as many as suit it. `planned`: how many runs there will be, about."""
        self.runs, self.proof = runs, ProofReport()
        self._steps, self._show = steps, show
        self._done, self._planned = 0, planned

    def run(self, chain: RunChain, what: str, **told: Any) -> RunOutcome:
        """See `Runs.run`."""
        self._show(self._done, self._planned, what)
        outcome = self.runs.run(chain, **told)
        self._done += 1
        self._show(self._done, self._planned, what)
        return outcome

    # --- without a stop ---

    def first_run(self) -> RunOutcome | None:
        """The reference. None: it cannot be one, and the proof says why."""
        proof, chain = self.proof, self.runs.chain()
        outcome = self.run(chain, "uninterrupted", steps=self._steps or -1)
        self.runs.drop(chain)
        if self.runs.why_fresh and self.runs.why_fresh != "--fresh":
            proof.notes.append(f"each run is a fresh interpreter: {self.runs.why_fresh}")
        self.reference = Reference(lives=outcome.lives)
        self.steps = self.reference.common_steps
        proof.steps, proof.num_ranks = len(self.steps), len(self.reference.by_rank)
        proof.has_ended = self.reference.has_ended
        proof.notes += dict.fromkeys(f"the guard says: {note}" for life in outcome.lives for note in life.notes)
        verdict = failure(outcome, "the uninterrupted run")
        if verdict is None and not self.steps:
            what = "the script has passed no step_end()" if outcome.lives else "the script has entered no guard"
            remedy = "Write `with guard:` around the loop and guard.step_end() at the end of each step"
            verdict = _fails(Explained(what=f"{what}, so there is nothing to prove", remedy=remedy), outcome)
        proof.rows.append(replace(verdict or Row(), name="uninterrupted"))
        return outcome if verdict is None else None

    def is_deterministic(self, first: RunOutcome) -> bool:
        """Whether a second run is as the `first` one. What differs in each run and decides nothing is left out."""
        chain, last = self.runs.chain(), self.steps[-1].place
        self.last = (last[0], 2 * last[1] + _TOO_MANY) if self.reference.has_ended else last
        again = self.run(chain, "uninterrupted, again", last=self.last, hashes=1)
        self.runs.drop(chain)
        self.reference = replace(self.reference, varying=_varying(self.reference, again.lives))
        verdict = failure(again, "the second uninterrupted run") or self.chance(again)
        row = replace(verdict, name="uninterrupted, again", compared=count_steps(again.lives))
        self.proof.rows.append(row)
        told = (split_kind(key) for key in self.reference.varying)
        left_out = [f"{name}{' when the script ends' * (kind == 'exit')}" for kind, name in told if kind in _TOLD]
        if left_out and verdict.outcome == "equal":
            names = listed(sorted(left_out), 5)
            self.proof.notes.append(f"not compared, because it differs in each run: {names}")
        return verdict.outcome == "equal"

    # --- comparing ---

    def chance(self, other: RunOutcome) -> Row:
        """Whether `other`, a run that nothing has stopped, is as the reference."""
        found = earliest(self.reference, other.lives)
        if found is None:
            return self.length(other) or Row()
        explained = explain_chance(found)
        return Row(outcome="not deterministic", explained=explained, rank=found.life.rank, step=found.step)

    def length(self, outcome: RunOutcome) -> Row | None:
        """A run that has neither been stopped nor reached the reference's last step."""
        if any(life.alarm is not None for life in outcome.lives):
            return None
        for rank in sorted(self.reference.by_rank):
            last = self.reference.places(rank)[-1]
            lives = [life for life in outcome.lives if life.rank == rank]
            begun = [(life.series, life.resumed or 0) for life in lives]
            reached = max([*begun, *(step.place for life in lives for step in life.steps)], default=(0, 0))
            if reached < last:
                what = f"the run ended after step {reached[1]}; the uninterrupted one went on to step {last[1]}"
                cause = (
                    "the loop counts steps or epochs by itself, or an early stop depends on something that is not kept"
                )
                remedy = "Let guard.epochs(n) or guard.position decide where it begins and ends"
                explained = Explained(what=what, cause=cause, remedy=remedy)
                lines = outcome.last_lines
                return Row(outcome="differs", explained=explained, rank=rank, step=reached[1], lines=lines)
        return None


def count_steps(lives: Iterable[ProcessRecord]) -> int:
    return len({step.place for life in lives for step in life.steps})


def _varying(reference: Reference, again: Sequence[ProcessRecord]) -> frozenset[str]:
    """What differs between two runs without a stop and decides nothing: scalars, parts of stateful objects, variables
    and weights at the exit, at any step; and streams that the first step begins with."""
    found: set[str] = set()
    for life in again:
        for step in life.steps:
            if (one := reference.step(life, step.number)) is not None:
                differing = [*unequal(one.end, step.end), *unequal(one.begin or {}, step.begin or {})]
                found.update(of_kinds(dict.fromkeys(differing, ""), "scalar", "stateful", "variable"))
        for other in reference.same(life):
            found.update(unequal(other.exit, life.exit) if other.exit and life.exit else ())
            if other.steps and life.steps:
                pair = [of_kinds(step.begin or step.end, "stream") for step in (other.steps[0], life.steps[0])]
                found.update(key for key in unequal(*pair) if key in pair[0] and key in pair[1])
    return frozenset(found)


def failure(outcome: RunOutcome, run: str, *, stopped: bool = False) -> Row | None:
    """Why the run did not come to its end; None: it did. `stopped`: a stop may be its end."""
    if outcome.refusal:
        return Row(outcome="refused", explained=Explained(what=f"{run} is refused: {outcome.refusal}"))
    if outcome.hung_s:
        what = f"{run} hangs: no step and no output for {outcome.hung_s:g} s"
        return _fails(Explained(what=what, remedy="Give it more time (--timeout), or look at its log"), outcome)
    if outcome.code == 0 or (stopped and any(life.alarm is not None for life in outcome.lives)):
        return None
    how = f"by signal {-outcome.code}" if outcome.code < 0 else f"with exit code {outcome.code}"
    said = "".join(f": {line}" for line in outcome.lines[-1:])
    return _fails(Explained(what=f"{run} fails {how}{said}"), outcome)


def _resumed_failure(outcome: RunOutcome, *, stopped: bool = False) -> Row | None:
    """As `_failure`. The uninterrupted run has passed there, so this is a difference."""
    failed = failure(outcome, "the resumed run", stopped=stopped)
    return None if failed is None else replace(failed, outcome="differs")


def _fails(explained: Explained, outcome: RunOutcome) -> Row:
    return Row(outcome="fails", explained=explained, lines=outcome.last_lines)


# --- with stops ---


def prove(
    runs: Runs, *, stops: int | None, steps: int, seed: int, show: Show = lambda done, planned, what: None
) -> ProofReport:
    """Make all runs. `stops`: how many boundaries; None: each one. `steps`: of the run; 0: as many as suit it."""
    return _Prover(runs, stops=stops, steps=steps, seed=seed, show=show).prove()


def choose_stops(
    places: Sequence[WitnessedStep], stops: int | None, *, seed: int, has_ended: bool
) -> list[tuple[int, int]]:
    """Series and number of the boundaries to stop at, in order: the training's end, an epoch's and the first one, where
    there are any, and others by `seed`, at least one. Where the training goes on after `places`, a stop is carried out
    before the last of them: at its own boundary or, within an accumulation window, at the end of that."""
    known = [step.place for step in places]
    cuts = [step.place for step in places[:-1] if step.cut]
    candidates = known if has_ended else [place for place in known[:-1] if not cuts or place <= cuts[-1]]
    if stops is None or stops >= len(candidates):
        return candidates
    ends = [one.place for one, other in itertools.pairwise(places) if other.epoch > one.epoch > 0]
    special = [*([known[-1]] if has_ended else []), *ends[:1], *known[:1]]
    chosen = list(dict.fromkeys(place for place in special if place in candidates))[: max(0, stops - 1)]
    others = [place for place in candidates if place not in chosen]
    return sorted([*chosen, *random.Random(seed).sample(others, stops - len(chosen))])


class _Prover(Baseline):
    def __init__(self, runs: Runs, *, stops: int | None, steps: int, seed: int, show: Show) -> None:
        super().__init__(runs, steps=steps, show=show, planned=2 + (stops or 10) + 1)
        self._stops, self._seed = stops, seed

    def prove(self) -> ProofReport:
        first = self.first_run()
        if first is None or not self.is_deterministic(first):
            return self.proof
        stops = choose_stops(self.steps, self._stops, seed=self._seed, has_ended=self.reference.has_ended)
        if not stops:
            what = f"the runs have no boundary to stop at: the proof is {counted(self.proof.steps, 'step')} long"
            explained = Explained(what=what, remedy="Give --steps 2 or more")
            self.proof.rows.append(Row(name="no stop", outcome="fails", explained=explained))
            return self.proof
        self._planned = 2 + len(stops) + 1
        ranks = sorted(self.reference.by_rank)
        choice = random.Random(self._seed)
        self._stop_in_chains([PlannedStop(series=s, step=n, rank=choice.choice(ranks)) for s, n in stops])
        return self.proof

    # --- with stops ---

    def _stop_in_chains(self, alarms: Sequence[PlannedStop]) -> None:
        chain: RunChain | None = None
        for index, alarm in enumerate(alarms):
            if chain is None:
                chain = self.runs.chain()
                first = self.run(chain, f"until it is {alarm}", alarm=alarm, last=self.last, hashes=index)
                verdict = failure(first, "an uninterrupted run", stopped=True) or self.chance(first)
                if verdict.outcome != "equal":
                    self.proof.rows.append(replace(verdict, name="uninterrupted, once more"))
                    return
            follows = alarms[index + 1] if index + 1 < len(alarms) else None
            stopped = chain.runs[-1]
            resumed = self.run(chain, f"{alarm}, resumed", alarm=follows, last=self.last, hashes=index + 1)
            row = self._row(str(alarm), stopped, resumed, is_stopped=follows is not None)
            self.proof.rows.append(row)
            if row.resumed is not None and row.resumed < alarm.step and row.outcome == "equal":
                self.proof.notes.append(f"{alarm}, it went on from step {row.resumed}: later steps were not saved")
            if row.outcome != "equal":
                self.runs.drop(chain)
                chain = None
        if chain is not None:
            self.runs.drop(chain)

    def _row(self, name: str, stopped: RunOutcome, resumed: RunOutcome, *, is_stopped: bool = False) -> Row:
        verdict = self._never_resumed(stopped, resumed)
        if verdict is None and resumed.refusal:
            verdict = _resumed_failure(resumed)
        if verdict is None and (found := earliest(self.reference, resumed.lives)) is not None:
            explained = explain(found)
            verdict = Row(outcome="differs", explained=explained, rank=found.life.rank, step=found.step)
        verdict = verdict or _resumed_failure(resumed, stopped=is_stopped) or self.length(resumed)
        lost = (each for life in resumed.lives for each in lost_variables(self.reference, life))
        return replace(
            verdict or Row(),
            name=name,
            resumed=max((life.resumed for life in resumed.lives if life.resumed is not None), default=None),
            compared=count_steps(resumed.lives),
            lost=list({each.name: each for each in lost}.values()) if verdict is None else (),
        )

    def _never_resumed(self, stopped: RunOutcome, resumed: RunOutcome) -> Row | None:
        fresh = next((life for life in resumed.lives if life.resumed is None), None)
        if fresh is None:
            return None
        before = next((life for life in stopped.lives if (life.rank, life.series) == (fresh.rank, fresh.series)), None)
        if before is None or not before.steps:
            return None
        step = before.steps[-1].number
        what = f"the run never resumed: it was stopped after step {step}, and started over with step 1"
        cause = 'the guard was told not to (resume="never"), or the stop saved nothing'
        remedy = 'Give the guard resume="auto"'
        if before.directory != fresh.directory:
            cause = f"its directory is another one each time: {before.directory}, then {fresh.directory}"
            remedy = "Give the guard the same directory at each start"
        elif before.outcome in ("", "finished"):
            cause = "the stop saved nothing: no callback of the guard answers the signal"
            remedy = "Add ExceptionCheckpoint to the callbacks, or do not leave the signal out of Guard(signals=...)"
        explained = Explained(what=what, cause=cause, remedy=remedy)
        return Row(outcome="differs", explained=explained, rank=fresh.rank, step=step + 1, lines=resumed.last_lines)
