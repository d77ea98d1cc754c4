"""Seconds and bytes of the ranks' meetings at a start, from a few to 16,384 ranks, through a real TCPStore.

    python benchmarks/bench_start.py [--ranks 4 64 1024 4096 16384] [--modes replicated fsdp zero] [--tensors 150]

The ranks are simulated: one process holds an object for each of them, and all share one connection to a TCPStore that
another thread of the process hosts. They run the code of a real start: every meeting of `start.start` with its parts
(disks, faults, peers, whole shapes, interval, nodes, layouts, findings, plan, reading, flags), rank after rank, so that
"seconds" is the work of all ranks added up on one core, rank 0's merging and planning included. What each finds on disk
is told by objects as headers would make them: one file a rank, all on one shared disk, of which it reads its own.
Nothing is read from files, no state is loaded, and waiting for the slowest rank is left out. Strategies that are equal
on all ranks are one object here, so their text is made once and not once a rank (a few milliseconds each).

- `replicated`: DDP; every file has everything.
- `fsdp`: every tensor is split over all ranks.
- `zero`: weights are replicated, each optimizer state is on one rank.
- `lost`: as `replicated`, and every eighth rank's file is gone: another rank's stands in.

Bytes are those of keys and values, through the store in both directions. The older way, in which every rank read what
every rank said, is not run: it is the same code no longer. Its figures at 4 and 8 ranks are in
benchmarks/results/history.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import harness
from mindx_elastic.agreement.gather import Part, hear_all, merged, value_of
from mindx_elastic.agreement.store_exchange import StoreExchange
from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.config import RankInfo, RedundancySettings
from mindx_elastic.core.layout import Layout, Shard, parse_placement
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.memory.boundaries import OwnState
from mindx_elastic.mirror.mirror import NodesPart
from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.persist.reader import Checkpoint
from mindx_elastic.platforms.at_start import AnsweredFlagsPart, FaultsPart, GroupInfoPart
from mindx_elastic.platforms.flag_file import AnsweredFlags
from mindx_elastic.start.facts import FileFact
from mindx_elastic.start.findings import Findings
from mindx_elastic.start.job_layouts import JobLayouts
from mindx_elastic.start.restore import Disks, PlanPart, SearchPlaces, Target
from mindx_elastic.start.shares import Share, ShareReader
from mindx_elastic.start.start import PeersPart

MODES = ("replicated", "fsdp", "zero", "lost")
RANKS_PER_NODE = 8
TARGET_RANKS, TARGET_S, TARGET_MB = 1024, 5.0, 200.0
DIRECTORY = Path("/checkpoints")
MOMENT = ("run", 0, 1000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256, 1024, 4096, 16384])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES[:3]))
    parser.add_argument("--tensors", type=int, default=150, help="parameters of the model (default 150)")
    harness.add_arguments(parser, rounds=1)
    args = parser.parse_args()
    report = harness.Report(args)
    for mode in args.modes:
        for ranks in args.ranks:
            method = f"{mode}, {ranks} ranks"
            methods = {method: lambda mode=mode, ranks=ranks: measure(mode, ranks, args.tensors).figures()}
            targets = [
                harness.Target(method=method, at_most=TARGET_S),
                harness.Target(method=method, figure="MB", at_most=TARGET_MB),
            ]
            compared = harness.compare(f"{method}, {args.tensors} parameters, Adam", methods, rounds=args.rounds)
            report.add(compared, targets=targets if ranks == TARGET_RANKS else (), unit="s, MB, bytes")
    return report.end()


class CountingStore:
    """A connection to the store that counts what goes through it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.up = self.down = self.calls = 0

    def _count(self, sent: Sequence[str | bytes], got: Sequence[bytes] = ()) -> None:
        self.calls += 1
        self.up += sum(map(len, sent))
        self.down += sum(map(len, got))

    def set(self, key: str, value: str) -> None:
        self._count([key, value])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        self._count([key], [found])
        return found

    def add(self, key: str, amount: int) -> int:
        self._count([key, "0" * 8], [b"0" * 8])
        return int(self._store.add(key, amount))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count(keys)
        self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        self._count(keys)
        return bool(self._store.check(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        found: bytes = self._store.compare_set(key, expected, desired)
        self._count([key, expected, desired], [found])
        return found

    def delete_key(self, key: str) -> bool:
        self._count([key])
        return bool(self._store.delete_key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found: list[bytes] = self._store.multi_get(keys)
        self._count(keys, found)
        return found

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._count([*keys, *values])
        self._store.multi_set(keys, values)


class ReadsNothing(ShareReader):
    """In place of the files: every share can be read."""

    def __init__(self) -> None:
        self.path = Path()
        self.small: OwnState | None = None

    def read(self, share: Share, blueprint: Blueprint | None) -> tuple[Checkpoint | None, list[Any]]:
        info = CheckpointInfo(
            run_id=MOMENT[0],
            world_size=share.plan.source.world_size,
            rank=share.rank.file.rank,
            step=MOMENT[2],
            epoch=1,
            step_in_epoch=1,
            batch_num=1,
            reason="",
            kind="periodic",
            created=1.0,
        )
        return Checkpoint(info, {}, {}), []


@dataclass
class Measured:
    meetings: int
    seconds: float
    chair_s: float
    """Of rank 0's merging, planning and answering."""
    nbytes: int
    mean_in: float
    """Bytes that a rank other than rank 0 has read, and sent keys for."""
    max_in: int

    def figures(self) -> dict[str, float]:
        return {
            harness.SECONDS: self.seconds,
            "rank 0 s": self.chair_s,
            "meetings": self.meetings,
            "MB": self.nbytes / 1e6,
            "bytes a rank in": self.mean_in,
            "most": self.max_in,
        }


def measure(mode: str, world_size: int, num_tensors: int) -> Measured:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = CountingStore(dist.PrefixStore("bench", server))
    exchanges = [StoreExchange(lambda: store, rank=r, world_size=world_size) for r in range(world_size)]
    strategies, files = job(mode, world_size, num_tensors)
    spent, chair = [0] * world_size, [0.0]
    meetings = 0

    def meet(name: str, parts: Callable[[int], list[Part]]) -> list[list[Part]]:
        """One meeting of all ranks; what happens at once in a job happens here one after the other."""
        nonlocal meetings
        meetings += 1
        made = []
        for rank, exchange in enumerate(exchanges):
            before = store.down
            made.append(parts(rank))
            exchange.say(name, value_of(made[rank]))
            spent[rank] += store.down - before
        began = time.perf_counter()
        exchanges[0].preside(name, lambda said: merged(made[0], said))
        chair[0] += time.perf_counter() - began
        for rank, exchange in enumerate(exchanges):
            before = store.down
            hear_all(made[rank], exchange.hear(name))
            spent[rank] += store.down - before
        return made

    ranks = [RankInfo(rank=rank, world_size=world_size) for rank in range(world_size)]
    places = [SearchPlaces([DIRECTORY], "auto") for _ in ranks]
    one_copy = RedundancySettings(copies=1)
    began = time.perf_counter()
    here = meet(
        "here",
        lambda r: [
            _Disk(places[r], r),
            FaultsPart(),
            GroupInfoPart(ranks[r]),
            PeersPart(ranks[r], identity_of(r)),
            NodesPart(one_copy, ranks[r]),
        ],
    )

    def second(rank: int) -> list[Part]:
        target = Target(strategies(rank), Blueprint({}, {}, {}))
        layouts = JobLayouts(exchanges[rank], target, lambda specs: None)
        disks: Any = here[rank][0]
        findings = Findings(disk="disk", machine=f"node {rank // RANKS_PER_NODE}")
        findings.facts = files(rank)
        findings.known, findings.anything = {"run"}, True
        disks.findings = findings
        plan = PlanPart(exchanges[rank], ranks[rank], disks, target)
        plan.reader = ReadsNothing()
        return [layouts, plan]

    plans: list[Any] = [each[-1] for each in meet("plan", second)]
    for plan in plans:
        plan.follow()
    while plans[0].goes_on:
        meet("read", lambda r: [plans[r]])
        for plan in plans:
            plan.follow()
    assert all(plan.resumed is not None for plan in plans)
    meet("loaded", lambda r: [AnsweredFlagsPart(AnsweredFlags())])
    meet("entered", lambda r: [])
    seconds = time.perf_counter() - began
    others = spent[1:] or [0]
    return Measured(meetings, seconds, chair[0], store.up + store.down, sum(others) / len(others), max(others))


def identity_of(rank: int) -> str:
    """Of a process on a machine of 8 ranks."""
    space = f"00000000-0000-0000-0000-{rank // RANKS_PER_NODE:012}/pid:[4026531836]"
    return json.dumps({"pid": 1000 + rank, "started": "123456789", "space": space})


class _Disk(Disks):
    """A disk that all ranks share, and the memory of a machine of 8 ranks."""

    def __init__(self, places: SearchPlaces, rank: int) -> None:
        super().__init__(SearchPlaces((), "never"))
        self.places, self._rank = places, rank
        self.findings = Findings()

    def say(self) -> Any:
        return ["disk", f"node {self._rank // RANKS_PER_NODE}"]

    def look(self, *args: Any, **options: Any) -> Findings:
        return self.findings


def job(
    mode: str, world_size: int, num_tensors: int
) -> tuple[Callable[[int], Strategy], Callable[[int], list[FileFact]]]:
    """For each rank what it lays out now, and what its file says."""
    split = Layout((world_size,), (parse_placement("S(0)"),))
    whole = Layout((world_size,), (parse_placement("R"),))
    layout = split if mode == "fsdp" else whole
    parameters = [
        TensorSpec(f"model.layers.{i}.weight", (4096, 64 * (1 + i % 4)), layout, "F32") for i in range(num_tensors)
    ]

    def states(specs: Sequence[TensorSpec], layout: Layout) -> list[TensorSpec]:
        return [
            TensorSpec(f"optimizer.state.{spec.name}.{key}", spec.shape, layout, "F32", spec.name)
            for spec in specs
            for key in ("exp_avg", "exp_avg_sq")
        ]

    marker = TensorSpec("@optimizer.state", (world_size,), Layout((world_size,), (Shard(0),)))
    common_target = Strategy(world_size, tuple(parameters))
    common_file = Strategy(world_size, (*parameters, *states(parameters, layout)))

    def target(rank: int) -> Strategy:
        if mode != "zero":
            return common_target
        own = TensorSpec("@optimizer.state", (), Layout((1,), (parse_placement("R"),), (rank,)))
        return Strategy(world_size, (*parameters, own))

    def strategy_of(rank: int) -> Strategy:
        if mode != "zero":
            return common_file
        mine = Layout((1,), (parse_placement("R"),), (rank,))
        return Strategy(world_size, (*parameters, *states(parameters[rank::world_size], mine), marker))

    def file(rank: int) -> list[FileFact]:
        if mode == "lost" and rank % 8 == 7:
            return []
        path = DIRECTORY / f"rank_{rank}" / "resnet-3_250.safetensors"
        return [
            FileFact(
                path=str(path),
                rank=rank,
                moment=MOMENT,
                world_size=world_size,
                strategy=strategy_of(rank),
                kind="periodic",
                created=1_790_000_000.5,
                nbytes=1 << 30,
                epoch=3,
                step_in_epoch=250,
                where="disk",
            )
        ]

    return target, file


if __name__ == "__main__":
    sys.exit(main())
