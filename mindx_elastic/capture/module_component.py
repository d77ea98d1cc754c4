"""A module of the job: parameters are stable and read in place; buffers (BatchNorm changes them in forward), extra
state and what no state_dict has (flags, masks, buffers that are not persistent) are copied at every boundary."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from mindx_elastic.capture.buffer_block import BufferBlock, BufferReader, is_plain, view_of
from mindx_elastic.capture.copying import copy_state
from mindx_elastic.capture.dtensors import local_part, with_layout_of
from mindx_elastic.capture.extra_state import ExtraTensors, Flags, OwnAttributes, original_names, prune_as, pruned_in
from mindx_elastic.capture.structure import Structure, buffers_of, parameters_of
from mindx_elastic.capture.values import originals
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError, UnsupportedStateError, UsageError

__all__ = ["ModuleComponent", "unwrap_module"]

_MODEL = re.compile(r"model(_\d+)?")
_MOST_PARTS = 64
_LAZY = (UninitializedParameter, UninitializedBuffer)
_name_of = attrgetter("__name__")


def unwrap_module(module: nn.Module) -> nn.Module:
    """The user's own module inside DDP and `torch.compile` wrappers, so that names do not depend on them."""
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def _inside(module: nn.Module) -> nn.Module | None:
    """What DDP or `torch.compile` has wrapped in `module`; None: it is not a wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        inner: object = module.module
    else:
        inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _wrappers_of(module: nn.Module) -> list[nn.Module]:
    found = []
    while (inner := _inside(module)) is not None:
        found.append(module)
        module = inner
    return found


_PLAIN = (torch.Tensor, nn.Parameter)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Hardly anything gives the buffers of these other memory, and what does gives it to those of all: at each boundary
those of the outermost are asked, and those between them now and then."""
_NUM_BUFFERS = 3
"""Of one of these."""


