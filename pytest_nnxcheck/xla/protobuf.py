"""The wire format of protobuf, read without a library: one message at a time, its nested messages still serialized.

Unknown fields are kept, so that a new field in a new jaxlib costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

Message = dict[int, list["int | bytes"]]
"""Field number to the values of that field, in the order of the wire."""

_FIXED = {1: 8, 5: 4}

_GROUPS = (3, 4, 6, 7)


class MalformedProto(ValueError):
    """The bytes are no message of the kind that was expected."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that starts at an offset, and the offset after it. Raises `MalformedProto`."""
    number, shift, end = 0, 0, min(len(data), at + 10)
    while at < end:
        byte = data[at]
        at += 1
        if byte < 0x80:
            return number | byte << shift, at
        number |= (byte & 0x7F) << shift
        shift += 7
    raise MalformedProto("a number has no end")


def fields(data: bytes) -> Message:
    """One message, its nested messages still serialized. Raises `MalformedProto`."""
    at, end, message = 0, len(data), Message()
    while at < end:
        # Most numbers are one byte long, and a call for each would double the time.
        key, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
        kind = key & 7
        value: int | bytes
        if kind in _FIXED:
            size = _FIXED[kind]
        else:
            size, at = (data[at], at + 1) if at < end and data[at] < 0x80 else varint(data, at)
        if kind == 0:
            value = size
        else:
            value, at = data[at : at + size], at + size
        if at > end or kind in _GROUPS:
            raise MalformedProto("a field reaches past the end")
        if (key := key >> 3) in message:
            message[key].append(value)
        else:
            message[key] = [value]
    return message


def number(message: Message, field: int) -> int:
    """A number, the last one given as protobuf has it, 0 where there is none. Raises `MalformedProto`."""
    value = message[field][-1] if field in message else 0
    if not isinstance(value, int):
        raise MalformedProto(f"field {field} is not a number")
    return value


def raw(message: Message, field: int) -> bytes:
    """A nested message, still serialized; an empty one where there is none. Raises `MalformedProto`."""
    return embedded(message[field][-1]) if field in message else b""


def embedded(value: int | bytes) -> bytes:
    """A value that is a nested message, still serialized, or a string. Raises `MalformedProto` for a number."""
    if isinstance(value, int):
        raise MalformedProto("a number in place of a message")
    return value


def text(message: Message, field: int) -> str:
    """A string. Raises `MalformedProto`."""
    return raw(message, field).decode(errors="replace")


def messages(message: Message, field: int) -> Iterator[Message]:
    """Nested messages, read. Raises `MalformedProto`."""
    for value in message.get(field, ()):
        yield fields(embedded(value))


def numbers(message: Message, field: int) -> tuple[int, ...]:
    """Repeated numbers, packed or not. Raises `MalformedProto`."""
    values: list[int] = []
    for value in message.get(field, ()):
        if isinstance(value, int):
            values.append(value)
            continue
        at = 0
        while at < len(value):
            item, at = varint(value, at)
            values.append(item)
    return tuple(values)
