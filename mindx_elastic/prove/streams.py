"""How far one random stream has moved: counts the numbers between two of its states by stepping a copy.

Python's, numpy's and torch's generators on the CPU are all MT19937 with 32-bit words, so Python's own can step each of
them. Torch's on CUDA counts by itself.
"""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass

__all__ = ["MOST_NUMBERS", "numbers_between"]

MOST_NUMBERS = 1_000_000
_WORDS = 624
_TORCH_LEFT, _TORCH_NEXT, _TORCH_WORDS = 8, 16, 24  # int32 left, uint64 next, uint64[624]: c10's legacy layout
_CUDA_BYTES = 16  # seed, offset


@dataclass(frozen=True)
class _Twister:
    words: tuple[int, ...]
    at: int
    kept: str
    """A normal deviate that was made together with one that is used up."""


def numbers_between(stream: str, before: bytes, after: bytes, *, most: int = MOST_NUMBERS) -> int | None:
    """32-bit words drawn from `before` to `after`; None: more than `most`, or the one does not lead to the other.

    `stream`: ``python``, ``numpy``, ``torch`` or ``cuda:0``, whose states `digests.stream_bytes` gives. On CUDA it is
    the movement of the offset.
    """
    if before == after:
        return 0
    if stream.startswith("cuda"):
        if len(before) != _CUDA_BYTES or len(after) != _CUDA_BYTES or before[:8] != after[:8]:
            return None
        moved = int(struct.unpack("<Q", after[8:])[0]) - int(struct.unpack("<Q", before[8:])[0])
        return moved if moved > 0 else None
    one, other = _read(before), _read(after)
    if one is None or other is None:
        return None
    return _count(one, other, most)


def _count(one: _Twister, other: _Twister, most: int) -> int | None:
    generator = random.Random()
    generator.setstate((3, (*one.words, one.at), None))
    if one.words == other.words and one.at <= other.at:
        return other.at - one.at
    total = _WORDS - one.at
    while total <= most:
        generator.getrandbits(32 * (_WORDS if total > _WORDS - one.at else _WORDS - one.at + 1))
        # After the first number of a new block its words are there; `at` is how many of them are used.
        state = generator.getstate()[1]
        words, at = state[:-1], state[-1]
        if words == other.words:
            return total + other.at
        total += _WORDS
        assert at == 1, "the loop draws whole blocks"
    return None


def _read(state: bytes) -> _Twister | None:
    if state[:1] == b"{":
        found = json.loads(state)
        return _Twister(tuple(found["words"]), found["at"], found["kept"]) if len(found["words"]) == _WORDS else None
    if len(state) < _TORCH_WORDS + 8 * _WORDS:
        return None
    left = struct.unpack_from("<i", state, _TORCH_LEFT)[0]
    at = struct.unpack_from("<Q", state, _TORCH_NEXT)[0]
    words = struct.unpack_from(f"<{_WORDS}Q", state, _TORCH_WORDS)
    return _Twister(tuple(word & 0xFFFFFFFF for word in words), _WORDS if left == 1 else at, "")
