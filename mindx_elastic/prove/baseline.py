"""The script without a stop, twice: what each step must be, whether that is the same each time; and how others compare.

`prove` stops the script and `drill` breaks it; both ask here what the uninterrupted run has done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindx_elastic.core.printable import listed
from mindx_elastic.prove.causes import Explained, explain_chance
from mindx_elastic.prove.compare import Reference, VariableNotRestored, earliest
from mindx_elastic.prove.records import ProcessRecord, Sample, of_kinds, split_kind
from mindx_elastic.prove.runs import RunChain, RunOutcome, Runs

__all__ = [
    "EXIT_CODES",
    "Baseline",
    "ProofReport",
    "Row",
    "Show",
    "count_steps",
    "failure",
    "resumed_failure",
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
                unequal = _unequal(one.end, step.end) | _unequal(one.begin or {}, step.begin or {})
                found.update(of_kinds(unequal, "scalar", "stateful", "variable"))
        for other in reference.same(life):
            found.update(_unequal(other.exit, life.exit) if other.exit and life.exit else ())
            if other.steps and life.steps:
                pair = [of_kinds(step.begin or step.end, "stream") for step in (other.steps[0], life.steps[0])]
                found.update(key for key in _unequal(*pair) if key in pair[0] and key in pair[1])
    return frozenset(found)


def _unequal(one: Sample, other: Sample) -> dict[str, str]:
    return {key: "" for key in {**one, **other} if one.get(key) != other.get(key)}


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


def resumed_failure(outcome: RunOutcome, *, stopped: bool = False) -> Row | None:
    """As `_failure`. The uninterrupted run has passed there, so this is a difference."""
    failed = failure(outcome, "the resumed run", stopped=stopped)
    return None if failed is None else replace(failed, outcome="differs")


def _fails(explained: Explained, outcome: RunOutcome) -> Row:
    return Row(outcome="fails", explained=explained, lines=outcome.last_lines)
