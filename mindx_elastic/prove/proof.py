"""Decides which runs are made and what they show.

First the script runs twice without a stop: is it deterministic at all? Then it is stopped and resumed again and again
in one chain of runs, each from the checkpoint of the one before; a chain that has once differed starts over for the
next stop. Kills are for `drill`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from mindx_elastic.core.printable import counted
from mindx_elastic.prove.baseline import (
    Baseline,
    ProofReport,
    Row,
    Show,
    count_steps,
    failure,
    resumed_failure,
)
from mindx_elastic.prove.causes import Explained, explain
from mindx_elastic.prove.compare import earliest, lost_variables
from mindx_elastic.prove.control import PlannedStop
from mindx_elastic.prove.records import WitnessedStep
from mindx_elastic.prove.runs import RunChain, RunOutcome, Runs

__all__ = ["choose_stops", "prove"]


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
            verdict = resumed_failure(resumed)
        if verdict is None and (found := earliest(self.reference, resumed.lives)) is not None:
            explained = explain(found)
            verdict = Row(outcome="differs", explained=explained, rank=found.life.rank, step=found.step)
        verdict = verdict or resumed_failure(resumed, stopped=is_stopped) or self.length(resumed)
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
