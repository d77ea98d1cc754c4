"""The line to write against what is not kept, in the names that the program has where it makes the guard."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.guard.checks.surroundings import Found, Names, Seen

__all__ = ["Remedies"]


class Remedies:
    """One per guard. Training thread."""

    def __init__(self, targets: Mapping[str, Any], own: Collection[str] = ()) -> None:
        """`own`: names of objects that a layer asks for their state (callbacks)."""
        self._targets, self._own = targets, own
        self._known_names = Names()  # optimizers, schedulers and modules of the program, at entry
        self._places: Collection[str] = ()  # where the program's variables were then

    def at_entry(self, seen: Seen, places: Collection[str]) -> None:
        """What the program has where it makes the guard."""
        kinds = (seen.optimizers, seen.schedulers, seen.modules, seen.generators)
        self._known_names = Names(found for kind in kinds for found in kind.values())
        self._places = places

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
        known = self._known_names.of(found.value) or found
        if known.name.partition(".")[0] in self._own:
            known = found
        line = self.stateful_line([known.name])
        if found.name.partition(".")[0] in self._own:
            return f"Write {line}"
        return f"Make it once, before the guard, and write {line}" if self._is_later(found) else f"Write {line}"

    def how_to_name(self, argument: str, seen: Seen, found: Found) -> str:
        """What to do about an optimizer or a scheduler that is not named."""
        names = self._names_of(argument, seen)
        if self._is_later(found) or found.name in names:
            own = found.name.rpartition(".")[2]
            own = f"own_{own}" if own in names else own
            line = f"Guard({argument}=[{', '.join([*names, own])}], ...)" if names else f"Guard({argument}={own}, ...)"
            return f"Make it once, before the guard, in a variable of its own, and write {line}"
        return f"Write {self.line(argument, seen, [found])}"

    def line(self, argument: str, seen: Seen, added: Iterable[Found]) -> str:
        """``Guard(optimizer=[opt, disc_opt], ...)``."""
        names = self._names_of(argument, seen)
        for found in added:
            names.append((self._known_names.of(found.value) or found).name)
        return f"Guard({argument}={names[0] if len(names) == 1 else '[' + ', '.join(names) + ']'}, ...)"

    def _is_later(self, found: Found) -> bool:
        """Whether it was made after the guard, in a function that the program has entered after it.

        Such a variable does not exist where the guard is made."""
        known = found.value in self._known_names
        return bool(self._places) and bool(found.place) and not known and found.place not in self._places

    def _names_of(self, argument: str, seen: Seen) -> list[str]:
        """What the program calls the objects that the guard was given as `argument`."""
        kinds: Mapping[str, dict[int, Found]] = {
            "model": seen.modules, "optimizer": seen.optimizers, "lr_scheduler": seen.schedulers
        }  # fmt: skip
        names = []
        for name, target in self._targets.items():
            if name == argument or (name.startswith(f"{argument}_") and name[len(argument) + 1 :].isdigit()):
                found = self._known_names.of(target) or kinds[argument].get(id(target))
                names.append(found.name if found is not None and found.place else name)
        return names


def _as_code(name: str) -> str:
    """``model[0].gen`` of ``model.0.gen``: the parts of an `nn.Sequential` have numbers for names."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", name)
