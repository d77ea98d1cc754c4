"""Protobuf's wire format by hand, and strategy files in it: made without the generated code, so that they prove it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["bytes_field", "group_info", "layout_item", "number_field", "strategy_item", "strategy_map", "varint"]


def varint(value: int) -> bytes:
    """Negative numbers as 64 bits, as int32 and int64 have them."""
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def number_field(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def bytes_field(number: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def _dims(number: int, values: Iterable[int]) -> bytes:
    """A sub-message with a repeated field 1, not packed."""
    return bytes_field(number, b"".join(number_field(1, value) for value in values))


def layout_item(
    name: str,
    dev_matrix: Sequence[int],
    tensor_map: Sequence[int] | Sequence[Sequence[int]],
    *,
    split: Sequence[int] = (),
    offsets: Sequence[int] = (),
    field: int = 0,
    step: int = 0,
    size: int = 0,
) -> bytes:
    """Field 3 of a ``ParallelStrategyMap``. tensor_map: of the whole tensor, or a list for each of its dimensions."""
    maps = [tensor_map] if all(isinstance(k, int) for k in tensor_map) else tensor_map
    layouts = _dims(1, dev_matrix) + b"".join(_dims(2, each) for each in maps)  # type: ignore[arg-type]
    layouts += _dims(3, split) + _dims(4, offsets)
    layouts += number_field(5, field) + number_field(6, step) + number_field(7, size)
    return bytes_field(3, bytes_field(1, name) + bytes_field(2, layouts))


def strategy_item(node: str, stage: int, *strategies: Sequence[int]) -> bytes:
    """Field 2 of a ``ParallelStrategyMap``."""
    inner = number_field(1, stage) + b"".join(_dims(2, each) for each in strategies)
    return bytes_field(2, bytes_field(1, node) + bytes_field(2, inner))


def strategy_map(*items: bytes, stage: int | None = 0, current: int = 1) -> bytes:
    """A strategy file; `stage`: of its one operator; None: without operators."""
    head = number_field(1, current) + (b"" if stage is None else strategy_item("Default/MatMul-op0", stage, (2, 4)))
    return head + b"".join(items)


def group_info(groups: dict[str, Sequence[int]], restore: Sequence[int] | None) -> bytes:
    """A group info file."""
    found = b"".join(bytes_field(1, bytes_field(1, name) + _dims(2, ranks)) for name, ranks in groups.items())
    return found + (b"" if restore is None else _dims(2, restore))
