"""A few elements of each parameter, to compare with them later: an exchange or change of weights changes some.

`HiddenChanges` looks so for weights that the training changes without torch's knowledge: ``p.data.mul_(...)``, code in
C++ or CUDA.

No version counter moves and no optimizer steps, so the update gate takes the state for that of the last boundary when
it is not: a momentum encoder (MoCo, BYOL, DINO) that follows by ``.data`` in each forward has moved on when a peer
dies in the backward. Copies of all such weights at each boundary would cost their memory, so a few elements of each
parameter are compared:

=============================  ========================================================================================
after two boundaries of a      between the boundary and the first update after it: see `close_looks`
process, and two of fifty
once something was found, or   elements are kept at every boundary
where no optimizer is named
at an epoch's end              elements are kept: code after it may exchange the weights for averaged ones
wherever elements are kept     the reader compares first: a state that has changed is not a boundary, as with
                               changes that are counted. A peer may die before the first update has shown anything
=============================  ========================================================================================

Most steps of a program that has none of this cost one comparison: whether there is a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from operator import eq
from typing import Any, NamedTuple

import torch

from mindx_elastic.capture.close_looks import is_close
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent
from mindx_elastic.capture.dtensors import local_part
from mindx_elastic.capture.graph_replays import is_capturing
from mindx_elastic.core.events import logger
from mindx_elastic.core.tensor_memory import memory_of, without_collections

__all__ = ["HiddenChanges", "WeightSample", "WeightSamples", "same_elements", "sample_of"]

_DIGITS = 16  # of a digest
_FIRST = 2  # boundaries of a process after which is looked: one by itself finds what there is
_STOCK = frozenset((torch.Tensor, torch.nn.Parameter))
_PIECES = 4  # a sample has an element more, of a large parameter the first one and about the last


class WeightSample(NamedTuple):
    """A sample of one module, or of other tensors."""

    kinds: Sequence[tuple[torch.device, torch.dtype]]
    groups: Sequence[torch.Tensor]
    """The elements of each device and type."""
    owners: Sequence[Sequence[tuple[int, int]]]
    """In each group, one after the other: the number of a parameter, and how many elements are its own."""
    versions: Sequence[int]
    """The version counter of each parameter."""

    def digest(self) -> str:
        """Hexadecimal; equal where the elements are."""
        elements = hashlib.sha256()
        for group in self.groups:
            elements.update(memory_of(group.cpu().contiguous()))
        return elements.hexdigest()[:_DIGITS]


class WeightSamples:
    """Takes samples of the named modules. Any thread.

    No view of a parameter is kept: it would keep the memory that a program gives back when it moves its weights.
    """

    def __init__(self, collector: Collector) -> None:
        self._modules = {n: c for n, c in collector.components.items() if isinstance(c, ModuleComponent)}

    def take(self) -> dict[str, WeightSample]:
        """Samples of the weights as they are now, by module."""
        found: dict[str, WeightSample] = {}
        for name, component in self._modules.items():  # this is done in steps of the training: no call for nothing
            found[name] = sample_of([*component.named.values()])
        return found

    def digests(self) -> dict[str, str]:
        """Digests of a sample of each module: equal where the elements are."""
        return {name: sample.digest() for name, sample in self.take().items()}

    def changed_since(self, before: Mapping[str, WeightSample]) -> list[str]:
        """The modules of which an element is another now."""
        now = self.take()
        return [name for name, sample in before.items() if not same_elements(sample, now[name])]

    def num_hidden(self, before: Mapping[str, WeightSample], now: Mapping[str, WeightSample] | None = None) -> int:
        """How many parameters have other elements now though their version counters have not moved. `now`: the sample
        of this moment, where there is one."""
        after = self.take() if now is None else now
        total = 0
        for name, sample in before.items():
            total += _num_hidden(sample, after[name])
        return total


class HiddenChanges:
    """One per guard: those between a boundary and the next update. Training thread; `problem` in any."""

    def __init__(self, samples: WeightSamples, changes: Callable[[], str | None], *, are_likely: bool = False) -> None:
        """`changes`: what the version counters tell, as `UpdateGate.changed_since_boundary`. `are_likely`: the program
        updates without an optimizer, so no update shows them."""
        self._samples, self._changes = samples, changes
        self._are_likely = are_likely
        self.sample: Mapping[str, WeightSample] | None = None
        """As of the last boundary, where that was to be looked at."""
        self._boundaries = 0
        self.are_known = False
        """They were seen."""

    def watch(self) -> Mapping[str, WeightSample]:
        """Look at the boundary that was just copied as well. Returns the sample."""
        if self.sample is None:
            self.sample = self._samples.take()
        return self.sample

    def at_boundary(self, step: int) -> bool:
        """Boundary `step` has just been copied. Call it at close ones, and where there is a sample. Returns whether
        such changes were found just now, in a step in which no optimizer has stepped."""
        self._boundaries += 1
        is_due = self.are_known or self._are_likely or is_close(self._boundaries, step, _FIRST)
        before, self.sample = self.sample, self._samples.take() if is_due else None
        if self.are_known or before is None or self._samples.num_hidden(before, self.sample) == 0:
            return False
        self.are_known = True
        return True

    def before_update(self) -> bool:
        """The first optimizer after a boundary is about to step. Returns whether such changes were found just now."""
        if self.are_known or self.sample is None or is_capturing():
            return False
        num = 0 if self._changes() is not None else self._samples.num_hidden(self.sample)
        if num == 0:
            self.sample = None
            return False
        self.are_known = True
        logger.info(
            "%d parameters change in front of the step's update and without torch's knowledge (through .data, or by "
            "code in C++ or CUDA). A step that is cut off after that, by an exception or a killed peer, is not saved; "
            "periodic=... or snapshot_every=1 bounds what that costs",
            num,
        )
        return True

    def problem(self) -> str | None:
        """Why the live weights are not those of the last boundary, where a sample shows it; None: they may be."""
        sample = self.sample
        if sample is None or (num := self._samples.num_hidden(sample)) == 0:
            return None
        return f"{num} parameters were changed since the boundary without torch's knowledge (through .data, say)"


@torch.no_grad()
@without_collections()
def sample_of(parameters: Sequence[torch.Tensor]) -> WeightSample:
    """A few elements of each, as they are now. Of thousands, so what is asked of each is little."""
    groups: dict[Any, list[torch.Tensor]] = {}
    owners: dict[Any, list[tuple[int, int]]] = {}
    versions: list[int] = []
    for number, parameter in enumerate(parameters):
        versions.append(-1 if parameter.is_inference() else parameter._version)
        tensor = parameter if type(parameter) in _STOCK else local_part(parameter)
        key = (tensor.device, tensor.dtype)
        if (pieces := groups.get(key)) is None:
            pieces, owners[key] = groups.setdefault(key, []), []
        # One made of other tensors need not have elements in memory that can be picked.
        is_simple = type(tensor) in _STOCK or not hasattr(tensor, "__tensor_flatten__")
        count = tensor.numel() if is_simple and tensor.layout is torch.strided else 0
        if not count or tensor.is_meta or tensor.is_quantized:
            continue
        if tensor.is_contiguous() or (
            tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)  # in another order, no gaps
        ):
            step = max(1, (count - 1) // _PIECES)
            length = 1 + min(_PIECES, (count - 1) // step)
            pieces.append(tensor.as_strided((length,), (step,)))
        else:
            length = 1
            pieces.append(tensor[tuple([size - 1 for size in tensor.shape])].reshape(1))
        owners[key].append((number, length))
    groups = {key: pieces for key, pieces in groups.items() if pieces}
    return WeightSample([*groups], [*map(torch.cat, groups.values())], [owners[key] for key in groups], versions)


def same_elements(one: WeightSample, other: WeightSample) -> bool:
    """Bit for bit, so that nan equals nan."""
    if not _fit(one, other):
        return False
    for ours, theirs in zip(one.groups, other.groups, strict=True):
        if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            return False
    return True


def _num_hidden(before: WeightSample, now: WeightSample) -> int:
    if not _fit(before, now):
        return 0  # other parameters
    still = [*map(eq, before.versions, now.versions)]
    found: set[int] = set()
    for owners, one, other in zip(now.owners, before.groups, now.groups, strict=True):
        differ = (one.view(torch.uint8) != other.view(torch.uint8)).view(len(one), -1).any(1)
        if differ.any():
            numbers = [number for number, length in owners for _ in range(length)]
            found.update(n for n, differs in zip(numbers, differ.tolist(), strict=True) if differs and still[n])
    return len(found)


def _fit(one: WeightSample, other: WeightSample) -> bool:
    """Whether they are of the same elements."""
    is_same_number = len(one.versions) == len(other.versions)
    return is_same_number and one.kinds == other.kinds and one.owners == other.owners
