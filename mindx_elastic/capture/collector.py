"""Collects what a checkpoint holds: the job's objects, the random generators and the position, at one boundary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mindx_elastic.capture.compilations import Compilations
from mindx_elastic.capture.components import (
    AdaptedComponent,
    Component,
    ModuleComponent,
    OptimizerComponent,
    PlainComponent,
    WrapperComponent,
    component_for,
)
from mindx_elastic.capture.copying import copy_tree, same_tree, tensors_in
from mindx_elastic.capture.ddp import BufferBroadcasts
from mindx_elastic.capture.device_progress import DeviceProgress, PassedBoundary
from mindx_elastic.capture.forecast import Forecast
from mindx_elastic.capture.given_settings import GivenSettings
from mindx_elastic.capture.layouts import LayoutRecorder, ParallelSetup, groups_inside, named_parameters, places_of
from mindx_elastic.capture.names import arrange_groups, grouped
from mindx_elastic.capture.nested import are_in_use, devices_of, put_on
from mindx_elastic.capture.rng import capture_rng, equal_rng, pack_rng, raw_rng, unpack_raw_rng
from mindx_elastic.capture.structure import Watch
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.core.tensor_memory import without_collections
from mindx_elastic.errors import MismatchError

__all__ = ["Collector"]

_MOST_KEPT = 64 << 20
_MOST_COPIED = 1 << 20


class Collector:
    """Gathers the state of named `targets`.

    Call `copy` in the training thread inside the update gate, and `state` with the gate held.
    """

    def __init__(self, targets: Mapping[str, object]) -> None:
        self.targets = dict(targets)
        known = frozenset(id(one) for t in targets.values() for one in (t, *_inside(t)))
        self.components: dict[str, Component] = {name: component_for(name, t, known) for name, t in targets.items()}
        self.layouts = LayoutRecorder(self.components, ParallelSetup())
        """Says which ranks hold what; a guard replaces it by one that knows the other ranks."""
        self.position = Position()
        self.loop: dict[str, Any] = {}
        """What else a loop needs to go on from `position`, see `guard.loops`; only ever replaced."""
        self._loop = self.loop
        self.gradient_order: dict[str, list[int]] = {}
        self._watches_weights = False
        self._weights: dict[str, list[torch.Tensor]] = {}  # by module: those that no optimizer of the job updates
        self._moves: dict[str, int] = {}
        self.weight_samples: dict[str, int] = {}
        """Digests of some of the weights at the last boundaries that were looked at, ``weights_49`` of step 49; empty
        where DDP keeps the ranks alike."""
        self.broadcasts = BufferBroadcasts()
        """The broadcasts of DDP's buffers; a guard replaces it by one that knows the DDP modules."""
        self.compiled = Compilations()
        self._settings = GivenSettings(self.components)
        self._modules = {n: c for n, c in self.components.items() if isinstance(c, ModuleComponent)}
        self._structures = [module.structure for module in self._modules.values()]  # each one for life
        self._optimizers = {n: c for n, c in self.components.items() if isinstance(c, OptimizerComponent)}
        self._watch: Watch | None = None
        self.on_new_parameters: Callable[[Sequence[torch.Tensor]], None] = lambda parameters: None
        """Called at a boundary at which modules, parameters or groups have changed."""
        self.at_first_boundary: Callable[[], None] | None = None
        """Called once, by `leave_head`."""
        self.before_keeping: Callable[[], None] = lambda: None
        """Called in the training thread before the last boundary is kept outside of this object: what is not worth the
        time at every boundary is made part of it (`add_to_boundary`)."""
        self.problems: list[str] = []
        """What the last such boundary has that a start cannot make again, in words."""
        self.structure_is_new = False
        """Such a boundary has been copied; reset by the reader."""
        self.adapted = [c for c in self.components.values() if isinstance(c, AdaptedComponent)]
        self._plain = [(n, c) for n, c in self.components.items() if isinstance(c, PlainComponent)]
        for _, plain in self._plain:
            plain.set_parameters(named_parameters(self.components))
        places = self.places() if self._optimizers else {}
        for optimizer in self._optimizers.values():
            optimizer.set_names(places)
        self._makers = [(c, c.make) for _, c in self._plain if type(c).copy is PlainComponent.copy]
        others = {id(c) for c in self._modules.values()}.union(id(c) for c, _ in self._makers)
        self._copies = [component.copy for component in self.components.values() if id(component) not in others]
        self._streams = [component for component in self.adapted if component.is_stream]
        self._forecast = Forecast(c for _, c in self._plain)
        self._foreseen = dict(self._modules)
        """The modules whose buffers have always come out as `copy_ahead` forecast."""
        self.is_at_boundary = False
        """The program has not gone on since the last `copy`."""
        self.last_step = 0
        """The step with which a loop ends, where that is known without a loader."""
        self.rng = capture_rng()
        """The generators as they were at the boundary, as `capture_rng` gives them."""
        self._ahead_rng: dict[str, Any] | None = None
        self._raw_rng = self.rng, raw_rng(self.rng)  # a captured state, and what it is packed to
        self.forecast_correct: bool | None = None
        """Whether the last boundary came out as `copy_ahead` had forecast it; None: there was no forecast."""
        self.devices = DeviceProgress()
        """How far the devices have come that hold state of the job."""
        self.devices.follow(self._tensors())

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Every parameter whose in-place change outside an optimizer would tear the state."""
        return [p for module in self._modules.values() for p in module.parameters]

    @property
    def module_names(self) -> Collection[str]:
        """The names of the modules among the objects."""
        return self._modules.keys()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The named ones, those inside of wrappers, and the one that a ZeroRedundancyOptimizer steps."""
        found = [o for c in self._optimizers.values() for o in (c.optimizer, c.local)]
        found += [o for _, c in self._plain if isinstance(c, WrapperComponent) for o in c.optimizers]
        return list({id(o): o for o in found}.values())

    @torch.no_grad()
    def look_at_buffers(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | int]]:
        """The saved buffers of all modules, by place, for `changed_buffers`: each with a copy, as BatchNorm's have, or
        above 1 MiB with its version counter."""
        return {
            place: (t, t.clone() if t.nbytes <= _MOST_COPIED else _version_of(t)) for place, t in self._saved_buffers()
        }

    @torch.no_grad()
    def changed_buffers(self, before: Mapping[str, tuple[torch.Tensor, torch.Tensor | int]]) -> list[str]:
        """The places of buffers that are not as in `before`."""
        changed = []
        for place, now in self._saved_buffers():
            tensor, look = before.get(place, (now, now))
            if isinstance(look, torch.Tensor):
                is_same = same_tree(now, look)
            else:
                is_same = now is tensor and _version_of(now) == look
            if not is_same:
                changed.append(place)
        return changed

    def _saved_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module in self._modules.items():
            yield from ((f"{name}.{place}", buffer) for place, buffer in module.named_buffers())

    def places(self) -> dict[int, str]:
        """The place of each parameter (``model.fc.weight``), by its id; of a tied one the first."""
        return places_of(self.components)

    def watch(self) -> None:
        """Notice modules and parameters that are registered from here on, until `unwatch`. Main thread."""
        self._watch = Watch(self._structures)

    def unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _follow(self) -> None:
        """Modules, parameters or groups may have changed since the last boundary."""
        problems = {name: module.follow() for name, module in self._modules.items() if module.structure.has_changed()}
        names = self.places()
        problems |= {name: optimizer.follow(names) for name, optimizer in self._optimizers.items()}
        self.problems = [f"{name}: {problem}" for name, found in problems.items() for problem in found]
        self.structure_is_new = True
        self.layouts.forget()
        self.devices.follow(self._tensors())
        if self._watches_weights:
            self.watch_weights()
        self.on_new_parameters(self.parameters)

    def _has_changed(self) -> bool:
        for structure in self._structures:
            if structure.has_changed():
                return True
        for optimizer in self._optimizers.values():  # noqa: SIM110
            if optimizer.has_changed():
                return True
        return False

    def is_other_model(self) -> bool:
        """Whether a start could not make the model again as it is now."""
        return any(module.is_other_model() for module in self._modules.values())

    def add_to_boundary(self, more: Mapping[str, Any]) -> None:
        """Make `more` part of `loop`, of the boundary just copied too."""
        self.loop = self._loop = {**self._loop, **more}
        if self.devices.keeps_older:
            self.devices.keep(self.kept())

    def copy(self, position: Position, closely: bool = True) -> None:
        """Copy all volatile state: this is the boundary `position`. `closely`: see `close_looks`."""
        self.is_at_boundary = True
        for structure in self._structures:
            if structure.is_touched:
                structure.is_touched, closely = False, True
        for optimizer in self._optimizers.values():
            closely |= len(optimizer.optimizer.param_groups) != len(optimizer.groups)  # there is a new one
        if closely and self._has_changed():
            self._follow()
        for adapted in self.adapted:
            # The last boundary of an epoch may be the last of all, and the end is saved when code has run after it.
            ends_epoch = 0 < position.batch_num <= position.step_in_epoch
            adapted.may_be_last = ends_epoch or position.step == self.last_step
        for module in self._modules.values():
            module.copy(closely=closely)
        for copy in self._copies:
            copy()
        for plain, make in self._makers:  # as `copy`, without the call
            plain.copied = make()
        if self.broadcasts.are_used:
            self.broadcasts.copy()
        if self._weights:
            self._moves = {name: sum(t._version for t in weights) for name, weights in self._weights.items()}
        self.rng = capture_rng(self._ahead_rng or self.rng)  # after a forward the generators seldom move
        devices = self.devices
        self.position, self._loop = position, self.loop
        if devices.is_used:
            # Kernels of this boundary's update may still run, and a reader in another thread waits for those only.
            devices.at_boundary(position.step, self.kept() if devices.keeps_older else None)

    def buffers_of_this_rank(self, *, leads: bool) -> list[str]:
        """The places of these buffers, see `ModuleComponent.buffers_of_this_rank`."""
        return [f"{n}.{b}" for n, m in self._modules.items() for b in m.buffers_of_this_rank(leads=leads)]

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Whose devices count."""
        yield from self.parameters
        for optimizer in self._optimizers.values():
            yield from optimizer.parameters
        for module in self._modules.values():
            yield from module.module.buffers()
        for adapted in self.adapted:
            if isinstance(adapted.target, torch.Tensor):
                yield adapted.target

    def stable_tensors(self) -> list[torch.Tensor]:
        """The parameters, and what the optimizers have of theirs."""
        return [*self.parameters, *(t for optimizer in self._optimizers.values() for t in optimizer.tensors())]

    def other_tensors(self) -> list[torch.Tensor]:
        """The modules' buffers, and the tensors that were named."""
        named = (c.target for c in self.adapted if isinstance(c.target, torch.Tensor))
        return [*(b for module in self._modules.values() for b in module.module.buffers()), *named]

    def watch_weights(self) -> None:
        """Note at each boundary whether weights have moved that no optimizer of the job updates: averages, frozen
        copies. Those of a killed rank are taken from another one, which is wrong for an average that rank 0 alone
        updates: where they moved on one rank and not on another, the start that takes them says so."""
        self._watches_weights = True
        updated = {id(p) for optimizer in self._optimizers.values() for p in optimizer.parameters}
        self._weights = {
            name: [t for t in own.values() if not t.is_inference()]
            for name, module in self._modules.items()
            if (own := dict(module.named)) and not module.is_sharded and updated.isdisjoint(map(id, own.values()))
        }

    def keep_older_boundaries(self) -> None:
        """Keep what `go_back` needs from now on: other ranks' deaths can stop this rank's devices."""
        if not self.devices.is_used:
            return
        nbytes = sum(t.nbytes for _, c in self._plain for _, t in tensors_in(c.seen) if t.is_cuda)
        if nbytes > _MOST_KEPT:
            logger.info(
                "named objects have %d MiB on a device, too much to keep them for older boundaries: when a rank is "
                "killed over NCCL, the others may have to go back to the last snapshot or file",
                nbytes >> 20,
            )
            return
        self.devices.keeps_older = True
        for optimizer in self._optimizers.values():
            optimizer.keeps_host_state = True

    def kept(self) -> Any:
        """The copies of the boundary just copied. Nothing in them is changed later, but for tensors on a device: in the
        order of its queue, so not before it has left the boundary."""
        own = self.position, self._loop, self.rng, self.forecast_correct, self.broadcasts.seen
        return own, {name: component.kept() for name, component in self.components.items()}, self._moves

    def go_back(self, boundary: PassedBoundary) -> None:
        """Let an older boundary count, which the devices hold. The caller holds the update gate, and the training does
        not go on: what the program has done since is lost. Raises UnsupportedStateError where it cannot be."""
        self.devices.hold(boundary)
        own, components, self._moves = boundary.kept
        self.position, self._loop, self.rng, self.forecast_correct, self.broadcasts.seen = own
        self.is_at_boundary = False
        for name, kept in components.items():
            self.components[name].go_back(kept)

    def leave_head(self) -> None:
        """The first boundary of the process is near, or there will be none: what the start has kept for it may go."""
        if self.at_first_boundary is not None:
            end, self.at_first_boundary = self.at_first_boundary, None
            end()

    def leave_boundary(self) -> None:
        """The program goes on: what is not copied at boundaries is not the boundary's any more. `is_at_boundary` by
        itself will do where nothing is `adapted`."""
        self.is_at_boundary = False
        for component in self.adapted:
            component.at_boundary = False

    def take_late(self) -> list[str]:
        """The training is over: what was not copied at the last boundary is taken as it is now. Returns its names."""
        late = [component for component in self.adapted if component.copied is None and not component.at_boundary]
        for component in late:
            component.at_boundary = True
        return [component.name for component in late]

    def return_to_boundary(self) -> None:
        """The program asks for a save between two steps: what is not copied at boundaries is taken as it is now."""
        self.before_keeping()
        for component in self.adapted:
            component.at_boundary = True
        self.read_flags()

    def read_flags(self) -> None:
        """The program is between two steps: its modules' flags are those of the boundary still."""
        for module in self._modules.values():
            module.read_flags()

    @without_collections()
    def state(self) -> dict[str, Any]:
        """The boundary's whole state; tensors of the stable part are the live ones, not copies."""
        if self.is_at_boundary:
            for module in self._modules.values():
                module.recheck()
            for adapted in self.adapted:
                adapted.recheck()
        else:
            for module in self._modules.values():
                module.tell_if_uncertain()
        state: dict[str, Any] = {name: component.state() for name, component in self.components.items()}
        state["rng"] = pack_rng(self.rng)
        state["progress"] = self._progress()
        state["gradient_order"] = self.gradient_order
        if broadcasts := self.broadcasts.state():
            state["buffer_broadcasts"] = broadcasts
        state["module_extras"] = {name: module.module_extras() for name, module in self._modules.items()}
        if settings := self._settings.kept:
            state["settings_given"] = settings
        if are_in_use() and (devices := self._tensor_devices(state)):
            state["tensor_devices"] = devices
        return state

    def _tensor_devices(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The devices of the tensors in the program's own objects; for a module by the places of its extra states."""
        own = self.devices.device
        found: dict[str, Any] = {name: devices_of(state[name], own) for name, _ in self._plain}
        for name, module in self._modules.items():
            extras = {place: devices_of(extra, own) for place, extra in module.extras.items()}
            found[name] = {place: devices for place, devices in extras.items() if devices}
        return {name: devices for name, devices in found.items() if devices}

    def volatile(self, *, everything: bool = False) -> dict[str, Any]:
        """The small part of the boundary's state that may differ from rank to rank where the weights do not. The
        generators are as `raw_rng` gives them. `everything`: also objects that are too slow to copy at each boundary,
        or that are on a device; not the buffers there (`copied_from_device`).

        Nothing is copied. Call it in the training thread, right after `copy`, or where `state` may be called.
        """
        # At each boundary: loops, for a comprehension is a call.
        buffers, groups, plain = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        extras = dict[str, Any]()
        for name, module in self._modules.items():
            buffers[name] = module.buffers()
            if own := module.extras:
                extras[name] = own
        for name, optimizer in self._optimizers.items():
            groups[name] = optimizer.groups
        for name, component in self._plain:
            if everything or not (component.is_heavy or component.is_on_device):
                plain[name] = component.state()
        if self._raw_rng[0] is not self.rng:  # after most steps no generator has moved
            self._raw_rng = self.rng, raw_rng(self.rng)
        progress: dict[str, Any] = dict(zip(Position._fields, self.position, strict=True))  # as `_progress`
        if self._loop:
            progress["loop"] = self._loop
        state: dict[str, Any] = {"rng": self._raw_rng[1], "progress": progress}
        state |= {"buffers": buffers, "groups": groups, "plain": plain}
        if extras:
            state["extras"] = extras
        if self._moves:
            state["moves"] = self._moves
        if self.weight_samples:
            state["weights"] = self.weight_samples
        return state

    def copy_of_small(self) -> dict[str, Any]:
        """A copy of the boundary's small state that outlives the next `copy`: for `compose`, to go back to it while
        the weights are still those. Without objects that are too slow to copy (`slow_objects`). Waits for the devices.
        Call it where `state` may be called."""
        state = self.volatile()
        state["on_device"] = self.copied_from_device()
        state["beside"] = {name: module.module_extras() for name, module in self._modules.items()}
        state["buffer_broadcasts"] = self.broadcasts.state()
        copied: dict[str, Any] = copy_tree(state)
        return copied

    def slow_objects(self) -> list[str]:
        """The names of objects that are not copied at each boundary."""
        return [name for name, component in self._plain if component.is_heavy or component.is_on_device]

    def copied_from_device(self) -> dict[str, dict[str, torch.Tensor]]:
        """The boundary's saved buffers that were on a device, in host memory. Waits for the device."""
        return {name: there for name, m in self._modules.items() if (there := m.copied_from_device())}

    def _progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = dict(zip(Position._fields, self.position, strict=True))
        if self._loop:
            progress["loop"] = self._loop
        return progress

    def copy_ahead(self) -> dict[str, Any]:
        """Forecast generators, buffers and named objects of the coming boundary. Training thread, after a forward.

        The forecast is right if nothing else draws or changes them. It has the buffers and objects that have always
        come out as foreseen; not those of a module whose buffers were replaced since the last boundary.
        """
        buffers = dict[str, Any]()
        for name, module in self._foreseen.items():
            if (ahead := module.copy_ahead()) is not None:
                buffers[name] = ahead
        rng = self._ahead_rng = capture_rng(self.rng)
        if self._raw_rng[0] is not rng:
            self._raw_rng = rng, raw_rng(rng)
        state: dict[str, Any] = {"rng": self._raw_rng[1], "buffers": buffers}
        if self._forecast.is_used:
            state["plain"] = self._forecast.look()
            if self._forecast.epochs:
                state["epochs"] = self._forecast.epochs
        if self.weight_samples:
            state["weights"] = self.weight_samples
        return state

    def forecast_came_true(self) -> bool | None:
        """Call it at a boundary. Whether the generators are as `copy_ahead` forecast; None: there is no forecast.

        Buffers and named objects that have come out otherwise are foreseen no longer.
        """
        if self._ahead_rng is None:
            return None
        if self._forecast.is_used:
            self._forecast.check()
        for name, module in [*self._foreseen.items()]:
            if not module.forecast_came_true():
                del self._foreseen[name]
        return self._ahead_rng is self.rng or equal_rng(self._ahead_rng, self.rng)

    def compose(self, state: dict[str, Any], volatile: dict[str, Any]) -> dict[str, Any]:
        """The state of this rank, from a replica's `state` of the same boundary and this rank's own volatile part.

        `volatile` comes from `volatile` (everything), from `copy_of_small` (of the same rank, too), or from
        `copy_ahead` (generators, buffers and some named objects; the rest is the other rank's).
        """
        own = {**state, "rng": unpack_raw_rng(volatile["rng"]), "progress": volatile.get("progress", state["progress"])}
        plain = volatile.get("plain", {})
        for name, component in self.components.items():
            if name in plain:
                own[name] = plain[name]
            if name not in state:
                continue  # another program wrote it: `load` reports that
            if isinstance(component, ModuleComponent):
                extras = volatile.get("extras", {}).get(name, {})
                there = volatile.get("on_device", {}).get(name, {})
                own[name] = component.with_buffers(state[name], volatile["buffers"].get(name), extras, there)
            elif isinstance(component, OptimizerComponent):
                groups = volatile.get("groups", {}).get(name)
                if groups is not None:
                    theirs = state[name]["param_groups"]
                    merged = [{**mine, "params": g["params"]} for mine, g in zip(groups, theirs, strict=True)]
                    own[name] = {**state[name], "param_groups": merged}
        if module_extras := volatile.get("beside"):
            own["module_extras"] = state.get("module_extras", {}) | module_extras
        if "buffer_broadcasts" in volatile:
            own.pop("buffer_broadcasts", None)
            if broadcasts := volatile["buffer_broadcasts"]:
                own["buffer_broadcasts"] = broadcasts
        return own

    def with_weights_of(self, own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's `own` state of a boundary, with the weights and optimizer tensors of a replica's `state`."""
        made = dict(own)
        for name, component in self.components.items():
            if isinstance(component, ModuleComponent):
                named = component.named
                rest = {place: value for place, value in own[name].items() if place not in named}
                made[name] = {**state[name], **rest}
            elif isinstance(component, OptimizerComponent):
                made[name] = {**state[name], "param_groups": own[name]["param_groups"]}
        return made

    @property
    def is_sharded(self) -> bool:
        """Whether some parameter is a DTensor."""
        return any(component.is_sharded for component in self._modules.values())

    @property
    def is_spread(self) -> bool:
        """Whether an optimizer's state is spread over the ranks although the weights are not (ZeRO)."""
        return any(optimizer.is_spread for optimizer in self._optimizers.values())

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the same state, so that one rank's file can replace any other's."""
        setup = self.layouts.setup
        whole = len(setup.replicas) == setup.world_size > 1
        return whole and not self.is_sharded and not self.is_spread

    def set_parallel_setup(self, setup: ParallelSetup) -> None:
        """From now on `layout` also says which other ranks hold the same. Main thread, at the start."""
        self.layouts = LayoutRecorder(self.components, setup)

    def layout(self) -> dict[str, Any]:
        """The layout record of this rank's files, as JSON; see `core.strategy.LayoutRecord`."""
        return self.layouts.record().json

    def load(self, state: dict[str, Any], *, live: bool = False, layout: Mapping[str, Any] | None = None) -> list[str]:
        """Put a state back, except the random generators. Returns notes on what differs and may. `live`: `state` has
        been read from these very objects, and the weights have not changed since. layout: the file's ``mindx.layout``,
        which names the parameters; without it numbers have to mean what they meant.

        Raises MismatchError when a part is missing or does not fit; training must not start after it.
        """
        missing = [name for name in self.components if name not in state]
        if missing:
            raise MismatchError(
                f"the checkpoint holds nothing for {', '.join(missing)} (it has {', '.join(sorted(state))}); use the "
                'same objects as the run that wrote it, or start over with resume="never" in another directory'
            )
        said = [] if live or layout is None else self._arrange_groups(state, layout)
        self._load_components(state, self.components, live=live)
        changed = [*said, *self._settings.resume(state, self.components, live=live)]
        progress = dict(state["progress"])
        self.loop = self._loop = dict(progress.pop("loop", {}))
        self.position = Position(**progress)
        self.gradient_order = {key: list(order) for key, order in state["gradient_order"].items()}
        extra = [name for name in state if name not in self.components and name not in RESERVED_NAMES]
        return [*changed, *(f"the checkpoint also holds {name}, which this job does not use" for name in extra)]

    def without_parts(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """A `state` that another world has written, less what of `module_extras` each rank holds in its own parts;
        and the names of that."""
        module_extras = dict(state.get("module_extras", {}))
        left_out: list[str] = []
        for name, module in self._modules.items():
            if name in module_extras:
                module_extras[name], parts = module.without_parts(module_extras[name])
                left_out += [f"{part} ({name})" for part in parts]
        return {**state, "module_extras": module_extras}, left_out

    def _load_components(self, state: Mapping[str, Any], names: Iterable[str], *, live: bool = False) -> None:
        wanted = set(names)
        modules = {name: module for name, module in self._modules.items() if name in wanted}
        # Neither is in files of older versions.
        module_extras, devices, own = (
            state.get("module_extras", {}),
            state.get("tensor_devices", {}),
            self.devices.device,
        )
        for name, module in modules.items():
            module.prepare(module_extras.get(name, {}), state[name])
        self._regroup(state)
        for name, component in self.components.items():
            if name in wanted and live and isinstance(component, (ModuleComponent, OptimizerComponent)):
                component.load_live(state[name])
            elif name in wanted and isinstance(component, ModuleComponent):
                there = [(place, each) for place, each in devices.get(name, {}).items() if place in state[name]]
                extras = {place: put_on(state[name][place], each, own) for place, each in there}
                component.load({**state[name], **extras} if extras else state[name])
            elif name in wanted:
                component.load(put_on(state[name], devices.get(name, ""), own))
        for name, module in modules.items():
            module.load_module_extras(module_extras.get(name, {}))

    def load_again(self, state: Mapping[str, Any], names: Sequence[str]) -> None:
        """Put back the objects `names`, which code has touched since `load`. Training thread."""
        follows = self._has_changed()
        if follows:
            self._follow()
        self._load_components(state, {*names, *(self._optimizers if follows else ())})
        if follows:
            self._follow()  # the parameter groups may hold others again
            self.structure_is_new = bool(self.problems)
        self.on_new_parameters(self.parameters)

    def _arrange_groups(self, state: Mapping[str, Any], layout: Mapping[str, Any]) -> list[str]:
        """Put the live groups into the order that the file has. Returns what is to be said."""
        parameters = named_parameters(self.components)
        said = [
            f"{name}: its parameters are registered in another order than in the run that wrote the checkpoint. They "
            "are matched by name; what goes by their place (an average's list, the sum of clip_grad_norm_) may differ"
            for name, module in self._modules.items()
            if isinstance(state[name], Mapping) and _differ_in_order(state[name], module.named)
        ]
        for name, optimizer in self._optimizers.items():
            own, names = state[name], layout.get("parameters", {}).get(name)
            if names is None or len(names) != sum(len(group["params"]) for group in own["param_groups"]):
                said.append(
                    f"{name}: the checkpoint does not name its parameters (it is converted, or of an old version), and "
                    "their state goes back by their order, which has to be the same"
                )
            elif own.get("names") is None:
                wanted = grouped(names, [len(group["params"]) for group in own["param_groups"]])
                said += optimizer.arrange(wanted, parameters, own["state"])
        there = layout.get("groups", {})
        for name, lists in groups_inside(self.components).items():
            for groups, wanted in zip(lists, there.get(name, ()), strict=False):
                said += arrange_groups(name, groups, wanted, parameters)
        self.layouts.forget()
        return said

    def _regroup(self, state: Mapping[str, Any]) -> None:
        """Make the parameter groups that the run had got in mid-run (unfreezing with another learning rate)."""
        for name, optimizer in self._optimizers.items():
            if isinstance(state[name], Mapping) and (groups := state[name].get("names")) is not None:
                optimizer.regroup(groups, named_parameters(self.components), self.places())

    def load_flags(self, state: Mapping[str, Any]) -> dict[str, list[str]]:
        """Set what `state` says of modules besides their state_dict: `training`, `requires_grad`, and DDP's broadcasts.

        Returns what was changed, by list, broadcasts apart. Files of older versions say nothing.
        """
        self.broadcasts.load(state.get("buffer_broadcasts", {}))
        changed: dict[str, list[str]] = {}
        for name, module in self._modules.items():
            for key, places in module.flags.load(state.get("module_extras", {}).get(name, {})).items():
                changed.setdefault(key, []).extend(f"{name}.{place}" if place else name for place in places)
        return changed

    def load_streams(self, state: Mapping[str, Any]) -> None:
        """Set the named generators once more: code before the first batch may have drawn from them."""
        for component in self._streams:
            component.load(state[component.name])  # a generator's is in host memory

    @contextmanager
    def kept_streams_and_flags(self) -> Iterator[None]:
        """Named generators and flags are afterwards as they were, whatever an evaluation does with them."""
        self.read_flags()
        streams, broadcasts = [component.look() for component in self._streams], self.broadcasts.look()
        flags = {name: module.flags.look() for name, module in self._modules.items()}
        try:
            yield
        finally:
            for component, before in zip(self._streams, streams, strict=True):
                component.put_back(before)
            for name, module in self._modules.items():
                module.flags.put_back(flags[name])
            self.broadcasts.put_back(broadcasts)


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _inside(target: object) -> Iterator[object]:
    """What is kept with `target`: the modules below a module, the optimizer that one wraps."""
    if isinstance(target, torch.nn.Module):
        yield from target.modules()
    elif isinstance(target, torch.optim.Optimizer):
        yield target


def _differ_in_order(some: Collection[str], others: Collection[str]) -> bool:
    """Whether the names that both have come in another order."""
    return [name for name in some if name in others] != [name for name in others if name in some]
