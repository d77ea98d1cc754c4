"""Our own checkpoint files as a source: read as a start reads them.

The plan of a start with as many ranks as before chooses the step. Where one rank's file has the whole model, or the
replicas that have divided it do, that is read; sharded tensors, and those of pipeline stages, are put together from the
files of all ranks. A damaged file is left out, and the rest planned again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mindx_elastic.core.layout import REPLICATE, Layout
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.printable import printable
from mindx_elastic.core.strategy import TensorSpec
from mindx_elastic.errors import (
    CorruptCheckpointError,
    ForeignCheckpointError,
    MismatchError,
    NoUsableCheckpointError,
    UsageError,
)
from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.reader import read_checkpoint, read_some
from mindx_elastic.start.facts import FileFact, RankPlan, Refusal, ResumePlan, World
from mindx_elastic.start.file_facts import strategy_of
from mindx_elastic.start.findings import list_files, reader_trust, scan
from mindx_elastic.start.inventory import Inventory, until_sound
from mindx_elastic.start.planner import newest_world_size
from mindx_elastic.start.reshard import Parts

__all__ = ["Source", "read_source"]

_FEW_RANKS = 1 << 12
_OF_OTHERS = (
    "what another program has written is not converted: torch.load(FILE, weights_only=True) or "
    "safetensors.torch.load_file(FILE) loads its weights (docs/porting.md)"
)


class Source(NamedTuple):
    step: int
    model: Mapping[str, Any]
    """The component."""
    notes: list[str]
    """For people: what is doubtful about it."""


def read_source(path: Path, component: str, *, step: int | None) -> Source:
    """The component of that name: of a file, or of a directory's newest step, or `step`.

    Raises NoUsableCheckpointError when there is nothing, another CheckpointError when nothing can be used, UsageError
    for a component that is not there, and one rank's file of a sharded job.
    """
    return (_of_directory if path.is_dir() else _of_file)(path, component, step)


def _component_of(path: Path, component: str, state: Mapping[str, Any]) -> Mapping[str, Any]:
    found = state.get(component)
    if not isinstance(found, Mapping):
        names = ", ".join(str(name)[:60] for name in state)
        raise UsageError(f"{path} has no component {component!r}; there are {names or 'none'}")
    return found


def _of_file(path: Path, component: str, step: int | None) -> Source:
    owners = reader_trust(path).of(path)
    try:
        header = read_header(path)
    except (CorruptCheckpointError, ForeignCheckpointError) as error:
        raise type(error)(f"{error}; {_OF_OTHERS}", path=path) from None
    info = header.info
    try:
        specs = strategy_of(header)[0].tensors
    except UsageError:
        raise
    except Exception as error:
        problem = printable(f"{path}: its layout record cannot be read: {error!r}")
        raise CorruptCheckpointError(problem, path=path) from None
    if any(spec.layout.num_shards > 1 for spec in specs):
        raise UsageError(
            f"{path} is rank {info.rank}'s part of {info.world_size}: give the directory that holds all ranks, and "
            f"--step {info.step}"
        )
    if step is not None and step != info.step:
        raise UsageError(f"{path} is of step {info.step}, not {step}")
    alone = any(spec.layout.size < info.world_size for spec in specs)
    note = f"what rank {info.rank} holds; the other ranks of {info.world_size} may hold more"
    state = read_checkpoint(path, owners=owners).state
    return Source(info.step, _component_of(path, component, state), [note] * alone)


def _of_directory(path: Path, component: str, step: int | None) -> Source:
    trust = reader_trust(path)
    found = Inventory.merge([scan(list_files([path]), trust=trust)])
    facts = [fact for fact in found.facts if step in (None, fact.moment[2])]
    world = World(newest_world_size(facts) or 1)
    if world.size > _FEW_RANKS and world.size > 16 * len(facts):  # a plan for so many takes minutes
        raise UsageError(
            f"{path}: the step that goes first says that {world.size} ranks wrote it, and {len(facts)} files are here; "
            "give one of them"
        )
    states: list[Source] = []

    def read(plan: ResumePlan | Refusal) -> Iterator[tuple[None, FileFact, str]]:
        if isinstance(plan, Refusal):
            return
        try:
            states.append(_read(plan, component, trust))
        except CorruptCheckpointError as error:
            used = (fact for facts in plan.files.values() for fact in facts if fact.path == str(error.path))
            if (fact := next(used, None)) is None:
                raise
            yield None, fact, str(error)

    plan = until_sound(found, lambda: found.plan(world, step=step), read)
    if isinstance(plan, Refusal):
        kind = CorruptCheckpointError if facts or (found.rejected and not found.facts) else NoUsableCheckpointError
        others = "" if found.facts else f"; {_OF_OTHERS}"
        raise kind(f"no checkpoint found in {path} that can be used: {plan}{others}", path=path)
    return states[-1]


def _read(plan: ResumePlan, component: str, trust: Trust) -> Source:
    base, prefix = plan.ranks[0], f"{component}."
    specs = {name.removeprefix(prefix): found for name, found in plan.source.by_name.items() if name.startswith(prefix)}
    notes = list(plan.inexact)
    for name, found in specs.items():
        if len(found) > 1:
            ranks = " and ".join(f"rank {spec.layout.ranks[0]}" for spec in found[:2])
            raise MismatchError(
                f"{prefix}{name}: {ranks} hold different tensors of this name, and their files do not say how they "
                "belong together (pipeline stages that all count from 0, or weights of each rank's own). Convert one "
                "rank's file"
            )
    if _is_in(base.file, {f"{prefix}{name}": specs[name] for name in specs}):
        path = Path(base.file.path)
        others = [fact.path for fact in base.others]
        state = read_checkpoint(path, owners=trust.of(path), others=others).state
        return Source(plan.step, _component_of(path, component, state), notes)
    return Source(plan.step, _put_together(plan, component, specs, trust), notes)


def _is_in(file: FileFact, wanted: Mapping[str, Sequence[TensorSpec]]) -> bool:
    """Whether one rank's file, or the replicas among which it is divided, has all these tensors whole."""
    known = file.strategy.by_name
    return all(
        name in known and spec.layout.num_shards == 1 and file.rank in spec.layout
        for name, found in wanted.items()
        for spec in found
    )


def _put_together(
    plan: ResumePlan, component: str, specs: Mapping[str, Sequence[TensorSpec]], trust: Trust
) -> dict[str, Any]:
    whole, model = Layout((1,), (REPLICATE,), (0,)), dict[str, Any]()
    with Parts(plan, RankPlan(0, plan.ranks[0].file), trust) as parts:
        base = parts.file(plan.ranks[0].file)
        for file in chain([base], parts.others(base)):  # pipeline stages: each has names of its own
            tree = file.header.tree.get(component, {})
            nodes: dict[str, Any] = dict(tree.get("$odict", ())) if "$odict" in tree else tree
            nodes = {name: node for name, node in nodes.items() if name not in model}
            rest = {name: node for name, node in nodes.items() if name not in specs}  # buffers
            read = read_some(file.fd, file.header, rest, file.path)
            model |= {n: parts.tensor(specs[n][0], whole, 0) if n in specs else read[n] for n in nodes}
        parts.finish()
    return model
