"""How replicas save together: they divide the state among their files.

At an agreed stop all ranks of a DDP job hold the same weights and optimizer state, so that not each of them need write
all of it. In short (decision 23):

1. At the start the ranks tell each other where they save (`SavesPart`). Ranks of one machine, which save into the same
   folder of the same disk, make a *group*.
2. At the stop each rank works out how it would divide the state (`core.division`) and tells the others that, and a
   sample of its tensors. They divide only if all say the same.
3. Each rank writes its parts, and its own small state (random numbers, buffers, counters), into its file.

No rank waits for another one's file: each part is in two of them, so that one rank may fail in its save. Nothing here
decides whether a step is complete: the next start does, by what the files hold. So whatever the ranks of the group do
or miss, the step is complete or an older one is taken. Where the ranks do not agree, each writes all it has.

Policies with ``remove_redundancy=True`` also divide what is saved periodically and at the end of a training, each part
once: if a rank fails in it, the step before stays the newest.

Weights of a replicated job that the ranks should have alike and have not are told (`UnevenModules`): each rank may get
another's, after its death, or where its file is lost. DDP makes the weights that it wraps the same on all ranks. A copy
that a program makes before that, with another seed on each rank (an average of the weights, as DeiT has it), begins
with each rank's own and stays another. The files of a usual stop have all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.agreement.stop_step import CANNOT
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.weight_samples import WeightSamples, sample_of
from mindx_elastic.config import RankInfo
from mindx_elastic.core.division import MAX_PARTS, Division, parts_of_member
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import boot_id
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.tensor_memory import flat_bytes, memory_of
from mindx_elastic.guard.policy import ExitPolicy, PeriodicPolicy
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.persist.dtypes import NAMES
from mindx_elastic.persist.flatten import Tree
from mindx_elastic.persist.format import Held
from mindx_elastic.persist.places import places_in

_Policy = TypeVar("_Policy", ExitPolicy, "ExitPolicy | PeriodicPolicy")

__all__ = ["DividedSaves", "SavesPart", "SavingGroup", "UnevenModules"]

COPIES = 2
"""Number of files of a stop that have each part, so that a step survives the loss of one."""
WORTH_BYTES = 64 << 20
"""Smaller states are written whole by every rank: that is as fast, and any file is enough."""
_LEAST_BYTES = 1024  # smaller tensors are in every file
_SAMPLES = 256  # tensors that are compared
_ROUND = "share"


class SavingGroup(NamedTuple):
    """The ranks that divide a state among them."""

    ranks: tuple[int, ...] = ()
    """Ascending; empty: this rank writes all of its state."""
    copies: int = COPIES

    def parts_of(self, rank: int) -> tuple[int, ...]:
        return parts_of_member(self.ranks.index(rank), len(self.ranks), self.copies)


class SavesPart(Part):
    """Where and what the ranks save at a stop; afterwards the group of this rank."""

    name = "saves"

    def __init__(
        self,
        policies: Sequence[ExitPolicy],
        periodic: Sequence[PeriodicPolicy],
        folders: Sequence[Path],
        nbytes: int,
        *,
        divides: bool,
        mode: str = "auto",
    ) -> None:
        """`folders`: where all of them save, made and resolved. `nbytes`: of the state, about. `divides`: every other
        rank holds the same tensors, and this rank's file need not have all of them. `mode`: see `SavingSettings`."""
        saving = [policy for policy in policies if policy.save]
        plain = all(policy.place is None and policy.finish is None for policy in saving)
        self.group = SavingGroup()
        """The ranks with which this one divides what is saved at a stop."""
        self.single = SavingGroup()
        """The group with which it divides other saves of policies that want no redundancy."""
        every: list[ExitPolicy | PeriodicPolicy] = [*saving, *periodic]
        once = [policy for policy in every if getattr(policy, "remove_redundancy", False)]  # a user's own may not say
        self._own = {
            "disk": _disk_of(folders) if divides and plain and mode != "never" else "",
            # Directories by their numbers: on the nodes' own disks they may have other names on each.
            "policies": [[p.kind, sorted(p.alarms), number, p.prefix] for p, number in _numbered(saving)],
            "once": [[number, getattr(policy, "prefix", "")] for policy, number in _numbered(once)],
            "saves": bool(saving),
            "nbytes": WORTH_BYTES if mode == "always" else nbytes,
        }

    def say(self) -> Any:
        return self._own

    def merge(self, said: Sequence[Any]) -> Merged:
        alike = all(each["saves"] is True and each["policies"] == said[0]["policies"] for each in said)
        disks: dict[str, list[int]] = {}
        for rank, each in enumerate(said):
            disks.setdefault(str(each["disk"]) or f"rank {rank}", []).append(rank)
        is_worth = min(int(each["nbytes"]) for each in said) >= WORTH_BYTES
        together = {rank: ranks for ranks in disks.values() for rank in ranks if COPIES < len(ranks) <= MAX_PARTS}
        divides = alike and is_worth
        same = all(each["once"] == said[0]["once"] for each in said) and bool(said[0]["once"])
        once = {rank: ranks for ranks in disks.values() for rank in ranks if same and 1 < len(ranks) <= MAX_PARTS}
        return Merged(
            None, [[together.get(rank, []) if divides else [], once.get(rank, [])] for rank in range(len(said))]
        )

    def hear(self, answer: Answer) -> None:
        group, once = (tuple(int(rank) for rank in ranks) for ranks in answer.own)
        self.group, self.single = SavingGroup(group), SavingGroup(once, 1)


