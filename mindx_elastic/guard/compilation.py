"""Says what a compiler makes of the program that a resumed run may have in another way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["tell_of_compiled", "tell_of_script_functions", "tell_of_torchscript"]


def tell_of_compiled(collector: Collector, unmanaged: Unmanaged) -> None:
    """At a boundary: say what was compiled that a resumed run may compile in another way."""
    if found := collector.compiled.look():
        unmanaged.risk(
            f"torch.compile compiles {listed(found, 2)} for sizes that vary, in the order in which they come, and a "
            "resumed run meets them in another: it may differ in the last bits",
            "Give it batches of one size (drop_last=True, padding) or write torch.compile(..., dynamic=False)",
        )


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
    if scripted:
        _tell_of_measuring(listed(scripted, 3), unmanaged)


def tell_of_script_functions(unmanaged: Unmanaged) -> None:
    """At a boundary: the same for functions, which libraries have. Another graph has run than before the guard was
    entered."""
    if not any(note.startswith("TorchScript runs") for note in unmanaged.notes):
        _tell_of_measuring("functions of a library that the training uses", unmanaged)


def _tell_of_measuring(what: str, unmanaged: Unmanaged) -> None:
    set_strategy = torch._C._jit_set_fusion_strategy  # the public one warns and cannot be asked
    strategy = set_strategy([])
    set_strategy(strategy)
    if strategy:
        unmanaged.risk(
            f"TorchScript runs {what}: it measures the first calls of a process and then runs other, "
            "fused code, so a resumed run may differ in the last bits",
            "Write torch.jit.set_fusion_strategy([]) before the first call",
        )
