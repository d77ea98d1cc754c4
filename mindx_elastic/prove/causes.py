"""Says what a difference is, what usually makes it, and what to write (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mindx_elastic.core.printable import listed
from mindx_elastic.prove.compare import Difference, DifferingPart, VariableNotRestored, is_digest
from mindx_elastic.prove.records import MOST_FORWARDS

__all__ = ["NOT_GOT_BACK", "Explained", "explain", "explain_chance", "in_words"]

NOT_GOT_BACK = "if what comes later reads them, keep them: Guard(stateful={...}), or compute them from guard.step"
"""What to write where steps are equal and variables are not."""
_NAMED, _VARIABLES = 3, 5
_DRAWN = (
    "something is drawn from a generator that was not seeded, goes through a set of texts (Python's hashes differ from "
    "process to process), or depends on the time"
)
_SEED = (
    "Write random.seed(0), numpy.random.seed(0) and torch.manual_seed(0) at the start, seed every other generator, and "
    "sort what comes from a set"
)
_OPERATION = "streams and batches were equal: an operation gives other bits each time (atomic additions, threads)"
_EXACT = "See torch.use_deterministic_algorithms(True), torch.set_num_threads(1) and CUBLAS_WORKSPACE_CONFIG"
_AT_ENTRY = (
    "no file has them (a buffer that is not persistent, a module that is not named), or load_state_dict() leaves them",
    "Name the module: Guard(model=[model, other]); register the buffer with persistent=True",
)
_USUAL = {
    "begin stream": (
        "code after step_end(), at the head of the loop or in a data set draws, or a seed is set there",
        "Draw before step_end() or in `with guard.outside_step():`; set seeds at the head of each epoch or step",
    ),
    "end stream": (
        "the step draws depending on something that is not kept",
        "Name it in stateful=, or compute it from guard.step",
    ),
    "position": (
        "the loop counts its epochs, or the batches of an epoch (`break`, `islice`, `if i >= limit`), from 0 again",
        "Write `for epoch in guard.epochs(n):` and `for i, batch in guard.enumerate(loader):`",
    ),
    "too many": (
        "the loop does not read its position, or an early stop depends on something that is not kept",
        "Write `for epoch in guard.epochs(n):`, and name in stateful= what the early stop counts",
    ),
    "calls": (
        "the number of forwards depends on a counter that started over (an i of enumerate(loader), an accumulation)",
        "Write `for i, batch in guard.enumerate(loader):`, compute it from guard.step, or name it in stateful=",
    ),
    "batch": (
        "no loader is named, or another one than the loop reads; or a generator, a counter or another input decides it",
        "Name the loader that is read: Guard(loader=...), or data.from_function(get_batch); or what decides the batch",
    ),
    "flag": (
        "the program sets it at a moment that the resumed run does not pass again",
        "Set it before `with guard:`, or at the head of each epoch or step, from guard.position",
    ),
    "option": (
        "a scheduler is not named, or the value is computed from a counter that started over",
        "Name the scheduler: Guard(lr_scheduler=...), or compute it from guard.step at the head of each step",
    ),
    "entry weights": _AT_ENTRY,
    "entry optimizer": _AT_ENTRY,
    "begin weights": (
        "they were changed after the boundary (clipped, averaged, frozen), or initialised after the state was back",
        "Change weights before step_end(); initialise and load pretrained ones before `with guard:`",
    ),
    "end weights": (
        "the step began alike: a variable (a counter, an average), an unnamed optimizer, an operation with other bits",
        "Name it: stateful=, optimizer=[...], guard.enumerate(loader); TorchScript: torch.jit.set_fusion_strategy([])",
    ),
    "end optimizer": (
        "the gradients or the number of updates differ",
        "Name every optimizer: Guard(optimizer=[...]), and what counts in stateful=",
    ),
    "stateful": (
        "what is written into it depends on something that is not kept, or load_state_dict() does not put it back",
        "Give all of it in state_dict(), and name the rest in stateful=",
    ),
    "scalar": (
        "it depends on a counter, an average or a module that is not kept",
        "Name it: stateful=, model=[model, other]; or compute it from guard.step",
    ),
    "exit": (
        "code after the last boundary loads or averages weights that a variable keeps (the best ones so far)",
        "Keep them in a dict that the guard saves, Guard(stateful={'best': best}), and fill it before step_end()",
    ),
}
"""The usual cause and what to write, by the kind of the first difference, and where it is."""


class Explained(NamedTuple):
    """A difference for a person."""

    what: str
    cause: str = ""
    """The usual one."""
    remedy: str = ""
    """What to write."""
    variables: str = ""
    """Variables of the program that the resumed run did not get back."""

    @property
    def lines(self) -> list[str]:
        """At most two: what differs, with the variables; the cause and what to write."""
        told = f"{self.what}; not got back: {self.variables}" if self.variables else self.what
        return [told, self.why] if self.why else [told]

    @property
    def why(self) -> str:
        """The cause and what to write."""
        return f"usual cause: {self.cause}. " * bool(self.cause) + self.remedy


def in_words(lost: Sequence[VariableNotRestored], most: int = _VARIABLES) -> str:
    """Variables with both values, where these are no digests."""
    return listed(list(dict.fromkeys(map(str, lost))), most)


def explain(difference: Difference) -> Explained:
    """What is different in a stopped run that is not as the reference, and why."""
    part = difference.parts[0]
    if (
        part.kind == "stream" and part.where == "begin"
    ):  # the batch says more than what an iterator drew on its way there
        part = next((each for each in difference.parts if each.kind == "batch"), part)
    cause, remedy = _USUAL.get(part.kind) or _USUAL[f"{part.where} {part.kind}"]
    return Explained(_in_words(difference, part), cause, remedy, in_words(difference.lost))


def explain_chance(difference: Difference) -> Explained:
    """Why two runs without a stop, of other seeds of Python's hashes, differ."""
    part = difference.parts[0]
    how = _in_words(difference, part).replace("resumed", "second").replace("state was put back", "guard was entered")
    what = f"the script itself is not deterministic: {how}"
    if part.where != "entry" and part.kind in ("weights", "optimizer", "scalar"):
        return Explained(what, cause=_OPERATION, remedy=_EXACT)
    return Explained(what, cause=_DRAWN, remedy=_SEED)


