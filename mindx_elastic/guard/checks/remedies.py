"""The line to write against what is not kept, in the names that the program has."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from mindx_elastic.core.reserved_names import RESERVED_NAMES

__all__ = ["Remedies"]

_CLOSURE = re.compile(r"(.+)\.<(\w+)>")


class Remedies:
    """One per guard. Training thread."""

    def __init__(self, named: Collection[str], own: Collection[str] = (), *, is_layered: bool = False) -> None:
        """`named`: what the guard calls the named objects. `own`: names of objects that a layer asks for their state
        (callbacks). `is_layered`: a layer makes the guard, and the program can only give `stateful` more."""
        self._named, self._own, self._is_layered = named, own, is_layered

    def key(self, name: str) -> str:
        """The key in `stateful` for the variable `name`."""
        last = name.rpartition(".")[2]
        plain = "".join(c for c in last if c.isalnum() or c == "_") or "state"
        return f"own_{plain}" if plain in self._named or plain in RESERVED_NAMES else plain

    def stateful_line(self, names: Sequence[str]) -> str:
        """``Write Guard(stateful={"rng": env.rng}, ...)``."""
        for name in names:
            if (owner := name.partition(".")[0]) in self._own:
                return f"Write state_dict() and load_state_dict() in {owner}, with this in it"
        keys = list(map(self.key, names))
        if len(set(keys)) < len(keys):
            keys = [re.sub(r"\W+", "_", name).strip("_") for name in names]
        content = ", ".join(f'"{key}": {_as_code(name)}' for key, name in zip(keys, names, strict=True))
        return self.line(content) + _made_outside(names)

    def line(self, content: str) -> str:
        """The line that gives `stateful` these items, written as those of a dict."""
        return f"Write stateful={{{content}}}" if self._is_layered else f"Write Guard(stateful={{{content}}}, ...)"

    def argument_line(self, argument: str, names: Sequence[str]) -> str:
        """``Write Guard(optimizer=[..., disc_opt], ...)``. An object may have no name at all."""
        known_as = [name or f"the_{argument.rpartition('_')[2]}" for name in names]
        if self._is_layered:
            return self.stateful_line(known_as)
        others = ["..."] if any(re.fullmatch(rf"{argument}(_\d+)?", name) for name in self._named) else []
        added = [*others, *map(_as_code, known_as)]
        given = added[0] if len(added) == 1 else f"[{', '.join(added)}]"
        return f"Write Guard({argument}={given}, ...), with one that is made before the guard"


def _as_code(name: str) -> str:
    """``model[0].gen`` of ``model.0.gen``: the parts of an `nn.Sequential` have numbers for names. ``gen`` of
    ``noise.<gen>``: no code outside of a function can name a variable of its closure."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", _CLOSURE.sub(r"\2", name))


def _made_outside(names: Sequence[str]) -> str:
    owners = dict.fromkeys(found[1] for name in names if (found := _CLOSURE.match(name)))
    return f", made where the guard is, and give it to what makes {', '.join(owners)}" if owners else ""
