"""What one training step has seen and made: `Witness` looks, its subclasses keep the steps.

It looks in up to three places:

* the first forward of a named module in training mode: streams, weights, options of the optimizers, flags, and the
  program's own variables, which are not compared, but explain a difference;
* what the modules are given: the tensors of the first forwards;
* the boundary: all that the guard saves, and what it does not (flags, buffers that are not persistent), and the
  streams; and the variables. Once more where code has followed the step at its epoch's end.

It only reads. Training thread.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from mindx_elastic.capture.components import ModuleComponent, OptimizerComponent
from mindx_elastic.capture.rng import capture_rng
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.position import Position
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.data.iteration import CursorLoader
from mindx_elastic.guard.checks.program_variables import program_frames
from mindx_elastic.guard.loops.followed_loader import FollowedLoader
from mindx_elastic.guard.loops.loops import Loops
from mindx_elastic.guard.opening import Opening
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.prove.causes import Explained, explain
from mindx_elastic.prove.compare import Difference, root_of
from mindx_elastic.prove.digests import digest, leaves, stream_digest
from mindx_elastic.prove.loop_variables import rebound_in
from mindx_elastic.prove.records import MOST_FORWARDS, WitnessedStep
from mindx_elastic.prove.variables import Variables

__all__ = ["Observed", "Witness", "kept_of"]

_MOST_PARTS = 16  # of a batch
_MOST_ITEMS = 256  # of a container in a state, each with its own digest
_LOADER = re.compile(r"loader(_\d+)?")


class Observed:
    """An observer reads it, and changes nothing."""

    def __init__(self, opening: Opening, stopper: Stopper, loops: Loops, is_outside: Callable[[], bool]) -> None:
        """`is_outside`: what happens now belongs to no step."""
        start = opening.start
        self.directory, self.prefix = opening.options.folder, opening.options.prefix
        self.run_id, self.ranks = start.run_id, stopper.ranks
        self.targets, self.collector = opening.targets, opening.collector
        self.position = loops.position
        """The last boundary passed."""
        self.resumed = start.step
        """Step of the checkpoint that this run went on from."""
        self.resumed_path = None if start.resumed is None else start.resumed.path
        self.was_not_kept = "" if start.resumed is None else start.resumed.checkpoint.info.not_kept
        """What `not_kept` had found in the stopped process: ``self.n, self.meter (4 attributes)``."""
        self._told_at_start = start.shown
        self.policies, self.stopper = opening.policies, stopper
        self.unmanaged = opening.unmanaged
        """Where a comparison notes what it has shown."""
        self.is_outside = is_outside
        self.loops = loops

    def explain(self, difference: Difference) -> Explained:
        """What is different in the resumed run, and why: what the start has told (a rank takes another one's file),
        else the usual cause."""
        found = explain(difference)
        told = self._told_at_start
        return found._replace(cause="", remedy=f"As the start has said: {told[0]}") if told else found


class Witness:
    """One per guard that is looked at."""

    def __init__(self) -> None:
        self.is_over, self.outcome = False, ""
        """There is nothing more to look at."""
        self.scalars: Mapping[str, Any] = {}
        """What the program has given to the step's `step_end`."""
        self._rebound: set[str] = set()
        self.begin_step()

    def watch(self, stack: ExitStack, seen: Observed) -> None:
        """Look from here on, until `stack` closes."""
        self._collector, self._outside = seen.collector, seen.is_outside
        self._kept, self._ids = kept_of(seen.targets)
        self._modules = {name: t for name, t in seen.targets.items() if isinstance(t, nn.Module)}
        for name, module in self._modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                handle = module.register_forward_pre_hook(self._forward_hook(name), prepend=True, with_kwargs=True)
                stack.callback(handle.remove)

    def at_forward(self) -> None:
        """The first forward of a step begins."""

    # --- one step ---

    def begin_step(self) -> None:
        """What was seen since the last boundary is part of no step."""
        self._begin: dict[str, str] | None = None
        self._inputs: dict[str, list[str]] = {}
        self.scalars = {}

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
                return
            if not (self._outside() or _is_transformed()):
                self._note_forward(name, args, kwargs)

        return hook

    def _note_forward(self, name: str, args: Any, kwargs: Any) -> None:
        if self._begin is None:
            self._begin = self._streams() | self._now()
            self.at_forward()
        given = self._inputs.setdefault(name, [])
        if len(given) < MOST_FORWARDS:
            given.append(_parts({"args": args, "kwargs": kwargs}).replace(" ", "_"))

    def made_step(self, position: Position, *, is_cut: bool, series: int = 0) -> WitnessedStep:
        """The step is over: what was seen of it."""
        end = self._streams() | self.state()
        end.update({f"scalar|{name}": digest(value) for name, value in self.scalars.items()})
        end.update({f"calls|{name}": str(len(given)) for name, given in self._inputs.items()})
        end.update({f"batch|{name}": " ".join(given) for name, given in self._inputs.items()})
        step = WitnessedStep(
            series=series,
            number=position.step,
            epoch=position.epoch,
            step_in_epoch=position.step_in_epoch,
            cut=is_cut,
            begin=self._begin,
            end=end,
            clock=time.monotonic(),
        )
        self.begin_step()
        return step

    def state(self) -> dict[str, str]:
        """What `_now` has, and what else the guard saves, as it would save it now."""
        found = self._now()
        modules = [c.module for c in self._collector.components.values() if isinstance(c, ModuleComponent)]
        names = {id(parameter): name for module in modules for name, parameter in module.named_parameters()}
        for target, state in self._collector.state().items():
            component = self._collector.components.get(target)
            if target in RESERVED_NAMES or component is None or target not in self._kept:
                continue
            if isinstance(component, OptimizerComponent):
                of_key = {index: names.get(id(each), str(index)) for index, each in enumerate(component.parameters)}
                for key, value in state["state"].items():
                    name = of_key.get(key, str(key))
                    found.update((f"optimizer|{target} {leaf} of {name}", d) for leaf, d in leaves(value))
                continue
            is_module = isinstance(component, ModuleComponent)
            rest = {k: v for k, v in state.items() if f"weights|{target}.{k}" not in found} if is_module else state
            if rest:
                found.update((f"stateful|{place}", each) for place, each in leaves(rest, target, most=_MOST_ITEMS))
        return found

    # --- what there is to see: "kind|name" -> digest ---

    def _streams(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, state in capture_rng().items():
            of_devices = {f"{name}:{n}": each for n, each in enumerate(state)} if type(state) is list else {}
            for each, part in (of_devices or {name: state}).items():
                found[f"stream|{each}"] = f"{stream_digest(part):016x}"
        return found

    def _now(self) -> dict[str, str]:
        """Weights, options, flags and variables."""
        found = self._variables()
        for target, component in self._collector.components.items():
            if isinstance(component, ModuleComponent):
                module = component.module
                for each in (module.named_parameters, module.named_buffers):
                    found.update(
                        (f"weights|{target}.{n}", digest(tensor)) for n, tensor in each(remove_duplicate=False)
                    )
                for name, inner in module.named_modules():
                    found[f"flag|{target}{'.' if name else ''}{name}.training"] = str(inner.training)
                for name, parameter in module.named_parameters():
                    found[f"flag|{target}.{name}.requires_grad"] = str(parameter.requires_grad)
            elif isinstance(component, OptimizerComponent):
                groups = component.optimizer.param_groups
                for index, group in enumerate(groups):
                    where = target if len(groups) == 1 else f"{target} group {index}"
                    options = ((key, value) for key, value in group.items() if key != "params")
                    found.update((f"option|{where} {key}", digest(value)) for key, value in options)
        return found

    def _variables(self) -> dict[str, str]:
        """Without what each turn of the innermost loop binds before it reads it: a batch, a loss."""
        for frame in program_frames(sys._getframe(1)):
            self._rebound |= rebound_in(frame)
        found = Variables(self._ids, parameters=True).of_program(sys._getframe(1)) | Variables(()).of_kept(self._kept)
        return {f"variable|{name}": each for name, each in found.items() if root_of(name) not in self._rebound}


def kept_of(targets: Mapping[str, Any]) -> tuple[dict[str, Any], set[int]]:
    """The objects of a guard that are kept as a whole, and the `id` of these, of the modules and parameters inside of
    them and of what adapters around them hold. The data set of a loader is the program's."""
    loaders = (DataLoader, FollowedLoader, CursorLoader)
    kept = {n: t for n, t in targets.items() if not (_LOADER.fullmatch(n) or isinstance(t, loaders))}
    adapters = [target for target in kept.values() if type(target).__module__.startswith("mindx_elastic.")]
    held = (value for adapter in adapters for value in attributes_of(adapter).values())
    modules = [target for target in kept.values() if isinstance(target, nn.Module)]
    inside = (inner for each in modules for inner in (*each.modules(), *each.parameters()))
    return kept, {*map(id, kept.values()), *map(id, held), *map(id, inside)}


def _is_transformed() -> bool:
    """Inside of torch.func.grad, vmap, ...: tensors have no bytes of their own there."""
    return torch._C._functorch.maybe_current_level() is not None


def _parts(batch: Any) -> str:
    """The digests of a batch's tensors: where some are equal and others not, the samples are the same."""
    found = [each for _, each in leaves(batch)]
    return ",".join(found) if len(found) <= _MOST_PARTS else digest(batch)
