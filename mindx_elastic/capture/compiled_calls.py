"""Records the calls that make torch.compile compile, so that a resumed process can compile the same code.

What torch.compile runs for a call depends on the calls before it. The first call is compiled for its exact sizes. A
call with another size is compiled once more, with that size as a variable ("automatic dynamic"), and from then on this
newer code also runs the sizes of the first call. The backend may sum in another order in either code. So a resumed
process that begins with the short last batch of an epoch, or in a later epoch, runs other code than the uninterrupted
one, and its weights differ in the last bits.

What is compiled follows from the sequence of the calls that were compiled. This module keeps that sequence: for each
such call its module, a description of its arguments (sizes, types, no large values), and the modes it was made in. It
travels in the checkpoint, and `resume.compiled_replay` makes the calls again. Dynamo tells when it compiles, so a step
that compiles nothing costs nothing.

A compiled function that is not one of the job's modules (a loss, a whole training step) cannot be called again: it may
have effects. Its sizes are kept, to tell when they make a difference (`CompiledCalls.problems`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.call_arguments import UnknownArgumentError, describe_arguments, sizes_in
from mindx_elastic.capture.components import unwrap_module

__all__ = ["CompiledCalls", "bits_of", "calls_in", "modes_of", "named_modules_of", "wrappers_in"]

_MOST_CALLS = 512
_MOST_BYTES = 1 << 20
_WRAPPERS = ("compile_wrapper", "_fn")  # the function that torch.compile returns; the second name before torch 2.8


def named_modules_of(targets: Mapping[str, object]) -> dict[str, nn.Module]:
    """Every module of the job by its path, without the wrappers (DDP, torch.compile) around a whole component."""
    return {
        f"{name}.{place}" if place else name: module
        for name, target in targets.items()
        if isinstance(target, nn.Module)
        for place, module in unwrap_module(target).named_modules()
    }


def calls_in(kept: bytes) -> list[dict[str, Any]]:
    """The calls of `CompiledCalls.kept`. Raises ValueError."""
    return [json.loads(line) for line in kept.decode().splitlines()]


def bits_of(flags: Iterable[bool]) -> str:
    """Flags as a hexadecimal number, the first one in its lowest bit."""
    return f"{sum(1 << place for place, flag in enumerate(flags) if flag):x}"


def modes_of(module: nn.Module) -> dict[str, Any]:
    """The modes on which a compiled call depends: of torch, and of the module's parts."""
    devices = ["cpu", *({torch._C._get_accelerator().type} - {"cpu"})]
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {
            device: str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            for device in devices
            if torch.is_autocast_enabled(device)
        },
        "training": bits_of(part.training for part in module.modules()),
        "learns": bits_of(parameter.requires_grad for parameter in module.parameters()),
        "in_ddp": DistributedDataParallel._get_active_ddp_module() is not None,
    }


