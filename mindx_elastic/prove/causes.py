"""Says what a difference is, what usually makes it, and what to write (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mindx_elastic.core.printable import listed
from mindx_elastic.prove.compare import Difference, Part, Reference
from mindx_elastic.prove.records import Step, Streams

__all__ = ["Explained", "Moves", "explain", "explain_chance"]

Moves = Callable[[str, str, str], "int | None"]
"""Name of a stream and the digests of two of its states -> numbers drawn between; None: the one does not lead to the
other."""
_NAMED = 3
_AHEAD = 16


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Three sentences or groups of them for a person."""

    what: str
    cause: str
    remedy: str
    also: str = ""
    """What else differs at the same step."""


def explain(reference: Reference, difference: Difference, moves: Moves) -> Explained:
    """What is behind a stopped run that differs from the reference."""
    found = _Explainer(reference, difference, moves)
    part = difference.parts[0]
    what, cause, remedy = found.stream(part) if part.kind == "stream" else found.other(part)
    return Explained(what=what, cause=cause, remedy=remedy, also=_also(difference.parts[1:]))


def explain_chance(difference: Difference, *, by_hash: bool, unseeded: tuple[str, ...]) -> Explained:
    """Why two runs without a stop differ. `by_hash`: with equal seeds of Python's hashes they do not."""
    part, step = difference.parts[0], difference.step
    names = listed(part.names, _NAMED) if part.names else ""
    thing = {
        "stream": f"the {part.names[0] if part.names else ''} stream",
        "batch": "the batch",
        "option": names,
        "flag": names,
        "weights": names,
        "optimizer": names,
        "position": "the place in the epoch",
        "too many": "the number of steps",
    }.get(part.kind, names)
    early = ", before any step was done" if part.where == "entry" else ""
    what = f"the script itself is not deterministic: two uninterrupted runs differ at step {step}{early}, in {thing}"
    also = _also(difference.parts[1:])
    if by_hash:
        cause = "Python's hashes differ from process to process, and something goes through a set of texts"
        return Explained(
            what=what, cause=cause, remedy="Sort it (sorted(names)), or set PYTHONHASHSEED=0 for the job", also=also
        )
    drawn = [name for name in unseeded if name in ("python", "numpy")]
    seeds = {"python": "random.seed(0)", "numpy": "numpy.random.seed(0)"}
    if part.where in ("entry", "begin", "batch", "fetch") or part.kind in ("stream", "batch"):
        if drawn:
            cause = f"the {' and '.join(drawn)} stream{'s' * (len(drawn) > 1)} began at random"
            remedy = f"Write {', '.join(seeds[name] for name in drawn)} first, if the data or the weights come from it"
        else:
            cause = (
                "something is drawn from a generator that was not seeded, or depends on the time or on other processes"
            )
            remedy = "Seed it at the start: torch.manual_seed(0), numpy.random.default_rng(0)"
        return Explained(what=what, cause=cause, remedy=remedy, also=also)
    cause = "streams and batches were equal: an operation gives other bits each time (atomic additions, threads)"
    if part.kind not in ("weights", "optimizer", "scalar"):
        cause = "the program depends on the time, on other processes, or on a generator that was not seeded"
    remedy = "See torch.use_deterministic_algorithms(True), torch.set_num_threads(1) and CUBLAS_WORKSPACE_CONFIG"
    return Explained(what=what, cause=cause, remedy=remedy, also=also)


def _also(parts: tuple[Part, ...]) -> str:
    """The other parts, in causal order, each kind once."""
    words = {"stream": "random streams", "batch": "the batch", "option": "options of the optimizer", "flag": "flags",
             "weights": "weights", "optimizer": "the optimizer's state", "stateful": "stateful objects",
             "scalar": "scalars", "position": "the position"}  # fmt: skip
    kinds = dict.fromkeys(words.get(part.kind, part.kind) for part in parts)
    return ", ".join(kinds)


