"""Finds what the samplers of the named loaders carry from epoch to epoch: above all weights that follow the training.

A loader begins a resumed epoch again as it began. Weights that were changed since the start are not there then, unless
the head of the epoch sets them: that runs again.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, WeightedRandomSampler

from mindx_elastic.core.looks import asked, attributes_of, has_method
from mindx_elastic.data import ReplayLoader
from mindx_elastic.guard.checks.source_reads import Sources
from mindx_elastic.guard.checks.surroundings import Found
from mindx_elastic.guard.checks.syntax import walk

__all__ = ["WeightsOfSamplers", "samplers_of"]


def _parts(loaders: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Samplers and data sets that decide an order and have no state of their own for a checkpoint."""
    for loader in loaders:
        if isinstance(loader, ReplayLoader):
            for name, part in loader._parts().items():
                if name != "loader" and not has_method(part, "state_dict"):
                    yield name, part


def samplers_of(loaders: Sequence[Any]) -> list[Found]:
    """Samplers and data sets of the program's own classes that have no state of their own for a checkpoint."""
    parts = _parts(loaders)
    own = [Found(f"loader.{name}", "", p) for name, p in parts if type(p).__module__.partition(".")[0] != "torch"]
    known = {id(one.value) for one in own}
    return [*own, *(one for one in _datasets_of(loaders) if id(one.value) not in known)]


def _datasets_of(loaders: Iterable[Any]) -> list[Found]:
    found: dict[int, Found] = {}
    for loader in loaders:
        source = loader.loader if isinstance(loader, ReplayLoader) else loader
        dataset = asked(source, "dataset")
        while isinstance(inner := _inside(dataset), Dataset):
            dataset = inner  # one of ours, or a Subset
        is_own = dataset is not None and type(dataset).__module__.partition(".")[0] != "torch"
        if is_own and not (isinstance(loader, ReplayLoader) and has_method(dataset, "state_dict")):  # which keeps that
            found[id(dataset)] = Found("loader.dataset", "", dataset)
    return list(found.values())


def _inside(dataset: Any) -> Any:
    attributes = attributes_of(dataset)
    return attributes.get("wrapped", attributes.get("dataset"))


@dataclass
class _Weights:
    tensor: weakref.ref[torch.Tensor]
    version: int
    epoch: int


class WeightsOfSamplers:
    """Watches the `WeightedRandomSampler` of each named loader. One per guard. Training thread."""

    def __init__(self) -> None:
        self._before: dict[int, _Weights] = {}
        self._done: set[int] = set()

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._before = {}

    def look(
        self,
        loaders: Iterable[Any],
        epoch: int,
        is_kept: Callable[[torch.Tensor], bool],
        files: Callable[[], Collection[str]],
    ) -> Iterator[tuple[str, str]]:
        """What is known against the named loaders, and what to write. `files`: gives the program's source files."""
        for name, sampler in _parts(loaders):
            if not isinstance(sampler, WeightedRandomSampler) or not isinstance(sampler.weights, torch.Tensor):
                continue
            key, weights = id(sampler), sampler.weights
            if is_kept(weights):
                continue
            old = self._before.get(key)
            self._before[key] = _Weights(weakref.ref(weights), weights._version, epoch)
            if old is None or key in self._done:
                continue
            is_same = old.tensor() is weights
            if is_same and old.version == weights._version:
                continue
            if (is_same and old.epoch == epoch) or _is_set_after_steps(Sources(files())):
                self._done.add(key)
                what = f"the weights of loader.{name} (WeightedRandomSampler) change in the training and are not kept"
                remedy = (
                    "Change them in place, after the inner loop: sampler.weights.copy_(weights), and write "
                    'Guard(stateful={"sampler_weights": sampler.weights, ...}, ...) with whatever they are made of; or '
                    "set them at the head of each epoch, from what the guard keeps"
                )
                yield what, remedy


def _is_set_after_steps(sources: Sources) -> bool:
    """Whether the program sets ``.weights`` anywhere but at the head of an epoch, in front of its loop over steps."""
    for tree, parents in sources.trees():
        for node in walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr != "weights":
                continue
            statement = _statement(node, parents)
            if _changes(statement, node) and _is_in_a_loop(statement, parents) and not _is_head(statement, parents):
                return True
    return False


def _statement(node: ast.AST, parents: Mapping[int, ast.AST]) -> ast.AST:
    while not isinstance(node, ast.stmt) and (parent := parents.get(id(node))) is not None:
        node = parent
    return node


def _changes(statement: ast.AST, node: ast.Attribute) -> bool:
    if isinstance(statement, (ast.Assign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(inner is node for target in targets for inner in walk(target))
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    func = statement.value.func
    return isinstance(func, ast.Attribute) and func.attr.endswith("_") and any(n is node for n in walk(func))


def _is_in_a_loop(node: ast.AST, parents: Mapping[int, ast.AST]) -> bool:
    while (parent := parents.get(id(node))) is not None:
        if isinstance(parent, (ast.For, ast.While)):
            return True
        node = parent
    return False


def _is_head(node: ast.AST, parents: Mapping[int, ast.AST]) -> bool:
    """Whether a loop with steps in it follows in the same pass of the loop around it."""
    while (parent := parents.get(id(node))) is not None and not isinstance(node, (ast.For, ast.While)):
        body = getattr(parent, "body", None)
        if isinstance(body, list) and node in body:
            for later in body[body.index(node) + 1 :]:
                if isinstance(later, (ast.For, ast.While)):
                    return True
        node = parent
    return False
