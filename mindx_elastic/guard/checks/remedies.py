"""The line to write against what is not kept, in the names that the program has where it makes the guard."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.guard.checks.surroundings import Found, Seen

__all__ = ["Remedies"]


class Remedies:
    """One per guard. Training thread."""

    def __init__(self, targets: Mapping[str, Any], own: Collection[str] = ()) -> None:
        """`own`: names of objects that a layer asks for their state (callbacks)."""
        self._targets, self._own = targets, own
        self._first: set[int] = set()
        """By `id`: what the program has where it makes the guard."""
        self._names: dict[str, str] = {}
        """What it calls the targets there, by their own names."""

    def at_entry(self, seen: Seen) -> None:
        """What the program has where it makes the guard."""
        kinds = (seen.optimizers, seen.schedulers, seen.modules, seen.generators)
        known = {key: found for kind in kinds for key, found in kind.items()}
        self._first = set(known)
        named = {name: known[id(target)] for name, target in self._targets.items() if id(target) in known}
        self._names = {name: found.name for name, found in named.items() if found.place}

    def name_of(self, target: str) -> str:
        """What the program calls the object that the guard knows as `target`."""
        return self._names.get(target, target)

    def key(self, name: str) -> str:
        """The key in `stateful` for the variable `name`."""
        last = name.rpartition(".")[2]
        plain = "".join(c for c in last if c.isalnum() or c == "_") or "state"
        return f"own_{plain}" if plain in self._targets or plain in RESERVED_NAMES else plain

    def stateful_line(self, names: Sequence[str]) -> str:
        """``Guard(stateful={"rng": env.rng}, ...)``."""
        for name in names:
            if (owner := name.partition(".")[0]) in self._own:
                return f"state_dict() and load_state_dict() in {owner}, with this in it"
        keys = list(map(self.key, names))
        if len(set(keys)) < len(keys):
            keys = [re.sub(r"\W+", "_", name).strip("_") for name in names]
        content = ", ".join(f'"{key}": {_as_code(name)}' for key, name in zip(keys, names, strict=True))
        return f"Guard(stateful={{{content}}}, ...)"

    def how_to_keep(self, found: Found) -> str:
        """What to do about an object that goes into `stateful`."""
        line = self.stateful_line([found.name])
        return f"Make it once, before the guard, and write {line}" if self._is_later(found) else f"Write {line}"

    def how_to_name(self, argument: str, found: Found) -> str:
        """What to do about an optimizer or a scheduler that is not named. It may have no name at all."""
        name, names = found.name or f"the_{argument.rpartition('_')[2]}", self._names_of(argument)
        if self._is_later(found) or name in names:
            own = name.rpartition(".")[2]
            own = f"own_{own}" if own in names else own
            return f"Make it once, before the guard, in a variable of its own, and write {self.line(argument, [own])}"
        return f"Write {self.line(argument, [name])}"

    def line(self, argument: str, added: Sequence[str]) -> str:
        """``Guard(optimizer=[opt, disc_opt], ...)``."""
        names = [*self._names_of(argument), *added]
        return f"Guard({argument}={names[0] if len(names) == 1 else '[' + ', '.join(names) + ']'}, ...)"

    def _is_later(self, found: Found) -> bool:
        """Whether it was made after the guard: where that is made, no variable has it."""
        return bool(found.place) and id(found.value) not in self._first

    def _names_of(self, argument: str) -> list[str]:
        """What the program calls the objects that the guard was given as `argument`."""
        of_argument = re.compile(rf"{argument}(_\d+)?")
        return [self.name_of(name) for name in self._targets if of_argument.fullmatch(name)]


def _as_code(name: str) -> str:
    """``model[0].gen`` of ``model.0.gen``: the parts of an `nn.Sequential` have numbers for names."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", name)
