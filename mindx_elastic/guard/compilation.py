"""Keeps what torch.compile compiles the same after a resume, or says why it may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.capture.collector import Collector
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.resume.compiled_replay import CompiledReplay, runs_of

__all__ = ["CompiledPart", "restore_compiled", "tell_of_compiled", "tell_of_torchscript"]

_REMEDY = (
    "Give it batches of one size (drop_last=True, padding) or write torch.compile(..., dynamic=False): code for other "
    "sizes may sum in another order"
)


class CompiledPart(Part):
    """The calls that each rank wants to make again: a forward may wait for the other ranks, so all make as many."""

    name = "compiled"

    def __init__(self, kept: bytes) -> None:
        self._own = runs_of(kept)
        self.runs: Sequence[int] | None = ()
        """How many calls each run has, on the rank that makes most; None: the ranks' calls do not fit together."""

    def say(self) -> Any:
        return self._own

    def merge(self, said: Sequence[Any]) -> Merged:
        outlines = {tuple(str(outline) for outline, _ in each) for each in said}
        if len(outlines) > 1:
            return Merged(None)
        return Merged([max(int(each[place][1]) for each in said) for place in range(len(said[0]))])

    def hear(self, answer: Answer) -> None:
        self.runs = None if answer.common is None else [int(number) for number in answer.common]


def restore_compiled(
    targets: Mapping[str, object], collector: Collector, kept: bytes, runs: Sequence[int] | None, unmanaged: Unmanaged
) -> None:
    """Compile what the run before had compiled. Main thread, all ranks together, when the state is back. `runs`: see
    `CompiledPart`."""
    if not kept:
        return
    problem, frames = None, {}
    if runs is None:
        problem = "the ranks have compiled different calls, and a forward may wait for the other ranks"
    elif not collector.compiled.only_names:
        replay = CompiledReplay(targets, kept)
        problem, frames = replay.run(runs), dict(replay.frames)
    collector.compiled.go_on(kept, frames)
    collector.copy(collector.position)  # a file of this boundary has them too
    if problem is not None:
        unmanaged.risk(
            "what torch.compile had compiled could not be compiled the same again, so the resumed run may differ in "
            f"the last bits: {problem}",
            _REMEDY,
        )


def tell_of_compiled(collector: Collector, unmanaged: Unmanaged) -> None:
    """At a boundary: say what was compiled in the step that a resumed run may compile in another way."""
    for name, reason in collector.compiled.problems.items():
        unmanaged.risk(
            f"torch.compile compiles {name} for sizes that vary, and a resumed run cannot compile it in the same order "
            f"({reason}): it may differ in the last bits",
            f"{_REMEDY}. A compiled module that the guard has is exact with sizes that vary",
        )
    collector.compiled.problems.clear()


def tell_of_torchscript(targets: Mapping[str, object], unmanaged: Unmanaged) -> None:
    """TorchScript measures the first calls in a process and then runs fused code, and a resumed run measures again."""
    modules = {
        f"{name}.{path}" if path else name: module
        for name, target in targets.items()
        if isinstance(target, nn.Module)
        for path, module in target.named_modules()
    }
    scripted = [name for name, module in modules.items() if isinstance(module, torch.jit.ScriptModule)]
    scripted = [name for name in scripted if name.rpartition(".")[0] not in scripted]
    if not scripted:
        return
    set_strategy = torch._C._jit_set_fusion_strategy  # the public one warns and cannot be asked
    strategy = set_strategy([])
    set_strategy(strategy)
    if strategy:
        unmanaged.risk(
            f"TorchScript runs {listed(scripted, 3)}: it measures the first calls of a process and then runs other, "
            "fused code, so a resumed run may differ in the last bits",
            "Write torch.jit.set_fusion_strategy([]) before the first call",
        )
