"""Says what a difference is, what usually makes it, and what to write (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mindx_elastic.core.printable import listed
from mindx_elastic.prove.compare import Difference, Lost, Part, Reference
from mindx_elastic.prove.records import MOST_FORWARDS

__all__ = ["NOT_GOT_BACK", "Explained", "explain", "explain_chance", "in_words"]

NOT_GOT_BACK = "if what comes later reads them, keep them: Guard(stateful={...}), or compute them from guard.step"
"""What to write where steps are equal and variables are not."""
_Words = tuple[str, str, str]
_NAMED = 3
_VARIABLES = 5
_HASHED = re.compile(r"[0-9a-f]{16}")
_AHEAD = 16
_KEEP = "Name it in stateful=, or compute it from guard.step"
_ENUMERATE = "Write `for i, batch in guard.enumerate(loader):`"
_SEED = "Set seeds before `with guard:` only, or at the head of each epoch or step"
_SEEDS = {"python": "random.seed(0)", "numpy": "numpy.random.seed(0)", "torch": "torch.manual_seed(0)"}
_SCHEDULED = ("lr", "momentum", "betas", "weight_decay", "initial_lr")


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A difference for a person."""

    what: str
    cause: str = ""
    """The usual one."""
    remedy: str = ""
    """What to write."""
    variables: str = ""
    """Those of the program that the resumed run did not get back."""

    @property
    def lines(self) -> list[str]:
        """At most two: what differs, with the variables; the cause and what to write."""
        told = f"{self.what}; not got back: {self.variables}" if self.variables else self.what
        why = f"usual cause: {self.cause}. " * bool(self.cause) + self.remedy
        return [told, why] if why else [told]


def in_words(lost: Sequence[Lost], most: int = _VARIABLES) -> str:
    """Variables with both values, where these are no digests."""
    return listed(list(dict.fromkeys(map(str, lost))), most)


def explain(reference: Reference, difference: Difference) -> Explained:
    """What is different in a stopped run that is not as the reference, and why."""
    found = _Explainer(reference, difference)
    part = difference.parts[0]
    batch = next((each for each in difference.parts if each.kind == "batch"), None)
    if part.kind == "stream" and batch is not None and (known := found.known_batch(batch)) is not None:
        what, cause, remedy = known  # says more than what an iterator has drawn on its way there
    else:
        what, cause, remedy = found.describe(part)
    return Explained(what=what, cause=cause, remedy=remedy, variables=in_words(difference.lost))


def explain_chance(difference: Difference, *, unseeded: Iterable[str]) -> Explained:
    """Why two runs without a stop, of other seeds of Python's hashes, differ."""
    part, names = difference.parts[0], listed(difference.parts[0].names, _NAMED)
    thing = {
        "stream": f"the {''.join(part.names[:1])} stream",
        "batch": "the batch",
        "position": "the place in the epoch",
        "too many": "the number of steps",
    }.get(part.kind, names)
    early = ", before any step was done" if part.where == "entry" else ""
    what = f"the script itself is not deterministic: two uninterrupted runs differ at step {difference.step}{early}, "
    what += f"in {thing}"
    if part.where in ("entry", "batch") or part.kind == "stream":
        cause = (
            "something is drawn from a generator that was not seeded, goes through a set of texts (Python's hashes "
            "differ from process to process), or depends on the time"
        )
        drawn = [_SEEDS[name] for name in unseeded if name in _SEEDS]
        seeds = ", ".join(drawn or ["torch.manual_seed(0)", "numpy.random.default_rng(0)"])
        return Explained(
            what=what,
            cause=cause,
            remedy=f"Write {seeds} at the start, seed every other generator, and sort what comes from a set",
        )
    cause = "the program depends on the time, on other processes, or on a generator that was not seeded"
    if part.kind in ("weights", "optimizer", "scalar"):
        cause = "streams and batches were equal: an operation gives other bits each time (atomic additions, threads)"
    remedy = "See torch.use_deterministic_algorithms(True), torch.set_num_threads(1) and CUBLAS_WORKSPACE_CONFIG"
    return Explained(what=what, cause=cause, remedy=remedy)


