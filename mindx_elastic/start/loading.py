"""Loads what a start has found into the live objects.

In this order: DDP's bucket layout (a synthetic backward), the state, the random generators last. The generators are
restored once more when the loop reaches the resumed place, because creating an iterator, and the program's own code
before the first batch, may draw numbers.

A rank that has no file of the resumed step takes a replica's file, and what is its own (`_state_of`). What all replicas
share is the donor's: weights, optimizer, position. Of the rest this rank's own copy is used, from its boundary ring.
Where the rank was killed in the step, before its boundary, some of it is only foreseen, and an object that moves after
the forward (a counter after the update) is not even that. Whether the donor's can stand in for it is seen from the
boundaries that both have kept: `choose` decides. What may be another than it was is a warning, and a note in every file
from here on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import xxhash

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import AdaptedComponent, ModuleComponent, PlainComponent
from mindx_elastic.capture.copying import copy_tree, map_tensors, same_tree
from mindx_elastic.capture.loop_ends import VALUES, LoopHead, front_of, names_of_tail_values, tail_values_in
from mindx_elastic.capture.plain_component import InParts
from mindx_elastic.capture.rng import restore_rng, seed_rng
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import asked
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.ports import Risks
from mindx_elastic.core.printable import listed
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.data.position import at_place_of, without_order
from mindx_elastic.memory.boundaries import BoundaryRecord
from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.persist.reader import map_checkpoint
from mindx_elastic.start.restore import Resumed
from mindx_elastic.start.tail_side import TailSide

__all__ = ["ChosenState", "RingStates", "choose", "choose_of_loader", "choose_parts", "load", "on_one_side"]

MISSING: Any = object()
_THEIRS = object()
_OF_MODULES = {"buffers": "the buffers", "extras": "the extra state"}
"""What modules have besides their parameters, as `Collector.volatile` names it."""
_FOLLOWS_THE_STEPS = re.compile(r"(loader|optimizer|lr_scheduler|scaler)(_\d+)?")
"""Names of objects that replicas move alike: the donor's counts where nothing is known against it."""


def load(
    found: Resumed,
    collector: Collector,
    ranks: RankInfo,
    risks: Risks,
    *,
    tail: TailSide,
    with_flags: bool,
) -> Callable[[], None]:
    """Load the state, and copy the boundary. Returns what puts everything back as it was at the boundary, before the
    first batch (see `capture.loop_ends`).

    with_flags: also the modules' modes. A guard that only evaluates keeps those that its program has set.
    """
    tail.tell(collector, risks, leads=ranks.rank == 0)
    state = _state_of(found, collector, ranks.rank, risks, tail)
    if found.plan.resharded:
        state, left_out = collector.without_parts(state)
        if left_out:
            risks.risk(
                f"the checkpoint was written by {found.plan.source.world_size} ranks, and it keeps no layout for "
                f"{listed(left_out, 5)}: they begin as the program builds them",
                "Resume once with as many ranks as before, where they count",
            )
    state = _for_a_list(state, collector)
    layout = None if found.plan.resharded else found.checkpoint.layout  # a new layout is put together by names
    for note in collector.load(state, live=found.is_live, layout=layout):
        logger.warning("%s", note)
    restore_streams = _how_to_restore_rng(found, state["rng"], ranks, risks)
    _tell_of_device_buffers(found, collector, ranks, risks)
    if with_flags:
        _say_flags(collector.load_flags(state))
    head, saved, step = LoopHead(collector.components), [state], found.checkpoint.info.step

    def put_back() -> None:
        touched = head.touched() if saved else []
        if touched and found.is_live:  # the weights that code has changed are all that this process had
            saved[:] = [collector.with_weights_of(state, map_checkpoint(found.path).state)]
        for each in saved:  # until the first boundary of the process
            _put_back(each, touched, head, collector, step, with_flags=with_flags)
        restore_streams()

    def end() -> None:
        head.end()
        saved.clear()  # the memory of a whole checkpoint

    restore_streams()
    collector.at_first_boundary = end
    collector.copy(collector.position)
    return put_back


