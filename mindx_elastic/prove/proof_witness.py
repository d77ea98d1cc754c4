"""What a guard notes and does in a run that `mindx-elastic prove`, `drill` or `audit` has started.

``MINDX_PROVE`` names a control file (`prove.control`).

One JSON object a line, each with one `write`, so that a kill loses none. Where the whole training was done, the weights
are looked at once more when the script ends.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindx_elastic.config import ProveSettings, RankInfo
from mindx_elastic.core.position import Position
from mindx_elastic.prove.control import Control, read_control
from mindx_elastic.prove.records import of_kinds, split_kind
from mindx_elastic.prove.witness import Observed, Witness

if TYPE_CHECKING:
    from mindx_elastic.drill.inject import Injector
    from mindx_elastic.prove.audited import AuditedSteps

__all__ = ["ProofWitness", "open_proof"]

_series: list[tuple[str, str]] = []
"""Directory and prefix of the guards of this process, in the order in which they were first entered."""

_HEARD_S = 60.0
_passed = itertools.count(1)
"""Numbers the boundaries of this process, in all its guards."""
_entered: dict[int, ProofWitness] = {}
"""The newest one of each series of this process."""


def _at_exit(pid: int) -> None:
    """The process `pid` ends. A forked one does not count, nor a run that was stopped: its training is not over."""
    if os.getpid() == pid and all(witness._has_finished for witness in _entered.values()):
        for witness in _entered.values():
            witness.at_exit()


def open_proof(ranks: RankInfo) -> ProofWitness | None:
    """The witness of a guard that is about to be entered; None: this is an ordinary run."""
    path = ProveSettings.from_env().control
    return None if path is None else ProofWitness(read_control(path), ranks)


def _open_injector(control: Control, ranks: RankInfo) -> Injector | None:
    """What carries out the fault of this run; None: it has none."""
    if control.fault is None:
        return None
    from mindx_elastic.drill.inject import Injector

    return Injector(control, ranks.rank)


class ProofWitness(Witness):
    """The observer in a run of a proof; one per entered guard."""

    def __init__(self, control: Control, ranks: RankInfo) -> None:
        super().__init__()
        self._control, self._ranks = control, ranks
        self._path: Path | None = None
        self._series = 0
        self._is_ended = self._waits_for_tail = False
        self._has_finished = False
        self.audited: AuditedSteps | None = None
        """What compares each step with the living job's; None: this is no audit."""
        self._injector = _open_injector(control, ranks)

    # --- the guard's directories ---

    def redirected(self, wanted: Sequence[Path]) -> list[Path]:
        """Private folders in place of the directories that the program names."""
        return [self._control.directory_for(path) for path in wanted]

    def redirected_file(self, path: Path) -> Path:
        """A private place for a file that the program names."""
        folder = self._control.directory_for(path.parent)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / path.name

    # --- life ---

    def enter(self, stack: ExitStack, seen: Observed) -> None:
        key = os.path.abspath(seen.directory), seen.prefix
        if key not in _series:
            _series.append(key)
        self._series = _series.index(key)
        self._stopper, self._loops = seen.stopper, seen.loops
        signals = [number for policy in seen.policies for number in policy.signals]
        self._signal = signal.SIGTERM if signal.SIGTERM in signals or not signals else signals[0]
        self._path = self._control.folder / f"rank_{self._ranks.rank}.{time.monotonic_ns()}.jsonl"
        if not _entered:
            atexit.register(_at_exit, os.getpid())
        _entered[self._series] = self
        self.watch(stack, seen)
        if self._control.living is not None:
            from mindx_elastic.prove.audited import AuditedSteps

            self.audited = AuditedSteps(stack, seen, self._control.living)
        if self._injector is not None:
            self._injector.entered(self._series, seen.position.step, self._signal)
        self.write(
            "enter",
            rank=self._ranks.rank,
            series=self._series,
            directory=str(seen.directory),
            resumed=seen.resumed,
            entered=self.state(),
            pid=os.getpid(),
            clock=time.monotonic(),
        )

    def leave(self, outcome: str, notes: Sequence[str]) -> None:
        """The block is over. `notes`: what the guard knows against an exact resume."""
        if self._path is not None:
            self.write("now", outcome="ended" if self._is_ended else outcome, notes=list(notes))
        self._has_finished = outcome == "finished" and not self._is_ended

    def at_exit(self) -> None:
        """The script is over: note the weights that it ends with, which may be others than those of the last step."""
        weights = of_kinds(self._now(), "weights")
        self.write("now", exit={f"exit|{split_kind(key)[1]}": value for key, value in weights.items()})

    def write(self, event: str, **content: Any) -> None:
        """One line, see `records.parse_life`."""
        assert self._path is not None
        with open(self._path, "ab", buffering=0) as file:
            file.write(json.dumps({"event": event, **content}).encode() + b"\n")

    def at_forward(self) -> None:
        if self._injector is not None:
            self._injector.at_forward()

    # --- one step ---

    def at_boundary(self, position: Position, *, is_cut: bool) -> bool:
        self.write("step", **vars(self.made_step(position, is_cut=is_cut, series=self._series)))
        return self._act(position)

    def behind_tail(self) -> None:
        self.begin_step()  # what that code has called is part of no step
        self.write("tail", behind=self.state())
        if self._waits_for_tail:
            self._end()
            self._stopper.step_gate.wait_for_limit(_HEARD_S)

    def _act(self, position: Position) -> bool:
        control, alarm = self._control, self._control.alarm
        if self._is_ended:
            return False
        if control.is_last(self._series, position.step, position.batch_num, passed=next(_passed)):
            # What the living job has kept of an epoch's last step was taken after the code that follows it.
            self._waits_for_tail = self.audited is not None and self._loops.tail.is_pending
            return not self._waits_for_tail and self._end()
        if self._injector is not None and self._injector.at_boundary(position.step):
            return True
        if alarm is None or (alarm.series, alarm.step) != (self._series, position.step):
            return False
        if alarm.rank == self._ranks.rank:
            self.write("now", alarm=position.step)
            os.kill(os.getpid(), self._signal)
        return True

    def _end(self) -> bool:
        """The run ends at this boundary."""
        self._is_ended, save = True, self._stopper.save
        if self.audited is not None:
            self.write("now", unlike=self.audited.differences())
        save.policies = tuple(replace(policy, save=False) for policy in save.policies)
        self._stopper.request("the proof ends here", 0)
        return True
