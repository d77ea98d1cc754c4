"""Random worlds, layouts, missing files and faults: a plan exists exactly when the oracle says so, and it is right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import Box, Layout, Placement, overlap
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.start.facts import FileFact, RankPlan, Refusal, ResumePlan, World
from mindx_elastic.start.planner import plan_resume
from tests.start import oracle
from tests.start.oracle import Case, File, Moment, Numbers, Spread, Tensor

KINDS = ("breakpoint", "ttp", "request_exit", "periodic", "manual", "snapshot")


# --- random cases ---


def draw_mesh(draw: st.DrawFn, limit: int) -> tuple[int, ...]:
    mesh: list[int] = []
    for _ in range(draw(st.sampled_from([2, 1, 3]))):
        left = limit // math.prod(mesh)
        mesh.append(draw(st.sampled_from([size for size in (2, 3, 1, 4) if size <= left])))
    return tuple(mesh)


def draw_spread(draw: st.DrawFn, shape: tuple[int, ...], mesh: tuple[int, ...], ranks: list[int]) -> Spread:
    """Each mesh dimension splits a dimension or repeats, often the same one; the splits happen in any order."""
    splits = []
    together = draw(st.booleans())
    for mesh_dim in range(len(mesh)):
        dim = (0 if shape else None) if together else draw(st.sampled_from([None, *range(len(shape))]))
        if dim is not None:
            splits.append((mesh_dim, dim))
    return Spread(mesh, tuple(ranks), tuple(draw(st.permutations(splits))))


def draw_tensors(draw: st.DrawFn, stages: int, mesh: tuple[int, ...]) -> list[Tensor]:
    """One or more in each stage; one may lie on a single rank (ZeRO-1), or on a row of the mesh (expert parallel)."""
    size, tensors = math.prod(mesh), []
    for stage in range(stages):
        ranks = list(range(stage * size, (stage + 1) * size))
        for number in range(draw(st.integers(1, 3))):
            shape = tuple(draw(st.lists(st.sampled_from([9, 5, 7, 1, 3, 0, 12]), max_size=2)))
            where = draw(st.sampled_from(["mesh", "mesh", "mesh", "alone", "row"])) if number else "mesh"
            if where == "alone":
                spread = Spread((1,), (draw(st.sampled_from(ranks)),))
            elif where == "row":
                row = draw(st.integers(0, size // mesh[-1] - 1)) * mesh[-1]
                spread = draw_spread(draw, shape, mesh[-1:], ranks[row : row + mesh[-1]])
            else:
                shuffled = draw(st.booleans()) and draw(st.booleans())
                spread = draw_spread(draw, shape, mesh, draw(st.permutations(ranks)) if shuffled else ranks)
            tensors.append(Tensor(f"stage{stage}.t{number}", shape, spread))
    return tensors


def draw_files(
    draw: st.DrawFn, world_size: int, tensors: list[Tensor], stage_size: int, node: int | None
) -> list[File]:
    """Several steps of one or two attempts and runs; some files are gone, some ranks have two."""
    everything = frozenset(t.name for t in tensors)
    by_stage = draw(st.booleans())
    moments = draw(
        st.lists(
            st.tuples(st.sampled_from(["run", "run", "run", "old run"]), st.integers(0, 1), st.integers(7, 11)),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    seen: dict[int, frozenset[int]] = {}
    if node is not None:
        for rank in range(world_size):
            seen[rank] = frozenset(r for r in range(24) if r // node == rank // node)
    files: list[File] = []
    for moment in moments:
        num_gone = draw(st.sampled_from([0, 0, 1, 2, world_size // 2]))
        gone = draw(st.permutations(range(world_size)))[:num_gone]
        twice = draw(st.sets(st.integers(0, world_size - 1), max_size=1))
        odd = draw(st.integers(0, 15)) == 0
        kind = draw(st.sampled_from(KINDS))
        created = float(draw(st.integers(0, 3)))  # clocks are not to be relied on
        for rank in range(world_size):
            stage = f"stage{rank // stage_size}."
            describes = frozenset(n for n in everything if n.startswith(stage)) if by_stage else everything
            for _ in range(0 if rank in gone else 2 if rank in twice else 1):
                files.append(
                    File(
                        len(files),
                        rank,
                        moment,
                        world_size + (odd and rank == 0),
                        draw(st.sampled_from(KINDS)) if rank in twice else kind,
                        created,
                        describes,
                        seen.get(rank),
                    )
                )
    return files


def draw_target(draw: st.DrawFn, tensors: list[Tensor], size: int) -> dict[str, Spread]:
    target = {}
    for tensor in tensors:
        mesh = draw_mesh(draw, size)
        first = draw(st.integers(0, size - math.prod(mesh)))
        target[tensor.name] = draw_spread(draw, tensor.shape, mesh, list(range(first, first + math.prod(mesh))))
    return target


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stages = draw(st.sampled_from([1, 1, 2, 3]))
    mesh = draw_mesh(draw, 12 // stages)
    tensors = draw_tensors(draw, stages, mesh)
    world_size = stages * math.prod(mesh) + draw(st.sampled_from([0, 0, 0, 1]))  # one holds no tensor at all
    node = draw(st.sampled_from([None, None, None, 1, 2, 4]))
    files = draw_files(draw, world_size, tensors, math.prod(mesh), node)
    faults = draw(st.sets(st.integers(0, world_size - 1), max_size=draw(st.sampled_from([0, 0, 1, 2, world_size]))))
    own_states: dict[Moment, frozenset[int]] = {}
    for moment in {f.moment: None for f in files}:
        if draw(st.booleans()):
            own_states[moment] = frozenset(draw(st.sets(st.integers(0, world_size - 1))))
    new_size, target = world_size, None
    if draw(st.booleans()):
        new_size = draw(st.sampled_from([world_size, world_size, 1, 2, 3, 5, 8]))
        target = draw_target(draw, tensors, new_size)
        if new_size == world_size and draw(st.booleans()):
            target |= {t.name: t.spread for t in tensors[draw(st.integers(0, 1)) :]}
    return Case(
        world_size,
        tuple(tensors),
        tuple(files),
        new_size,
        frozenset(faults),
        own_states,
        target,
    )


# --- told to the planner ---


def to_layout(spread: Spread) -> Layout:
    """A split is strided by all splits of the same dimension that are made before it and stand to its right."""
    placements = [Placement() for _ in spread.mesh]
    for position, (mesh_dim, dim) in enumerate(spread.splits):
        before = [other for other, its_dim in spread.splits[:position] if its_dim == dim and other > mesh_dim]
        placements[mesh_dim] = Placement(dim, math.prod(spread.mesh[other] for other in before))
    return Layout(spread.mesh, tuple(placements), spread.ranks)


def to_facts(case: Case) -> list[FileFact]:
    specs = {t.name: TensorSpec(t.name, t.shape, to_layout(t.spread), "I64") for t in case.tensors}
    shared: dict[frozenset[str], Strategy] = {}
    for file in case.files:
        described = tuple(spec for name, spec in specs.items() if name in file.describes)
        shared.setdefault(file.describes, Strategy(case.world_size, described))
    return [
        FileFact(
            f"/{f.number}",
            f.rank,
            f.moment,
            f.world_size,
            shared[f.describes],
            kind=f.kind,
            created=f.created,
            visible_to=f.seen_by,
        )
        for f in case.files
    ]


def ask(case: Case, facts: list[FileFact]) -> ResumePlan | Refusal:
    target = None
    if case.target is not None:
        layouts = {name: to_layout(spread) for name, spread in case.target.items()}
        specs = [TensorSpec(t.name, t.shape, layouts[t.name], "I64") for t in case.tensors]
        for name, layout in list(layouts.items())[:1]:  # what an optimizer has made since: no file has it
            specs.append(TensorSpec(f"optimizer.{name}", specs[0].shape, layout, "I64", parameter=name))
        target = Strategy(case.new_size, tuple(specs))
    return plan_resume(facts, World(case.new_size, target), faults=case.faults, own_states=case.own_states)


def shuffled(facts: list[FileFact], seed: int) -> list[FileFact]:
    """In another order; of one rank's files of a step the order has a meaning, so it stays."""
    order = list(facts)
    random.Random(seed).shuffle(order)
    queues: dict[tuple[Moment, int], list[FileFact]] = {}
    for fact in facts:
        queues.setdefault((fact.moment, fact.rank), []).append(fact)
    return [queues[fact.moment, fact.rank].pop(0) for fact in order]


