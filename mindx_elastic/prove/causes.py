"""Says what a difference is, what usually makes it, and what to write (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mindx_elastic.core.printable import listed
from mindx_elastic.prove.compare import Difference, Part, Reference
from mindx_elastic.prove.records import MOST_FORWARDS, Step, Streams

__all__ = ["Explained", "Moves", "Words", "explain", "explain_chance"]

Moves = Callable[[str, str, str], "int | None"]
"""Name of a stream and the digests of two of its states -> numbers drawn between; None: the one does not lead to the
other."""
Words = tuple[str, str, str]
_NAMED = 3
_VARIABLES = 5
_HASHED = re.compile(r"[0-9a-f]{16}")
_WHOLE = re.compile(r"-?\d+")
_AHEAD = 16


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Three sentences or groups of them for a person."""

    what: str
    cause: str
    remedy: str
    also: str = ""
    """What else differs at the same step."""
    variables: str = ""
    """Those of the program that the resumed run did not have as the stopped one had left them."""


def explain(reference: Reference, difference: Difference, moves: Moves) -> Explained:
    """What is behind a stopped run that differs from the reference."""
    found = _Explainer(reference, difference, moves)
    part = difference.parts[0]
    batch = next((each for each in difference.parts if each.kind == "batch"), None)
    if part.kind == "stream" and batch is not None and (known := found.known_batch(batch)) is not None:
        what, cause, remedy = known  # says more than the numbers that an iterator has drawn on its way there
    else:
        what, cause, remedy = found.describe(part)
    variables = ", ".join(found.lost_variables(_VARIABLES))
    return Explained(what=what, cause=cause, remedy=remedy, also=_also(difference.parts), variables=variables)


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
    also = _also(difference.parts)
    if by_hash:
        cause = "Python's hashes differ from process to process, and something goes through a set of texts"
        return Explained(
            what=what, cause=cause, remedy="Sort it (sorted(names)), or set PYTHONHASHSEED=0 for the job", also=also
        )
    seeds = {"python": "random.seed(0)", "numpy": "numpy.random.seed(0)", "torch": "torch.manual_seed(0)"}
    drawn = [name for name in unseeded if name in seeds]
    if part.where in ("entry", "begin", "batch", "fetch") or part.kind in ("stream", "batch"):
        cause = "something is drawn from a generator that was not seeded, or depends on the time or on other processes"
        remedy = "Seed it at the start: torch.manual_seed(0), numpy.random.default_rng(0)"
        if drawn:
            cause += f" (not seeded: {', '.join(drawn)})"
            remedy = (
                f"Write {', '.join(seeds[name] for name in drawn)} at the start, and a seed for every other generator"
            )
        return Explained(what=what, cause=cause, remedy=remedy, also=also)
    cause = "streams and batches were equal: an operation gives other bits each time (atomic additions, threads)"
    if part.kind not in ("weights", "optimizer", "scalar"):
        cause = "the program depends on the time, on other processes, or on a generator that was not seeded"
    remedy = "See torch.use_deterministic_algorithms(True), torch.set_num_threads(1) and CUBLAS_WORKSPACE_CONFIG"
    return Explained(what=what, cause=cause, remedy=remedy, also=also)


def _also(parts: tuple[Part, ...]) -> str:
    """What differs besides the first part, in causal order, each kind once."""
    words = {"stream": "random streams", "batch": "the batch", "option": "options of the optimizer", "flag": "flags",
             "weights": "weights", "optimizer": "the optimizer's state", "stateful": "stateful objects",
             "scalar": "scalars", "position": "the position", "exit": "weights",
             "calls": "the number of calls"}  # fmt: skip
    kinds = dict.fromkeys(words.get(part.kind, part.kind) for part in parts if part.kind != parts[0].kind)
    return ", ".join(kinds)


