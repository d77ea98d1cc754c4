"""Seconds and memory to plan a resume of a large job, and how both grow; DCP's global plan beside it where it ends.

    python benchmarks/bench_plan.py [--ranks 16384] [--tensors 2000] [--faults 64] [--repeats 3] [--limit 120]

The job is dp x tp x pp with tp = 8 and pp = 4. Each pipeline stage has its share of the tensors: column- and
row-parallel matrices, and small replicated vectors. What lies on disk is told by plain objects, as the catalog makes
them of headers:

- `replicated`: data parallel repeats everything. One step; the faulty ranks' files are gone, and others stand in.
- `fsdp`: data parallel splits everything (FSDP2 around tensor parallel). The newest step lacks the faulty ranks' parts,
  so it is searched in vain, and the step before it, which is whole, is chosen.
- `uneven`: as `fsdp`, and no dimension divides by the number of ranks.
- `reshard`: as `fsdp`, and the new world has half the data parallel degree: every rank reads from several files.

Each sample is a fresh process. Memory is the growth of its peak resident size from before the objects are made: files,
strategy and plan together. DCP's part is what its coordinator does for the same job: its global save plan from all
ranks' local ones (`DefaultSavePlanner.create_global_plan`, the only place where it learns which file holds what), its
global load plan, and the local load plan of one rank. Ours is the plan of all ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from typing import Any

import harness
from mindx_elastic.core.layout import Layout, parse_placement
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.start.facts import FileFact, ResumePlan, World
from mindx_elastic.start.planner import plan_resume

TP, PP = 8, 4
MODES = ("replicated", "fsdp", "uneven", "reshard")
TARGET_S, TARGET_MIB = 2.0, 1024


class GivenUpError(Exception):
    """A point took longer than the limit, or more memory than there is."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384, help="of the old world (default 16384)")
    parser.add_argument("--tensors", type=int, default=2000, help="of the whole job (default 2000)")
    parser.add_argument("--faults", type=int, default=64, help="faulty ranks (default 64)")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds after which a point is given up (default 120)"
    )
    parser.add_argument("--child", choices=(*MODES, "dcp"), help=argparse.SUPPRESS)
    harness.add_arguments(parser, rounds=3)
    args = parser.parse_args()
    if args.child:
        measure = _measure_dcp if args.child == "dcp" else _measure
        print(json.dumps(measure(args.child, args.ranks, args.tensors, args.faults)))
        return 0
    report = harness.Report(args)
    _compare_layouts(args, report)
    _compare_sizes(args, report)
    _compare_with_dcp(args, report)
    return report.end()


# --- the job ---


