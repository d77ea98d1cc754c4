"""DDP modules: which ones there are, which ranks they keep equal, and what of theirs no `state_dict` has.

* `GradientOrders`: DDP lays out its buckets again after the first backward, in the order in which gradients arrived. A
  resumed process would do its first step with the initial layout, sum in another order, and diverge at three and more
  ranks. The order is recorded during the first backward of a fresh run and travels in the checkpoint; see
  `start.ddp_warmup`. Not with ``static_graph=True``, which counts in the first backward and lays out its buckets in the
  order of the second.
* `BufferBroadcasts`: whether DDP broadcasts a module's buffers from rank 0 in its next forward. It does so by default,
  but not after a forward whose gradients it does not reduce: one under ``no_sync()``, or without gradients, as in an
  evaluation. In a loop that is all in ``no_sync()``, because the program averages the gradients itself, each rank so
  keeps its own batch norm statistics; a new process would broadcast rank 0's once.
* `CollectiveWaits`: how long this rank waits for the others in DDP's collectives.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.components import unwrap_module
from mindx_elastic.core.events import logger
from mindx_elastic.core.ports import Risks
from mindx_elastic.core.status_page import StatusPage

__all__ = [
    "BufferBroadcasts",
    "CollectiveWaits",
    "DdpModules",
    "GradientOrder",
    "GradientOrders",
    "ddp_modules",
    "effect_of_order",
    "find_objects",
    "outermost_replicas",
    "replica_ranks",
]

DdpModules = Sequence[tuple[str, DistributedDataParallel]]
"""DDP modules and their paths."""


def find_objects(kind: type[Any]) -> list[Any]:
    """Every object of a type or of one derived from it. Looks at all objects of the process: 30 ms for a million.

    Objects that were frozen (`gc.freeze`) are not found.
    """
    kinds = {kind}
    new = [kind]
    while new:
        new = [derived for each in new for derived in each.__subclasses__() if derived not in kinds]
        kinds.update(new)
    return [each for each in gc.get_objects() if type(each) in kinds]  # isinstance would run code of proxies


def ddp_modules(targets: Mapping[str, Any]) -> list[tuple[str, DistributedDataParallel]]:
    """Every DDP module and its path: those among the guard's objects, at any depth, and those that the guard was not
    given but that wrap one of its modules (``ddp = DDP(model)``, ``Guard(model=model)``). All ranks find the same ones.
    """
    found = [
        (f"{name}.{place}" if place else name, module)
        for name, target in targets.items()
        if isinstance(target, nn.Module)
        for place, module in target.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and _alone(targets, found):
        found += _hidden(targets, {id(module) for _, module in found})
    return found


def _trained(targets: Mapping[str, Any]) -> dict[int, str]:
    """The parameters that are trained, by id, with their path: those that a named optimizer has. An average of the
    weights is in none, though its parameters may ask for gradients."""
    optimizers = [t for t in targets.values() if isinstance(t, torch.optim.Optimizer)]
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        id(p): path for path, p in _parameters(targets) if p.requires_grad and (id(p) in optimized or not optimized)
    }


def _parameters(targets: Mapping[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Of the job's modules, with their paths in the checkpoint."""
    for name, target in targets.items():
        if isinstance(target, nn.Module):
            yield from ((f"{name}.{place}", p) for place, p in unwrap_module(target).named_parameters())


def _alone(targets: Mapping[str, Any], found: DdpModules) -> bool:
    """Whether some trained parameter is whole on this rank and in no DDP module of `found`."""
    wrapped = {id(parameter) for _, module in found for parameter in module.parameters()}
    return any(
        parameter.requires_grad and id(parameter) not in wrapped and not isinstance(parameter, DTensor)
        for target in targets.values()
        if isinstance(target, nn.Module)
        for parameter in target.parameters()
    )


def _hidden(targets: Mapping[str, Any], known: Collection[int]) -> list[tuple[str, DistributedDataParallel]]:
    """DDP modules anywhere in the process around a module of `targets`."""
    modules = _named_modules(targets)
    paths = {id(module): path for path, module in modules.items()}
    living = [each for each in find_objects(DistributedDataParallel) if id(each) not in known]
    found: dict[str, DistributedDataParallel] = {}
    for module in living:
        path = paths.get(id(unwrap_module(module))) or next(
            (paths[id(part)] for part in module.modules() if id(part) in paths and "." not in paths[id(part)]), None
        )
        if path is not None:
            found[path] = module  # of two around one module the later one
    return sorted(found.items())


