"""What a stopped process leaves of the step that it plays on, and the comparison in the resumed one.

The stop's boundary k is durable in a file; next to it comes ``<file>.witness.jsonl`` with what the next step has seen
and made (`witness`), and with the program's variables at its first forward. The resumed process makes that step anyway,
looks at the same, and says whether both are equal. The file, one JSON object a line:

1. version, run, rank, number of ranks, step k, software and device;
2. a line for each `records.WitnessedStep`: k, then the one that was played on, or all to the end of an accumulation
   window;
3. xxh3-64 of all that comes before it.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from mindx_elastic.agreement.stop_step import CANNOT
from mindx_elastic.core.certificate import MOST_WITNESS_BYTES, NOT_COMPARED, WITNESS_SUFFIX
from mindx_elastic.core.events import logger
from mindx_elastic.core.owners import open_trusted
from mindx_elastic.core.position import Position
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.errors import ResumeDiffersError
from mindx_elastic.guard.checks.program_variables import program_frames
from mindx_elastic.guard.unmanaged import NOW_AND_THEN
from mindx_elastic.persist.storage import new_file
from mindx_elastic.prove.causes import NOT_GOT_BACK, Explained
from mindx_elastic.prove.compare import Reference, compare_life, compare_variables, pair_of, root_of
from mindx_elastic.prove.loop_variables import carried, loops_around
from mindx_elastic.prove.records import ProcessRecord, WitnessedStep
from mindx_elastic.prove.variables import KEPT
from mindx_elastic.prove.witness import Observed, Witness

__all__ = [
    "Comparison",
    "Played",
    "note_comparison",
    "open_comparison",
]

_T = TypeVar("_T")
_VERSION = 3
_MOST_FILES = 64
_MOST_TOLD = 8
_DECIDE_S = 60.0


class _Notes(Witness):
    """A witness whose steps stay in memory."""

    def __init__(self, stack: ExitStack, seen: Observed) -> None:
        super().__init__()
        self._seen, self._from = seen, seen.position.step
        self._stack = stack.enter_context(ExitStack())
        self.watch(self._stack, seen)
        self.life = ProcessRecord(rank=seen.ranks.rank, resumed=seen.resumed, entered=self.state())

    def _note_forward(self, name: str, args: Any, kwargs: Any) -> None:
        self._harmless(super()._note_forward, name, args, kwargs)

    def _harmless(self, look: Callable[..., _T], *given: Any, **named: Any) -> _T | None:
        """What `look` gives. Where it raises the looks are over, and the program goes on: None, then and later."""
        if self.is_over:
            return None
        try:
            return look(*given, **named)
        except Exception as error:
            self._close()
            what = printable(f"{type(error).__name__}: {error}", 200)
            logger.warning("step %d is not compared: %s", self._from + 1, what)
            return None

    def behind_tail(self) -> None:
        """The step was noted before."""
        self.begin_step()

    def leave(self, outcome: str, notes: Sequence[str]) -> None:
        """Do nothing: a step that did not end is not a step."""

    def _note_boundary(self, position: Position, *, is_cut: bool) -> None:
        self.life.add(self.made_step(position, is_cut=is_cut))

    def _close(self) -> None:
        self.is_over = True
        self._stack.close()


class Played(_Notes):
    """The observer in the process that stops."""

    def __init__(self, stack: ExitStack, seen: Observed, path: Path) -> None:
        """`path`: the file of the boundary `seen.position`, which is durable."""
        super().__init__(stack, seen)
        self._path = path.with_name(path.name + WITNESS_SUFFIX)
        self.life.steps.append(self.made_step(seen.position, is_cut=True))

    def at_boundary(self, position: Position, *, is_cut: bool) -> bool:
        if position.step > self._from and not self.is_over:
            self._harmless(self._note_boundary, position, is_cut=is_cut)
            if is_cut:
                self._harmless(self._keep)
                self._close()
        return False

    def _keep(self) -> None:
        """Write the file. A failure costs nothing but the comparison."""
        ranks = {"rank": self._seen.ranks.rank, "world_size": self._seen.ranks.world_size}
        head = {"version": _VERSION, "run": self._seen.run_id, **ranks, "step": self._from, "software": _software()}
        text = "".join(json.dumps(line) + "\n" for line in (head, *map(vars, self.life.steps)))
        text += json.dumps({"digest": xxhash.xxh3_64_hexdigest(text.encode())}) + "\n"
        try:
            with new_file(self._path) as (fd, _), open(fd, "w", encoding="utf-8", closefd=False) as file:
                file.write(text)
            _drop_orphans(self._path.parent)
        except OSError as error:
            logger.warning(
                "the witness of the next step cannot be written (%s): the checkpoint is whole, and the next start has "
                "nothing to compare itself with",
                error,
            )


class Comparison(_Notes):
    """The observer in the resumed process."""

    def __init__(self, stack: ExitStack, seen: Observed, text: str, on_difference: str) -> None:
        """`text`: of the witness. Raises ValueError, KeyError, TypeError, AttributeError for anything but a whole
        file."""
        lines = text.splitlines(keepends=True)
        if json.loads(lines[-1]).get("digest") != xxhash.xxh3_64_hexdigest("".join(lines[:-1]).encode()):
            raise ValueError("it is torn, or was changed")
        self._software = {str(key): str(value) for key, value in json.loads(lines[0])["software"].items()}
        """The software of the stopped process."""
        self._steps = [WitnessedStep(**json.loads(line)) for line in lines[1:-1]]
        """The stop's boundary, and the steps after it."""
        if len(self._steps) < 2:
            raise ValueError("it has no whole step")
        self._last = self._steps[-1].number
        self._on_difference = on_difference
        in_steps, _, later = f"; {seen.was_not_kept}".partition(f"; {NOW_AND_THEN}")
        self._went_on, self._changed_later = _names_in(in_steps[2:]), _names_in(later)
        """What `not_kept` had found in the stopped process: ``self.n``, ``self.meter.*``."""
        super().__init__(stack, seen)

    def at_boundary(self, position: Position, *, is_cut: bool) -> bool:
        if position.step > self._from:  # else the second half of the resumed boundary
            self._harmless(self._note_boundary, position, is_cut=is_cut)
            if self.is_over or position.step >= self._last:
                explained = self._harmless(self._compare, position.step)
                self._close()
                if self._on_difference == "stop":
                    self._stop_if_different(position.step, explained)
        return False

    def _compare(self, step: int) -> Explained | None:
        """Tells how the step differs, and returns that; None: it does not."""
        reference = Reference(lives=[ProcessRecord(rank=self.life.rank, steps=self._steps)])
        difference = compare_life(reference, self.life)
        explained = None
        if difference is not None:
            explained = self._seen.explain(difference)
            if difference.is_fact:
                logger.info("step %d: %s. If only a clock is the cause, nothing is lost", step, explained.what)
                explained = None
        lost, others, num_equal = self._not_got_back()
        self.outcome = outcome = "differs" if explained is not None else "variables differ" if lost else "verified"
        self._tell(step, explained, lost, others, num_equal)
        reason = explained.what if explained is not None else ", ".join([*lost, *others])
        why = reason if explained is not None else ", ".join(lost)
        note_comparison(self._seen, step, outcome, reason=reason, why=why)
        return explained

    def _not_got_back(self) -> tuple[list[str], list[str], int]:
        """As the step began, or ended where it had no forward: those that were not got back and that later steps read
        as far as one can see (what has changed in the step and is not a loop's count, or went on in the first steps of
        the stopped process, or has changed later in it and was not set by this one, containers, attributes of kept
        objects), others, and how many are equal."""
        goes_on_by = [(carried(frame), loops_around(frame)) for frame in program_frames(sys._getframe(1))]
        carried_names = {name for names, _ in goes_on_by for name in names}
        counts = {name for names, loops in goes_on_by for loop in loops for name in loop.targets - names}
        before, first = self._steps[:2]  # at the stop's boundary, and the step that was played on
        changed = {key for key, value in before.end.items() if first.end.get(key) != value}
        found, num_equal = compare_variables(*pair_of(first, self.life.steps[0]))
        lost: dict[str, None] = {}
        others: dict[str, None] = {}
        for each in found:
            names = root_of(each.name), each.short, each.whole, f"{each.whole.rpartition('.')[0]}.*"
            goes_on = f"variable|{each.name}" in changed and counts.isdisjoint(names)
            goes_on = goes_on or not (self._went_on | carried_names).isdisjoint(names)
            goes_on = goes_on and not each.is_same_count(self._last - self._from)
            is_as_begun = self.life.entered.get(f"variable|{each.name}") == each.second
            goes_on = goes_on or (is_as_begun and not self._changed_later.isdisjoint(names))
            is_read = goes_on or each.is_length or each.name.endswith(f"({KEPT})")
            (lost if is_read else others)[str(each)] = None
        return list(lost), list(others), num_equal

    def _tell(
        self, step: int, explained: Explained | None, lost_ones: Sequence[str], others: Sequence[str], num_equal: int
    ) -> None:
        lost = listed(lost_ones, _MOST_TOLD)
        also = f"; not as they were{' either' * bool(lost)}: {listed(others, _MOST_TOLD)}" if others else ""
        if explained is not None:
            cause = f"not got back: {lost}; " * bool(lost) + explained.why
            logger.warning(
                "step %d is not the one of the stopped process: %s; %s%s%s",
                step,
                explained.what,
                cause,
                also,
                self._other_software(),
            )
        elif lost:
            told = "step %d is equal to the one of the stopped process; not got back: %s; %s%s"
            logger.warning(told, step, lost, NOT_GOT_BACK, also)
        elif self._seen.ranks.rank == 0 or others:
            told = "verified: step %d is the one of the stopped process, and so are %d variables%s"
            logger.info(told, step, num_equal, also and f"{also}; {NOT_GOT_BACK}")

    def _other_software(self) -> str:
        """What may explain other bits."""
        pairs = ((name, self._software.get(name), now) for name, now in _software().items())
        told = [f"{name} {before}, now {now}" for name, before, now in pairs if before not in (None, now)]
        return f"; the stopped process had {', '.join(told)}" if told else ""

    def _stop_if_different(self, step: int, explained: Explained | None) -> None:
        """All ranks. Raises ResumeDiffersError where one of them differs."""
        offer = self._from if explained is None else CANNOT
        decision = self._seen.stopper.exchange.decide(f"compared/{self._from}", offer, _DECIDE_S)
        if decision.step is None:
            what = explained.what if explained is not None else f"another rank's step differs ({decision.reason})"
            raise ResumeDiffersError(
                f'step {step} is not the one of the stopped process, and on_difference="stop" ends the job: {what}. '
                f'{self._seen.resumed_path} stays; mend the cause and start again, or give on_difference="warn"'
            )


