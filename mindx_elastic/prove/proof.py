"""Decides which runs are made and what they show.

First the script runs twice without a stop: is it deterministic at all? Then it is stopped and resumed again and again
in one chain of runs, each from the checkpoint of the one before; a chain that has once differed is begun anew for the
next stop. Kills are each a job of its own under the agent, which restarts it.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from mindx_elastic.core.printable import listed
from mindx_elastic.prove.causes import Explained, explain, explain_chance
from mindx_elastic.prove.compare import Difference, Reference, compare_life, split_kinds
from mindx_elastic.prove.control import Alarm
from mindx_elastic.prove.records import Life, Step
from mindx_elastic.prove.runs import Chain, Outcome, Runs
from mindx_elastic.prove.streams import numbers_between

__all__ = ["EXIT_CODES", "Proof", "Row", "Verdict", "choose_stops", "prove", "steps_in_words"]

EXIT_CODES = {"equal": 0, "differs": 1, "not deterministic": 3, "refused": 4, "fails": 4}
"""By `Verdict.outcome` of the whole proof."""
_ORDER = ("position", "entry", "begin", "fetch", "batch", "forward", "boundary", "exit")
_TOO_MANY = 8
Show = Callable[[int, int, str], None]
"""Runs made, runs planned, what the present one is."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one comparison has shown."""

    outcome: str
    """``equal``, ``differs``, ``not deterministic``, ``refused`` or ``fails``."""
    explained: Explained | None = None
    """None: equal."""
    rank: int | None = None
    step: int | None = None
    lines: Sequence[str] = ()
    """The end of what the run has printed, where it failed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    """``uninterrupted, again``, ``stopped after step 7``."""
    verdict: Verdict
    resumed: int | None = None
    """The step that it went on from."""
    compared: int = 0
    """Steps that were compared."""


@dataclass
class Proof:
    """Everything that is reported."""

    steps: int = 0
    """Steps of the uninterrupted run."""
    has_ended: bool = False
    """They were the whole training."""
    num_ranks: int = 0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a user should know besides."""
    writes: Sequence[str] = ()
    """Files of the user's that the script itself has written to, in any of the runs."""

    @property
    def repeating_steps(self) -> int:
        """The `steps` that give runs of this length on a machine of any speed; 0: not even the first one came to its
        end."""
        if not self.rows or self.rows[0].verdict.outcome != "equal":
            return 0
        return self.steps + self.has_ended  # a training that ends by itself must not be ended at its last boundary

    @property
    def verdict(self) -> Verdict:
        """Of the whole: the first that is not equal."""
        return next((row.verdict for row in self.rows if row.verdict.outcome != "equal"), Verdict(outcome="equal"))

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict.outcome]


def prove(
    runs: Runs, *, stops: int | None, steps: int, seed: int, kill: bool, show: Show = lambda done, planned, what: None
) -> Proof:
    """Make all runs. `stops`: how many boundaries; None: each one. `steps`: of the run; 0: as many as suit it."""
    return _Prover(runs, stops=stops, steps=steps, seed=seed, kill=kill, show=show).prove()


