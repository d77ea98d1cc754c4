"""The start of a guard: find what to resume from, put it into the live objects, in the right order.

DDP's bucket layout (a synthetic backward), the state, the random generators last; and those once more when the
loader's iterator exists, because creating it, and the program's own code before the first batch, may draw numbers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.told import making_sense, whole_number
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp_order import GradientOrder
from mindx_elastic.capture.rng import restore_rng, seed_rng
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.position import Position
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import MismatchError
from mindx_elastic.guard.policy import is_another_job
from mindx_elastic.inventory.views import Transport
from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.plan.facts import KnownFaults, ResumePlan
from mindx_elastic.resume.ddp_warmup import replay_gradient_order
from mindx_elastic.resume.restore import Resumed, Target, find_and_read

__all__ = [
    "GradientOrders",
    "Start",
    "ddp_modules",
    "ignored_parameters",
    "is_replicated",
    "outermost_replicas",
    "replica_ranks",
    "start_or_resume",
]

_RUN_ID_TIMEOUT_S = 600.0
_LONGEST_RUN_ID = 1000


@dataclass(frozen=True)
class Start:
    """How a guard began."""

    run_id: str
    attempt: int
    resumed: Resumed | None

    def is_new_on_disk(self, arenas: Path | None) -> bool:
        """This rank's state was put together, with a file on disk in it, and is nowhere whole."""
        found = self.resumed
        if found is None or found.own is None or found.plan.resharded:
            return False
        return arenas is None or not found.path.is_relative_to(arenas)

    @property
    def plan(self) -> ResumePlan | None:
        """What was loaded, by all ranks; None on a fresh start."""
        return None if self.resumed is None else self.resumed.plan

    @property
    def step(self) -> int | None:
        """The step that the run goes on from; None on a fresh start."""
        return None if self.resumed is None else self.resumed.checkpoint.info.step


def start_or_resume(
    directories: Sequence[Path],
    *,
    collector: Collector,
    targets: Mapping[str, Any],
    loader: Any,
    ranks: RankInfo,
    exchange: Exchange,
    events: EventLog,
    resume: str | Path,
    arenas: Path | None = None,
    transport: Transport | None = None,
    target: Target | None = None,
    faults: KnownFaults | None = None,
    on_found: Callable[[Resumed | None], None] = lambda found: None,
    trust: Trust | None = None,
    names: Sequence[str] = (),
) -> Start:
    """Main thread, all ranks together. `names`: what this job calls its files.

    Raises what `find_and_read` and `Collector.load` raise, and MismatchError for another job's step.
    """
    began = time.perf_counter()
    found = find_and_read(
        directories,
        ranks,
        exchange,
        resume=resume,
        arenas=arenas,
        transport=transport,
        target=target,
        faults=faults,
        trust=trust,
    )
    if found is not None and resume == "auto":
        _refuse_another_job(found, names)
    on_found(found)  # before anything is loaded: loading may be what kills the process
    fresh_id = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
    own_id = found.checkpoint.info.run_id if found else fresh_id
    told_id = exchange.gather("run_id", own_id, _RUN_ID_TIMEOUT_S)[0]
    events.run_id = run_id = printable(told_id, _LONGEST_RUN_ID)
    # Launchers count for themselves, on each node; files of two attempts are never put together.
    own_attempt = str(ranks.attempt if found is None else found.next_attempt)
    attempts = exchange.gather("attempt", own_attempt, _RUN_ID_TIMEOUT_S)
    with making_sense("the number of attempts"):
        events.attempt = max(whole_number(text, 0, 10**9) for text in attempts)
    if found is None:
        logger.info("fresh start in %s", directories[0])
        collector.copy(Position())
        events.emit("start", step=0, outcome="fresh")
        return Start(run_id, events.attempt, None)
    info = found.checkpoint.info
    _load_together(found, collector, targets, loader, ranks, exchange)
    where = f"step {info.step} (epoch {info.epoch}, step {info.step_in_epoch})"
    logger.info("resumed from %s: %s, saved because of %s", found.path, where, info.reason)
    if ranks.rank == 0 and found.plan.resharded:
        logger.warning("not bit for bit the uninterrupted run: %s", "; ".join(found.plan.inexact))
    events.emit(
        "resume",
        step=info.step,
        reason=info.reason,
        duration_s=time.perf_counter() - began,
        outcome="resumed",
        path=str(found.path),
        rejected=list(found.rejected),
        exact=found.plan.exact,
        resharded=found.plan.resharded,
    )
    return Start(run_id, events.attempt, found)


def _refuse_another_job(found: Resumed, names: Sequence[str]) -> None:
    """Two jobs that share a directory by mistake would go on from each other's steps, or find that all is done."""
    recorded = found.checkpoint.info.names
    if is_another_job(recorded, names):
        theirs, ours = (", ".join(map(repr, each)) for each in (recorded, names))
        raise MismatchError(
            f"{found.path} is another job's: it was saved with the prefix {theirs}, and this job's is {ours}. A "
            'directory is one job\'s: give this one its own, or say resume="PATH" to go on from that file all the '
            'same, or resume="never" to start anew',
            path=found.path,
        )


def _load_together(
    found: Resumed,
    collector: Collector,
    targets: Mapping[str, Any],
    loader: Any,
    ranks: RankInfo,
    exchange: Exchange,
) -> None:
    """Raises on all ranks when one of them cannot load its part: nobody trains on and waits for it."""
    _load(found, collector, targets, loader, ranks)
    exchange.gather("loaded", "", _RUN_ID_TIMEOUT_S)