def _names_in(listed_names: str) -> set[str]:
    return {re.sub(r" \(\d+ attributes\)$", ".*", name) for name in listed_names.split(", ") if name}


def _software() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else platform.machine()
    return {"torch": str(torch.__version__), "threads": str(torch.get_num_threads()), "device": device}


def note_comparison(seen: Observed, step: int, outcome: str, *, reason: str, why: str) -> None:
    """What steps of a resumed run have shown up to `step`: in the event log, and in later files."""
    assert seen.resumed is not None
    unmanaged, ranks = seen.unmanaged, seen.ranks.world_size
    unmanaged.certify(seen.resumed, outcome, ranks=ranks, last=step, why=why)
    reason = printable(reason, 300)
    if outcome == "differs":
        unmanaged.inherit([f"since step {step}, which is not the one of the stopped process: {reason}"])
    seen.stopper.events.emit("compared", step=step, reason=reason, outcome=outcome, ranks=ranks)


def open_comparison(stack: ExitStack, seen: Observed, *, on_difference: str) -> Comparison | None:
    """What compares the first step of a resumed run with the one that the stopped process has played on, and tells;
    None: there is none to compare with. `on_difference`: ``warn``, or ``stop``: its `at_boundary` raises
    ResumeDiffersError on all ranks."""
    if seen.resumed is None or seen.resumed_path is None:
        return None
    saver = seen.stopper.saver
    folders = dict.fromkeys([*(saver.folder(p.directory) for p in seen.policies), seen.resumed_path.parent])
    for path in (path for folder in folders for path in sorted(folder.glob(f"*{WITNESS_SUFFIX}"))[:_MOST_FILES]):
        try:
            text = _read(path, seen)
            head = json.loads(text.partition("\n")[0])
            if (head["run"], head["rank"], head["step"]) != (seen.run_id, seen.ranks.rank, seen.resumed):
                continue
            if head["version"] == _VERSION and head["world_size"] == seen.ranks.world_size:
                return Comparison(stack, seen, text, on_difference)
            ranks = printable(f"{head['world_size']} ranks, not {seen.ranks.world_size}")
            other = ranks if head["version"] == _VERSION else "another version of this package"
            logger.info("step %d is not compared: %s is of %s", seen.resumed + 1, path.name, other)
            why = f"what it left is of {other}"
            seen.unmanaged.certify(seen.resumed, NOT_COMPARED, ranks=seen.ranks.world_size, why=why)
            return None
        except Exception as error:  # a file by anyone, and looks at the program's objects
            logger.warning("%s is left out of the comparison: %s", path, printable(str(error), 200))
    return None


def _read(path: Path, seen: Observed) -> str:
    with open(open_trusted(path, seen.stopper.saver.trust.of(path.parent)), "rb") as file:
        content = file.read(MOST_WITNESS_BYTES + 1)
    if len(content) > MOST_WITNESS_BYTES:
        raise ValueError(f"it has more than {MOST_WITNESS_BYTES} bytes")
    return content.decode()


def _drop_orphans(folder: Path) -> None:
    """Delete witnesses whose checkpoint was deleted."""
    for path in folder.glob(f"*{WITNESS_SUFFIX}*"):  # also what a kill has left of a write
        if not path.with_name(path.name.partition(WITNESS_SUFFIX)[0]).exists():
            path.unlink(missing_ok=True)