def steps_in_words(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def choose_stops(places: Sequence[Step], stops: int | None, *, seed: int, has_ended: bool) -> list[tuple[int, int]]:
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


class _Prover:
    def __init__(self, runs: Runs, *, stops: int | None, steps: int, seed: int, kill: bool, show: Show) -> None:
        self.runs, self.proof = runs, Proof()
        self._stops, self._steps, self._seed, self._kill, self._show = stops, steps, seed, kill, show
        self._done, self._planned = 0, 2 + (stops or 10) + 1 + (stops or 10) * kill
        self._moves_cache: dict[tuple[str, str, str], int | None] = {}

    def prove(self) -> Proof:
        first = self._first_run()
        if first is None or not self._is_deterministic(first):
            return self.proof
        stops = choose_stops(self._steps_of(first), self._stops, seed=self._seed, has_ended=self.reference.has_ended)
        kills = choose_stops(self._steps_of(first)[:-1], self._stops, seed=self._seed + 1, has_ended=False)
        if self._lacks("stop", stops, least=2) or (self._kill and self._lacks("kill", kills, least=3)):
            return self.proof
        self._planned = 2 + len(stops) + 1 + len(kills) * self._kill
        ranks = sorted(self.reference.by_rank)
        choice = random.Random(self._seed)
        self._stop_in_chains([Alarm(series=s, step=n, rank=choice.choice(ranks)) for s, n in stops])
        if self._kill:
            for series, number in kills:
                self._kill_once(Alarm(series=series, step=number, rank=choice.choice(ranks), kill=True))
        return self.proof

    def _lacks(self, what: str, chosen: Sequence[object], *, least: int) -> bool:
        """Whether the runs are too short for a stop or a kill; then nothing is proved, and the table says so."""
        if not chosen:
            said = f"the runs have no boundary to {what} at: the proof is {steps_in_words(self.proof.steps)} long"
            remedy = f"Give --steps {least} or more"
            if self.proof.has_ended:
                said, remedy = f"{said}, the whole training", f"Train for {least} steps or more, or leave --kill out"
            explained = Explained(what=said, cause="", remedy=remedy)
            self.proof.rows.append(Row(name=f"no {what}", verdict=Verdict(outcome="fails", explained=explained)))
        return not chosen

    def _run(self, chain: Chain, what: str, **control: object) -> Outcome:
        self._show(self._done, self._planned, what)
        outcome = self.runs.run(chain, **control)  # type: ignore[arg-type]
        self.proof.writes = list(dict.fromkeys([*self.proof.writes, *outcome.writes]))
        self._done += 1
        self._show(self._done, self._planned, what)
        return outcome

    # --- without a stop ---

    def _first_run(self) -> Outcome | None:
        """The reference. None: it cannot be one, and the proof says why."""
        outcome = self._reference_run()
        if outcome.variables and not self.runs.is_fresh and self.runs.command.agent is None:
            names = listed(outcome.variables, 3)
            self.runs.is_fresh, self.runs.why_fresh = True, f"the script sets {names} for torch's import"
            outcome = self._reference_run()
        if self.runs.why_fresh and self.runs.why_fresh != "--fresh":
            self.proof.notes.append(f"each run is a fresh interpreter: {self.runs.why_fresh}")
        verdict = _failure(outcome, "the uninterrupted run")
        steps = self._steps_of(outcome)
        if verdict is None and not steps:
            what = "the script has passed no step_end()" if outcome.lives else "the script has entered no guard"
            remedy = "Write `with guard:` around the loop and guard.step_end() at the end of each step"
            verdict = _fails(Explained(what=f"{what}, so there is nothing to prove", cause="", remedy=remedy), outcome)
        self.reference = Reference(lives=outcome.lives)
        self.proof.steps, self.proof.num_ranks = len(steps), len(self.reference.by_rank)
        self.proof.has_ended = self.reference.has_ended
        notes = (note for life in outcome.lives for note in life.notes)
        self.proof.notes += dict.fromkeys(f"the guard says: {note}" for note in notes)
        row = Row(name="uninterrupted", verdict=verdict or Verdict(outcome="equal"), compared=0)
        self.proof.rows.append(row)
        return outcome if verdict is None else None

    def _reference_run(self) -> Outcome:
        chain = self.runs.chain()
        outcome = self._run(chain, "uninterrupted", steps=self._steps or -1)
        self.runs.drop(chain)
        return outcome

    def _is_deterministic(self, first: Outcome) -> bool:
        chain = self.runs.chain()
        last = self._steps_of(first)[-1].place
        self._last = (last[0], 2 * last[1] + _TOO_MANY) if self.reference.has_ended else last
        again = self._run(chain, "uninterrupted, again", last=self._last, hashes=1)
        self.runs.drop(chain)
        unseeded = _unseeded(first.lives, again.lives)
        self.reference = replace(self.reference, unseeded=unseeded)
        self.reference = replace(self.reference, varying=_varying(self.reference, again.lives))
        verdict = _failure(again, "the second uninterrupted run") or self._chance(first, again)
        self.proof.rows.append(Row(name="uninterrupted, again", verdict=verdict, compared=_count(again.lives)))
        left_out = sorted(_shown(key) for key in self.reference.varying if split_kinds(key)[0] != "variable")
        if left_out and verdict.outcome == "equal":
            names = listed(left_out, 5)
            self.proof.notes.append(f"not compared, because it differs in each run: {names}")
        return verdict.outcome == "equal"

    def _chance(self, first: Outcome, other: Outcome) -> Verdict:
        """Whether `other`, a run that nothing has stopped, is as the reference."""
        found = self._earliest(other.lives)
        if found is None:
            return self._length(other) or Verdict(outcome="equal")
        explained = explain_chance(
            found, by_hash=self._is_by_hash(found), unseeded=tuple(sorted(self.reference.unseeded))
        )
        return Verdict(outcome="not deterministic", explained=explained, rank=found.rank, step=found.step)

    def _is_by_hash(self, found: Difference) -> bool:
        """Whether runs with the same seed of Python's hashes are equal."""
        if os.environ.get("PYTHONHASHSEED", "random") != "random":
            return False
        last = found.series, found.step
        if self.runs.is_fresh or self.runs.command.agent is not None:
            pair = [self._short_run(last, env={"PYTHONHASHSEED": "0"}) for _ in range(2)]
            one = Reference(lives=pair[0].lives, unseeded=self.reference.unseeded, varying=self.reference.varying)
            return _count(pair[1].lives) > 0 and _earliest(one, pair[1].lives) is None
        same = self._short_run(last)
        return _count(same.lives) > 0 and _earliest(self.reference, same.lives) is None

    def _short_run(self, last: tuple[int, int], env: dict[str, str] | None = None) -> Outcome:
        chain = self.runs.chain()
        outcome = self._run(chain, "why the runs differ", last=last, env=env)
        self.runs.drop(chain)
        return outcome

    # --- with stops ---

    def _stop_in_chains(self, alarms: Sequence[Alarm]) -> None:
        chain: Chain | None = None
        for index, alarm in enumerate(alarms):
            if chain is None:
                chain = self.runs.chain()
                first = self._run(chain, f"until it is {alarm}", alarm=alarm, last=self._last, hashes=index)
                verdict = _failure(first, "an uninterrupted run", stopped=True) or self._chance(first, first)
                if verdict.outcome != "equal":
                    self.proof.rows.append(Row(name="uninterrupted, once more", verdict=verdict))
                    return
            follows = alarms[index + 1] if index + 1 < len(alarms) else None
            stopped = chain.runs[-1]
            resumed = self._run(chain, f"{alarm}, resumed", alarm=follows, last=self._last, hashes=index + 1)
            row = self._row(str(alarm), stopped, resumed, is_stopped=follows is not None)
            self.proof.rows.append(row)
            if row.resumed is not None and row.resumed < alarm.step and row.verdict.outcome == "equal":
                self.proof.notes.append(f"{alarm}, it went on from step {row.resumed}: later steps were not saved")
            if row.verdict.outcome != "equal":
                self.runs.drop(chain)
                chain = None
        if chain is not None:
            self.runs.drop(chain)

    def _kill_once(self, alarm: Alarm) -> None:
        chain = self.runs.chain()
        outcome = self._run(chain, str(alarm), alarm=alarm, last=self._last)
        before = [life for life in outcome.lives if life.resumed is None]
        after = [life for life in outcome.lives if life not in before[: self.proof.num_ranks]]
        self.proof.rows.append(self._row(str(alarm), replace(outcome, lives=before), replace(outcome, lives=after)))
        self.runs.drop(chain)

    def _row(self, name: str, stopped: Outcome, resumed: Outcome, *, is_stopped: bool = False) -> Row:
        verdict = self._never_resumed(stopped, resumed)
        if verdict is None and resumed.refusal:
            verdict = _resumed_failure(resumed)
        if verdict is None and (found := self._earliest(resumed.lives)) is not None:
            explained = explain(self.reference, found, self._moves)
            verdict = Verdict(outcome="differs", explained=explained, rank=found.rank, step=found.step)
        if verdict is None:
            verdict = _resumed_failure(resumed, stopped=is_stopped)
        verdict = verdict or self._length(resumed)
        steps = [life.resumed for life in resumed.lives if life.resumed is not None]
        return Row(
            name=name,
            verdict=verdict or Verdict(outcome="equal"),
            resumed=max(steps, default=None),
            compared=_count(resumed.lives),
        )

    def _never_resumed(self, stopped: Outcome, resumed: Outcome) -> Verdict | None:
        anew = next((life for life in resumed.lives if life.resumed is None), None)
        if anew is None:
            return None
        before = next((life for life in stopped.lives if (life.rank, life.series) == (anew.rank, anew.series)), None)
        if before is None or not before.steps:
            return None
        step = before.steps[-1].number
        what = f"the run never resumed: it was stopped after step {step}, and began anew with step 1"
        cause = 'the guard was told not to (resume="never"), or the stop saved nothing'
        remedy = 'Give the guard resume="auto"'
        if before.directory != anew.directory:
            cause = f"its directory is another one each time: {before.directory}, then {anew.directory}"
            remedy = "Give the guard the same directory at each start"
        elif before.outcome in ("", "finished"):
            cause = "the stop saved nothing: no callback of the guard answers the signal"
            remedy = "Add ExceptionCheckpoint to the callbacks, or do not leave the signal out of Guard(signals=...)"
        explained = Explained(what=what, cause=cause, remedy=remedy)
        return Verdict(outcome="differs", explained=explained, rank=anew.rank, step=step + 1, lines=resumed.last_lines)

    def _length(self, outcome: Outcome) -> Verdict | None:
        """A run that has neither been stopped nor reached the reference's last step."""
        if any(life.alarm is not None for life in outcome.lives):
            return None
        for rank in sorted(self.reference.by_rank):
            last = self.reference.places(rank)[-1]
            lives = [life for life in outcome.lives if life.rank == rank]
            reached = max((life.steps[-1].place for life in lives if life.steps), default=(0, 0))
            reached = max([reached, *((life.series, life.resumed or 0) for life in lives)])
            if reached < last:
                what = f"the run ended after step {reached[1]}; the uninterrupted one went on to step {last[1]}"
                cause = (
                    "the loop counts steps or epochs by itself, or an early stop depends on something that is not kept"
                )
                remedy = "Let guard.epochs(n) or guard.position decide where it begins and ends"
                explained = Explained(what=what, cause=cause, remedy=remedy)
                return Verdict(
                    outcome="differs", explained=explained, rank=rank, step=reached[1], lines=outcome.last_lines
                )
        return None

    # --- comparing ---

    def _steps_of(self, outcome: Outcome) -> list[Step]:
        """The steps that all ranks have done, in order, as one of them has seen them."""
        by_rank: dict[int, dict[tuple[int, int], Step]] = {}
        for life in outcome.lives:
            by_rank.setdefault(life.rank, {}).update({step.place: step for step in life.steps})
        if not by_rank:
            return []
        common = set.intersection(*(set(steps) for steps in by_rank.values()))
        return [by_rank[min(by_rank)][place] for place in sorted(common)]

    def _earliest(self, lives: Iterable[Life]) -> Difference | None:
        return _earliest(self.reference, lives)

    def _moves(self, stream: str, before: str, after: str) -> int | None:
        key = stream, before, after
        if key not in self._moves_cache:
            one, other = self.runs.stream(stream, before), self.runs.stream(stream, after)
            self._moves_cache[key] = None if one is None or other is None else numbers_between(stream, one, other)
        return self._moves_cache[key]


def _earliest(reference: Reference, lives: Iterable[Life]) -> Difference | None:
    """Of all ranks the earliest; within a step what causes the others."""
    known = [found for life in lives if (found := compare_life(reference, life)) is not None]
    return min(known, key=lambda d: (d.series, d.step, _ORDER.index(d.parts[0].where), d.rank), default=None)


def _shown(key: str) -> str:
    kind, name = split_kinds(key)
    return f"{name} when the script ends" if kind == "exit" else name


def _count(lives: Iterable[Life]) -> int:
    return len({step.place for life in lives for step in life.steps})


def _unseeded(first: Sequence[Life], again: Sequence[Life]) -> frozenset[str]:
    """Streams that the two runs have begun with different states of."""
    found: set[str] = set()
    for one in first:
        for other in again:
            if (one.rank, one.series) == (other.rank, other.series) and one.steps and other.steps:
                pair = [step.begin or step.forward or step.streams for step in (one.steps[0], other.steps[0])]
                found |= {name for name in pair[0] if pair[1].get(name, pair[0][name]) != pair[0][name]}
    return frozenset(found)


def _varying(reference: Reference, again: Sequence[Life]) -> frozenset[str]:
    """Scalars, parts of stateful objects and variables that differ between the two runs at any step."""
    found: set[str] = set()
    for life in again:
        known = reference.by_rank.get(life.rank, {})
        for step in life.steps:
            if (one := known.get(step.place)) is not None:
                ends = [{**each.end, **each.scalars} for each in (one, step)]
                keys = (key for key in {**ends[0], **ends[1]} if ends[0].get(key) != ends[1].get(key))
                found |= {key for key in keys if key.startswith(("scalar|", "stateful|", "variable|"))}
        exits = [one.exit for one in reference.lives if (one.rank, one.series) == (life.rank, life.series) and one.exit]
        if exits and life.exit:
            found |= {key for key in {**exits[-1], **life.exit} if exits[-1].get(key) != life.exit.get(key)}
    return frozenset(found)


def _failure(outcome: Outcome, run: str, *, stopped: bool = False) -> Verdict | None:
    """Why the run did not come to its end; None: it did. `stopped`: a stop may be its end."""
    if outcome.refusal:
        explained = Explained(what=f"{run} is refused: {outcome.refusal}", cause="", remedy="")
        return Verdict(outcome="refused", explained=explained)
    if outcome.hung_s:
        what = f"{run} hangs: no step and no output for {outcome.hung_s:g} s"
        return _fails(
            Explained(what=what, cause="", remedy="Give it more time (--timeout), or look at its log"), outcome
        )
    if outcome.code == 0 or (stopped and any(life.alarm is not None for life in outcome.lives)):
        return None
    said = next((f"{error['type']}: {error['text']}" for error in outcome.errors), "")
    how = f"by signal {-outcome.code}" if outcome.code < 0 else f"with exit code {outcome.code}"
    what = f"{run} fails {how}{': ' if said else ''}{said}"
    return _fails(Explained(what=what, cause="", remedy=""), outcome)


def _resumed_failure(outcome: Outcome, *, stopped: bool = False) -> Verdict | None:
    """As `_failure`. The uninterrupted run has passed there, so this is a difference."""
    failed = _failure(outcome, "the resumed run", stopped=stopped)
    return None if failed is None else replace(failed, outcome="differs")


def _fails(explained: Explained, outcome: Outcome) -> Verdict:
    return Verdict(outcome="fails", explained=explained, lines=outcome.last_lines)