# --- a tiny resume ---


def inside(box: Box, whole: Box) -> tuple[slice, ...]:
    """`box`, a part of `whole`, in the memory that has just that."""
    return tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(box, whole, strict=True))


def assemble(plan: ResumePlan, spec: TensorSpec, reader: int, get: Callable[[FileFact, str], Numbers]) -> Numbers:
    """A tensor of the new world from parts of the old one's."""
    (source,) = plan.source.by_name[spec.name]
    shard = spec.layout.shard_of(reader)
    memory: Numbers = np.full(spec.layout.local_shape(spec.shape, shard), -1)
    mine = spec.layout.box(spec.shape, shard)
    for old_shard in range(source.layout.num_shards):
        theirs = source.layout.box(spec.shape, old_shard)
        common = overlap(mine, theirs)
        if common is None:
            continue
        file = next(plan.holders(source.layout, old_shard, reader))
        assert file.moment == plan.moment
        assert file.seen_by(reader)
        memory[inside(common, mine)] = get(file, spec.name)[inside(common, theirs)]
    return memory


def check_rank(case: Case, plan: ResumePlan, each: RankPlan, contents: Mapping[str, Mapping[str, Numbers]]) -> None:
    assert each.file.moment == plan.moment
    assert each.file.seen_by(each.rank)
    shapes = {t.name: t.shape for t in case.tensors}
    spreads = {t.name: t.spread for t in case.tensors} if case.target is None else case.target
    assert plan.world.strategy is not None
    layouts = {spec.name: spec.layout for spec in plan.world.strategy.tensors}
    for name, shape in shapes.items():
        expected = oracle.part(shape, spreads[name], each.rank)
        if expected is None:
            continue
        if each.assembled:
            spec = TensorSpec(name, shape, layouts[name])
            found = assemble(plan, spec, each.rank, lambda file, key: contents[file.path][key])
        else:
            found = contents[each.file.path][name]
        assert found.size == expected.size and found.ravel().tolist() == expected.ravel().tolist(), (each, name)