def _named_modules(targets: Mapping[str, object]) -> dict[str, nn.Module]:
    """Every module of the job by its path, without the wrappers (DDP, torch.compile) around a whole component."""
    return {
        f"{name}.{place}" if place else name: module
        for name, target in targets.items()
        if isinstance(target, nn.Module)
        for place, module in unwrap_module(target).named_modules()
    }


def outermost_replicas(targets: Mapping[str, Any], ddp: DdpModules) -> list[nn.Module]:
    """The modules whose forward runs a replica: DDP, or the `torch.compile` wrapper around it. Both keep hooks.

    `ddp`, here and below: what `ddp_modules` gives for `targets`.
    """
    modules = [module for _, module in ddp]
    wrappers = [t for t in targets.values() if isinstance(t, nn.Module) and hasattr(t, "_orig_mod")]
    inside = {id(wrapper): {id(part) for part in wrapper.modules()} for wrapper in wrappers}
    compiled = [wrapper for wrapper in wrappers if any(id(module) in inside[id(wrapper)] for module in modules)]
    return [*compiled, *(m for m in modules if not any(id(m) in inside[id(wrapper)] for wrapper in compiled))]


def replica_ranks(targets: Mapping[str, Any], ddp: DdpModules) -> list[int]:
    """The ranks that hold the same weights as this one, if DDP reduces every trained parameter; empty: unknown."""
    modules = [module for _, module in ddp]
    if any(module.parameters_to_ignore or _is_local(module) for module in modules):  # each rank has its own
        return []
    groups = {tuple(sorted(dist.get_process_group_ranks(module.process_group))) for module in modules}
    trained, reduced = _trained(targets), {id(parameter) for module in modules for parameter in module.parameters()}
    if not trained or len(groups) != 1 or not trained.keys() <= reduced:
        return []
    return list(groups.pop())


def _is_local(module: DistributedDataParallel) -> bool:
    """Whether its hook reduces gradients over some of the ranks only: torch's local SGD."""
    return any(kind.__name__ == "PostLocalSGDState" for _, state in module._comm_hooks for kind in type(state).__mro__)


def effect_of_order(module: DistributedDataParallel) -> str:
    """How a run with another order of gradients may differ, in words; empty: it does not."""
    if any(state is not None and not isinstance(state, dist.ProcessGroup) for _, state in module._comm_hooks):
        return "may differ, for the communication hook has state that follows that order"  # PowerSGD's errors
    # A sum of two is the same in any order.
    return "may differ in the last bits from 3 ranks on" if module.process_group.size() > 2 else ""


class GradientOrder:
    """Records, once, the order of gradient arrival for one DDP module. Indices count the parameters with gradients."""

    def __init__(self, module: DistributedDataParallel, known: Sequence[int] = ()) -> None:
        """`known`: what has been recorded before."""
        self.module = module
        self.order = list(known)
        """What has been recorded so far."""
        self._handles: list[Any] = []

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.module.module.parameters() if p.requires_grad]

    def record(self) -> None:
        """Listen to the next backward. Call `finish` at the boundary after it."""
        for index, parameter in enumerate(self.parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._note(index)))

    def finish(self) -> bool:
        """At a boundary: stop listening once all has been seen. True when there is nothing left to record."""
        if self._handles and self.order:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        return not self._handles

    def _note(self, index: int) -> None:
        # Only the first arrival counts, as in DDP: an accumulation window brings each gradient several times.
        if index not in self.order:
            self.order.append(index)


class _KeepsOrders(Protocol):
    """The collector."""

    gradient_order: dict[str, list[int]]

    @property
    def is_sharded(self) -> bool: ...


class GradientOrders:
    """Records the gradient order of every DDP module that does not have one yet, during the first backward."""

    def __init__(
        self,
        ddp: DdpModules,
        collector: _KeepsOrders,
        risks: Risks,
        *,
        world_size: int,
        by_hand: bool = False,
    ) -> None:
        """by_hand: the user has given layouts, or the guard does not train; then there is no warning without DDP."""
        self._collector = collector
        if world_size > 1 and not by_hand and not ddp and not collector.is_sharded:
            others = find_objects(DistributedDataParallel)  # around something else: perhaps around a copy
            logger.log(
                logging.WARNING if others else logging.INFO,
                "no DDP or sharded module among the guard's objects: if the model is wrapped in DDP, give the guard "
                "the wrapped one, or a resumed run may differ in the last bits at 3 and more ranks",
            )
        self._recording: dict[str, GradientOrder] = {}
        for name, module in ddp:
            if module.static_graph:
                if effect := effect_of_order(module):
                    risks.risk(
                        f"{name} is DDP with static_graph=True, whose order of gradients no checkpoint has: a resumed "
                        f"run {effect}",
                        "Write DDP(..., static_graph=False), and torch.utils.checkpoint with use_reentrant=False",
                    )
            elif not collector.gradient_order.get(name):
                order = self._recording[name] = GradientOrder(module)
                order.record()
        self.are_complete = not self._recording
        """There is nothing left to record, and `at_boundary` need not be called."""

    def at_boundary(self) -> None:
        """Training thread, at each boundary: keep the orders that are complete."""
        for name, order in list(self._recording.items()):
            is_complete = order.finish()
            self._collector.gradient_order[name] = order.order
            if is_complete:
                del self._recording[name]
                self.are_complete = not self._recording