def make_strategies(mode: str, ranks: int, tensors: int) -> list[Strategy]:
    """One for each pipeline stage, as its files describe it; the same objects for all its files."""
    per_stage, dp = ranks // PP, ranks // PP // TP
    names = ("dp", "tp")
    odd = 1 if mode == "uneven" else 0
    rows, columns = 2 * dp * TP + odd, 4 * TP + odd
    around = (f"_S(0,{TP})", "S(0)"), ("S(0)", "S(1)"), ("S(0)", "R")
    if mode == "replicated":
        around = ("R", "S(0)"), ("R", "S(1)"), ("R", "R")
    strategies = []
    for stage in range(PP):
        where = range(stage * per_stage, (stage + 1) * per_stage)
        layouts = [Layout((dp, TP), tuple(map(parse_placement, each)), where, names) for each in around]
        kinds = [((rows, columns), layouts[0]), ((rows, columns), layouts[1]), ((rows,), layouts[2])]
        specs = [TensorSpec(f"stage{stage}.t{i}", *kinds[i % 3], dtype="BF16") for i in range(tensors // PP)]
        strategies.append(Strategy(ranks, tuple(specs)))
    return strategies


def make_files(strategies: list[Strategy], step: int, kind: str, missing: frozenset[int]) -> list[FileFact]:
    ranks = strategies[0].world_size
    return [
        FileFact(
            path=f"/job/checkpoints/rank_{rank}/model-1_{step}.safetensors",
            rank=rank,
            moment=("20250101-000000-0badcafe", 0, step),
            world_size=ranks,
            strategy=strategies[rank * PP // ranks],
            kind=kind,
            created=1e9 + step,
            nbytes=1 << 30,
            epoch=1,
            step_in_epoch=step,
        )
        for rank in range(ranks)
        if rank not in missing
    ]


def faulty(ranks: int, count: int) -> frozenset[int]:
    """Whole nodes of eight, spread over the job."""
    nodes = max(1, count // 8)
    return frozenset(rank for i in range(nodes) for rank in range(i * (ranks // nodes), i * (ranks // nodes) + 8))


def _measure(mode: str, ranks: int, tensors: int, faults: int) -> dict[str, float]:
    from mindx_elastic.platforms.plan_files import plan_to_json

    before = _peak_kib()
    named = faulty(ranks, faults)
    strategies = make_strategies(mode, ranks, tensors)
    files = make_files(strategies, 1000, "breakpoint", named)
    if mode != "replicated":
        files += make_files(strategies, 990, "periodic", frozenset())
    world = World(ranks)
    if mode == "reshard":
        specs = [spec for strategy in make_strategies(mode, ranks // 2, tensors) for spec in strategy.tensors]
        shapes = {spec.name: spec.shape for strategy in strategies for spec in strategy.tensors}
        layouts = {spec.name: spec.layout for spec in specs}
        target = tuple(TensorSpec(name, shapes[name], layouts[name], "BF16") for name in shapes)
        world = World(ranks // 2, Strategy(ranks // 2, target))
    gc.collect()
    start = time.perf_counter()
    plan = plan_resume(files, world, faults=named)
    seconds = time.perf_counter() - start
    growth = _peak_kib() - before
    assert isinstance(plan, ResumePlan), str(plan)
    assert plan.step == (1000 if mode == "replicated" else 990)
    start = time.perf_counter()
    text = json.dumps(plan_to_json(plan))
    to_json = time.perf_counter() - start
    return {"seconds": seconds, "mib": growth / 1024, "json_s": to_json, "json_mib": len(text) / (1 << 20)}


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- DCP ---


def _measure_dcp(_mode: str, ranks: int, tensors: int, _faults: int) -> dict[str, float]:
    import torch
    from torch.distributed.checkpoint import default_planner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    before = _peak_kib()
    properties = TensorProperties(dtype=torch.bfloat16)
    items: list[list[Any]] = [[] for _ in range(ranks)]
    for spec in (spec for strategy in make_strategies("fsdp", ranks, tensors) for spec in strategy.tensors):
        for shard, holders in enumerate(spec.layout.holders):
            box = spec.layout.box(spec.shape, shard)
            chunk = ChunkStorageMetadata(
                offsets=torch.Size(low for low, _ in box), sizes=torch.Size(high - low for low, high in box)
            )
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(spec.shape))
            for rank in holders:
                index = MetadataIndex(spec.name, chunk.offsets)
                items[rank].append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    local_plans = [SavePlan(each, planner_data={}) for each in items]
    gc.collect()
    start = time.perf_counter()
    _, metadata = default_planner.DefaultSavePlanner().create_global_plan(local_plans)
    save_s = time.perf_counter() - start
    start = time.perf_counter()
    reads: list[Any] = []
    for item in items[0]:
        saved = metadata.state_dict_metadata[item.index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        reads += create_read_items_for_chunk_list(item.index.fqn, saved, [item.tensor_data.chunk])
    local_s = time.perf_counter() - start
    start = time.perf_counter()
    default_planner.create_default_global_load_plan([LoadPlan(reads)] * ranks)
    load_s = time.perf_counter() - start
    return {"seconds": save_s + load_s, "local_s": local_s, "mib": (_peak_kib() - before) / 1024}


# --- tables ---


def _sample(args: argparse.Namespace, mode: str, ranks: int, tensors: int) -> dict[str, float]:
    """A fresh process. Raises GivenUpError."""
    command = [sys.executable, __file__, "--child", mode, "--ranks", str(ranks), "--tensors", str(tensors)]
    command += ["--faults", str(args.faults)]
    try:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=args.limit)
    except subprocess.TimeoutExpired:
        raise GivenUpError(f"{mode}, {ranks} x {tensors}: given up after {args.limit:g} s") from None
    if done.returncode < 0:
        raise GivenUpError(f"{mode}, {ranks} x {tensors}: ended by signal {-done.returncode}, out of memory")
    done.check_returncode()
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _compare(
    args: argparse.Namespace, title: str, points: dict[str, tuple[str, int, int]], rounds: int
) -> harness.Comparison | None:
    """None, and the reason printed: one of the points was given up."""
    methods: dict[str, harness.Method] = {
        name: lambda point=point: _sample(args, *point)  # type: ignore[misc]
        for name, point in points.items()
    }
    try:
        return harness.compare(title, methods, rounds=rounds)
    except GivenUpError as error:
        print(f"\n{title}: {error}", flush=True)
        return None


def _compare_layouts(args: argparse.Namespace, report: harness.Report) -> None:
    shape = f"{args.ranks} ranks ({args.ranks // PP // TP} x {TP} x {PP}), {args.tensors} tensors, {args.faults} faulty"
    for mode in MODES:
        compared = _compare(args, f"{shape}, {mode}", {mode: (mode, args.ranks, args.tensors)}, args.rounds)
        if compared is not None:
            targets = [
                harness.Target(method=mode, at_most=TARGET_S),
                harness.Target(method=mode, figure="mib", at_most=TARGET_MIB),
            ]
            report.add(compared, targets=targets, unit="s, MiB")


def _compare_sizes(args: argparse.Namespace, report: harness.Report) -> None:
    """Linear growth: each point takes about 2 times the one before it."""
    ranks, tensors = args.ranks // 4, args.tensors // 4
    curves = {
        "ranks x 2": [(ranks << i, args.tensors) for i in range(4)],
        "tensors x 2": [(args.ranks, tensors << i) for i in range(4)],
        "both x 2": [(ranks << i, tensors << i) for i in range(4)],
    }
    for mode in ("replicated", "fsdp"):
        for name, sizes in curves.items():
            points = {f"{one} x {other}": (mode, one, other) for one, other in sizes}
            compared = _compare(args, f"growth, {mode}, {name}", points, args.rounds)
            if compared is not None:
                report.add(compared, base=next(iter(points)), unit="s, MiB")


def _compare_with_dcp(args: argparse.Namespace, report: harness.Report) -> None:
    """DCP: the coordinator's global plans, and one rank's local load plan (`local_s`); ours: all. fsdp layouts."""
    for ranks, tensors in ((64, 100), (128, 200), (256, 200), (512, 400), (1024, 800), (2048, 1600), (4096, 2000)):
        if ranks > args.ranks or tensors > args.tensors:
            continue
        points = {"mindx_elastic": ("fsdp", ranks, tensors), "DCP": ("dcp", ranks, tensors)}
        compared = _compare(args, f"beside DCP, {ranks} x {tensors}", points, 1)
        if compared is None:
            break
        report.add(compared, base="mindx_elastic", unit="s, MiB")


if __name__ == "__main__":
    sys.exit(main())