class _Explainer:
    def __init__(self, reference: Reference, difference: Difference, moves: Moves) -> None:
        self.reference, self.difference, self._moves = reference, difference, moves
        self.step = difference.step
        self.one, self.other_step = difference.one, difference.other

    @property
    def before(self) -> Step | None:
        """The step before, in the reference."""
        return None if self.one is None else self.reference.step_before(self.difference.rank, self.one)

    # --- random streams ---

    def stream(self, part: Part) -> tuple[str, str, str]:
        name = part.names[0]
        if part.where == "boundary":
            return self._stream_inside(name)
        point = "the batch" if self.one is not None and self.one.batches else "the first forward"
        what = f"step {self.step} began with another {name} stream"
        ours, theirs = self._moved(name, part.where, part.first), self._moved(name, part.where, part.second)
        early = self._moved_before(name)
        if early and part.where != "begin" and ours is not None and theirs == ours - early:
            ours, theirs = early, 0
        elif part.where != "begin" and not early:
            return self._stream_of_fetch(name, part.where, ours, theirs)
        if ours and not theirs and theirs is not None:
            what += f": something drew {_numbers(ours)} between the boundary of {self.step - 1} and {point}"
            cause = "the resumed run did not draw them: the code after step_end(), or at the head of the loop, ran before the stop only"
            return (
                what,
                cause,
                ("Draw before step_end(), or put that code (an evaluation, logging) into `with guard.outside_step():`"),
            )
        if theirs and ours is not None:
            what += (
                f": the resumed run drew {_numbers(theirs)} between its start and {point}, the uninterrupted one "
                f"{_numbers(ours) if ours else 'none'}"
            )
            cause = "code that runs once at the start (a warm-up, an iterator, initial weights) draws after the guard was entered"
            return what, cause, "Move it before `with guard:`, or into `with guard.outside_step():`"
        cause = "it is no continuation of the stream at the boundary: a seed is set again after the guard is entered"
        return what, cause, "Set seeds before `with guard:` only; for a seed an epoch or step, set it at each of them"

    def _stream_of_fetch(self, name: str, where: str, ours: int | None, theirs: int | None) -> tuple[str, str, str]:
        place = "while the batch was fetched" if where == "fetch" else "between the batch and the first forward"
        counted = ours is not None and theirs is not None
        numbers = f": {_numbers(ours or 0)}, and {_numbers(theirs or 0)} in the resumed run" if counted else ""
        what = f"step {self.step}: the {name} stream moved otherwise {place}{numbers}"
        if where == "fetch":
            return (
                what,
                "the loader or its data set draws from the global stream, at other moments after a resume",
                ("Name the loader: loader=..., or give the data set seeds of its own for each sample"),
            )
        return (
            what,
            "the code in front of the model draws depending on something that is not kept",
            ("Name what it depends on in stateful=, or compute it from guard.position.step"),
        )

    def _stream_inside(self, name: str) -> tuple[str, str, str]:
        what = f"step {self.step} ended with another {name} stream, and had begun with the same one"
        return (
            what,
            "the step draws depending on something that is not kept",
            ("Name what it depends on in stateful=, or compute it from guard.position.step"),
        )

    def _moved(self, name: str, where: str, digest: str) -> int | None:
        before = self.before
        base = before.streams.get(name) if before is not None else None
        return None if base is None else self._moves(name, base, digest)

    def _moved_before(self, name: str) -> int:
        """How far the stream moved in the reference between the boundary and the step's begin."""
        begin: Streams = (self.one.begin if self.one is not None else None) or {}
        return (self._moved(name, "begin", begin[name]) or 0) if name in begin else 0

    # --- everything else ---

    def other(self, part: Part) -> tuple[str, str, str]:
        describe = {
            "position": self._position,
            "too many": self._too_many,
            "batch": self._batch,
            "flag": self._flag,
            "option": self._option,
            "weights": self._weights,
            "optimizer": self._optimizer,
            "stateful": self._stateful,
            "scalar": self._scalar,
        }
        return describe[part.kind](part)

    def _position(self, part: Part) -> tuple[str, str, str]:
        return (
            f"step {self.step} is {part.first}; in the resumed run it is {part.second}: it began another epoch",
            "the loop counts its epochs by itself and begins at the first one again",
            "Write `for epoch in guard.epochs(n):`",
        )

    def _too_many(self, part: Part) -> tuple[str, str, str]:
        steps = int(part.names[0])
        return (
            f"the uninterrupted run ended after step {self.step - 1}; the resumed one went on for {steps} steps "
            f"{'or more ' * (steps > 8)}too many",
            "the loop does not read its position: it counts from 0 again after a resume",
            "Write `for epoch in guard.epochs(n):`, `for step in guard.steps(n):`, or begin at guard.position.step",
        )

    def _batch(self, part: Part) -> tuple[str, str, str]:
        step = self.step
        for number in self._steps_with(part):
            if step < number <= step + _AHEAD:
                ahead = number - step
                what = f"the batch of step {step} is the one of step {number}: {_count(ahead)} fetched ahead"
                return (
                    what,
                    "the loop asks for a batch before the boundary and uses it after; after a resume it is lost",
                    (
                        "Name the loader so that the guard sees what is fetched: loader=...; or fetch at the head of the step"
                    ),
                )
            if number == 1 or (self.one is not None and number == step - self.one.step_in_epoch + 1):
                what = f"the batch of step {step} is that of step {number}: the data order began anew"
                return (
                    what,
                    "no loader is named, or another one than the loop goes through",
                    ("Name it: Guard(loader=...), and iterate that one"),
                )
            if number < step:
                what = f"the batch of step {step} is that of step {number} again"
                return (
                    what,
                    "the position of the data is behind the step that was saved",
                    ("Name the loader that the loop goes through: Guard(loader=...), and call step_end() once a batch"),
                )
        return self._unknown_batch()

    def _unknown_batch(self) -> tuple[str, str, str]:
        step, one, other = self.step, self.one, self.other_step
        what = f"the batch of step {step} is another one"
        if one is None or other is None:
            return what, "", ""
        if one.batches and set(one.batches) & set(other.batches):
            return (
                f"{what}: the loader handed out the same, and the model was given something else",
                "code between loader and model (augmentation, noise, a curriculum) uses a generator or a counter that "
                "is not kept",
                "Name it in stateful=, or compute it from guard.position.step",
            )
        equal = {part for batch in one.batches for part in batch.split(",")}
        if equal & {part for batch in other.batches for part in batch.split(",")}:
            return (
                f"{what}: a part of it is equal, so the samples are the same and their content differs",
                "the data set draws from a generator of its own, which no checkpoint has",
                "Draw from the global streams (they are seeded for each sample), or seed by the sample's index",
            )
        if not one.batches and not other.batches:
            return (
                what,
                "it comes from no loader that the guard knows",
                (
                    "Name the loader, or the generator that it is drawn from: Guard(loader=..., stateful={'generator': g})"
                ),
            )
        return (
            what,
            "its order or content comes from a generator, a set or a counter that no checkpoint has",
            (
                "Let a seed and the epoch decide the order (mindx_elastic.data.ResumableLoader), or name the generator in "
                "stateful="
            ),
        )

    def _steps_with(self, part: Part) -> Iterator[int]:
        """The reference's steps that were given what the other run was given here; the nearest ones ahead first."""
        digests = set(part.second.split(" ")) - {""}
        if not digests or self.one is None:
            return
        steps = self.reference.by_rank[self.difference.rank].values()
        found = []
        for step in steps:
            known = step.inputs.get(part.names[0], ()) if part.names else step.batches
            if step.series == self.one.series and step.number != self.step and digests & set(known):
                found.append(step.number)
        yield from sorted(found, key=lambda number: (number < self.step, number))

    def _flag(self, part: Part) -> tuple[str, str, str]:
        name = part.names[0]
        more = f" (and {len(part.names) - 1} more)" if len(part.names) > 1 else ""
        return (
            f"step {self.step}: {name} is {part.first}, and {part.second} in the resumed run{more}",
            "the program sets it at a moment that the resumed run does not pass again",
            "Set it at the head of each epoch or step, from guard.position",
        )

    def _option(self, part: Part) -> tuple[str, str, str]:
        name = part.names[0]
        what = f"{name} differs at step {self.step}: {part.first}, and {part.second} in the resumed run"
        if name.rpartition(" ")[2] not in ("lr", "momentum", "betas", "weight_decay", "initial_lr"):
            return what, "the program sets it and the resumed run does not", "Set it before the guard is entered"
        return (
            what,
            "a scheduler is not named, or the value is computed from a counter that began anew",
            "Name the scheduler: Guard(lr_scheduler=...), or compute the value from guard.position.step",
        )

    def _weights(self, part: Part) -> tuple[str, str, str]:
        step, names = self.step, listed(part.names, _NAMED)
        loose = next((name for name in part.names if "in no named module" in name), None)
        if part.where in ("entry", "forward") and self.difference.is_first:
            what = f"weights differ at the very first resumed step ({step}), before any batch: {names}"
            if loose is not None:
                return what, f"{loose}: no checkpoint has it", "Name its module: Guard(model=[model, other])"
            if part.where == "entry":
                return (
                    what,
                    "it is not saved (a buffer that is not persistent), or load_state_dict() does not put it back",
                    ("Register the buffer with persistent=True, or compute it in forward"),
                )
        if part.where == "forward":
            what = f"weights differ at the first forward of step {step}: {names}"
            before = self.before
            key = f"weights|{part.names[0]}"
            if before is not None and self.one is not None and before.end.get(key) == (self.one.given or {}).get(key):
                return (
                    what,
                    "the resumed run changed them after the state was put back",
                    ("Initialise and load pretrained weights before `with guard:`"),
                )
            return (
                what,
                f"they were changed after the boundary of {step - 1}, and no checkpoint has that",
                ("Change weights (clipping, averaging, freezing) before step_end()"),
            )
        what = f"weights differ after step {step}: {names}"
        return (
            what,
            (
                "the step began alike, so the update was another one: an optimizer that is not named, a counter of the "
                "program, or an operation that gives other bits after a new start"
            ),
            "Name every optimizer: Guard(optimizer=[...]), and what counts in stateful=",
        )

    def _optimizer(self, part: Part) -> tuple[str, str, str]:
        name = part.names[0]
        where = "when the state was put back" if part.where == "entry" else f"after step {self.step}"
        more = f" (and {len(part.names) - 1} more)" if len(part.names) > 1 else ""
        what = f"the optimizer's state differs {where}: {name}{more}"
        if part.where == "entry":
            return what, "the optimizer does not put back what its state_dict() gives", "Look at its load_state_dict()"
        return (
            what,
            "the gradients or the number of updates differ",
            ("Name every optimizer: Guard(optimizer=[...]), and what counts in stateful="),
        )

    def _stateful(self, part: Part) -> tuple[str, str, str]:
        name = part.names[0]
        more = f" (and {len(part.names) - 1} more)" if len(part.names) > 1 else ""
        return (
            f"{name}{more} differs after step {self.step}: {part.first}, and {part.second} in the resumed run",
            "the object's load_state_dict() does not put back all of its state, or it changes after the boundary",
            "Give all of it in state_dict(), and change it before step_end()",
        )

    def _scalar(self, part: Part) -> tuple[str, str, str]:
        return (
            f"{part.names[0]} differs at step {self.step}: {part.first}, and {part.second} in the resumed run",
            "the loss depends on something that is not kept: a counter, a curriculum, an averaged value",
            "Name it in stateful=, or compute it from guard.position.step",
        )


def _numbers(count: int) -> str:
    return f"{count} number{'s' * (count != 1)}"


def _count(ahead: int) -> str:
    return "one was" if ahead == 1 else f"{ahead} were"