class _Explainer:
    """Each method returns what differs, the usual cause, and what to write."""

    def __init__(self, reference: Reference, difference: Difference, moves: Moves) -> None:
        self.reference, self.difference, self._moves = reference, difference, moves
        self.step = difference.step
        self.one, self.other_step = difference.one, difference.other

    @property
    def before(self) -> Step | None:
        """The step before, in the reference."""
        return None if self.one is None else self.reference.step_before(self.difference.rank, self.one)

    def lost_variables(self, most: int) -> Iterator[str]:
        """Variables of the program that were other ones when the resumed run began than at the boundary that it went
        on from; and counts in the loop's own functions, which begin later, at the end of the step."""
        entered, resumed = self.difference.entered, self.difference.resumed
        steps = self.reference.by_rank.get(self.difference.rank, {})
        saved = steps.get((self.difference.series, resumed or 0))
        pairs: list[tuple[str, str, str]] = []
        if saved is not None:
            pairs += [(key, value, entered[key]) for key, value in saved.end.items() if key in entered]
        if self.one is not None and self.other_step is not None:
            ends = self.one.end, self.other_step.end
            late = [key for key in ends[0] if key in ends[1] and key not in entered]
            pairs += [(k, ends[0][k], ends[1][k]) for k in late if _WHOLE.fullmatch(ends[0][k])]
        told = [
            f"{key.partition('|')[2]}{_values(first, second)}"
            for key, first, second in pairs
            if key.startswith("variable|") and first != second and key not in self.reference.varying
        ]
        yield from told[:most]
        if len(told) > most:
            yield f"{len(told) - most} more"

    # --- random streams ---

    def stream(self, part: Part) -> Words:
        name, step = part.names[0], self.step
        if part.where == "boundary":
            what = f"step {step} ended with another {name} stream, and had begun with the same one"
            cause = "the step draws depending on something that is not kept"
            return what, cause, "Name what it depends on in stateful=, or compute it from guard.step"
        ours, theirs = self._moved(name, part.first), self._moved(name, part.second)
        early = self._moved_before(name)
        if early and part.where != "begin" and ours is not None and theirs in (ours - early, ours):
            ours, theirs = early, 0
        elif part.where != "begin" and not early:
            return self._stream_of_fetch(name, part.where, ours, theirs)
        elif part.where == "begin" and ours == 0:
            ours = early
        what = f"step {step} began with another {name} stream"
        point = "the batch" if self.one is not None and self.one.batches else "the first forward"
        if ours and theirs == 0:
            what += f": something drew {_numbers(ours)} between the boundary of {step - 1} and {point}"
            cause = (
                "code after step_end(), or at the head of the loop, draws, and the resumed run did not pass it again"
            )
            remedy = "Draw before step_end(), or put an evaluation or logging into `with guard.outside_step():`"
            return what, cause, remedy
        if theirs and ours is not None:
            uninterrupted = _numbers(ours) if ours else "none"
            what += f": the resumed run drew {_numbers(theirs)} up to {point}, the uninterrupted one {uninterrupted}"
            cause = (
                "code that runs once at the start draws after the guard was entered: the iterator of a loader that is "
                "not named, a warm-up, initial weights"
            )
            return what, cause, "Name the loader; move other code before `with guard:`"
        cause = "it is no continuation of the stream at the boundary: a seed is set again after the guard was entered"
        return what, cause, "Set seeds before `with guard:` only, or at the head of each epoch or step"

    def _stream_of_fetch(self, name: str, where: str, ours: int | None, theirs: int | None) -> Words:
        place = "while the batch was fetched" if where == "fetch" else "between the batch and the first forward"
        what = f"step {self.step}: the {name} stream moved otherwise {place}"
        if theirs is None:
            cause = "it is no continuation of the stream at the boundary: a seed is set there"
            return what, cause, "Set seeds before `with guard:` only, or at the head of each epoch or step"
        if ours is not None:
            what += f": by {_numbers(ours)}, and by {theirs} in the resumed run" if ours != theirs else ""
        if where == "fetch":
            cause = "the loader or its data set draws from the global stream, at other moments after a resume"
            return what, cause, "Name the loader: loader=..., or give the data set a seed for each sample"
        cause = "the code in front of the model draws depending on something that is not kept"
        return what, cause, "Name what it depends on in stateful=, or compute it from guard.step"

    def _moved(self, name: str, digest: str) -> int | None:
        """Numbers drawn since the boundary before."""
        before = self.before
        base = before.streams.get(name) if before is not None else None
        return None if base is None else self._moves(name, base, digest)

    def _moved_before(self, name: str) -> int:
        """How far the stream moved in the reference between the boundary and the step's begin. A normal deviate that
        was made together with the one before takes no new number, and counts as one."""
        begin: Streams = (self.one.begin if self.one is not None else None) or {}
        before = self.before
        if before is None or name not in begin or begin[name] == before.streams.get(name):
            return 0
        moved = self._moved(name, begin[name])
        return 0 if moved is None else max(1, moved)

    # --- the place ---

    def position(self, part: Part) -> Words:
        what = f"step {self.step} is {part.first}; in the resumed run it is {part.second}: it "
        one, other = self.one, self.other_step
        if (
            one is not None
            and other is not None
            and other.epoch < one.epoch
            and other.step_in_epoch > one.step_in_epoch
        ):
            cause = "a `break`, `islice` or `if i >= limit` counts the batches of an epoch from 0 again after a resume"
            remedy = "Write `for i, batch in guard.enumerate(loader):`, and let that i decide where the epoch ends"
            return f"{what}went on in an epoch that had ended", cause, remedy
        what += "began another epoch"
        cause = "the loop counts its epochs by itself and begins at the first one again"
        return what, cause, "Write `for epoch in guard.epochs(n):`"

    def too_many(self, part: Part) -> Words:
        steps, more = int(part.first), "or more " * bool(part.second)
        what = f"the uninterrupted run ended after step {self.step - 1}; the resumed one went on for "
        what += f"{_counted(steps, 'step')} {more}too many"
        cause = (
            "the loop does not read its position and counts from 0 again after a resume, or what ends it (an early "
            "stop) is not kept"
        )
        remedy = (
            "Write `for epoch in guard.epochs(n):` or `for step in guard.steps(n):`, or begin at guard.step; "
            "name what decides an early stop: Guard(stateful={'stopping': stopping})"
        )
        return what, cause, remedy

    # --- the batch ---

    def calls(self, part: Part) -> Words:
        what = (
            f"{part.names[0]} was called {_times(part.first)} in step {self.step}, and {_times(part.second)} in the "
            "resumed run"
        )
        cause = "a counter or a value that no checkpoint has decides it, such as the i of `enumerate(loader)`"
        remedy = (
            "Write `for i, batch in guard.enumerate(loader):`, compute it from guard.step, or name the "
            "counter in stateful="
        )
        return what, cause, remedy

    def batch(self, part: Part) -> Words:
        return self.known_batch(part) or self._unknown_batch()

    def known_batch(self, part: Part) -> Words | None:
        """Where the batch is that of another step."""
        step = self.step
        for number in self._steps_with(part):
            if step < number <= step + _AHEAD and number != self._first_of_epoch:
                ahead = "one was" if number == step + 1 else f"{number - step} were"
                what = f"the batch of step {step} is the one of step {number}: {ahead} fetched ahead"
                cause = "the loop asks for a batch before the boundary and uses it after; after a resume it is lost"
                return what, cause, "Name the loader, so that the guard sees it: loader=...; or fetch within the step"
            if number in (1, self._first_of_epoch):
                what = f"the batch of step {step} is that of step {number}: the data order began anew"
                cause = "no loader is named, or another one than the loop goes through"
                return what, cause, "Name it: Guard(loader=...), and iterate that one"
            if number < step:
                what = f"the batch of step {step} is that of step {number} again"
                cause = "the position of the data is behind the step that was saved"
                return what, cause, "Name the loader that the loop goes through, and call step_end() once a batch"
        return None

    def _unknown_batch(self) -> Words:
        what, one, other = f"the batch of step {self.step} is another one", self.one, self.other_step
        if one is None or other is None:
            return what, "", ""
        unknown = not one.batches and not other.batches
        if (unknown or set(one.batches) & set(other.batches)) and self._inputs_are_equal_in_part(one, other):
            what = f"step {self.step}: a part of what the model was given is equal, and another part is not"
            cause = (
                "the program gives the model something besides the batch (a hidden state, noise, a table) that is not "
                "kept"
            )
            return what, cause, "Name it in stateful=, make it a buffer of the model, or compute it within the step"
        if set(one.batches) & set(other.batches):
            what += ": the loader handed out the same, and the model was given something else"
            cause = (
                "code between loader and model (augmentation, a curriculum) uses a generator or counter that is not "
            )
            return what, f"{cause}kept", "Name it in stateful=, or compute it from guard.step"
        num_other_parts = self._num_other_parts(one, other)
        if num_other_parts == 1:
            what += ": a part of it is equal, so the samples are the same and their content differs"
            cause = "the data set has a generator or a counter of its own, which no checkpoint has"
            return what, cause, "Draw from the global streams (they are seeded for each sample), or seed by the index"
        if num_other_parts:
            what += f": {num_other_parts} parts of it differ, and the rest is equal"
        if not one.batches and not other.batches:
            cause = "it comes from no loader that the guard knows, and its order, generator or counter is not kept"
            remedy = (
                "Name the loader: loader=...; for a function that draws, write "
                "loader = mindx_elastic.data.from_function(get_batch) and iterate that; or name what decides the batch "
                "(a generator, an array of indices): stateful={'generator': g}"
            )
            return what, cause, remedy
        cause = "its order or content comes from a generator, a set or a counter that no checkpoint has"
        return what, cause, "Let seed and epoch decide the order (data.ResumableLoader), or name the generator"

    def _inputs_are_equal_in_part(self, one: Step, other: Step) -> bool:
        """Of what a module was given first that differs, a tensor that tells this step from others is equal."""
        for name, given in one.inputs.items():
            for first, second in zip(given, other.inputs.get(name, ()), strict=False):
                if first != second:
                    return bool(self._telling(first, second, lambda step, name=name: step.inputs.get(name, ())))  # type: ignore[misc]
        return False

    def _num_other_parts(self, one: Step, other: Step) -> int:
        """How many parts differ of a batch that the loader handed out, where one that tells this step from others is
        equal; 0: there is none. (Labels, masks and the like are equal by chance in batches of other samples, too.)"""
        for first, second in zip(one.batches, other.batches, strict=False):
            if first != second and self._telling(first, second, lambda step: step.batches):
                return sum(a != b for a, b in zip(first.split(","), second.split(","), strict=False))
        return 0

    def _telling(self, first: str, second: str, of_step: Callable[[Step], Sequence[str]]) -> list[str]:
        """The digests of tensors that two batches have at the same place, and that no step of the reference at another
        place in its epoch has there. (Without a shuffle each epoch has the same batches.)"""
        pairs = enumerate(zip(first.split(","), second.split(","), strict=False))
        equal = {index: part for index, (part, theirs) in pairs if part == theirs and _HASHED.fullmatch(part)}
        for step in self.reference.by_rank[self.difference.rank].values():
            if self.one is not None and step.step_in_epoch != self.one.step_in_epoch:
                for batch in of_step(step):
                    parts = batch.split(",")
                    equal = {k: part for k, part in equal.items() if k >= len(parts) or parts[k] != part}
        return list(equal.values())

    def _steps_with(self, part: Part) -> Iterator[int]:
        """The reference's steps that were given what the other run was given here, the likeliest explanation first:
        the next step, the first ones, those ahead. (Without a shuffle each epoch has the same batches.)"""
        digests = set(part.second.split(" ")) - {""}
        if not digests or self.one is None or digests <= set(part.first.split(" ")):
            return
        found = []
        for step in self.reference.by_rank[self.difference.rank].values():
            known = step.inputs.get(part.names[0], ()) if part.names else step.batches
            if step.series == self.one.series and step.number != self.step and digests & set(known):
                found.append(step.number)
        firsts = 1, self._first_of_epoch
        yield from sorted(found, key=lambda n: (n != self.step + 1, n not in firsts, n < self.step, n))

    @property
    def _first_of_epoch(self) -> int:
        return 1 if self.one is None else self.step - self.one.step_in_epoch + 1

    # --- state ---

    def flag(self, part: Part) -> Words:
        what = f"step {self.step}: {part.names[0]} is {part.first}, and {part.second} in the resumed run{_more(part)}"
        cause = "the program sets it at a moment that the resumed run does not pass again"
        return what, cause, "Set it at the head of each epoch or step, from guard.position"

    def option(self, part: Part) -> Words:
        name = part.names[0]
        what = f"{name} differs at step {self.step}: {part.first}, and {part.second} in the resumed run"
        if name.rpartition(" ")[2] not in ("lr", "momentum", "betas", "weight_decay", "initial_lr"):
            return what, "the program sets it and the resumed run does not", "Set it before the guard is entered"
        cause = "a scheduler is not named, or the value is computed from a counter that began anew"
        return what, cause, "Name the scheduler: Guard(lr_scheduler=...), or compute it from guard.step"

    def weights(self, part: Part) -> Words:
        step, names = self.step, listed(part.names, _NAMED)
        if part.where == "entry":
            return self._weights_at_entry(part)
        if part.where == "forward":
            what = f"weights differ at the first forward of step {step}: {names}"
            before, key = self.before, f"weights|{part.names[0]}"
            if before is not None and self.one is not None and before.end.get(key) == (self.one.given or {}).get(key):
                cause = "the resumed run changed them after the state was put back"
                return what, cause, "Initialise and load pretrained weights before `with guard:`"
            cause = f"they were changed after the boundary of {step - 1}, and no checkpoint has that"
            return what, cause, "Change weights (clipping, averaging, freezing) before step_end()"
        what = f"weights differ after step {step}: {names}"
        remedy = (
            "Keep such a variable in an object that is named: Guard(stateful={'counts': counts}), or compute it from "
            "guard.step; name every optimizer: Guard(optimizer=[...])"
        )
        if (updated := self._updated_alone(part)) is not None:
            what += f": the {updated} run has updated them in this step, and the other one has not"
            cause = (
                "a counter decides when optimizer.step() is called (the i of `enumerate(loader)`, a count of batches), "
                "and it began anew"
            )
            return what, cause, f"Write `for i, batch in guard.enumerate(loader):`. {remedy}"
        cause = (
            "the step began alike, so something else has decided the update: a variable of the program (a counter, a "
            "running average, weights put aside), an optimizer that is not named, or an operation that gives other "
            "bits after a new start"
        )
        return what, cause, remedy

    def _updated_alone(self, part: Part) -> str | None:
        """Which of the two runs has changed weights in this step that the other one has left as they were."""
        changed: list[bool] = []
        for step in (self.one, self.other_step):
            if step is None or step.given is None:
                return None
            keys = [f"weights|{name}" for name in part.names]
            changed.append(any(step.end.get(key) != step.given.get(key) for key in keys))
        if changed[0] == changed[1]:
            return None
        return "uninterrupted" if changed[0] else "resumed"

    def _weights_at_entry(self, part: Part) -> Words:
        names = listed(part.names, _NAMED)
        what = f"weights differ at the very first resumed step ({self.step}), before any batch: {names}"
        if any("in no named module" in name for name in part.names):
            return (
                what,
                "no checkpoint has a parameter of a module that is not named",
                ("Name its module: Guard(model=[model, other])"),
            )
        cause = "they are not saved (a buffer that is not persistent), or load_state_dict() does not put them back"
        return what, cause, "Register the buffer with persistent=True, or compute it in forward"

    def optimizer(self, part: Part) -> Words:
        where = "when the state was put back" if part.where == "entry" else f"after step {self.step}"
        what = f"the optimizer's state differs {where}: {part.names[0]}{_more(part)}"
        if part.where == "entry":
            return what, "the optimizer does not put back what its state_dict() gives", "Look at its load_state_dict()"
        cause = "the gradients or the number of updates differ"
        return what, cause, "Name every optimizer: Guard(optimizer=[...]), and what counts in stateful="

    def stateful(self, part: Part) -> Words:
        what = f"{part.names[0]}{_more(part)} differs after step {self.step}: {part.first}, and {part.second} in the "
        cause = (
            "what the step writes into it depends on something that is not kept (an environment, a generator, a "
            "counter), or its load_state_dict() does not put back all of it"
        )
        remedy = "Name that as well in stateful=, give all of it in state_dict(), and change it before step_end()"
        return f"{what}resumed run", cause, remedy

    def scalar(self, part: Part) -> Words:
        what = f"{part.names[0]} differs at step {self.step}: {part.first}, and {part.second} in the resumed run"
        cause = "it depends on something that is not kept: a counter, a curriculum, an averaged value"
        return what, cause, "Name that in stateful=, or compute it from guard.step"

    def exit(self, part: Part) -> Words:
        names = listed(part.names, _NAMED)
        what = f"every step is equal, and the weights differ with which the script ends: {names}"
        cause = (
            "code after the last boundary loads or averages weights that a variable keeps (the best ones so far), and "
            "the resumed run does not have those from before the stop"
        )
        remedy = (
            'Keep them in an object that the guard saves: best = {"loss": inf, "state": None}, '
            'Guard(stateful={"best": best}), and best.update(loss=..., state=copy.deepcopy(model.state_dict())) before '
            "step_end()"
        )
        return what, cause, remedy

    def describe(self, part: Part) -> Words:
        describers: dict[str, Callable[[Part], Words]] = {
            "position": self.position,
            "too many": self.too_many,
            "stream": self.stream,
            "batch": self.batch,
            "calls": self.calls,
            "flag": self.flag,
            "option": self.option,
            "weights": self.weights,
            "optimizer": self.optimizer,
            "stateful": self.stateful,
            "scalar": self.scalar,
            "exit": self.exit,
        }
        return describers[part.kind](part)


def _values(first: str, second: str) -> str:
    hashed = _HASHED.fullmatch(first) or _HASHED.fullmatch(second)
    return "" if hashed else f": {first}, and {second} in the resumed run"


def _times(count: str) -> str:
    """Of forwards that a step notes."""
    return f"{_counted(int(count), 'time')}{' or more' * (int(count) >= MOST_FORWARDS)}"


def _more(part: Part) -> str:
    return f" (and {len(part.names) - 1} more)" if len(part.names) > 1 else ""


def _numbers(count: int) -> str:
    return _counted(count, "number")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
