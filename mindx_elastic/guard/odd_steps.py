"""``Guard(odd="back")``: a step whose loss or gradient norm is no number is made again, once, from the boundary before.

1. A rank whose step k is odd does not pass its boundary. It notes the step on disk and leaves with an `OddStepError`,
   the others with it: they wait for it in the step after.
2. The next start goes on at k - 1, from the snapshot of that boundary in memory; files of k that other ranks may have
   saved are not used (`start.odd_steps`). So step k is made again, with the same batch and the same random numbers.
3. It is odd again: that is what the program computes. This is told, and the training goes on, or with ``odd="stop"``
   ends. It is a number now: a device or its memory was wrong, or the step cannot be reproduced; the rank is told.

That is exact where no boundary of the step was passed, and the state before is kept for each step. What is not so is
refused when the guard is entered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from mindx_elastic.config import MemorySettings
from mindx_elastic.core.events import logger
from mindx_elastic.errors import OddStepError, SaveError, UsageError
from mindx_elastic.guard.opening import Opening
from mindx_elastic.platforms.small_files import write_whole
from mindx_elastic.start.odd_steps import ODD_STEPS, OddStep, OddSteps, odd_steps_path, read_odd_steps

__all__ = ["OddStepWatch", "watch_odd_steps"]

_MOST_KEPT = 100


def watch_odd_steps(opening: Opening, *, is_layered: bool) -> OddStepWatch | None:
    """Of an entered guard; None: it was not asked for it, or does not train. Raises UsageError where no step could be
    made again."""
    mode = opening.settings.odd
    if mode == "ignore" or opening.evaluates or opening.proof is not None:
        return None
    wanted = f"odd={mode!r} (MINDX_ODD)"
    if is_layered:
        raise UsageError(f"{wanted} is for a loop of your own, which calls guard.step_end(loss=...): leave it out")
    every = MemorySettings.from_env().with_every(opening.options.snapshot_every).snapshot_every
    if every != 1 or not opening.around.takes_snapshots:
        raise UsageError(
            f"{wanted} goes back by one step, and needs a snapshot of each in shared memory: give "
            "Guard(snapshot_every=1), or mindx-elastic run --snapshot-every 1, and make room in /dev/shm"
        )
    return OddStepWatch(opening, stops=mode == "stop", wanted=wanted)


class OddStepWatch:
    """One per entered guard. Training thread."""

    def __init__(self, opening: Opening, *, stops: bool, wanted: str) -> None:
        self._stops, self._wanted = stops, wanted
        self._events, self._rank = opening.saver.events, opening.saver.ranks.rank
        directory = opening.resolved[opening.options.folder]
        self._path = odd_steps_path(directory, self._rank)
        self._owners = opening.saver.trust.of(directory)
        self._steps = list(read_odd_steps(self._path, self._owners).steps)
        newest = self._steps[-1] if self._steps else None
        is_open = newest is not None and newest.run_id == self._events.run_id and newest.verdict == "open"
        self._again = newest if is_open else None
        """The step that is made again."""
        self._is_own = False  # the last step was odd, and is known to be the program's own
        scalers = (t for t in opening.targets.values() if isinstance(t, torch.amp.GradScaler))
        # A scaler skips updates whose gradients are no numbers: these are no sign of anything.
        self._names = ("loss",) if any(scaler.is_enabled() for scaler in scalers) else ("loss", "grad_norm")
        self.left: OddStepError | None = None
        """What was raised: the training must not go on, also where the program has caught it."""

    def look(self, step: int, scalars: Mapping[str, Any]) -> None:
        """`step` has been made, and its boundary is not passed yet. Raises OddStepError."""
        if self.left is not None:
            raise self.left
        if scalars.get("loss") is None:
            raise UsageError(f"{self._wanted} looks at each step's loss: write guard.step_end(loss=loss)")
        odd = [f"{name} {value}" for name in self._names if (value := _odd_value(name, scalars.get(name))) is not None]
        is_again = self._again is not None and self._again.step == step
        if odd and not (self._is_own or is_again or self._comes_of_own(step, ", ".join(odd))):
            self._go_back(step, ", ".join(odd))
        if is_again:
            self._conclude(step, "own" if odd else "other")
        self._is_own = bool(odd)

    def _comes_of_own(self, step: int, what: str) -> bool:
        """Whether the step before was the program's own, of another rank: its gradients have gone into all weights. Or
        another rank has already had this step made again: once is enough. Or there is no step before."""
        if step == 1:
            logger.error("step 1 is odd on rank %d; there is no boundary to go back to, and it goes on", self._rank)
            try:
                self._note(step, what, "own")  # the others' steps come of it
            except SaveError as error:
                logger.error("%s; other ranks may go back from the step after", error)
            return True
        files = self._path.parent.glob(f"{ODD_STEPS}*.json")
        run, attempt = self._events.run_id, self._events.attempt
        known = [each for path in files for each in read_odd_steps(path, self._owners).steps if each.run_id == run]
        if any((each.step, each.verdict) == (step - 1, "own") for each in known):
            return True
        before = [each for each in known if each.step == step and each.attempt < attempt and each.verdict != "other"]
        is_made_again = bool(before) and not self._stops
        if is_made_again:
            text = "step %d has been made again, and is odd on rank %d (%s), too; the training goes on"
            logger.warning(text, step, self._rank, what)
        return is_made_again

    def _go_back(self, step: int, what: str) -> None:
        text = f"step {step}: {what} on rank {self._rank}"
        try:
            self._note(step, what, "open")
        except SaveError as error:
            logger.error("%s; no step is made again: %s", text, error)
            return
        logger.error("%s; the job goes back to step %d, to make it again", text, step - 1)
        self._events.emit("odd", step=step, reason=text, outcome="back")
        self.left = OddStepError(f"{text}; a start goes on at step {step - 1} and makes it again")
        raise self.left

    def _conclude(self, step: int, verdict: Literal["own", "other"]) -> None:
        before = self._again
        assert before is not None
        self._again = None
        text = f"step {step} was odd on rank {self._rank} ({before.what})"
        text += ", and is so again: it is the program's own" if verdict == "own" else ", and is not when made again"
        stops = self._stops and verdict == "own"
        outcome = "stop" if stops else verdict
        self._events.emit("odd", step=step, reason=text, outcome=outcome)
        if verdict == "other":
            logger.error("%s: suspect that rank's device, or its memory, unless the step is not reproducible", text)
        elif not stops:
            logger.warning("%s; the training goes on", text)
        try:
            self._steps[-1] = replace(before, verdict=verdict)
            if stops:  # what the other ranks save of it now
                self._note(step, before.what, "own")
            else:
                self._write()
        except SaveError as error:
            logger.error("%s; a further start may judge step %d once more", error, step)
        if stops:
            self.left = OddStepError(f"{text}. The next start goes on at step {step - 1}")
            raise self.left

    def _note(self, step: int, what: str, verdict: Literal["open", "own"]) -> None:
        self._steps.append(OddStep(self._events.run_id, self._events.attempt, step, self._rank, what, verdict))
        self._write()

    def _write(self) -> None:
        write_whole(self._path, OddSteps(self._steps[-_MOST_KEPT:]).as_json())


def _odd_value(name: str, value: Any) -> float | None:
    """The value, if it is no number or infinite; of several the first such one. Raises UsageError."""
    if value is None:
        return None
    try:
        found = torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"guard.step_end({name}=...) has got a {type(value).__name__}, in which odd= cannot look for what is no "
            "number: give a number or a tensor, the sum of several losses"
        ) from error
    found = found.detach().flatten().double()  # of 8-bit types torch does not say which are finite
    is_finite = torch.isfinite(found)
    return None if bool(is_finite.all()) else found[~is_finite][0].item()