def _load(found: Resumed, collector: Collector, targets: Mapping[str, Any], loader: Any, ranks: RankInfo) -> None:
    state = found.checkpoint.state
    for name, module in ddp_modules(targets):
        problem = replay_gradient_order(module, state["gradient_order"].get(name, []))
        if problem is not None:
            logger.warning("the resumed run may differ in the last bits from an uninterrupted one: %s", problem)
    own = None if found.own is None else found.own.unpack()
    if own is not None:
        state = collector.compose(state, own)
    for note in collector.load(state):
        logger.warning("%s", note)
    restore = _how_to_restore_rng(found, state["rng"], ranks)
    restore()
    _call_when_ready(loader, restore)
    collector.copy(collector.position)


def _how_to_restore_rng(found: Resumed, rng: dict[str, Any], ranks: RankInfo) -> Callable[[], None]:
    info = found.checkpoint.info
    if found.donor is None:
        return lambda: restore_rng(rng)
    if found.plan.resharded:
        return _new_numbers(info, ranks)
    if found.own is not None:
        logger.info(
            "rank %d has no file of step %d: weights, optimizer and position come from rank %d, its random numbers and "
            "CPU buffers %s",
            ranks.rank,
            info.step,
            found.donor,
            "are foreseen from its last forward, all else is that rank's" if found.own.forecast else "from memory",
        )
        return lambda: restore_rng(rng)
    logger.warning(
        "rank %d has no file of step %d and takes rank %d's: weights, optimizer and position are the same; its random "
        "numbers begin anew, so from here the run is not bit for bit the uninterrupted one",
        ranks.rank,
        info.step,
        found.donor,
    )
    return _new_numbers(info, ranks)


def _new_numbers(info: CheckpointInfo, ranks: RankInfo) -> Callable[[], None]:
    # Not the donor's: two ranks would draw the same dropout masks.
    seed = xxhash.xxh3_64_intdigest(f"{info.run_id}/{info.step}/{ranks.rank}".encode()) >> 1
    return lambda: seed_rng(seed)


def _call_when_ready(loader: Any, restore: Callable[[], None]) -> None:
    if not hasattr(loader, "on_iterator_ready"):
        return

    def once() -> None:
        loader.on_iterator_ready = None
        restore()

    loader.on_iterator_ready = once


def ddp_modules(targets: Mapping[str, Any]) -> list[tuple[str, DistributedDataParallel]]:
    """Every DDP module by its place, also below the top level (a `ModuleDict`, `torch.compile`)."""
    return [
        (f"{name}.{place}" if place else name, module)
        for name, target in targets.items()
        if isinstance(target, nn.Module)
        for place, module in target.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]


def outermost_replicas(targets: Mapping[str, Any]) -> list[nn.Module]:
    """The modules whose forward is a replica's: DDP, or what `torch.compile` made of it, where a hook stays a hook."""
    wrapped = {name.split(".")[0] for name, _ in ddp_modules(targets)}
    compiled = [t for name, t in targets.items() if name in wrapped and hasattr(t, "_orig_mod")]
    inside = {id(module) for target in compiled for module in target.modules()}
    return [*compiled, *(module for _, module in ddp_modules(targets) if id(module) not in inside)]


def replica_ranks(targets: Mapping[str, Any]) -> list[int]:
    """The ranks that hold the same weights as this one: every trained module is wrapped in DDP; empty: not known."""
    trained = {
        name
        for name, target in targets.items()
        if isinstance(target, nn.Module) and any(p.requires_grad for p in target.parameters())
    }
    modules = ddp_modules(targets)
    groups = {tuple(sorted(dist.get_process_group_ranks(module.process_group))) for _, module in modules}
    if not trained or len(groups) != 1 or not trained <= {name.split(".")[0] for name, _ in modules}:
        return []
    return list(groups.pop())


def ignored_parameters(targets: Mapping[str, Any]) -> frozenset[str]:
    """Places of parameters that DDP leaves alone (experts of a rank, for example)."""
    found = set()
    for place, module in ddp_modules(targets):
        component, _, inner = place.partition(".")
        for name in module.parameters_to_ignore:
            found.add(f"{component}.{inner}.{name}" if inner else f"{component}.{name}")
    return frozenset(found)


def is_replicated(targets: Mapping[str, Any], collector: Collector, world_size: int) -> bool:
    """Whether every rank holds the same, so that one rank's file can stand in for any other's."""
    whole = len(replica_ranks(targets)) == world_size > 1 and not ignored_parameters(targets)
    return whole and not collector.is_sharded and not collector.is_spread


class GradientOrders:
    """Records the gradient order of every DDP module that does not have one yet, during the first backward."""

    def __init__(
        self, targets: Mapping[str, Any], collector: Collector, *, world_size: int, by_hand: bool = False
    ) -> None:
        """by_hand: the user has said how the weights are laid out, and knows what he does; or nothing is trained."""
        self._collector = collector
        if world_size > 1 and not by_hand and not ddp_modules(targets) and not collector.is_sharded:
            logger.warning(
                "no DDP or sharded module among the guard's objects: if the model is wrapped in DDP, give the guard "
                "the wrapped one, or a resumed run may differ in the last bits at 3 and more ranks"
            )
        self._recording: dict[str, GradientOrder] = {}
        for name, module in ddp_modules(targets):
            if not collector.gradient_order.get(name):
                self._recording[name] = GradientOrder(module)
                self._recording[name].record()

    def at_boundary(self) -> None:
        """Training thread, each boundary: keep the orders that are complete."""
        for name, order in list(self._recording.items()):
            if order.finish():
                self._collector.gradient_order[name] = self._recording.pop(name).order
