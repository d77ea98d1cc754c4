"""Says what a difference is, what usually makes it, and what to write (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindx_elastic.core.printable import listed
from mindx_elastic.prove.compare import Difference, Lost, Part, Reference
from mindx_elastic.prove.records import MOST_FORWARDS, Step

__all__ = ["NOT_GOT_BACK", "Explained", "explain", "explain_chance", "in_words"]

NOT_GOT_BACK = "if what comes later reads them, keep them: Guard(stateful={...}), or compute them from guard.step"
"""What to write where steps are equal and variables are not."""
_NAMED, _VARIABLES = 3, 5
_AHEAD = 16
_SEEDS = {"python": "random.seed(0)", "numpy": "numpy.random.seed(0)", "torch": "torch.manual_seed(0)"}
_SCHEDULED = ("lr", "momentum", "betas", "weight_decay", "initial_lr")

_KEEP = "Name it in stateful=, or compute it from guard.step"
_USUAL: Mapping[str, tuple[str, str]] = {
    "draws in the step": ("the step draws depending on something that is not kept", _KEEP),
    "draws behind the boundary": (
        "code after step_end(), or at the head of the loop, draws; the resumed run did not pass it again",
        "Draw before step_end(), or put an evaluation or logging into `with guard.outside_step():`",
    ),
    "draws at the start": (
        "code that runs once at the start draws within the guard: a warm-up, a loader that is not named",
        "Name the loader; move other code before `with guard:`",
    ),
    "draws before the forward": (
        "something draws there that is not kept (code after step_end(), a data set), or a seed is set there",
        "Draw before step_end(); set seeds before `with guard:`, for each sample, or at the head of each epoch or step",
    ),
    "epoch goes on": (
        "a `break`, `islice` or `if i >= limit` counts the batches of an epoch from 0 again after a resume",
        "Write `for i, batch in guard.enumerate(loader):`, and let that i end the epoch",
    ),
    "epoch began anew": (
        "the loop counts its epochs by itself and begins at the first one again",
        "Write `for epoch in guard.epochs(n):`",
    ),
    "too many": (
        "the loop does not read its position and counts from 0 again, or what ends it (an early stop) is lost",
        "Write guard.epochs(n) or guard.steps(n); an early stop: Guard(stateful={'stopping': stopping})",
    ),
    "calls": (
        "a count that no checkpoint has decides it, such as the i of `enumerate(loader)`",
        "Write `for i, batch in guard.enumerate(loader):`, compute it from guard.step, or name it in stateful=",
    ),
    "fetched ahead": (
        "the loop asks for a batch before the boundary and uses it after; after a resume it is lost",
        "Name the loader, so that the guard sees it: loader=...; or fetch within the step",
    ),
    "data began anew": (
        "no loader is named, or another one than the loop goes through, or step_end() is not called once a batch",
        "Name it: Guard(loader=...), and iterate that one",
    ),
    "batch": (
        "it depends on a generator, a counter, a loader or another input of the model that no checkpoint has",
        "Name it: loader=...; data.from_function(get_batch) for a function; or what decides the batch: stateful=",
    ),
    "set once": (
        "the program sets it at a moment that the resumed run does not pass again",
        "Set it before `with guard:`, or at the head of each epoch or step, from guard.position",
    ),
    "scheduled": (
        "a scheduler is not named, or the value is computed from a counter that began anew",
        "Name the scheduler: Guard(lr_scheduler=...), or compute it from guard.step",
    ),
    "loose parameter": (
        "no checkpoint has a parameter of a module that is not named",
        "Name its module: Guard(model=[model, other])",
    ),
    "weights at entry": (
        "they are not saved (a buffer that is not persistent), or load_state_dict() does not put them back",
        "Register the buffer with persistent=True, or compute it in forward",
    ),
    "weights of the start": (
        "the resumed run changed them after the state was put back",
        "Initialise and load pretrained weights before `with guard:`",
    ),
    "weights behind the boundary": (
        "they were changed after the boundary, and no checkpoint has that",
        "Change weights (clipping, averaging, freezing) before step_end()",
    ),
    "weights": (
        "the step began alike: a variable (a counter, an average), an unnamed optimizer, an operation with other bits",
        "Name it: stateful=, optimizer=[...], guard.enumerate(loader); TorchScript: torch.jit.set_fusion_strategy([])",
    ),
    "optimizer at entry": (
        "the optimizer does not put back what its state_dict() gives",
        "Look at its load_state_dict()",
    ),
    "optimizer": (
        "the gradients or the number of updates differ",
        "Name every optimizer: Guard(optimizer=[...]), and what counts in stateful=",
    ),
    "stateful": (
        "what is written into it depends on something that is not kept, or load_state_dict() does not put it back",
        "Give all of it in state_dict(), and name the rest in stateful=",
    ),
    "scalar": ("it depends on a counter, a curriculum or an average that is not kept", _KEEP),
    "exit": (
        "code after the last boundary loads or averages weights that a variable keeps (the best ones so far)",
        "Keep them in a dict that the guard saves, Guard(stateful={'best': best}), and fill it before step_end()",
    ),
}
"""The usual cause of each case, and what to write."""


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
    part = difference.parts[0]
    batch = next((each for each in difference.parts if each.kind == "batch"), None)
    if part.kind == "stream" and batch is not None and next(_same_batches(reference, difference, batch), None):
        part = batch  # says more than what an iterator has drawn on its way there
    what, case = _describe(reference, difference, part)
    cause, remedy = _USUAL[case]
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
        remedy = f"Write {seeds} at the start, seed every other generator, and sort what comes from a set"
        return Explained(what=what, cause=cause, remedy=remedy)
    cause = "the program depends on the time, on other processes, or on a generator that was not seeded"
    if part.kind in ("weights", "optimizer", "scalar"):
        cause = "streams and batches were equal: an operation gives other bits each time (atomic additions, threads)"
    remedy = "See torch.use_deterministic_algorithms(True), torch.set_num_threads(1) and CUBLAS_WORKSPACE_CONFIG"
    return Explained(what=what, cause=cause, remedy=remedy)


def _describe(reference: Reference, difference: Difference, part: Part) -> tuple[str, str]:
    """What differs, and the case in `_USUAL`."""
    step, kind, at_entry = difference.step, part.kind, part.where == "entry"
    names, first_name = listed(part.names, _NAMED), "".join(part.names[:1])
    more = f" (and {len(part.names) - 1} more)" if len(part.names) > 1 else ""
    if kind == "stream":
        return _describe_stream(reference, difference, part)
    if kind == "batch":
        return _describe_batch(reference, difference, part)
    if kind == "position":
        one, other = difference.one, difference.other
        assert one is not None and other is not None
        what = f"step {step} is {part.first}; in the resumed run it is {part.second}: it "
        if other.epoch < one.epoch and other.step_in_epoch > one.step_in_epoch:
            return f"{what}went on in an epoch that had ended", "epoch goes on"
        return f"{what}began another epoch", "epoch began anew"
    if kind == "too many":
        steps, at_least = _counted(int(part.first), "step"), "or more " * bool(part.second)
        what = f"the uninterrupted run ended after step {step - 1}; the resumed one went on for {steps} "
        return f"{what}{at_least}too many", kind
    if kind == "calls":
        times = [
            f"{_counted(int(n), 'time')}{' or more' * (int(n) >= MOST_FORWARDS)}" for n in (part.first, part.second)
        ]
        return f"{first_name} was called {times[0]} in step {step}, and {times[1]} in the resumed run", kind
    if kind == "flag":
        return f"step {step}: {first_name} is {part.first}, and {part.second} in the resumed run{more}", "set once"
    if kind == "weights":
        return _describe_weights(reference, difference, part)
    if kind == "optimizer":
        where = "when the state was put back" if at_entry else f"after step {step}"
        return f"the optimizer's state differs {where}: {first_name}{more}", f"optimizer{' at entry' * at_entry}"
    if kind == "exit":
        return f"every step is equal, and the weights differ with which the script ends: {names}", kind
    more = more if kind == "stateful" else ""
    what = f"{first_name}{more} differs at step {step}: {part.first}, and {part.second} in the resumed run"
    if kind == "option":
        return what, "scheduled" if first_name.rpartition(" ")[2] in _SCHEDULED else "set once"
    return what, kind


def _describe_stream(reference: Reference, difference: Difference, part: Part) -> tuple[str, str]:
    name, step = part.names[0], difference.step
    if part.where == "boundary":
        return f"step {step} ended with another {name} stream, and had begun with the same one", "draws in the step"
    what = f"step {step} began with another {name} stream"
    since = f"between the boundary of {step - 1} and the first forward"
    before = _step_before(reference, difference)
    at_boundary = None if before is None else before.streams.get(name)
    if part.second == at_boundary:
        return f"{what}: something drew from it {since}", "draws behind the boundary"
    if part.first == at_boundary:
        drew = f"the resumed run drew from it {since}, and the uninterrupted one did not"
        return f"{what}: {drew}", "draws at the start"
    return f"{what}, as it was {since}", "draws before the forward"


def _describe_batch(reference: Reference, difference: Difference, part: Part) -> tuple[str, str]:
    step = difference.step
    number = next(_same_batches(reference, difference, part), None)
    if number is None:
        return f"the batch of step {step} is another one", "batch"
    if number > step:
        ahead = "one was" if number == step + 1 else f"{number - step} were"
        return f"the batch of step {step} is the one of step {number}: {ahead} fetched ahead", "fetched ahead"
    if number in (1, _first_of_epoch(difference)):
        return f"the batch of step {step} is that of step {number}: the data order began anew", "data began anew"
    return f"the batch of step {step} is that of step {number} again", "data began anew"


def _same_batches(reference: Reference, difference: Difference, part: Part) -> Iterator[int]:
    """The reference's steps that were given what the other run was given here, the likeliest explanation first: the
    next step, the first ones, those a little ahead, earlier ones. (Without a shuffle each epoch has the same batches.)
    """
    digests = set(part.second.split(" ")) - {""}
    if not digests or difference.one is None or digests <= set(part.first.split(" ")):
        return
    step, firsts = difference.step, (1, _first_of_epoch(difference))
    found = []
    for each in reference.by_rank[difference.rank].values():
        is_same = each.series == difference.series and each.number != step
        if is_same and each.number <= step + _AHEAD and digests & set(each.inputs.get(part.names[0], ())):
            found.append(each.number)
    yield from sorted(found, key=lambda n: (n != step + 1, n not in firsts, n < step, n))


def _describe_weights(reference: Reference, difference: Difference, part: Part) -> tuple[str, str]:
    step, names = difference.step, listed(part.names, _NAMED)
    if part.where == "entry":
        is_loose = any("in no named module" in name for name in part.names)
        what = f"weights differ at the very first resumed step ({step}), before any batch: {names}"
        return what, "loose parameter" if is_loose else "weights at entry"
    if part.where == "boundary":
        return f"weights differ after step {step}: {names}", "weights"
    before, one, key = _step_before(reference, difference), difference.one, f"weights|{part.names[0]}"
    is_untouched = before is not None and one is not None and before.end.get(key) == (one.given or {}).get(key)
    what = f"weights differ at the first forward of step {step}: {names}"
    return what, "weights of the start" if is_untouched else "weights behind the boundary"


def _step_before(reference: Reference, difference: Difference) -> Step | None:
    """In the reference."""
    return reference.by_rank.get(difference.rank, {}).get((difference.series, difference.step - 1))


def _first_of_epoch(difference: Difference) -> int:
    return 1 if difference.one is None else difference.step - difference.one.step_in_epoch + 1


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