def _numbered(policies: Sequence[_Policy]) -> list[tuple[_Policy, int]]:
    """Each policy with the number of its directory among theirs."""
    numbers = {directory: n for n, directory in enumerate(dict.fromkeys(policy.directory for policy in policies))}
    return [(policy, numbers[policy.directory]) for policy in policies]


def _disk_of(folders: Sequence[Path]) -> str:
    """Equal for two ranks only if these are the very same folders: of one machine, for nothing tells whether two
    machines see one disk or each has its own disk under that path. Empty where that is not known."""
    try:
        status = [folder.stat() for folder in dict.fromkeys(folders)]
        return json.dumps([boot_id(), [[each.st_dev, each.st_ino] for each in status]])
    except OSError:
        return ""


class DividedSaves:
    """One per guard. The thread that has the claim to save calls `agree`, once."""

    def __init__(self, exchange: Exchange, ranks: RankInfo, collector: Collector, part: SavesPart) -> None:
        self._exchange, self._ranks, self._collector = exchange, ranks, collector
        self.part = part

    @property
    def is_possible(self) -> bool:
        """There are ranks with which this one divides what is saved at a stop."""
        return bool(self.part.group.ranks)

    def decline(self) -> None:
        """This rank saves alone, or nothing: the others need not wait for it. Any thread."""
        if self.is_possible:
            self._exchange.announce(_ROUND, CANNOT)

    def agree(self, step: int, tree: Tree, tensors: Mapping[str, torch.Tensor], timeout_s: float) -> Held | None:
        """Agree with the others on who writes what of the boundary `step`, flattened to `tree` and `tensors`. Returns
        the parts that this rank writes; None: all of its state."""
        own = self.share(self.part.group, tree, tensors)
        if not self._exchange.tell(_ROUND, "" if own is None else own.key):
            return None
        decision = self._exchange.decide(_ROUND, step, timeout_s)
        if decision.step != step:
            logger.info("the ranks do not save together (%s): each writes all of its state", decision.reason)
            return None
        try:
            keys = self._exchange.try_collect(_ROUND, self.part.group.ranks) or ()
            said = dict(zip(self.part.group.ranks, keys, strict=True))
        except Exception as error:
            logger.warning("what the ranks say of their shares cannot be read (%s): this one writes all", error)
            return None
        return own if own is not None and self._is_alike(said) else None

    def share(self, group: SavingGroup, tree: Tree, tensors: Mapping[str, torch.Tensor]) -> Held | None:
        """What this rank of `group` writes of a state that was flattened to `tree` and `tensors`; None: all of it."""
        rank = self._ranks.rank
        if rank not in group.ranks:
            return None
        names = _divisible(tree, tensors, self._collector.layout())
        of = {name: (NAMES[tensors[name].dtype], tuple(tensors[name].shape), tensors[name].nbytes) for name in names}
        return Held(Division.of(of, len(group.ranks)), group.parts_of(rank), _sample(names, tensors)) if of else None

    def _is_alike(self, said: Mapping[int, str]) -> bool:
        """Whether all of the group say the same of the state. Where they do not, each keeps its own: they are no
        replicas, whatever the modules around them promise."""
        ranks = self.part.group.ranks
        other = [rank for rank in ranks if said[rank] != said[ranks[0]]]
        if other and self._ranks.rank == ranks[0]:
            logger.warning(
                "%s and %s do not hold the same weights and optimizer state, although DDP wraps them: each writes its "
                "own. Look for an update that only some ranks make",
                rank_list((ranks[0],)),
                rank_list(tuple(other)),
            )
        return not other


