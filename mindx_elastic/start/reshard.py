"""Assembles a rank's state from shards that other ranks have saved under another layout.

Each tensor is allocated at its final size and filled with the boxes of it that the old ranks' files contain. Memory
holds at most the rank's own shards. The rest (options of the optimizer, scheduler, loader, buffers) comes from one
file: that of the old rank of the same number, if there is one.

Boxes are found by the caller's thread. Each stored tensor with a wanted box is then read once, by a few threads, which
wait for the disk at the same time: its digest is checked, and its boxes are filled, in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.capture.names import grouped
from mindx_elastic.core.division import Divided, RowPiece, piece_name
from mindx_elastic.core.layout import REPLICATE, Box, Layout, overlap
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.printable import listed
from mindx_elastic.core.strategy import TensorSpec, global_name
from mindx_elastic.errors import CorruptCheckpointError, MismatchError
from mindx_elastic.persist.dtypes import BY_NAME
from mindx_elastic.persist.entries import TensorEntry
from mindx_elastic.persist.flatten import unflatten
from mindx_elastic.persist.format import Header, open_checkpoint
from mindx_elastic.persist.places import places_in
from mindx_elastic.persist.reader import Checkpoint, read_checked, read_some
from mindx_elastic.start.facts import FileFact, RankPlan, ResumePlan, completing

__all__ = ["Parts", "assemble"]

_MOST_OPEN = 64  # a process has 1024 descriptors by default, and a job may have more old ranks
_NUM_THREADS = 4
_SMALL_BYTES = 64 << 10  # to hand it to a thread takes as long as to read it


class Parts:
    """The files of a plan's step, opened when they are needed. Use as a context manager."""

    def __init__(self, plan: ResumePlan, share: RankPlan, trust: Trust | None = None) -> None:
        """`share`: of the rank that reads. `plan.ranks` is not used: a rank need not know the others' shares."""
        self.plan, self.reader, self.base, self.trust = plan, share.rank, share.file, trust or Trust()
        self._open: dict[str, tuple[_PartFile, ExitStack]] = {}
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mindx-persist-read")
        # A network has few different shapes. Layouts by id: those of thousands of ranks take long to hash.
        self._boxes: dict[tuple[int, tuple[int, ...], int], Box] = {}

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for _file, stack in self._open.values():
            stack.close()

    def finish(self) -> None:
        """Wait until all tensors are filled. Raises what reading them has raised."""
        for file, _stack in self._open.values():
            file.finish()

    def file(self, fact: FileFact) -> _PartFile:
        """Open a file. Use it at once: the next call may close it.

        Raises what `open_checkpoint` raises, and MismatchError with its path when another file has taken its place.
        """
        if fact.path in self._open:
            self._open[fact.path] = self._open.pop(fact.path)  # the most recently used stay open
            return self._open[fact.path][0]
        if len(self._open) >= _MOST_OPEN:  # the rank's base file stays open, it is used for every tensor
            oldest = next(path for path in self._open if path != self.base.path)
            self._open[oldest][0].finish()
            self._open.pop(oldest)[1].close()
        stack = ExitStack()
        fd, header = stack.enter_context(open_checkpoint(fact.path, self.trust.of(Path(fact.path))))
        file = _PartFile(Path(fact.path), fd, header, self._pool)
        self._open[fact.path] = (file, stack)
        if header.info.moment != fact.moment or header.info.rank != fact.rank:
            raise MismatchError(f"{fact.path} is of another step by now", path=fact.path)
        return file

    def tensor(self, spec: TensorSpec, layout: Layout, rank: int) -> torch.Tensor:
        """What `rank` holds of the tensor `spec` under `layout`, filled after `finish`. Raises MismatchError for
        missing elements."""
        mine = self._box_of(layout, spec.shape, layout.shard_of(rank))
        shape = tuple(stop - start for start, stop in mine)
        out: torch.Tensor | None = None
        missing = math.prod(shape)
        for shard in self._shards(spec, layout, rank):
            theirs = self._box_of(spec.layout, spec.shape, shard)
            common = overlap(theirs, mine)
            if common is None:
                continue
            fact = next(self.plan.holders(spec.layout, shard, self.reader))
            if out is None:
                out = torch.empty(shape, dtype=self.file(fact).dtype(spec), device="cpu")
            target = out[tuple(slice(a, b) for a, b in _inside(common, mine))]
            self._read(fact, spec, _inside(common, theirs), target)
            missing -= target.numel()
            if not missing:
                break
        if out is None:  # an empty shard still needs the right type
            out = torch.empty(shape, dtype=self._any_file(spec).dtype(spec), device="cpu")
        if missing:
            raise MismatchError(f"{missing} elements of {spec.name} are in no file of step {self.plan.step}")
        return out

    def _read(self, fact: FileFact, spec: TensorSpec, box: Box, out: torch.Tensor) -> None:
        """Read a box of what the rank of `fact` held of `spec`; pieces that its file lacks come from its replicas'."""
        file = self.file(fact)
        name = file.name_of(spec)
        divided = None if file.header.held is None else file.header.held.division.tensors.get(name)
        if divided is None:
            file.read(spec, box, out)
            return
        others = completing(fact, self.plan.files, self.reader) or ()
        first, last = box[0]
        for piece in divided.pieces:
            start, stop = max(first, piece.start), min(last, piece.stop)
            if start >= stop:
                continue
            holder = next(
                (each for each in (fact, *others) if each.held is None or piece.part in each.held.parts), None
            )
            if holder is None:
                raise MismatchError(f"rows of {spec.name} are in no file of step {self.plan.step}")
            rows = out[start - first : stop - first]
            self.file(holder).read_piece(name, divided, piece, ((start, stop), *box[1:]), rows)

    def _shards(self, spec: TensorSpec, layout: Layout, rank: int) -> Sequence[int]:
        """The shards of `spec` to read from, in order; only one if the rank held the same shard before."""
        old = spec.layout
        if rank in old:
            shard = old.shard_of(rank)
            if self._box_of(old, spec.shape, shard) == self._box_of(layout, spec.shape, layout.shard_of(rank)):
                return [shard]
        return range(old.num_shards)

    def _box_of(self, layout: Layout, shape: tuple[int, ...], shard: int) -> Box:
        key = (id(layout), shape, shard)
        if key not in self._boxes:
            self._boxes[key] = layout.box(shape, shard)
        return self._boxes[key]

    def any_state(self, component: str, name: str, specs: Sequence[TensorSpec]) -> tuple[_PartFile, Any]:
        """A file whose optimizer has parameter `name`, and the tree of its state; None: it had no state (yet). Raises
        MismatchError where none has."""
        for file in self._likely_files(specs or self.plan.source.by_name.get(name, ())):
            if name in (nodes := file.states(component).nodes):
                return file, nodes[name]
        raise MismatchError(
            f"the checkpoint does not fit {component}: it updates {name}, which it did not in the run that wrote it; "
            "use the same objects as that run"
        )

    def _likely_files(self, specs: Sequence[TensorSpec]) -> Iterator[_PartFile]:
        """Files that may have them, the likeliest first, opened one by one. Use each before you take the next."""
        base = self.file(self.base)
        yield base
        for spec in specs[:1]:
            yield self._any_file(spec)
        yield from self.others(base)

    def others(self, base: _PartFile) -> Iterator[_PartFile]:
        """One file of each other old rank that the reader can see. Use each before you take the next."""
        for rank, facts in self.plan.files.items():
            seen = next((fact for fact in facts if fact.seen_by(self.reader)), None)
            if seen is not None and rank != base.header.info.rank:
                yield self.file(seen)

    def _any_file(self, spec: TensorSpec) -> _PartFile:
        for shard in range(spec.layout.num_shards):
            holder = next(self.plan.holders(spec.layout, shard, self.reader), None)
            if holder is not None:
                return self.file(holder)
        raise MismatchError(f"{spec.name} is in no file of step {self.plan.step}")


