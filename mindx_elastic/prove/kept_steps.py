"""What a rank keeps of its steps in shared memory, and the comparison where they are done again.

A process that is killed leaves snapshots in its arena, and later steps are done again: by a restart, or in place. With
each boundary a few numbers are kept there too: digests of the random streams, the learning rates, the loss that
`step_end` was given, the place in the epoch. They cost no file access and wait for no device; weights and batches are
left out, for a sample of them would cost three times as much. The redone steps must have the same.

The file is a ring of fixed entries with one writer. The count of all entries is written after the entry, so a kill
leaves it whole, or not there.
"""

from __future__ import annotations

import math
import struct
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash

from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.memory.arena import ArenaFile
from mindx_elastic.prove.compare import Difference, compare_steps
from mindx_elastic.prove.digests import stream_digest
from mindx_elastic.prove.overlap import note_comparison
from mindx_elastic.prove.records import ProcessRecord, WitnessedStep
from mindx_elastic.prove.witness import Observed

__all__ = ["KeptSteps", "open_kept_steps"]

CAPACITY = 256
_MAGIC = 0x6D696E6478737432  # "mindxst2"
_HEAD = struct.Struct("=3Q")  # magic, whose steps, number of all entries
_NUM = struct.Struct("=Q")
_NUM_AT = 16
# step, epoch, step in it; digests of the streams and of all rates; first rate, loss
_ENTRY = struct.Struct("=3q4Q2d")
_BYTES = _HEAD.size + CAPACITY * _ENTRY.size
_STREAMS = ("python", "numpy", "torch")
_NONE = math.nan
"""A rate or a loss that was not given, or cannot be read at once."""

_Entry = tuple[Any, ...]


