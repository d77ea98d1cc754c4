"""Makes a resumed process compile what the interrupted one had compiled, in the same order.

The calls that were compiled are in the checkpoint (`capture.compiled_calls` says why they matter). Each is made again
with arguments of the same description, forward and backward, before the first step. Nothing of it is kept but the
compiled code: parameters, their gradients, buffers, plain attributes of modules and random streams are as before.

What dynamo compiled for each call is in the record too ("the second compilation of the first frame"). If a call leads
to other compilations now, the code is not the same, and the caller hears why.

Rejected:

* the profile that dynamo itself can keep (`torch._dynamo.pgo`). It says which sizes vary, but not in which order they
  came; a process that has it compiles the first size it meets as a variable, while the uninterrupted one compiled the
  second, and the backend chooses its loops by that example. It also knows a function with a closure by a hash that
  differs from process to process.
* `torch.compiler.load_cache_artifacts`: it brings compiled code, not the choice between two that fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from mindx_elastic.capture.call_arguments import make_arguments
from mindx_elastic.capture.compiled_calls import bits_of, calls_in, modes_of, named_modules_of, wrappers_in
from mindx_elastic.capture.components import unwrap_module
from mindx_elastic.capture.living import living_objects
from mindx_elastic.capture.rng import kept_rng
from mindx_elastic.core.looks import is_computed

__all__ = ["CompiledReplay", "runs_of"]

_OF_TORCH = frozenset(vars(nn.Module()))


def runs_of(kept: bytes) -> list[tuple[str, int]]:
    """The calls of the training that are to be made again: module and modes (not sizes), and how often in a row.

    The forward of a training may wait for the other ranks, so all of them have to make the same calls. Evaluations may
    be one rank's alone, and are not in it.
    """
    outlines = [_outline_of(call) for call in calls_in(kept) if _trains(call)]
    return [(outline, len(list(group))) for outline, group in itertools.groupby(outlines)]


def _trains(call: Mapping[str, Any]) -> bool:
    return "on" in call and bool(call["grad"])


def _outline_of(call: Mapping[str, Any]) -> str:
    return f"{call['on']} {call['how']} {call['training']} {call['in_ddp']}"


class CompiledReplay:
    """Makes the calls of a checkpoint again. Main thread, before the first step, when the state has been loaded."""

    def __init__(self, targets: Mapping[str, object], kept: bytes) -> None:
        """`kept`: see `CompiledCalls.kept`."""
        self._modules = named_modules_of(targets)
        self._roots = [target for target in targets.values() if isinstance(target, nn.Module)]
        self._calls = [call for call in calls_in(kept) if "on" in call]
        self._frames: dict[str, int] = {}
        self._compiled: list[str] = []

    @property
    def frames(self) -> Mapping[str, int]:
        """The numbers of the frames that were compiled, in their order, by dynamo's own number in this process."""
        return self._frames

    def run(self, runs: Sequence[int] = ()) -> str | None:
        """Make the calls. Returns None when the same code has been compiled, else why it has not.

        `runs`: how many calls each run of them has on the rank that makes most (see `runs_of`); this rank repeats its
        last one as often, which compiles nothing.
        """
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._note)
        try:
            with kept_rng(), _kept_state(self._roots):
                problems = [self._run(call, repeats) for call, repeats in self._with_repeats(runs)]
        finally:
            callback_handler.remove_start_callback(self._note)
        return next((problem for problem in problems if problem is not None), None)

    def _with_repeats(self, runs: Sequence[int]) -> list[tuple[Mapping[str, Any], int]]:
        groups = [list(group) for _, group in itertools.groupby(filter(_trains, self._calls), _outline_of)]
        last = {id(group[-1]): most - len(group) for group, most in zip(groups, runs, strict=False)}
        return [(call, last.get(id(call), 0)) for call in self._calls]

    def _run(self, call: Mapping[str, Any], repeats: int) -> str | None:
        name, how = call["on"], call["how"]
        module = self._modules.get(name)
        called = None if module is None else self._callable_of(module, call)
        if module is None or called is None:
            return f"{name} is not compiled any more" if how == "module" else f"{name}.{how} is not compiled any more"
        self._compiled = []
        try:
            with _modes(module, call, self._ddp_of(module) if call["in_ddp"] else None):
                for _ in range(1 + repeats):
                    arguments, named = make_arguments(call["arguments"])
                    _forward_and_backward(called, arguments, named, module)
        except Exception as error:  # of the program's forward, or of the compiler
            text = str(error).strip().split("\n")[0]
            return f"{name} cannot be called again with arguments of the same sizes: {type(error).__name__}: {text}"
        if self._compiled != call["compiles"]:
            return (
                f"a call of {name} with arguments of the same sizes compiles {_said(self._compiled)}, and it compiled "
                f"{_said(call['compiles'])} before"
            )
        return None

    def _note(self, args: Any = None) -> None:
        if args is not None and args.callback_trigger.name != "DYNAMO":
            return
        compile_id = str(torch._guards.CompileContext.current_compile_id() if args is None else args.compile_id)
        frame, _, number = compile_id.partition("/")
        self._compiled.append(f"{self._frames.setdefault(frame, len(self._frames))}/{number}")

    # --- what is called ---

    def _callable_of(self, module: nn.Module, call: Mapping[str, Any]) -> Any:
        how = call["how"]
        if how == "module":
            return next((each for each in self._wrappers_of(module) if wrappers_in(each) == call["inside"]), None)
        method = getattr(module, "_compiled_call_impl" if how == "_call_impl" else how, None)
        if hasattr(method, "_torchdynamo_orig_callable"):
            return method
        for function in living_objects(FunctionType):
            inner = getattr(function, "_torchdynamo_orig_callable", None)
            if getattr(inner, "__self__", None) is module and getattr(inner, "__name__", "") == how:
                return function
        return None

    def _wrappers_of(self, module: nn.Module) -> Iterator[nn.Module]:
        """The results of torch.compile around `module`: among the job's modules, else anywhere in the process."""
        from torch._dynamo.eval_frame import OptimizedModule

        known = [each for root in self._roots for each in root.modules() if isinstance(each, OptimizedModule)]
        yield from (each for each in known if unwrap_module(each) is module)
        yield from (each for each in living_objects(OptimizedModule) if unwrap_module(each) is module)

    def _ddp_of(self, module: nn.Module) -> DistributedDataParallel | None:
        """The innermost DDP module around `module`."""
        found = living_objects(DistributedDataParallel)
        around = [each for each in found if any(part is module for part in each.modules())]
        return min(around, key=lambda each: len(list(each.modules())), default=None)