def _for_a_list(state: dict[str, Any], collector: Collector) -> dict[str, Any]:
    """A run with one loader goes on with a list of them: the first takes the place of that one, the others begin."""
    plain = {name: c.target for name, c in collector.components.items() if isinstance(c, PlainComponent)}
    loaders = {name: target for name, target in plain.items() if re.fullmatch(r"loader_\d+", name)}
    if "loader" not in state or "loader_0" not in loaders or "loader_0" in state:
        return state
    logger.info("loader_0 goes on where the run's one loader was; the others of the list begin")
    others = {name: copy_tree(target.state_dict()) for name, target in loaders.items()}
    kept = {name: value for name, value in state.items() if name != "loader"}
    return {**kept, **others, "loader_0": state["loader"]}


def _put_back(
    state: Mapping[str, Any],
    touched: Sequence[str],
    head: LoopHead,
    collector: Collector,
    step: int,
    *,
    with_flags: bool,
) -> None:
    """Objects, named generators and flags as at the boundary `step`, where code has changed them since the start."""
    if touched:
        collector.load_again(state, touched)
        head.begin()
        logger.info(
            "put back as at step %d: %s; code has changed it before the first batch (the head of the loop runs again "
            "in a resumed epoch)",
            step,
            listed(touched, 5),
        )
    collector.load_streams(state)
    if with_flags:  # `model.train()` at the loop's head
        collector.load_flags(state)


def _say_flags(changed: Mapping[str, Sequence[str]]) -> None:
    """One line on flags that the program begins with and the boundary had otherwise."""
    words = {"training": "in training mode", "eval": "in evaluation mode", "trainable": "trained", "frozen": "frozen"}
    told = [f"{words[key]}: {listed(list(places), 3)}" for key, places in changed.items()]
    if told:
        logger.info("put back as at that step, where the program begins otherwise: %s", "; ".join(told))


def _how_to_restore_rng(found: Resumed, rng: dict[str, Any], ranks: RankInfo, risks: Risks) -> Callable[[], None]:
    info = found.checkpoint.info
    if found.donor is None:
        return lambda: restore_rng(rng)
    if found.plan.resharded:
        return _new_numbers(info, ranks)
    if found.own is not None:
        logger.info(
            "rank %d has no usable file of step %d: weights, optimizer and position come from rank %d, its random "
            "numbers and CPU buffers %s",
            ranks.rank,
            info.step,
            found.donor,
            "are foreseen from its last forward" if found.own.forecast else "from memory",
        )
        return lambda: restore_rng(rng)
    risks.risk(
        f"rank {ranks.rank} has no usable file of step {info.step} and takes rank {found.donor}'s: weights, optimizer "
        "and position are the same; its random numbers start over, so from here the run is not bit for bit the "
        "uninterrupted one",
        "In DDP jobs shared memory (MINDX_ARENA_DIR) keeps them for a killed rank, where nothing is drawn after the "
        "forward; in others, as with HSDP, snapshots do (MINDX_SNAPSHOT_EVERY=1, or mindx-elastic run "
        "--snapshot-every 1)",
    )
    return _new_numbers(info, ranks)


def _tell_of_device_buffers(found: Resumed, collector: Collector, ranks: RankInfo, risks: Risks) -> None:
    """The small state of a rank without a file comes from memory, but perhaps not what was on its device."""
    if found.own is None or found.donor is None or found.plan.resharded:
        return
    known = {f"{name}.{place}" for name, own in found.own.unpack().get("on_device", {}).items() for place in own}
    if names := [name for name in collector.buffers_of_this_rank(leads=ranks.rank == 0) if name not in known]:
        risks.risk(
            f"rank {ranks.rank} has left no file of its own, and its buffers on a device, or that are not contiguous "
            f"or not persistent, are lost ({listed(names, 3)}): it goes on with rank {found.donor}'s, so from here the "
            "run is not bit for bit the uninterrupted one",
            "--snapshot-every 1 keeps them for all ranks; torch.nn.SyncBatchNorm has the same on each rank",
        )