class _PartFile:
    """One open checkpoint file, its tensors by their names in the strategy."""

    def __init__(self, path: Path, fd: int, header: Header, pool: ThreadPoolExecutor) -> None:
        """`pool`: reads what is large."""
        self.path, self.fd, self.header = path, fd, header
        self._wanted: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        parameters = header.layout.get("parameters", {})
        self.parameters: Mapping[str, Sequence[str]] = parameters
        self._nodes = {global_name(place, parameters)[0]: node for place, node in places_in(header.tree).items()}
        self._pool = pool
        self._states: dict[str, _States] = {}

    def finish(self) -> None:
        """Wait until all boxes are filled. Raises what reading has raised."""
        wanted, self._wanted = self._wanted, {}
        reads: list[Future[None]] = []
        for name, boxes in wanted.items():
            entry = self.header.entries[name]
            read = partial(read_checked, self.fd, self.header, entry, self.path, boxes)
            if entry.nbytes < _SMALL_BYTES:
                read()
            else:
                reads.append(self._pool.submit(read))
        for each in reads:
            each.result()

    def _fill(self, entry: TensorEntry, box: Box, out: torch.Tensor) -> None:
        self._wanted.setdefault(entry.name, []).append((box, out))

    def _node(self, spec: TensorSpec) -> dict[str, Any]:
        node = self._nodes.get(spec.name)
        if node is None or "dtype" in node:
            problem = "is not in it" if node is None else f"has type {node['dtype']}, which cannot be cut into parts"
            raise MismatchError(f"{self.path}: {spec.name} {problem}")
        return node

    def dtype(self, spec: TensorSpec) -> torch.dtype:
        return BY_NAME[self.header.type_of(self.name_of(spec))[0]]

    def name_of(self, spec: TensorSpec) -> str:
        """The name of the tensor in the file. Raises MismatchError."""
        return str(self._node(spec)["$tensor"])

    def read_piece(self, name: str, divided: Divided, piece: RowPiece, box: Box, out: torch.Tensor) -> None:
        """Read `box`, rows of `piece` of a divided tensor; the file holds the piece, or the whole tensor."""
        is_whole = self.header.held is None
        entry = self.header.entries.get(name if is_whole else piece_name(name, divided, piece))
        if entry is None or entry.shape != (divided.shape if is_whole else divided.shape_of(piece)):
            raise CorruptCheckpointError(f"{self.path}: {name} is not in it as its header says", path=self.path)
        move = 0 if is_whole else piece.start
        (start, stop), rest = box[0], box[1:]
        self._fill(entry, ((start - move, stop - move), *rest), out)

    def read(self, spec: TensorSpec, box: Box, out: torch.Tensor) -> None:
        entry = self.header.entries[self._node(spec)["$tensor"]]
        if entry.shape != spec.layout.local_shape(spec.shape, spec.layout.shard_of(self.header.info.rank)):
            problem = f"{self.path}: {spec.name} has not the shape {list(entry.shape)} that its layout gives it"
            raise CorruptCheckpointError(problem, path=self.path, tensor=entry.name)
        self._fill(entry, box, out)

    def states(self, component: str) -> _States:
        if component not in self._states:
            names = self.parameters.get(component, ())
            self._states[component] = _States(self.header.tree.get(component, {}), names)
        return self._states[component]


