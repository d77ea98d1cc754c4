"""Reads JSON objects of which thousands say nearly the same: a part that was read before is not read again.

The headers of a job's ranks and steps differ in a few numbers, and most of each is long. So the members of an object
(of two levels) are recognised by their text: where the text begins with that of a list or an object which is known,
that list or object stands there, for its text says itself where it ends. Texts that know each other share what is made
of them, and must not change it; the headers of 16,384 files would not fit into memory otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

__all__ = ["SharedJson"]

_SHORTEST = 200
"""Characters; reading less takes no longer than looking for it."""
_MOST_KNOWN = 16
"""Texts in one place, of other steps or other stages of a pipeline."""
_MOST_MEMBERS = 64
"""Of an object that is read member by member, which takes longer for each than reading all at once."""

_KEY = re.compile(r'"([^"\\\x00-\x1f]*)": ?')
_NEXT = re.compile(r", ?")
_DECODER = json.JSONDecoder()

_Place = tuple[str, ...]
_Check = Callable[[Any, int, int], None]


class SharedJson:
    """For one scan, in one thread."""

    LEVELS = 2
    """Members of an object, and members of these, are looked for."""

    def __init__(self) -> None:
        self._known: dict[_Place, list[tuple[str, Any]]] = {}
        self._short: set[_Place] = set()
        self._kept: dict[int, Any] = {}

    def __contains__(self, value: object) -> bool:
        """Whether this very object is, or may be, what several texts have in common. It lives as long as this."""
        return id(value) in self._kept

    def loads(self, text: str, kind: str, check: _Check) -> Any:
        """As `json.loads`. Texts of one `kind` share their parts.

        check: called with each list and object that is new and read at once, the number of objects around it, and the
        number of its characters. What it raises is raised.
        """
        try:
            found = self._object(text, 0, (kind,), check)
        except json.JSONDecodeError:  # white space where we write none, or damage
            found = None
        if found is not None and found[1] == len(text):
            return found[0]
        value = json.loads(text)
        check(value, 0, len(text))
        return value

    def _object(self, text: str, start: int, place: _Place, check: _Check) -> tuple[dict[str, Any], int] | None:
        """The object at `start`, and where it ends. None: read it as a whole."""
        if not text.startswith("{", start):
            return None
        members: dict[str, Any] = {}
        position = start + 1
        while (key := _KEY.match(text, position)) is not None and len(members) < _MOST_MEMBERS:
            members[key[1]], position = self._value(text, key.end(), (*place, key[1]), check)
            if text.startswith("}", position):
                return members, position + 1
            separator = _NEXT.match(text, position)
            if separator is None:
                return None
            position = separator.end()
        return None

    def _value(self, text: str, start: int, place: _Place, check: _Check) -> tuple[Any, int]:
        if not text.startswith(("{", "["), start):
            return _DECODER.raw_decode(text, start)  # a number, a text, or neither
        known = self._known.get(place, [])
        for number, (own, value) in enumerate(known):
            if text.startswith(own, start):
                if number:
                    known.insert(0, known.pop(number))
                return value, start + len(own)
        found = None
        if len(place) <= self.LEVELS and place not in self._short:
            found = self._object(text, start, place, check)
        if found is None:
            found = _DECODER.raw_decode(text, start)
            check(found[0], len(place) - 1, found[1] - start)
        value, end = found
        if end - start < _SHORTEST:
            self._short.add(place)
        else:
            self._known[place] = [(text[start:end], value), *known[: _MOST_KNOWN - 1]]
            self._kept[id(value)] = value
        return found