def _new_numbers(info: CheckpointInfo, ranks: RankInfo) -> Callable[[], None]:
    # Not the donor's: two ranks would draw the same dropout masks.
    seed = xxhash.xxh3_64_intdigest(f"{info.run_id}/{info.step}/{ranks.rank}".encode()) >> 1
    return lambda: seed_rng(seed)


# --- a rank that has no file of the step ---


class RingStates(NamedTuple):
    """What the rings of both ranks have of one object. Lists: its states at the boundaries that both have kept before
    the step, the newest first."""

    mine: Sequence[Any] = ()
    theirs: Sequence[Any] = ()
    newest: Any = MISSING
    """This rank's newest boundary, kept by the donor too or not."""
    foreseen: Any = MISSING
    """At the step, this rank's forecast."""
    was_wrong: bool = False
    """The donor's forecast of the same has not come true."""


class ChosenState(NamedTuple):
    """The state to use, and what speaks against it; empty: nothing does. MISSING: as the program has built it."""

    value: Any
    doubt: str = ""


def choose(donated: Any, kept: RingStates, *, is_alike: bool, is_stream: bool = False) -> ChosenState:
    """The state of one object at the step. `donated`: in the donor's file, or MISSING.

    is_alike: replicas move it alike, if nothing is known against it. is_stream: a random generator, whose numbers two
    ranks should not share. Pure.
    """
    if kept.foreseen is not MISSING and not kept.was_wrong:
        return ChosenState(kept.foreseen)
    mine, theirs = kept.mine, kept.theirs
    own = mine[0] if mine else kept.newest
    if donated is MISSING:
        return ChosenState(own, "held by this rank only")
    if not mine and is_alike:
        return ChosenState(donated)
    if not mine:
        instead = own if is_stream and own is not MISSING else donated
        return ChosenState(instead, "not known to be the same on all ranks")
    if not all(map(same_tree, mine, theirs)):
        return ChosenState(donated if is_alike else own, "differs from rank to rank")
    if not is_alike and len({*map(_num_tensors, theirs)}) == 1 and _num_tensors(donated) > _num_tensors(theirs[0]):
        # PowerSGD's first errors, say.
        return ChosenState(donated, "has got tensors in this step, perhaps others on each rank")
    moves = [donated, *theirs]
    moved_alike = not all(map(same_tree, theirs[1:], theirs))
    if is_alike or moved_alike or same_tree(moves[0], moves[1]):
        return ChosenState(donated)
    return ChosenState(donated, "changed in this step for the first time in a while")


def _num_tensors(state: Any) -> int:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(state, note)
    return len(found)


def choose_parts(
    donated: Mapping[str, Any], kept: Callable[[str], RingStates], follow_the_steps: Collection[str]
) -> tuple[dict[str, Any], dict[str, ChosenState]]:
    """The state of an object whose entries are chosen one by one, and the choices that something speaks against.
    `kept`: of an entry. `follow_the_steps`: those that replicas move alike. Pure."""
    chosen = {key: choose(value, kept(key), is_alike=key in follow_the_steps) for key, value in donated.items()}
    return {key: each.value for key, each in chosen.items()}, {key: each for key, each in chosen.items() if each.doubt}


def choose_of_loader(donated: Any, kept: RingStates, begun: Any) -> Any:
    """This rank's own state of a loader that differs from rank to rank, moved on to the donor's batch. MISSING: it does
    not differ, or it is not known how far it has come.

    A sampler of each rank's own begins an epoch from its own generators; the batches are counted alike. `begun`: the
    loader's state in the middle of the step, where that is an epoch's first, else MISSING. Pure.
    """
    if (moved := at_place_of(begun, donated)) is not None:
        return moved
    if not kept.mine or all(map(same_tree, kept.mine, kept.theirs)):
        return MISSING
    pairs = zip(kept.mine, kept.theirs, strict=True)
    if not all(same_tree(at_place_of(mine, theirs), mine) for mine, theirs in pairs):
        return MISSING
    moved = at_place_of(kept.mine[0], donated)
    return MISSING if moved is None else moved