class BufferBroadcasts:
    """The broadcast flags of the DDP modules of a job, by their paths. All ranks have the same state here, for a
    broadcast takes all."""

    def __init__(self, modules: Sequence[tuple[str, DistributedDataParallel]] = ()) -> None:
        self._modules = [(name, module) for name, module in modules if module.broadcast_buffers]
        self.are_used = bool(self._modules)
        self.seen = self.look()
        """As at the last boundary."""

    def look(self) -> list[bool]:
        """As it is now."""
        return [module.require_forward_param_sync for _, module in self._modules]

    def copy(self) -> None:
        """This is a boundary. Only where they `are_used`."""
        self.seen = self.look()

    def put_back(self, seen: Sequence[bool]) -> None:
        """Let it be as `look` has given it."""
        for (_, module), flag in zip(self._modules, seen, strict=True):
            module.require_forward_param_sync = flag

    def state(self) -> dict[str, bool]:
        """As at the last boundary: the modules of which the next forward broadcasts nothing."""
        return {name: False for (name, _), flag in zip(self._modules, self.seen, strict=True) if not flag}

    def load(self, state: Mapping[str, bool]) -> None:
        for name, module in self._modules:
            module.require_forward_param_sync = state.get(name, True)
        self.copy()


class CollectiveWaits:
    """Times how long this rank waits for the others in the collectives of its DDP modules, by the clock of the host:

    * at the end of a backward, from the moment that all its own gradients are there until they are reduced. Autograd
      calls back then, in the order in which it was asked to: before DDP, and behind it;
    * before a forward, while DDP broadcasts rank 0's buffers: between the hooks of DDP and those of the module in it.
      That one has its hook for this moment only: a program may pickle it.

    Only in steps that are to be timed (`StatusPage.is_timed`). With NCCL the host does not wait there, the device does,
    and is not asked. A backward in which the timed parameter gets no gradient is not known: nothing is noted. Training
    thread, and autograd's.
    """

    def __init__(self, ddp: DdpModules, replicas: Sequence[nn.Module], page: StatusPage) -> None:
        """`replicas`: see `outermost_replicas`."""
        self._page = page
        self._handles: list[Any] = []
        self._inside: Any = None
        for _, module in ddp:
            trained = [p for p in module.module.parameters() if p.requires_grad]
            for parameter in trained[-1:]:
                self._handles.append(parameter.register_post_accumulate_grad_hook(lambda _: self._in_backward()))
            if any(module is each for each in replicas):  # in one that torch.compile compiles it would be traced
                self._handles.append(module.register_forward_pre_hook(lambda module, _: self._before_forward(module)))

    def _in_backward(self) -> None:
        if not self._page.is_timed or torch.compiler.is_compiling():
            return
        ask: Any = torch.autograd.Variable._execution_engine.queue_callback
        began = 0

        def note() -> None:
            self._page.note_wait(time.monotonic_ns() - began)

        def begin() -> None:
            nonlocal began
            began = time.monotonic_ns()
            ask(note)

        ask(begin)

    def _before_forward(self, module: Any) -> None:
        inner = module.module
        if (
            not self._page.is_timed
            or torch.compiler.is_compiling()
            or hasattr(inner, "_orig_mod")
            or inner._compiled_call_impl is not None
            or isinstance(inner, torch.jit.ScriptModule)  # takes no hooks
        ):
            return
        if module.will_sync_module_buffers():
            self._leave_module()  # of a forward that has failed
            began = time.monotonic_ns()
            self._inside = inner.register_forward_pre_hook(lambda *_: self._in_forward(began), prepend=True)

    def _in_forward(self, began: int) -> None:
        self._page.note_wait(time.monotonic_ns() - began)
        self._leave_module()

    def _leave_module(self) -> None:
        if self._inside is not None:
            self._inside.remove()
            self._inside = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._leave_module()