def contents_of(case: Case) -> dict[str, dict[str, Numbers]]:
    """What lies in each file: the numbers of its elements."""
    found: dict[str, dict[str, Numbers]] = {}
    for file in case.files:
        parts = {t.name: oracle.part(t.shape, t.spread, file.rank) for t in case.tensors}
        found[f"/{file.number}"] = {name: held for name, held in parts.items() if held is not None}
    return found


# --- the properties ---


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 1 << 16))
def test_a_plan_exists_exactly_when_the_oracle_says_so_and_is_read_from_believed_files(case: Case, seed: int) -> None:
    facts = to_facts(case)
    plan = ask(case, facts)
    chosen = plan.moment if isinstance(plan, ResumePlan) else None
    assert chosen in oracle.answers(case), str(plan)
    event(f"{'plan' if chosen else 'refusal'}, {'told' if case.target else 'as before'}")

    again = ask(case, shuffled(facts, seed))
    assert again == plan
    assert again.rejected == plan.rejected if isinstance(again, ResumePlan) and isinstance(plan, ResumePlan) else True
    if isinstance(plan, Refusal):
        assert {r.moment for r in plan.reasons} == {f.moment for f in case.files}
        assert all(r.reason for r in plan.reasons)
        return
    assert list(plan.files) == sorted(plan.files)
    assert [each.rank for each in plan.ranks] == list(range(case.new_size))
    assert all(fact.moment == plan.moment for found in plan.files.values() for fact in found)
    contents = contents_of(case)
    for each in plan.ranks:
        check_rank(case, plan, each, contents)
    believed = {f"/{file.number}" for file in oracle.usable(case, plan.moment)}
    assert believed >= {each.file.path for each in plan.ranks} | {
        f.path for found in plan.files.values() for f in found
    }
    if plan.exact:
        assert case.new_size == case.world_size and not plan.resharded
        own = case.own_states.get(plan.moment, ())
        assert all(each.donor is None or each.rank in own for each in plan.ranks)
    event(f"assembled: {any(e.assembled for e in plan.ranks)}, exact: {plan.exact}")
