"""Reads JSON objects of which thousands say nearly the same: a member that was read before is not read again.

The headers of a job's ranks differ in a few numbers, and most of each is long. So the members of an object are
recognised by their text: where the text begins with that of a list or an object which is known, that one stands there,
for its text says itself where it ends. Texts that know each other share what is made of them, and must not change it;
the headers of 16,384 files would not fit into memory otherwise.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["SharedJson"]

_MOST_KNOWN = 128
"""Texts in one place, of other steps or other stages of a pipeline."""
_KEY = re.compile(r'[{,] ?"([^"\\\x00-\x1f]*)": ?')
_DECODER = json.JSONDecoder()


class SharedJson:
    """For one scan, in one thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[tuple[str, Any]]] = {}
        self._kept: dict[int, Any] = {}

    def __contains__(self, value: object) -> bool:
        """Whether this very object is, or may be, what several texts have in common. It lives as long as this."""
        return id(value) in self._kept

    def loads(self, text: str, kind: str) -> Any:
        """As `json.loads`. Texts of one `kind` share their members."""
        members: dict[str, Any] = {}
        position = 0
        try:
            while (key := _KEY.match(text, position)) is not None and text[position] == ("," if position else "{"):
                members[key[1]], position = self._member((kind, key[1]), text, key.end())
        except json.JSONDecodeError:  # white space where we write none, or damage
            position = 0
        if position and text[position:] == "}":
            return members
        return json.loads(text)

    def _member(self, place: tuple[str, str], text: str, start: int) -> tuple[Any, int]:
        """The value at `start`, and where it ends."""
        known = self._known.setdefault(place, [])
        for own, value in known:
            if text.startswith(own, start):
                return value, start + len(own)
        value, end = _DECODER.raw_decode(text, start)
        if isinstance(value, (dict, list)):
            known.insert(0, (text[start:end], value))
            del known[_MOST_KNOWN:]
            self._kept[id(value)] = value
        return value, end