class _States:
    """An optimizer's states in one file, by parameter."""

    def __init__(self, tree: Mapping[str, Any], names: Sequence[str]) -> None:
        pairs = tree.get("state", {}).get("$map", ())
        nodes = {key: node for key, node in pairs if isinstance(key, int)}
        sharded: dict[str, list[str]] = {}
        for place in tree.get("sharded", ()):
            number, _, key = place.partition(".")
            sharded.setdefault(number, []).append(key)
        self.nodes = {name: nodes.get(number) for number, name in enumerate(names)}
        """The tree of each state; None: the parameter had none."""
        self.sharded = {name: sharded.get(str(number), []) for number, name in enumerate(names)}
        """The tensors in it that were DTensors."""


def _inside(common: Box, whole: Box) -> Box:
    """Where `common`, a part of `whole`, is in a tensor that has just that."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(common, whole, strict=True))


def assemble(parts: Parts, blueprint: Blueprint) -> Checkpoint:
    """Assemble the state of the rank that `parts` is for, ready for `Collector.load`.

    Raises MismatchError when the step lacks something that this program has, and what opening and reading files raise.
    """
    assert parts.plan.world.strategy is not None
    targets, rank = parts.plan.world.strategy.by_name, parts.reader
    base = parts.file(parts.base)
    made = {*blueprint.parameters, *blueprint.optimizers}
    state = _rest(base, made)
    for component, names in blueprint.parameters.items():
        own = {name: _parameter(parts, targets, f"{component}.{name}", rank) for name in names}
        state[component] = {**own, **_volatile(parts, base, component, blueprint.volatile[component])}
    for component, groups in blueprint.optimizers.items():
        state[component] = _optimizer(parts, base, component, groups, targets, rank)
    parts.finish()
    return Checkpoint(base.header.info, state, {})


def _rest(base: _PartFile, made: set[str]) -> dict[str, Any]:
    tree = {name: node for name, node in base.header.tree.items() if name not in made}
    state: dict[str, Any] = read_some(base.fd, base.header, tree, base.path)
    return state


def _volatile(parts: Parts, base: _PartFile, component: str, names: Sequence[str]) -> dict[str, Any]:
    """Buffers and extra state from the base file; missing ones from files of other pipeline stages."""
    state: dict[str, Any] = {}
    for file in chain([base], parts.others(base)):
        tree = file.header.tree.get(component, {})
        found: dict[str, Any] = dict(tree.get("$odict", ())) if "$odict" in tree else tree
        wanted = {name: found[name] for name in names if name in found and name not in state}
        state.update(read_some(file.fd, file.header, wanted, file.path))
        if len(state) == len(names):
            break
    return state


def _parameter(parts: Parts, targets: Mapping[str, Sequence[TensorSpec]], name: str, rank: int) -> torch.Tensor:
    target = next(spec for spec in targets[name] if rank in spec.layout)
    source = _source(parts.plan, name, target.layout)
    if source.shape != target.shape:
        raise MismatchError(
            f"the checkpoint does not fit: {name} has shape {list(source.shape)} there and {list(target.shape)} here"
        )
    return parts.tensor(source, target.layout, rank)


def _source(plan: ResumePlan, name: str, layout: Layout) -> TensorSpec:
    specs = plan.source.by_name.get(name, ())
    if not specs:
        raise MismatchError(
            f"the checkpoint does not fit: {name} is missing in it; use the model that wrote it, or start over with "
            'resume="never" in another directory'
        )
    return next((spec for spec in specs if spec.layout == layout), specs[0])


def _optimizer(
    parts: Parts,
    base: _PartFile,
    component: str,
    groups: Sequence[Sequence[str]],
    targets: Mapping[str, Sequence[TensorSpec]],
    rank: int,
) -> dict[str, Any]:
    tree = base.header.tree.get(component)
    if not isinstance(tree, dict):
        raise MismatchError(
            f"the checkpoint holds nothing for {component}; use the same objects as the run that wrote it"
        )
    saved = read_some(base.fd, base.header, {key: tree[key] for key in tree if key != "state"}, base.path)
    # "names": of a run that has changed its groups; see `OptimizerComponent.regroup`.
    groups = saved.get("names", groups)
    if len(saved["param_groups"]) != len(groups):
        raise MismatchError(
            f"the checkpoint does not fit {component}: it has {len(saved['param_groups'])} parameter groups, this "
            f"optimizer has {len(groups)}"
        )
    if "names" not in saved and (ordered := _in_order_of(base, component, saved["param_groups"], groups)) != groups:
        saved["names"] = groups = ordered
    by_parameter: dict[str, list[TensorSpec]] = {}
    prefix = f"{component}.state."
    for spec in parts.plan.source.tensors:
        if spec.parameter and spec.name.startswith(prefix):
            by_parameter.setdefault(spec.parameter, []).append(spec)
    state: dict[int, Any] = {}
    sources: dict[str, _PartFile] = {}
    sharded: list[str] = []
    merged, index = [], 0
    for names, options in zip(groups, saved["param_groups"], strict=True):
        numbers = list(range(index, index + len(names)))
        index += len(names)
        merged.append({**options, "params": numbers})
        for number, name in zip(numbers, names, strict=True):
            target = next((spec for spec in targets.get(name, ()) if rank in spec.layout), None)
            file, found, alike = _state_of(parts, component, name, by_parameter.get(name, []), target, rank)
            if found is not None:
                state[number] = found
                was_whole = not any(spec.layout.splitting for spec in parts.plan.source.by_name.get(name, ()))
                keys = alike if was_whole else file.states(component).sharded[name]
                sharded += [f"{number}.{key}" for key in keys]
                sources.setdefault(str(file.path), file)
    for file in sources.values():
        _check_options(component, base, file)
    return {**saved, "param_groups": merged, "state": state, "sharded": sharded}


def _in_order_of(
    base: _PartFile, component: str, saved: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[str]]
) -> Sequence[Sequence[str]]:
    """`groups` in the order in which the file has them. Raises MismatchError for one that is in several there."""
    there = grouped(base.parameters.get(component, ()), [len(group["params"]) for group in saved])
    number_of = {name: number for number, names in enumerate(there) for name in names}
    numbers = [{number_of[name] for name in names if name in number_of} for names in groups]
    if several := next((names for names, found in zip(groups, numbers, strict=True) if len(found) > 1), None):
        raise MismatchError(
            f"the checkpoint does not fit {component}: {listed(several, 3)} are one parameter group here and several "
            "there; list them as in the run that wrote it"
        )
    order = [next(iter(found), place) for place, found in enumerate(numbers)]
    return groups if len(set(order)) < len(order) else [groups[order.index(place)] for place in sorted(order)]


def _check_options(component: str, base: _PartFile, other: _PartFile) -> None:
    """Check that pipeline stages have the same options, if this rank gets parameters of several stages."""
    if other is base:
        return
    mine, theirs = (
        [{k: v for k, v in group.items() if k != "params"} for group in file.header.tree[component]["param_groups"]]
        for file in (base, other)
    )
    if mine != theirs:
        raise MismatchError(
            f"{component} had other options (learning rate, ...) on rank {base.header.info.rank} than on rank "
            f"{other.header.info.rank}, and both have parameters of this rank; start as many ranks as before"
        )


def _state_of(
    parts: Parts, component: str, name: str, specs: Sequence[TensorSpec], target: TensorSpec | None, rank: int
) -> tuple[_PartFile, Any, list[str]]:
    """An optimizer's state of one parameter, with its tensors in the new layout.

    Returns the file that it comes from, the state, and the names of the tensors with the parameter's layout.
    """
    file, node = parts.any_state(component, name, specs)
    if node is None:
        return file, None, []
    alike: list[str] = []
    known = {spec.name: spec for spec in specs}
    tensors: dict[str, torch.Tensor] = {}

    def put_together(node: Any, where: str) -> Any:
        if isinstance(node, list):
            return [put_together(item, f"{where}.{number}") for number, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if "$tensor" not in node:
            return {key: put_together(item, f"{where}.{key}") for key, item in node.items()}
        spec = known.get(where)
        if spec is None:
            raise MismatchError(f"{where}: its layout over the ranks is unknown; start with as many ranks as before")
        like = target is not None and spec.shape == target.shape and spec.shape != ()
        alike.extend([where.removeprefix(f"{component}.state.{name}.")] if like else [])
        whole = Layout((1,), (REPLICATE,), (rank,))
        tensors[where] = parts.tensor(spec, target.layout if like and target is not None else whole, rank)
        return {"$tensor": where, **({"grad": True} if node.get("grad") else {})}

    tree = put_together(node, f"{component}.state.{name}")
    return file, unflatten(tree, tensors, path=file.path), alike
