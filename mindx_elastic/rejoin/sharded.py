"""Makes sharded modules ready for the next forward, after a forward or backward that another rank's death has cut off.

The one room for what `torch.distributed.fsdp.fully_shard` (FSDP2) keeps to itself: `problem` says at the start whether
this torch has it all. Torch's own ``reset_iter_state`` puts parameters and flags back; it leaves the gradients that a
cut-off backward has put on gathered parameters, and the next backward would add to them. Tensor parallelism
(`torch.distributed.tensor.parallel`) keeps nothing from one step to the next.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindx_elastic.capture.living import living_objects

__all__ = ["problem", "reset"]

_OF_STATES = ("_fsdp_param_groups", "_is_root")
_OF_GROUPS = ("fsdp_params", "_all_gather_result")
_OF_PARAMETERS = ("sharded_param", "unsharded_accumulated_grad")


def problem(modules: Iterable[nn.Module]) -> str:
    """Why `modules` could not be made ready again, or the program uses what could not; empty: they can."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    old = getattr(fsdp, "FullyShardedDataParallel", None)
    parts = [part for module in modules for part in module.modules()]
    if old is not None and any(isinstance(part, old) for part in parts):
        return "FullyShardedDataParallel cannot be taken up again after an error in a step; fully_shard() can"
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    stage: Any = getattr(pipelining, "_PipelineStageBase", None)
    if stage is not None and living_objects(stage):
        return "the stages of torch.distributed.pipelining talk to each other before their first step"
    for part, state in _states(parts):
        missing = [name for name in _OF_STATES if not hasattr(state, name)]
        missing += [name for name in ("reset_iter_state",) if not hasattr(part, name)]
        for group in getattr(state, "_fsdp_param_groups", ()):
            missing += [name for name in _OF_GROUPS if not hasattr(group, name)]
            for parameter in getattr(group, "fsdp_params", ()):
                missing += [name for name in _OF_PARAMETERS if not hasattr(parameter, name)]
        if missing:
            return f"FSDP of this torch ({torch.__version__}) lacks {', '.join(dict.fromkeys(missing))}"
    return ""


def reset(modules: Iterable[nn.Module]) -> str:
    """Put all parameters back into parts and forget all gradients, whatever the modules were doing. Returns why it is
    not possible; empty: it is done."""
    found = list(_states([part for module in modules for part in module.modules()]))
    for _, state in found:
        for group in state._fsdp_param_groups:
            _drop_failed_gather(group)
            for parameter in group.fsdp_params:
                for tensor in (parameter.sharded_param, getattr(parameter, "_unsharded_param", None)):
                    if tensor is not None:
                        tensor.grad = None
                parameter.unsharded_accumulated_grad = None
    for module, state in found:
        if state._is_root:  # None: no forward has begun yet
            try:
                module.reset_iter_state()
            except RuntimeError as error:
                return f"FSDP cannot be reset: {error}"
    return ""


def _drop_failed_gather(group: Any) -> None:
    result = group._all_gather_result
    work = getattr(result, "all_gather_work", None)
    if isinstance(work, dist.Work):
        try:
            work.wait()
        except RuntimeError:  # the connections are cut
            group._all_gather_result = None


def _states(parts: Iterable[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """FSDP modules, each with what FSDP keeps for it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is not None:
        for part in dict.fromkeys(parts):
            if isinstance(part, kind):
                yield part, part._get_fsdp_state()