def _divisible(tree: Tree, tensors: Mapping[str, torch.Tensor], layout: Mapping[str, Any]) -> list[str]:
    """The tensors of which every replica is known to hold the same: parameters and what optimizers keep of them.

    Not buffers, which differ between the ranks; not what was never said to be equal; not objects of the program's own.
    """
    volatile = {f"{component}.{name}" for component, names in layout.get("volatile", {}).items() for name in names}
    described = {*layout.get("modules", ()), *layout.get("parameters", {})}
    laid, assumed, default = layout.get("tensors", {}), layout.get("assumed", ()), layout.get("default")

    def is_shared(place: str) -> bool:
        number = laid[place][0] if place in laid else default
        known = number is not None and number not in assumed
        return place.partition(".")[0] in described and place not in volatile and known

    shared: dict[str, bool] = {}
    for place, node in places_in(tree).items():
        name = node["$tensor"]
        shared[name] = shared.get(name, True) and is_shared(place)
    if any(name.endswith("]") for name in tensors):
        return []  # could be taken for a piece of another one
    return [
        name
        for name, tensor in tensors.items()
        if shared.get(name) and tensor.ndim and tensor.nbytes >= _LEAST_BYTES and tensor.shape[0] > 0
    ]


def _sample(shared: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of a few elements of many tensors: replicas that have gone apart differ almost everywhere."""
    names = sorted(shared)
    digest = xxhash.xxh3_128()
    for group in sample_of([tensors[name] for name in names[:: max(1, len(names) // _SAMPLES)]]).groups:
        digest.update(memory_of(flat_bytes(group.cpu())))
    return digest.hexdigest()


class UnevenModules(Part):
    """Some elements of each parameter are compared, when the state has been loaded."""

    name = "uneven_modules"

    def __init__(self, collector: Collector, unmanaged: Unmanaged, *, tells: bool = True) -> None:
        """`tells`: what differs has not been told yet."""
        self._collector, self._unmanaged, self._tells = collector, unmanaged, tells
        self.lacked: Sequence[str] = ()
        """The modules that this rank has not and another one has. Known after `hear`."""

    def say(self) -> Any:
        return WeightSamples(self._collector).digests()

    def merge(self, said: Sequence[Any]) -> Merged:
        every = {str(name) for each in said for name in each}
        names = sorted(name for name in every if len({each.get(name) for each in said}) > 1)
        return Merged([[name, all(name in each for each in said)] for name in names])

    def hear(self, answer: Answer) -> None:
        components = self._collector.components
        self.lacked = [name for name, is_everywhere in answer.common if not is_everywhere and name not in components]
        if not self._tells:
            return
        for name, is_everywhere in answer.common:
            if is_everywhere:
                self._unmanaged.risk(
                    f'the weights of module "{name}" are not the same on all ranks, and a rank that is killed gets '
                    "those of another rank",
                    "Copy it from the module inside DDP, which gives all ranks the same weights "
                    "(copy.deepcopy(ddp.module)), and update it on all ranks alike; or --snapshot-every 1 keeps "
                    "rank 0's",
                )
            elif name in components:
                logger.warning(
                    'not every rank has the module "%s": when this one is killed, the steps since its last save or '
                    "snapshot are lost. Name and update it on all ranks alike; or --snapshot-every 1 keeps it",
                    name,
                )