def _said(compiled: Sequence[str]) -> str:
    return ", ".join(compiled) or "nothing"


# --- the call and what must be as before ---


def _forward_and_backward(called: Any, arguments: tuple[Any, ...], named: dict[str, Any], module: nn.Module) -> None:
    outputs = [
        leaf
        for leaf in tree_leaves(called(*arguments, **named))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_computed(leaf)
    ]
    if not outputs or not torch.is_grad_enabled():
        return
    inputs = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    inputs += [parameter for parameter in module.parameters() if parameter.requires_grad]
    # Not backward(): gradients, their hooks and the reductions of a DDP around it are not touched.
    torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs], allow_unused=True)


@contextmanager
def _modes(module: nn.Module, call: Mapping[str, Any], ddp: DistributedDataParallel | None) -> Iterator[None]:
    """The modes in which `call` was made."""
    parts, parameters = list(module.modules()), list(module.parameters())
    training, learns = [part.training for part in parts], [parameter.requires_grad for parameter in parameters]
    try:
        with ExitStack() as stack:
            _set_flags(parts, _flags_of(call["training"], len(parts)))
            _set_gradients(parameters, _flags_of(call["learns"], len(parameters)))
            stack.enter_context(torch.inference_mode(call["inference"]))
            stack.enter_context(torch.set_grad_enabled(call["grad"]))
            for device in {*call["autocast"], *modes_of(module)["autocast"]}:
                dtype = call["autocast"].get(device)
                options = {} if dtype is None else {"dtype": getattr(torch, dtype)}
                stack.enter_context(torch.autocast(device, enabled=dtype is not None, **options))
            if ddp is not None:
                stack.enter_context(ddp._inside_ddp_forward())
            yield
    finally:
        _set_flags(parts, training)
        _set_gradients(parameters, learns)


def _flags_of(bits: str, count: int) -> list[bool]:
    number = int(bits, 16)
    flags = [bool(number >> place & 1) for place in range(count)]
    if bits_of(flags) != bits:
        raise ValueError("it has fewer parts or parameters now")
    return flags


def _set_flags(parts: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for part, flag in zip(parts, flags, strict=True):
        part.training = flag


def _set_gradients(parameters: Sequence[nn.Parameter], flags: Sequence[bool]) -> None:
    for parameter, flag in zip(parameters, flags, strict=True):
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)


@contextmanager
def _kept_state(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Buffers and plain attributes of all modules are as before: also those that no checkpoint has.

    Attributes that a forward makes the first time it runs (a table of positions) stay: the code is compiled for them.
    """
    modules = list({id(module): module for root in roots for module in root.modules()}.values())
    tables = [(module._buffers, dict(module._buffers)) for module in modules]
    buffers = [buffer for _, table in tables for buffer in table.values() if buffer is not None]
    copies = [(buffer, buffer.detach().clone()) for buffer in buffers]
    attributes = [(module, _attributes(module)) for module in modules]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)
        for live, table in tables:
            if not _same(live, table):
                live.clear()
                live.update(table)
        for module, kept in attributes:
            _put_back(module, kept)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Of each plain attribute the object, and a copy of what is in it where that can change."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(module).items():
        if name in _OF_TORCH:
            continue
        content = None
        if isinstance(value, torch.Tensor):
            content = value.detach().clone()
        elif type(value) in (list, dict, set):
            content = value.copy()
        found[name] = value, content
    return found


def _put_back(module: nn.Module, kept: Mapping[str, tuple[Any, Any]]) -> None:
    live = vars(module)
    for name, (value, content) in kept.items():
        if value is not None and live.get(name) is not value:
            live[name] = value
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(content)
        elif content is not None and not _same(value, content):
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def _same(live: Any, kept: Any) -> bool:
    """Whether two lists, dicts or sets hold the same objects."""
    if isinstance(live, set):
        return bool(live == kept)
    if isinstance(live, dict) and list(live) != list(kept):
        return False
    one, other = (list(each.values()) if isinstance(each, dict) else each for each in (live, kept))
    return len(one) == len(other) and all(map(is_, one, other))