def _state_of(found: Resumed, collector: Collector, rank: int, risks: Risks, tail: TailSide) -> dict[str, Any]:
    """The state that `rank` resumes from. Raises CorruptCheckpointError."""
    state = tail.state(collector)
    if found.donor is None:
        return state
    # Settings were given on that rank, and its samplers have given it other samples.
    state = {name: without_order(value) for name, value in state.items() if name != "settings_given"}
    if found.plan.resharded:
        return state
    own, is_whole = tail.own()
    names = {*collector.components, *RESERVED_NAMES}
    known = {name: value for name, value in state.items() if name in names}  # the donor may have objects of its own
    made = known if own is None else collector.compose(known, own)
    plain = {name: c for name, c in collector.components.items() if isinstance(c, PlainComponent)}
    rings = _Rings(found)
    doubts: dict[str, list[str]] = {}
    for name, component in plain.items():
        if is_whole and own is not None and name in own.get("plain", {name: None}):
            continue
        donated = state.get(name, MISSING)
        is_alike = _FOLLOWS_THE_STEPS.fullmatch(name) is not None
        choice = choose(donated, rings.of(name), is_alike=is_alike, is_stream=component.is_stream)
        target = component.target
        if choice.doubt and isinstance(target, InParts) and isinstance(donated, dict) and not is_whole:
            made[name], doubted = choose_parts(donated, partial(rings.entry_of, name), target.follow_the_steps)
            for key, choice in doubted.items():
                words = f"{choice.doubt}; {_whose(choice.value is donated[key], found)}"
                doubts.setdefault(words, []).append(target.entries_in_words.get(key, f"{name}.{key}"))
            continue
        own_way = choose_of_loader(donated, rings.of(name), rings.of(name, "epochs").foreseen)
        if own_way is not MISSING:
            choice = ChosenState(own_way)
        value = choice.value
        doubt = "takes too long to copy at every boundary" if is_whole else choice.doubt
        used = _whose(value is donated, found)
        if value is MISSING or (doubt and value is donated and not _fits(component, value)):
            value, used = component.state(), "begins as the program builds it"
        of_another = getattr(type(component.target), "as_of_another_rank", None)  # of our loaders
        if of_another is not None and value is donated and not rings.of(name).mine:
            value = of_another(value)
        made[name] = value
        if doubt:
            doubts.setdefault(f"{doubt}; {used}", []).append(asked(component.target, "in_words", name))
    modules = [name for name, c in collector.components.items() if isinstance(c, ModuleComponent) and name in state]
    for name, part in product(() if is_whole else modules, _OF_MODULES):  # they go with the weights: the donor's count
        choice = choose(_THEIRS, rings.of(name, part), is_alike=True)
        if choice.value is _THEIRS and part == "buffers":
            made[name] = {**state[name], **({} if own is None else own.get("on_device", {}).get(name, {}))}
        if choice.doubt:
            what = f"{_OF_MODULES[part]} of {name}"
            doubts.setdefault(f"{choice.doubt}; rank {found.donor}'s is used", []).append(what)
    for name in modules:
        moves = rings.of(name, "moves")
        if (len({*moves.mine}) > 1) != (len({*moves.theirs}) > 1):
            words = "only some ranks change them, and they are not kept at each step; another rank's are used"
            doubts.setdefault(words, []).append(f"the weights of {name}")
    samples = {} if found.own is None else found.own.unpack().get("weights", {})
    theirs_then = found.checkpoint.info.coordinates
    if any(theirs_then.get(step, digest) != digest for step, digest in samples.items()):
        words = f"each rank has its own, as in local SGD; rank {found.donor}'s are used"
        doubts.setdefault(words, []).append("the weights and the optimizer's state")
    donated, loop = tail_values_in(state["progress"].get("loop", {})), made["progress"].get("loop", {})
    if donated and not (is_whole and tail_values_in(loop)):
        made["progress"] = {**made["progress"], "loop": {**loop, VALUES: donated}}
        words = f"the code after the epoch may read it; rank {found.donor}'s is used"
        doubts.setdefault(words, []).extend(names_of_tail_values(donated))
    step = found.checkpoint.info.step
    for doubt, theirs in doubts.items():
        risks.risk(
            f"rank {rank} has no usable file of step {step} and had not kept all of its own state elsewhere, so from "
            f"here the run may differ from the uninterrupted one: {listed(theirs, 5)} ({doubt})",
            "Kept the same on all ranks, or changed before the forward of a step, it resumes exactly after a kill; "
            "the files of save_every and of stops have all of it",
        )
    return made