class _Explainer:
    """Each method returns what differs, the usual cause, and what to write."""

    def __init__(self, reference: Reference, difference: Difference) -> None:
        self.steps = reference.by_rank.get(difference.rank, {})
        self.step, self.one, self.other = difference.step, difference.one, difference.other
        self.before = None if self.one is None else self.steps.get((self.one.series, self.one.number - 1))
        """The step before, in the reference."""
        self._first_of_epoch = 1 if self.one is None else self.step - self.one.step_in_epoch + 1

    def describe(self, part: Part) -> _Words:
        describers: dict[str, Callable[[Part], _Words]] = {
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

    # --- random streams ---

    def stream(self, part: Part) -> _Words:
        name, step = part.names[0], self.step
        if part.where == "boundary":
            what = f"step {step} ended with another {name} stream, and had begun with the same one"
            return what, "the step draws depending on something that is not kept", _KEEP
        what = f"step {step} began with another {name} stream"
        since = f"between the boundary of {step - 1} and the first forward"
        at_boundary = None if self.before is None else self.before.streams.get(name)
        if part.second == at_boundary:
            cause = "code after step_end(), or at the head of the loop, draws; the resumed run did not pass it again"
            remedy = "Draw before step_end(), or put an evaluation or logging into `with guard.outside_step():`"
            return f"{what}: something drew from it {since}", cause, remedy
        if part.first == at_boundary:
            cause = "code that runs once at the start draws within the guard: a warm-up, a loader that is not named"
            what += f": the resumed run drew from it {since}, and the uninterrupted one did not"
            return what, cause, "Name the loader; move other code before `with guard:`"
        cause = f"something draws {since} that is not kept (code after step_end(), a data set), or a seed is set there"
        return what, cause, f"Draw before step_end(), and give the data set a seed for each sample. {_SEED}"

    # --- the place ---

    def position(self, part: Part) -> _Words:
        what = f"step {self.step} is {part.first}; in the resumed run it is {part.second}: it "
        one, other = self.one, self.other
        assert one is not None and other is not None
        if other.epoch < one.epoch and other.step_in_epoch > one.step_in_epoch:
            cause = "a `break`, `islice` or `if i >= limit` counts the batches of an epoch from 0 again after a resume"
            return f"{what}went on in an epoch that had ended", cause, f"{_ENUMERATE}, and let that i end the epoch"
        cause = "the loop counts its epochs by itself and begins at the first one again"
        return f"{what}began another epoch", cause, "Write `for epoch in guard.epochs(n):`"

    def too_many(self, part: Part) -> _Words:
        steps, more = _counted(int(part.first), "step"), "or more " * bool(part.second)
        what = f"the uninterrupted run ended after step {self.step - 1}; the resumed one went on for {steps} "
        cause = "the loop does not read its position and counts from 0 again, or what ends it (an early stop) is lost"
        remedy = (
            "Write `for epoch in guard.epochs(n):` or `for step in guard.steps(n):`; name what decides an early stop: "
            "Guard(stateful={'stopping': stopping})"
        )
        return f"{what}{more}too many", cause, remedy

    # --- the batch ---

    def calls(self, part: Part) -> _Words:
        times = [f"{_counted(int(n), 'time')}{' or more' * (int(n) >= MOST_FORWARDS)}"
                 for n in (part.first, part.second)]  # fmt: skip
        what = f"{part.names[0]} was called {times[0]} in step {self.step}, and {times[1]} in the resumed run"
        cause = "a count that no checkpoint has decides it, such as the i of `enumerate(loader)`"
        return what, cause, f"{_ENUMERATE}, compute it from guard.step, or name the counter in stateful="

    def batch(self, part: Part) -> _Words:
        return self.known_batch(part) or self._unknown_batch(part)

    def known_batch(self, part: Part) -> _Words | None:
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

    def _unknown_batch(self, part: Part) -> _Words:
        what, name = f"the batch of step {self.step} is another one", part.names[0]
        pairs = zip(part.first.split(" "), part.second.split(" "), strict=False)
        if any(self._telling(one, other, name) for one, other in pairs):  # also one call of several: real, not fake
            what = f"step {self.step}: a part of what the model was given is equal, and another part is not"
            cause = "the model is given something besides the batch (a hidden state, noise, a table) that is not kept"
            return what, cause, "Name it in stateful=, make it a buffer of the model, or compute it within the step"
        cause = "its order or content depends on a generator, a counter or a loader that no checkpoint has"
        remedy = (
            "Name the loader: loader=...; for a function that draws, iterate loader = "
            "mindx_elastic.data.from_function(get_batch); or name what decides the batch: stateful={'generator': g}"
        )
        return what, cause, remedy

    def _telling(self, first: str, second: str, name: str) -> bool:
        """Whether two inputs of the module `name` have an equal tensor at one place that no step of the reference at
        another place in its epoch has there. (Without a shuffle each epoch has the same batches. Labels, masks and the
        like are equal by chance in batches of other samples, too.)"""
        pairs = enumerate(zip(first.split(","), second.split(","), strict=False))
        equal = {index: part for index, (part, theirs) in pairs if part == theirs and _HASHED.fullmatch(part)}
        for step in self.steps.values():
            if self.one is not None and step.step_in_epoch != self.one.step_in_epoch:
                for batch in step.inputs.get(name, ()):
                    parts = batch.split(",")
                    equal = {k: part for k, part in equal.items() if k >= len(parts) or parts[k] != part}
        return bool(equal)

    def _steps_with(self, part: Part) -> Iterator[int]:
        """The reference's steps that were given what the other run was given here, the likeliest explanation first:
        the next step, the first ones, those ahead. (Without a shuffle each epoch has the same batches.)"""
        digests = set(part.second.split(" ")) - {""}
        if not digests or self.one is None or digests <= set(part.first.split(" ")):
            return
        found = []
        for step in self.steps.values():
            known = step.inputs.get(part.names[0], ())
            if step.series == self.one.series and step.number != self.step and digests & set(known):
                found.append(step.number)
        firsts = 1, self._first_of_epoch
        yield from sorted(found, key=lambda n: (n != self.step + 1, n not in firsts, n < self.step, n))

    # --- state ---

    def flag(self, part: Part) -> _Words:
        what = f"step {self.step}: {part.names[0]} is {part.first}, and {part.second} in the resumed run{_more(part)}"
        cause = "the program sets it at a moment that the resumed run does not pass again"
        return what, cause, "Set it at the head of each epoch or step, from guard.position"

    def option(self, part: Part) -> _Words:
        what = self._both(part, "")
        if part.names[0].rpartition(" ")[2] not in _SCHEDULED:
            return what, "the program sets it and the resumed run does not", "Set it before the guard is entered"
        cause = "a scheduler is not named, or the value is computed from a counter that began anew"
        return what, cause, "Name the scheduler: Guard(lr_scheduler=...), or compute it from guard.step"

    def weights(self, part: Part) -> _Words:
        step, names = self.step, listed(part.names, _NAMED)
        if part.where == "entry":
            what = f"weights differ at the very first resumed step ({step}), before any batch: {names}"
            if any("in no named module" in name for name in part.names):
                return (
                    what,
                    "no checkpoint has a parameter of a module that is not named",
                    ("Name its module: Guard(model=[model, other])"),
                )
            cause = "they are not saved (a buffer that is not persistent), or load_state_dict() does not put them back"
            return what, cause, "Register the buffer with persistent=True, or compute it in forward"
        if part.where == "forward":
            what = f"weights differ at the first forward of step {step}: {names}"
            before, key = self.before, f"weights|{part.names[0]}"
            if before is not None and self.one is not None and before.end.get(key) == (self.one.given or {}).get(key):
                cause = "the resumed run changed them after the state was put back"
                return what, cause, "Initialise and load pretrained weights before `with guard:`"
            cause = f"they were changed after the boundary of {step - 1}, and no checkpoint has that"
            return what, cause, "Change weights (clipping, averaging, freezing) before step_end()"
        what = f"weights differ after step {step}: {names}"
        if (updated := self._updated_alone(part)) is not None:
            what += f": the {updated} run has updated them in this step, and the other one has not"
            cause = "a count that began anew decides when optimizer.step() is called, as the i of `enumerate(loader)`"
            return what, cause, f"{_ENUMERATE}, or compute it from guard.step"
        cause = (
            "the step began alike, so a variable of the program (a counter, a running average), an optimizer that is "
            "not named, or an operation that gives other bits after a new start has decided the update"
        )
        return what, cause, "Name it: Guard(stateful={'counts': counts}), Guard(optimizer=[...])"

    def _updated_alone(self, part: Part) -> str | None:
        """Which of the two runs has changed weights in this step that the other one has left as they were."""
        changed: list[bool] = []
        for step in (self.one, self.other):
            if step is None or step.given is None:
                return None
            keys = [f"weights|{name}" for name in part.names]
            changed.append(any(step.end.get(key) != step.given.get(key) for key in keys))
        return None if changed[0] == changed[1] else "uninterrupted" if changed[0] else "resumed"

    def optimizer(self, part: Part) -> _Words:
        where = "when the state was put back" if part.where == "entry" else f"after step {self.step}"
        what = f"the optimizer's state differs {where}: {part.names[0]}{_more(part)}"
        if part.where == "entry":
            return what, "the optimizer does not put back what its state_dict() gives", "Look at its load_state_dict()"
        cause = "the gradients or the number of updates differ"
        return what, cause, "Name every optimizer: Guard(optimizer=[...]), and what counts in stateful="

    def stateful(self, part: Part) -> _Words:
        cause = (
            "what the step writes into it depends on something that is not kept (an environment, a generator), or its "
            "load_state_dict() does not put back all of it"
        )
        return self._both(part, _more(part)), cause, "Give all of it in state_dict(), and name the rest in stateful="

    def scalar(self, part: Part) -> _Words:
        return self._both(part, ""), "it depends on a counter, a curriculum or an average that is not kept", _KEEP

    def exit(self, part: Part) -> _Words:
        names = listed(part.names, _NAMED)
        what = f"every step is equal, and the weights differ with which the script ends: {names}"
        cause = "code after the last boundary loads or averages weights that a variable keeps (the best ones so far)"
        remedy = (
            'Keep them in an object that the guard saves: best = {"loss": inf, "state": None}, '
            'Guard(stateful={"best": best}), and fill it before step_end()'
        )
        return what, cause, remedy

    def _both(self, part: Part, more: str) -> str:
        return f"{part.names[0]}{more} differs at step {self.step}: {part.first}, and {part.second} in the resumed run"


def _more(part: Part) -> str:
    return f" (and {len(part.names) - 1} more)" if len(part.names) > 1 else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