class CompiledCalls:
    """The calls of this run that were compiled, in their order. Training thread, `kept` any thread."""

    def __init__(self, targets: Mapping[str, object]) -> None:
        self._targets = targets
        self._calls: list[dict[str, Any]] = []
        self._frames: dict[str, int] = {}
        self._listening = False
        self.is_same_step = False
        """The last call was made in the step that is being done; a boundary resets it."""
        self.kept = b""
        """The calls so far, one a line, as JSON; only ever replaced. Empty: nothing was compiled."""
        self.problems: dict[str, str] = {}
        """The compiled callables that are compiled for sizes that vary and cannot be compiled the same again; with the
        reason."""
        self.only_names = False
        """No call can be made again (a forward of a sharded model exchanges parts with the other ranks)."""

    # --- listening ---

    def listen(self) -> None:
        """Note each compilation from now on."""
        if self._listening or "torch._dynamo" not in sys.modules:  # every optimizer imports it
            return
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._compiles)
        self._listening = True

    def stop(self) -> None:
        """Undo `listen`."""
        if self._listening:
            from torch._dynamo.callback import callback_handler

            callback_handler.remove_start_callback(self._compiles)
            self._listening = False

    def go_on(self, kept: bytes, frames: Mapping[str, int]) -> None:
        """Go on from the calls of the run before. `frames`: the numbers of the frames that this process has compiled
        for them."""
        self._calls = calls_in(kept)
        self._frames = dict(frames)
        self.kept = kept

    # --- one compilation ---

    def _compiles(self, args: Any = None) -> None:
        """Dynamo begins to compile. Runs inside of it, under a lock of its own: looks only, and raises nothing."""
        if args is not None and args.callback_trigger.name != "DYNAMO":
            return
        compile_id = str(torch._guards.CompileContext.current_compile_id() if args is None else args.compile_id)
        try:
            self._note(compile_id)
        except Exception as error:  # the program's compilation must go on; the guard names the problem
            self.problems.setdefault("a model", f"the call could not be recorded: {type(error).__name__}: {error}")

    def _note(self, compile_id: str) -> None:
        found = _outermost_call()
        if found is None:
            return
        called, function, arguments = found
        module = _module_of(called, function)
        if module is None and (owner := _owner_among(arguments[0], function)) is not None:
            module, arguments = owner, (arguments[0][1:], arguments[1])
        frame, _, number = compile_id.partition("/")
        names = {id(module): name for name, module in named_modules_of(self._targets).items()}
        name = None if module is None else names.get(id(unwrap_module(module)))
        if module is None or name is None or self.only_names:
            why = "a call of a sharded model needs the other ranks" if name else "it is not a module that the guard has"
            self._note_other(name or _name_of(function), arguments, why)
            return
        if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
            # Dynamo compiles DDP's own forward too, for its flags: a call would have to reduce gradients.
            self._note_other(name, arguments, "DDP is inside of it; write DDP(torch.compile(model))")
            return
        try:
            described = describe_arguments(*arguments)
        except UnknownArgumentError as error:
            self._note_other(name, arguments, f"an argument cannot be made again: {error}")
            return
        call = {
            "on": name,
            "how": "module" if called is not None else function.__name__,
            "inside": wrappers_in(module),
            **modes_of(unwrap_module(module)),
            "arguments": described,
        }
        step = f"{self._frames.setdefault(frame, len(self._frames))}/{number}"
        last = self._calls[-1] if self._calls else {}
        if self.is_same_step and {key: value for key, value in last.items() if key != "compiles"} == call:
            last["compiles"].append(step)
        else:
            self._calls.append({**call, "compiles": [step]})
        self.is_same_step = True
        self._publish()

    def _note_other(self, name: str, arguments: tuple[tuple[Any, ...], dict[str, Any]], because: str) -> None:
        kind = f"{name}{'' if torch.is_grad_enabled() else ' (without gradients)'}"
        sizes = sizes_in(arguments)
        known = [call["sizes"] for call in self._calls if call.get("other") == kind]
        if all(each == sizes for each in known):
            self._calls.extend([] if known else [{"other": kind, "sizes": sizes}])
        elif not _is_static():
            self.problems[name] = because
            self._calls.extend([] if sizes in known else [{"other": kind, "sizes": sizes}])
        self._publish()

    def _publish(self) -> None:
        if len(self._calls) > _MOST_CALLS:
            self.problems["a model"] = f"more than {_MOST_CALLS} calls were compiled"
            return
        kept = "\n".join(json.dumps(call, separators=(",", ":")) for call in self._calls).encode()
        if len(kept) > _MOST_BYTES:
            self.problems["a model"] = "the descriptions of the calls are too large to be kept"
            return
        self.kept = kept


# --- which call it is ---


def _outermost_call() -> tuple[nn.Module | None, Any, tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """The compiled callable that the program has called: its `OptimizedModule` or None, the function inside, and the
    arguments; None where there is none."""
    from torch._dynamo.eval_frame import DisableContext, OptimizedModule

    call_of_module: CodeType | None = getattr(vars(OptimizedModule).get("__call__"), "__code__", None)
    found = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is call_of_module:
            local = frame.f_locals
            found = local["self"], local["self"]._orig_mod, (local["args"], local["kwargs"])
        elif code.co_name in _WRAPPERS and code.co_filename.endswith("eval_frame.py"):
            local = frame.f_locals
            if "fn" in local and "kwargs" in local and not isinstance(local.get("self"), DisableContext):
                found = None, local["fn"], (local["args"], local["kwargs"])
        frame = frame.f_back
    return found


def _module_of(called: nn.Module | None, function: Any) -> nn.Module | None:
    """The module that is called, where it can be called again: by its own name, or by a bound method of it."""
    if called is not None:
        return called
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _owner_among(positional: tuple[Any, ...], function: Any) -> nn.Module | None:
    """The module whose method is called, where the class has the compiled method (``@torch.compile`` above it)."""
    owner = positional[0] if positional else None
    method = getattr(type(owner), getattr(function, "__name__", ""), None)
    is_method = isinstance(owner, nn.Module) and getattr(method, "_torchdynamo_orig_callable", None) is function
    return owner if is_method else None


def wrappers_in(module: nn.Module) -> list[str]:
    """The types of the wrappers from `module` inwards, without the user's own module."""
    found = []
    innermost, outer = unwrap_module(module), module
    while outer is not innermost:
        found.append(type(outer).__name__)
        inner = outer.module if isinstance(outer, DistributedDataParallel) else outer._orig_mod
        assert isinstance(inner, nn.Module)
        outer = inner
    return found


def _is_static() -> bool:
    """Whether the call that is compiled has code of its own for each size (``dynamic=False``), whatever their order."""
    from torch._dynamo import config

    return bool(config.assume_static_by_default and not config.automatic_dynamic_shapes)


def _name_of(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if isinstance(code, CodeType) else str(name)