def _whose(is_donated: bool, found: Resumed) -> str:
    return f"rank {found.donor}'s is used" if is_donated else "this rank's last known one is used"


_Record = Mapping[str, Any]


class _Rings:
    """The named objects in the rings of this rank and of the donor, up to the resumed step."""

    def __init__(self, found: Resumed) -> None:
        info = found.checkpoint.info
        self._moment = info.moment
        self._mine, self._theirs = _unpacked(found.own_records), _unpacked(found.donor_records)
        for key in self._mine.keys() & self._theirs.keys():
            self._mine[key], self._theirs[key] = on_one_side(self._mine[key], self._theirs[key])
        self._has_forecast = found.own is not None and found.own.forecast

    def entry_of(self, name: str, entry: str) -> RingStates:
        return self.of(name, entry=entry)

    def of(self, name: str, part: str = "plain", *, entry: str | None = None) -> RingStates:
        """`part` of a boundary's state: one of `Collector.volatile`, which has the object `name`. `entry`: only that of
        its state."""
        now = self._moment
        mine = {key: _only(record.get(part, {}), name, entry) for key, record in self._mine.items()}
        theirs = {key: _only(record.get(part, {}), name, entry) for key, record in self._theirs.items()}
        earlier = sorted((m for m, is_forecast in mine if not is_forecast and m < now), reverse=True)
        own = [moment for moment in earlier if name in mine[moment, False]]
        common = [moment for moment in own if (moment, False) in theirs]
        foreseen = mine.get((now, True), {}).get(name, MISSING) if self._has_forecast else MISSING
        expected, came = theirs.get((now, True), {}), theirs.get((now, False), {})
        return RingStates(
            mine=[mine[moment, False][name] for moment in common],
            theirs=[theirs[moment, False].get(name, MISSING) for moment in common],
            newest=mine[own[0], False][name] if own else MISSING,
            foreseen=foreseen,
            was_wrong=bool(came) and name in expected and not same_tree(expected[name], came.get(name, MISSING)),
        )


def _only(states: Mapping[str, Any], name: str, entry: str | None) -> Mapping[str, Any]:
    """By name: of the object `name` only that entry of its state. None: all of it that another rank can have."""
    if entry is None:
        return {name: without_order(states[name])} if name in states else {}
    state = states.get(name)
    return {name: state[entry]} if isinstance(state, dict) and entry in state else {}


def on_one_side(mine: _Record, theirs: _Record) -> tuple[_Record, _Record]:
    """Records of one boundary, of two ranks, both in front of the code after an epoch where one of them is: from there
    all have gone on (`tail_side`). Pure."""
    fronts = [front_of(each.get("progress", {}).get("loop", {})) for each in (mine, theirs)]
    if None not in fronts:
        return mine, theirs
    return fronts[0] or mine, fronts[1] or theirs


def _unpacked(records: Sequence[BoundaryRecord]) -> dict[tuple[Moment, bool], _Record]:
    """Records by moment and whether they are forecasts; of several the newest."""
    found: dict[tuple[Moment, bool], _Record] = {}
    for record in records:
        key = (record.moment, record.forecast)
        if key not in found:
            found[key] = record.unpack()
    return found


def _fits(component: PlainComponent, state: Any) -> bool:
    """Whether a dict of the donor's has the names that this rank's has, as the program has built it."""
    own = component.state() if isinstance(component, AdaptedComponent) else None
    if not isinstance(own, dict) or not isinstance(state, dict):
        return True
    pairs = [(own, state), (own.get("value"), state.get("value"))]
    return all(one.keys() == other.keys() for one, other in pairs if isinstance(one, dict) and isinstance(other, dict))