def _in_words(difference: Difference, part: DifferingPart) -> str:
    """What differs."""
    step, kind, first = difference.step, part.kind, "".join(part.names[:1])
    more = f" (and {len(part.names) - 1} more)" if len(part.names) > 1 else ""
    both = f"{part.first}, and {part.second} in the resumed run"
    if kind == "stream":
        how = "began" if part.where == "begin" else "began with the same streams, and ended"
        return f"step {step} {how} with another {first} stream"
    if kind == "batch":
        return f"the batch of step {step} is another one"
    if kind == "position":
        return f"step {step} is {part.first}; in the resumed run it is {part.second}"
    if kind == "too many":
        many = f"{part.first} step{'s' * (part.first != '1')} {'or more ' * bool(part.second)}too many"
        return f"the uninterrupted run ended after step {step - 1}; the resumed one went on for {many}"
    if kind == "calls":
        most = f" (of {MOST_FORWARDS} that are counted)" * (str(MOST_FORWARDS) in (part.first, part.second))
        return f"forwards of {first} in step {step}: {both}{most}"
    if kind == "exit":
        return f"every step is equal, and the weights differ with which the script ends: {listed(part.names, _NAMED)}"
    if kind in ("weights", "optimizer"):
        where = {"entry": "when the state was put back", "begin": f"at the first forward of step {step}"}
        what = "weights differ" if kind == "weights" else "the optimizer's state differs"
        return f"{what} {where.get(part.where, f'after step {step}')}: {listed(part.names, _NAMED)}"
    # A digest says nothing to a person, and each rank would say another one.
    return f"{first}{more} differs at step {step}" + ("" if is_digest(part.first, part.second) else f": {both}")