class ModuleComponent:
    """A module: parameters are stable, buffers and extra state volatile. `name` is used in errors."""

    _block: BufferBlock

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = unwrap_module(module)
        children = list(self.module.modules())
        _refuse_lazy(name, self.module, children)
        _refuse_old_fsdp(name, children)
        _reshard(children)
        named = dict(self.module.named_parameters(remove_duplicate=False))
        self._sharded = named if any(isinstance(p, DTensor) for p in named.values()) else {}
        self._named = named
        self.flags = Flags(self.module, named, _wrappers_of(module))
        """`training` and `requires_grad`."""
        parts = dict(islice(self.module.named_modules(), _MOST_PARTS + 1))
        self.keeps_attributes = not _MODEL.fullmatch(name) and len(parts) <= _MOST_PARTS
        """Plain attributes are state, too: of a memory bank, a metric. A copy of a model has too many parts to look
        at in each step, and those of the model are mostly caches."""
        self._own = OwnAttributes(is_stable=False)
        self._own.set_owners(parts if self.keeps_attributes else {})
        self._is_broadcast = any(getattr(each, "broadcast_buffers", False) for each in _wrappers_of(module))
        self._loose = ExtraTensors(self.module)
        self.structure = Structure(self.module, original_names(named, self._loose.pruned))
        self._described: object = None
        self._description = ""
        self._find_slots()
        self._first = {name: (weakref.ref(t), t.shape, t.dtype) for name, t in self.named_buffers()}
        """The saved buffers as the program has built them."""
        self.copy()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Each of `named` once."""
        return list({id(parameter): parameter for parameter in self.named.values()}.values())

    def follow(self) -> list[str]:
        """Modules or parameters may have changed: go on with what there is now. Returns what a start cannot make again.

        A parameter or module of the same name and shape is none of that, nor is a pruned parameter.
        """
        _reshard(self.module.modules())
        named = self._named = dict(self.module.named_parameters(remove_duplicate=False))
        self._sharded = named if self._sharded else {}
        self._loose.follow()
        self.flags.follow(named)
        self._find_slots()
        self.structure.follow()
        return self.structure.problems(original_names(named, self._loose.pruned))

    def is_other_model(self) -> bool:
        """Whether the module has become what a start cannot make again, according to `follow`, which is not done."""
        if not self.structure.has_changed():
            return False
        named = dict(self.module.named_parameters(remove_duplicate=False))
        return bool(self.structure.problems(original_names(named, pruned_in(self.module))))

    def _find_slots(self) -> None:
        # Tables and keys, not tensors: a forward that assigns `self.buf = new` replaces the object.
        self._slot_tables: list[dict[str, Any]] = []
        self._slot_keys: list[str] = []
        self._slot_names: list[str] = []
        of_norms: list[int] = []
        self._extras: list[tuple[str, nn.Module]] = []
        places = [*self.module.named_modules(remove_duplicate=False)]
        tables = {id(child): buffers_of(child) for _, child in places}
        self._parameter_tables = [(f"{p}." if p else "", t) for p, child in places if (t := parameters_of(child))]
        self._order: list[str] = []  # of its state, as its `state_dict` has given it last
        seen: set[int] = set()
        for prefix, child in places:
            dot = f"{prefix}." if prefix else ""
            table = tables[id(child)]
            for key in table:
                if key not in child._non_persistent_buffers_set:
                    if type(child) in _BATCH_NORMS:
                        of_norms.append(len(self._slot_names))
                    self._slot_tables.append(table)
                    self._slot_keys.append(key)
                    self._slot_names.append(dot + key)
            if type(child).get_extra_state is not nn.Module.get_extra_state and id(child) not in seen:
                seen.add(id(child))
                self._extras.append((f"{dot}_extra_state", child))
        self._fixed = frozenset(of_norms[_NUM_BUFFERS:-_NUM_BUFFERS])
        self._has_read_flags = True  # as of the last boundary
        self._replaces_buffers = False  # the program has done so, and torch's hook has not told
        self._has_found_buffers = True  # at the last boundary: the tensors in its tables were looked at
        self._reader = BufferReader(self._live_buffers(), self._fixed)
        self._read_buffers()
        self._ahead = self._block.slices, self._block.raw
        self.extras: dict[str, Any] = {}
        """The copied extra state, by name."""

    def copy(self, *, closely: bool = True) -> None:
        """This is a boundary. `closely`: see `close_looks`."""
        self._has_read_flags = closely or self.flags.root["training"] is not self.flags.seen[0]
        if self._slot_names:
            self._has_found_buffers = self._has_read_flags or self._replaces_buffers or self.structure.has_new_buffers
            block = None if self._has_found_buffers else self._reader.read(self._block)
            if block is None:
                self._find_buffers()
            else:
                self._block = block
        if self._extras:
            self.extras = self.look()
        if self._has_read_flags:
            self.flags.copy()
        if self.keeps_attributes:
            self._own.copy()
        if self._loose.are_used:
            self._loose.copy()

    def _live_buffers(self) -> list[torch.Tensor | None]:
        """The saved buffers that there are now. Raises KeyError where one was deleted."""
        return [*map(getitem, self._slot_tables, self._slot_keys)]

    def _find_buffers(self) -> None:
        """Copy those that there are now."""
        is_told, self.structure.has_new_buffers = self.structure.has_new_buffers, False
        try:
            live = self._live_buffers()
        except KeyError:  # one was deleted, and another one put in
            self._find_slots()
            return
        if not self._reader.fits(live):
            self._replaces_buffers |= not is_told
            self._reader = BufferReader(live, self._fixed)
        self._read_buffers(self._block)

    def _read_buffers(self, earlier: BufferBlock | None = None) -> None:
        block = self._reader.read(earlier)
        assert block is not None, "they fit"
        self._block = block

    def kept(self) -> Any:
        places = [p.data_ptr() for p in self.parameters if type(p) in _PLAIN]
        copies = self._loose.kept(), self._own.seen
        return places, self._slot_names, self._block, self.extras, self.flags.seen, *copies

    def go_back(self, kept: Any) -> None:
        places, self._slot_names, self._block, self.extras, self.flags.seen, loose, seen = kept
        if places != [p.data_ptr() for p in self.parameters if type(p) in _PLAIN]:
            problem = "parameters have got other memory since the boundary, which the device has not filled yet"
            raise UnsupportedStateError(self.name, problem)
        self._own.seen = seen
        self._loose.go_back(loose)

    def copy_ahead(self) -> dict[str, Any] | None:
        """The buffers as they are in mid-step, as `buffers` gives those of the boundary; None: they were replaced."""
        reader = self._reader
        if self._replaces_buffers or self.structure.has_new_buffers:
            try:
                if not reader.are(self._live_buffers()):
                    return None
            except KeyError:
                return None
        raw = reader.read_raw()
        if raw is None:
            return None
        self._ahead = reader.slices, raw
        if self._described is not reader.slices:
            self._describe(reader.slices)
        return {"places": self._description, "flat": raw}

    def copied_from_device(self) -> dict[str, torch.Tensor]:
        """The boundary's saved buffers that are on a device, in host memory. Waits for the device."""
        return {n: c.cpu() for n, c in zip(self._slot_names, self._block.outside, strict=False) if c is not None}

    def forecast_came_true(self) -> bool:
        """Call it at a boundary. Whether its buffers are as `copy_ahead` copied them."""
        slices, raw = self._ahead
        return raw == self._block.raw and (slices is self._block.slices or slices == self._block.slices)

    @torch.no_grad()
    def look(self) -> dict[str, Any]:
        """Extra state as it is now, in the form of `extras`."""
        return {name: copy_state(child.get_extra_state()) for name, child in self._extras}

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The saved buffers themselves, by name."""
        found = zip(self._slot_names, self._slot_tables, self._slot_keys, strict=True)
        return [(name, t) for name, table, key in found if (t := table.get(key)) is not None]

    def buffers_of_this_rank(self, *, leads: bool) -> list[str]:
        """The buffers that other ranks may have otherwise and that are not in a rank's small state, by name: on a
        device, not plain, or not persistent and changed. Not those that DDP broadcasts before the next forward from the
        rank that `leads`, nor those that the ranks make together, nor counters that are saved."""
        if self._is_broadcast and not leads:
            return []
        alike = tuple(f"{n}." for n, m in self.module.named_modules() if isinstance(m, nn.SyncBatchNorm))
        live, loose = self._loose.live(), self._loose.changed()
        found = [name for name, t in self.named_buffers() if t.is_floating_point() and not is_plain(t)]
        found += [name for name in loose if name in live]
        return [name for name in found if not (alike and name.startswith(alike))]

    def copied_buffers(self) -> dict[str, torch.Tensor]:
        """The boundary's copies of the saved buffers, by name."""
        return {n: c for n, c in zip(self._slot_names, self._block.views, strict=False) if c is not None}

    def buffers(self) -> dict[str, Any]:
        """The copied buffers as one block: names, slices (JSON) and bytes. Those outside of it are left out."""
        block = self._block
        if self._described is not block.slices:
            self._describe(block.slices)
        return {"places": self._description, "flat": block.raw}

    def _describe(self, slices: Sequence[Any]) -> None:
        named = [[n, p] for n, p in zip(self._slot_names, slices, strict=True) if p is not None]
        self._described, self._description = slices, json.dumps(named)

    def with_buffers(
        self,
        state: dict[str, Any],
        buffers: dict[str, Any] | None,
        extras: dict[str, Any],
        on_device: Mapping[str, torch.Tensor],
    ) -> dict[str, Any]:
        """`state` of another rank with this rank's own buffers and extra state. None: its own are not known.
        `on_device`: those of its buffers that were on a device. What its memory means is read from `state`: it may have
        changed since this rank's last close look."""
        if on_device:
            state = {name: on_device.get(name, value) for name, value in state.items()}
        if buffers is None:
            return state
        flat = buffers["flat"]  # a tensor in the records of older versions
        if isinstance(flat, bytes):
            flat = torch.frombuffer(bytearray(flat or b"\0"), dtype=torch.uint8)
        own = {name: view_of(flat, place) for name, place in json.loads(buffers["places"])}
        return {
            name: _meant_as(own[name], value) if name in own else extras.get(name, value)
            for name, value in state.items()
        }

    def recheck(self) -> None:
        """Look more closely than `copy` did. The program has not gone on since."""
        self._loose.recheck()
        if not self._has_read_flags:
            self.flags.copy()
        if not self._has_found_buffers:
            self._find_buffers()
        if not self._reader.means_the_same():
            self._reader = BufferReader(self._reader.tensors, self._fixed)
            self._read_buffers()

    def state(self) -> dict[str, Any]:
        if not self._reader.means_the_same():
            problem = "buffers mean something else by their memory since one of the last steps (`.data = ...`)"
            raise UnsupportedStateError(self.name, problem)
        if not self._is_block_certain():
            problem = "other tensors are in the place of buffers since one of the last steps (`_buffers[...] = ...`)"
            raise UnsupportedStateError(self.name, problem)
        copies: dict[str, Any] = {
            n: c for n, c in zip(self._slot_names, self._block.views, strict=True) if c is not None
        }
        copies |= self.extras
        # FSDP2 swaps a module's parameters during forward, and its `state_dict` hooks would reshard them while the
        # training thread uses them: sharded parameters are taken from the references of the start. So are those of a
        # module that has been rebuilt since the boundary (made ready for an export, in the block).
        if self._sharded or self.structure.has_changed():
            known = self._named | copies
            if unknown := [name for name in self._order if name not in known]:
                problem = f"the module was changed since the last boundary, and {listed(unknown, 3)} cannot be found"
                raise UnsupportedStateError(self.name, f"{problem}; change it after the guard's block")
            state = {name: known[name] for name in self._order or self._named} | copies
        else:
            state = {name: copies.get(name, value) for name, value in self.module.state_dict().items()}
            self._order = list(state)
        return {name: local_part(t) if isinstance(t, torch.Tensor) else t for name, t in state.items()}

    def read_flags(self) -> None:
        """The program is between two steps: the flags are still those of the boundary, unless the mode of the whole
        module has changed since."""
        if not self._has_read_flags and self.flags.root["training"] is self.flags.seen[0]:
            self.flags.copy()
            self._has_read_flags = True

    def tell_if_uncertain(self) -> None:
        """Its state is asked for in the middle of a step."""
        if not self._has_read_flags and self.flags.look() != self.flags.seen:
            logger.warning(
                "%s: its mode or requires_grad, or that of some of its parts, has changed within the last 48 steps, "
                "before this boundary or, as in an evaluation, after it: the file has them as they were before. Where "
                "that is wrong, set them by the position in the training, not at a step, and evaluate in "
                "guard.outside_step()",
                self.name,
            )

    def _is_block_certain(self) -> bool:
        """Whether its copies are of the buffers that it had at the boundary: they were looked at there, or are the same
        still, or torch's hook has told of others since."""
        if self._has_found_buffers or self.structure.has_new_buffers or self.structure.has_changed():
            return True
        return self._reader.are(self._live_buffers())

    def module_extras(self) -> dict[str, Any]:
        """What no state_dict has, as it was at the boundary; small, and the same for replicas but for some buffers."""
        added = [
            n
            for n, c in zip(self._slot_names, self._block.views, strict=True)
            if c is not None and n not in self._first
        ]
        return {
            **self.flags.state(),
            "pruned": list(self._loose.pruned),
            "buffers": self._loose.state(),
            "added_buffers": [name for name in added if name.removesuffix("_mask") not in self._loose.pruned],
            "resized_buffers": self._resized(),
            "frozen_gradients": self._frozen_gradients(),
            "attributes": self._own.state(),
        }

    def _resized(self) -> dict[str, str]:
        """Saved buffers of another shape or type than the program builds them with (observers of a quantization, a
        queue that grows), and whether the training has resized them in place, put others there, or None."""
        found = {}
        for name, copy, live in zip(self._slot_names, self._block.views, self._reader.tensors, strict=True):
            if name not in self._first:
                continue
            first, shape, dtype = self._first[name]
            if copy is None:
                found[name] = "removed"
            elif (copy.shape, copy.dtype) != (shape, dtype):
                found[name] = "in place" if first() is live else "replaced"
        return found

    def _frozen_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients that frozen parameters have kept: no backward changes them, and an optimizer uses them (zeros too:
        weight decay and momentum go on)."""
        kept = ((name, p.grad) for name, p in self._named.items() if not p.requires_grad)
        return {name: local_part(gradient).detach() for name, gradient in kept if gradient is not None}

    def prepare(self, module_extras: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Before `load`: prune what was pruned, register the buffers that the module had got in mid-run, and give those
        that were resized the shape of then."""
        changed = "pruned" in module_extras and prune_as(self.module, module_extras["pruned"])
        for name in module_extras.get("added_buffers", ()):
            prefix, _, key = name.rpartition(".")
            child = dict(self.module.named_modules()).get(prefix)
            if child is not None and name in state and child._buffers.get(key) is None and key not in child._parameters:
                like = next(iter(self._named.values()), None)
                value = state[name].clone()
                child.register_buffer(key, value if like is None else value.to(like.device))
                changed = True
        for name, how in module_extras.get("resized_buffers", {}).items():
            self._resize(name, how, state.get(name))
        if changed:
            self.follow()

    @torch.no_grad()
    def _resize(self, name: str, how: str, saved: object) -> None:
        prefix, _, key = name.rpartition(".")
        child = dict(self.module.named_modules(remove_duplicate=False)).get(prefix)
        own = None if child is None else child._buffers.get(key)
        if child is None or own is None:
            return  # `load` says so
        if how == "removed" and saved is None:
            child._buffers[key] = None
        if not isinstance(saved, torch.Tensor) or isinstance(own, DTensor):
            return
        if how == "in place" and own.dtype == saved.dtype and own.untyped_storage().resizable():
            own.resize_(saved.shape)  # DDP and others may hold it
        elif how == "in place" and type(own) is torch.Tensor and own.layout is saved.layout is torch.strided:
            own.data = torch.empty_like(saved, device=own.device)  # was retyped; the object stays for the same reason
        elif (own.shape, own.dtype) != (saved.shape, saved.dtype):
            child._buffers[key] = torch.empty_like(saved, device=own.device)

    def without_parts(self, module_extras: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """`module_extras` of a file of another world, and the names of what had to be left out: what this world holds
        in parts, for which no layout is kept."""
        live = {**original_names(self._named, (n.removesuffix("_orig") for n in self._named)), **self._loose.live()}
        gradients, extras = module_extras.get("frozen_gradients", {}), _extra_tensors(module_extras)
        no_gradients = [name for name, value in gradients.items() if _is_part(value, self._named.get(name))]
        no_extras = [name for name, value in extras.items() if _is_part(value, live.get(name))]
        left_out = [*(f"the gradient of {name}" for name in no_gradients), *no_extras]
        kept = {
            **module_extras,
            "pruned": list(module_extras.get("pruned", ())),
            "frozen_gradients": {name: value for name, value in gradients.items() if name not in no_gradients},
            "buffers": {name: value for name, value in extras.items() if name not in no_extras},
        }
        return kept, left_out

    def load_module_extras(self, module_extras: Mapping[str, Any]) -> None:
        """After `load`: the rest of what `module_extras` gives, without the flags."""
        self._loose.load(_extra_tensors(module_extras))
        self._own.load(module_extras.get("attributes", {}))
        for name, gradient in module_extras.get("frozen_gradients", {}).items():
            if (parameter := self._named.get(name)) is not None:
                if gradient.shape != local_part(parameter).shape:
                    raise MismatchError(
                        f"the checkpoint does not fit {self.name}: the gradient of {name}, which is frozen, has shape "
                        f"{list(gradient.shape)} there and {list(local_part(parameter).shape)} here. Use the model "
                        "that wrote it, on as many ranks"
                    )
                parameter.grad = with_layout_of(parameter, gradient.to(parameter.device, copy=True))

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """Parameters by name, tied ones under each; sharded ones as they were at the last change (see `state`)."""
        if self._sharded:
            return self._sharded
        if self.structure.has_changed():
            return dict(self.module.named_parameters(remove_duplicate=False))
        return {f"{dot}{key}": p for dot, table in self._parameter_tables for key, p in table.items() if p is not None}

    @property
    def is_sharded(self) -> bool:
        """Whether some parameter is a DTensor."""
        return bool(self._sharded)

    @property
    def volatile_names(self) -> list[str]:
        """The part of its state that is not parameters: saved buffers and extra state."""
        return [*self._slot_names, *(name for name, _ in self._extras)]

    def load(self, state: dict[str, Any]) -> None:
        self._load(state, strict=True)

    def load_live(self, state: dict[str, Any]) -> None:
        """Put back a boundary of this very module's, from a `state` whose parameters are the live ones: what is copied
        at boundaries."""
        named = self.named
        self._load({name: value for name, value in state.items() if name not in named}, strict=False)

    def _load(self, state: dict[str, Any], *, strict: bool) -> None:
        live = dict(self.module.state_dict())
        if not strict:
            live = {name: live[name] for name in state}
        problems = _differences({n: local_part(t) if torch.is_tensor(t) else t for n, t in live.items()}, state)
        if problems:
            shown = listed(problems, 12, "; ")
            raise MismatchError(
                f"the checkpoint does not fit {self.name}: {shown}. Use the model that wrote it, or start over with "
                'resume="never" in another directory'
            )
        tensors = {name: saved for name, saved in state.items() if isinstance(saved, torch.Tensor)}
        laid_out = {name: with_layout_of(live[name], saved) for name, saved in tensors.items()}
        laid_out |= {name: originals(saved) for name, saved in state.items() if name not in tensors}
        self.module.load_state_dict(laid_out, strict=strict)
        self._find_slots()
        self.copy()


def _extra_tensors(module_extras: Mapping[str, Any]) -> dict[str, Any]:
    """In files of version 0.2 the products of pruning stand by themselves."""
    pruned = module_extras.get("pruned", ())
    products = {place: value for place, value in pruned.items() if value is not None} if type(pruned) is dict else {}
    return {**module_extras.get("buffers", {}), **products}


def _is_part(saved: object, live: torch.Tensor | None) -> bool:
    if live is None or not isinstance(saved, torch.Tensor):
        return False
    return isinstance(live, DTensor) or live.shape != saved.shape


def _refuse_lazy(name: str, module: nn.Module, children: Sequence[nn.Module]) -> None:
    kinds = {type(t) for child in children for table in (child._parameters, child._buffers) for t in table.values()}
    if not kinds.isdisjoint(_LAZY):
        tensors = (*module.named_parameters(), *module.named_buffers())
        lazy = [own for own, tensor in tensors if is_lazy(tensor)]
        problem = f"{listed(lazy, 3)} of a lazy module (LazyLinear, ...) has no shape before its first forward"
        raise UnsupportedStateError(name, f"{problem}. Run one batch through the model before the guard is made")


def _of_class(children: Iterable[nn.Module], name: str) -> list[nn.Module]:
    """Those with a base of that name, whose import takes long."""
    children = list(children)
    kinds = {kind for kind in {*map(type, children)} if name in map(_name_of, kind.__mro__)}
    return [child for child in children if type(child) in kinds]


def _refuse_old_fsdp(name: str, children: Iterable[nn.Module]) -> None:
    if _of_class(children, "FullyShardedDataParallel"):
        raise UsageError(
            f"{name} is wrapped in FullyShardedDataParallel (FSDP1), whose flat parts of the weights no checkpoint "
            "of this package can hold: use FSDP2, `from torch.distributed.fsdp import fully_shard`, "
            "`fully_shard(model)`"
        )


def _reshard(children: Iterable[nn.Module]) -> None:
    """Shard again what FSDP2 has left whole: its root, after a forward without a backward (an evaluation)."""
    for child in _of_class(children, "FSDPModule"):
        child.reshard()  # type: ignore[operator]


def _meant_as(own: torch.Tensor, other: object) -> torch.Tensor:
    """`own` with the type and shape of a replica's tensor, where its bytes are as many."""
    if isinstance(other, torch.Tensor) and own.nbytes == other.nbytes:
        return own.view(-1).view(other.dtype).view(other.shape)
    return own


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    found = [f"{name} is missing in the checkpoint" for name in ours if name not in theirs]
    found += [f"{name} is only in the checkpoint" for name in theirs if name not in ours]
    for name, mine in ours.items():
        other = theirs.get(name)
        if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
            if mine.shape != other.shape:
                found.append(f"{name} has shape {list(other.shape)} there and {list(mine.shape)} here")
            elif mine.dtype != other.dtype:
                found.append(f"{name} is {other.dtype} there and {mine.dtype} here")
    return found
