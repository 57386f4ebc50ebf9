"""The wire format of protobuf, read without a library: one message at a time, its nested messages still serialized.

What is not known is kept, so that a new field in a new jaxlib costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

Message = dict[int, list["int | memoryview"]]
"""Field number to the values of that field, in the order of the wire."""

_FIXED = {1: 8, 5: 4}

_GROUPS = (3, 4, 6, 7)


class MalformedProto(ValueError):
    """The bytes are no message of the kind that was expected."""


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number that starts at an offset, and the offset after it. Raises `MalformedProto`."""
    number = 0
    for place, byte in enumerate(data[at : at + 10]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    raise MalformedProto("a number has no end")


def fields(data: bytes | memoryview) -> Message:
    """One message, its nested messages still serialized. Raises `MalformedProto`."""
    view, at, end, message = memoryview(data), 0, len(data), Message()
    while at < end:
        # Most numbers are one byte long, and a call for each would double the time.
        key, at = (view[at], at + 1) if view[at] < 0x80 else varint(view, at)
        kind, value = key & 7, view
        if kind in _FIXED:
            size = _FIXED[kind]
        else:
            size, at = (view[at], at + 1) if at < end and view[at] < 0x80 else varint(view, at)
        if kind != 0:
            value, at = view[at : at + size], at + size
        if at > end or kind in _GROUPS:
            raise MalformedProto("a field reaches past the end")
        message.setdefault(key >> 3, []).append(value if kind else size)
    return message


def number(message: Message, field: int) -> int:
    """A number, the last one given as protobuf has it, 0 where there is none. Raises `MalformedProto`."""
    value = message[field][-1] if field in message else 0
    if not isinstance(value, int):
        raise MalformedProto(f"field {field} is not a number")
    return value


def raw(message: Message, field: int) -> memoryview:
    """A nested message, still serialized; an empty one where there is none. Raises `MalformedProto`."""
    value = message[field][-1] if field in message else memoryview(b"")
    if isinstance(value, int):
        raise MalformedProto(f"field {field} is a number")
    return value


def text(message: Message, field: int) -> str:
    """A string. Raises `MalformedProto`."""
    return bytes(raw(message, field)).decode(errors="replace")


def messages(message: Message, field: int) -> Iterator[Message]:
    """Nested messages, read. Raises `MalformedProto`."""
    for value in message.get(field, ()):
        yield fields(raw({field: [value]}, field))


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