class KeptSteps:
    """One per entered guard. Training thread."""

    def __init__(self, stack: ExitStack, seen: Observed, path: Path) -> None:
        """Open or make the file at `path`. Raises OSError, ArenaError where there is no room. `stack` closes it."""
        self._file = ArenaFile(path)
        self._map = self._file.resize(_BYTES)
        self._collector, self._seen = seen.collector, seen
        self._is_first_rank = seen.ranks.rank == 0
        owner = f"{seen.run_id}/{seen.ranks.rank}/{seen.ranks.world_size}"
        self._num, before = self._take_over(xxhash.xxh3_64_intdigest(owner.encode()))
        resumed = math.inf if seen.resumed is None else seen.resumed
        self._before = {step: entry for step, entry in before.items() if step > resumed}
        self._equal: list[_Entry] = []
        """First and last entry that came out as before."""
        self._newest = seen.position.step
        self._optimizers = self._collector.optimizers()
        self._is_broken = False
        self.difference: Difference | None = None
        """The first step that is not what it was."""
        stack.callback(self._file.close)
        stack.callback(self._tell_equal)

    @property
    def are_redone(self) -> bool:
        """Whether steps come that were done before."""
        return bool(self._before)

    def at_boundary(self, position: Position, loss: object) -> None:
        """A step has ended with a boundary. `loss`: as the program gave it; a tensor on a device is not waited for."""
        if position.step <= self._newest or self._is_broken:  # a later half of it
            return
        self._newest = position.step
        try:
            entry = self._note(position, loss)
            self._write(entry)
            if self._before:
                self._compare(position.step, entry)
        except Exception as error:  # an object of the program's
            self._is_broken = True
            logger.debug("steps are not kept for a comparison: %s: %s", type(error).__name__, error)

    def _note(self, position: Position, loss: object) -> _Entry:
        rng = self._collector.rng
        rates = [_number(group.get("lr")) for each in self._optimizers for group in each.param_groups]
        streams = [stream_digest(rng[name]) if name in rng else 0 for name in _STREAMS]
        digest = xxhash.xxh3_64_intdigest(array("d", rates)) if rates else 0
        return (*position[:3], *streams, digest, rates[0] if rates else _NONE, _number(loss))

    def _write(self, entry: _Entry) -> None:
        _ENTRY.pack_into(self._map, _HEAD.size + self._num % CAPACITY * _ENTRY.size, *entry)
        self._num += 1
        _NUM.pack_into(self._map, _NUM_AT, self._num)

    def _take_over(self, owner: int) -> tuple[int, dict[int, _Entry]]:
        """Number of all entries so far, and those that are whole, by step; the newest of a step counts."""
        magic, theirs, num = _HEAD.unpack_from(self._map)
        if (magic, theirs) != (_MAGIC, owner):
            _HEAD.pack_into(self._map, 0, _MAGIC, owner, 0)
            return 0, {}
        first = max(0, num - CAPACITY + 1)  # the place that comes next may be half written
        places = (_HEAD.size + number % CAPACITY * _ENTRY.size for number in range(first, num))
        return num, {entry[0]: entry for entry in (_ENTRY.unpack_from(self._map, place) for place in places)}

    # --- steps that are done again ---

    def _compare(self, step: int, entry: _Entry) -> None:
        before = self._before.pop(step, None)
        if before is not None and (parts := tuple(compare_steps(_step_of(before), _step_of(entry)))):
            self._before.clear()
            self._equal = []
            self._num = 0  # the job goes on from here, not from what was before
            self._write(entry)
            self.difference = Difference(ProcessRecord(rank=self._seen.ranks.rank), step, parts)
            found = self._seen.explain(self.difference)
            logger.warning("step %d, done again, is not what it was before: %s; %s", step, found.what, found.why)
            note_comparison(self._seen, step, "differs", reason=found.what, why=found.what)
            return
        if before is not None:
            self._equal = [*self._equal[:1], entry]
        if not self._before or step >= max(self._before):
            self._before.clear()
            self._tell_equal()

    def _tell_equal(self) -> None:
        if not self._equal:
            return
        (first, *_), (last, *_, loss) = self._equal[0], self._equal[-1]
        self._equal = []
        not_kept, has_losses = self._seen.unmanaged.not_kept, not math.isnan(loss)
        compared = "random streams, learning rates" + ", losses" * has_losses
        if self._is_first_rank:
            steps = f"steps {first} to {last}, done again, are what they were"
            steps = steps if last > first else f"step {last}, done again, is what it was"
            logger.info("%s%s before (%s)", "verified: " * (has_losses and not not_kept), steps, compared)
        if has_losses:  # without them nothing was compared that weights make
            outcome = "variables differ" if not_kept else "verified"
            note_comparison(self._seen, last, outcome, reason=not_kept, why=not_kept or compared)


def _step_of(entry: _Entry) -> WitnessedStep:
    """The same as a resume compares it, without what is unknown."""
    number, epoch, step_in_epoch, *streams, rates, rate, loss = entry
    found = {f"stream|{name}": f"{digest:016x}" for name, digest in zip(_STREAMS, streams, strict=True) if digest}
    numbers = {"option|learning rate": rate, "scalar|loss": loss}
    found |= {name: repr(number) for name, number in numbers.items() if not math.isnan(number)}
    found["option|learning rates"] = f"{rates:016x}"
    return WitnessedStep(number=number, epoch=epoch, step_in_epoch=step_in_epoch, end=found)


def _number(value: object) -> float:
    """The value of a number or of a tensor of one on the CPU."""
    kind = type(value)
    if kind is float or kind is int:
        return float(value)  # type: ignore[arg-type]
    if kind in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu" and value.numel() == 1:  # type: ignore[attr-defined]
        return _NONE if value.is_complex() else float(value.item())  # type: ignore[attr-defined]
    return _NONE


def open_kept_steps(stack: ExitStack, seen: Observed, path: Path) -> KeptSteps | None:
    """What keeps steps in the file `path` in shared memory. None: it cannot be used."""
    try:
        return KeptSteps(stack, seen, path)
    except OSError as error:
        logger.debug("steps are not kept for a comparison: %s", error)
        return None
