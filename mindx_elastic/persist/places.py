"""Names the tensors of a checkpoint by their path in the state: ``optimizer.state.3.exp_avg``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mindx_elastic.persist.flatten import MAX_DEPTH, Tree
from mindx_elastic.persist.format import Header
from mindx_elastic.persist.shared_json import SharedJson

__all__ = ["Places", "SharedPlaces", "places_in", "shape_of_node"]

_LONGEST_PLACE = 1 << 16

Places = dict[str, dict[str, Any]]
"""``$tensor`` nodes of a tree by their path."""


def places_in(tree: Tree) -> Places:
    """The tensors of a tree, in a file or not. Tied tensors have several paths and one name."""
    found: Places = {}
    _walk(tree, "", 0, found)
    return found


class SharedPlaces:
    """The same of many trees: what they have in common is looked through once."""

    def __init__(self, shared: SharedJson, without: Collection[str] = ()) -> None:
        """`shared`: has read the trees. `without`: components to leave out."""
        self._shared = shared
        self._without = frozenset(without)
        self._found: dict[int, Places] = {}

    def parts_of(self, tree: Tree) -> list[tuple[Places, bool]]:
        """The places of each component, in the tree's order; True: the same object for all trees that have it in
        common."""
        if not isinstance(tree, dict) or any(key.startswith("$") for key in tree):
            whole = places_in(tree)
            return [({place: whole[place] for place in whole if place.split(".")[0] not in self._without}, False)]
        parts: list[tuple[Places, bool]] = []
        for key, node in tree.items():
            if key in self._without or not isinstance(node, (dict, list)):
                continue
            is_shared = node in self._shared
            found = self._found.get(id(node)) if is_shared else None
            if found is None:
                found = {}
                _walk(node, key, 1, found)
            if is_shared:
                self._found[id(node)] = found
            if found:
                parts.append((found, is_shared))
        return parts


def _walk(node: Tree, where: str, depth: int, found: Places) -> None:
    """Calls itself for lists and dicts alone: most of a tree is numbers, and a catalog walks thousands of trees."""
    if depth > MAX_DEPTH:
        return
    if len(where) > _LONGEST_PLACE:
        raise ValueError(f"the name of a tensor's place in the tree is longer than {_LONGEST_PLACE} characters")
    if isinstance(node, list):
        for index, item in enumerate(node):
            if isinstance(item, (dict, list)):
                _walk(item, f"{where}.{index}", depth + 1, found)
    elif isinstance(node, dict):
        if isinstance(node.get("$tensor"), str):
            found[where] = node
            return
        for tag in ("$map", "$odict", "$default"):
            for pair in node.get(tag, ()) if isinstance(node.get(tag), list) else ():
                if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], (str, int)):
                    _walk(pair[1], f"{where}.{pair[0]}" if where else str(pair[0]), depth + 1, found)
        if any(key.startswith("$") for key in node):
            return
        for key, item in node.items():
            if isinstance(item, (dict, list)):
                _walk(item, f"{where}.{key}" if where else key, depth + 1, found)


def shape_of_node(node: Mapping[str, Any], header: Header) -> tuple[int, ...]:
    """The shape of the tensor as the program knows it: complex numbers are stored as pairs."""
    _, shape = header.type_of(node["$tensor"])
    return shape[:-1] if str(node.get("dtype", "")).startswith("complex") else shape
