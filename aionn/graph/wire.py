"""Protobuf's wire format, as far as it takes to leave large tensors unparsed. No I/O, no protobuf library.

    field   tag varint (number << 3 | type), then by type: 0 varint, 1 eight bytes, 2 length varint + bytes, 5 four bytes

`_ENTERED` lists the fields that are entered, with their numbers from onnx.proto. Within a TensorProto .raw_data 9 is left
out when it is large, and one .external_data 13 entry stands in its place. Its key is a word made for this one walk, its
value the number of the span. The word is random, so a file cannot carry it and point into bytes of its choice.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

_ENTERED: dict[str, dict[int, str]] = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 11: "graph"},
    "tensor": {},
}
_RAW_DATA = 9
_EXTERNAL_DATA = 13
_FIXED_BYTES = {1: 8, 5: 4}
_MAX_DEPTH = 100  # protobuf's own limit; a deeper message is refused by every parser


class WireError(ValueError):
    """The bytes are not a protobuf message, or not a whole one."""


@dataclass(slots=True)
class Excision:
    """A serialized ModelProto without its large `raw_data`.

    Attributes:
        message: what is left; a valid ModelProto.
        key: the external_data key that marks a tensor without its bytes; the value is an index into `spans`.
        spans: [start, end) in the source, per tensor left out.
    """

    message: bytes
    key: str
    spans: list[tuple[int, int]] = field(default_factory=list)


def excise(source: memoryview, larger_than_bytes: int) -> Excision:
    """Leave every tensor's raw_data of more than that many bytes out of a serialized ModelProto.

    Raises:
        WireError: the bytes cannot be a protobuf message.
    """
    excision = Excision(b"", f"span-{secrets.token_hex(8)}")
    shortened = _shorten(source, 0, len(source), "model", 0, larger_than_bytes, excision)
    excision.message = bytes(source) if shortened is None else shortened
    return excision


def _shorten(source: memoryview, at: int, end: int, kind: str, depth: int, larger_than_bytes: int, excision: Excision) -> bytes | None:
    """Return the message in [at, end) without large tensors, or None if it holds no large tensor."""
    if depth > _MAX_DEPTH:
        raise WireError(f"messages nested more than {_MAX_DEPTH} deep")
    entered = _ENTERED[kind]
    pieces: list[bytes | memoryview] = []
    kept = at
    while at < end:
        field_start = at
        number, wire_type, content, at = _field_at(source, at, end)
        if wire_type != 2 or at - content <= larger_than_bytes:
            continue
        instead: bytes | None = None
        if kind == "tensor" and number == _RAW_DATA:
            instead = _entry(excision.key, str(len(excision.spans)))
            excision.spans.append((content, at))
        elif number in entered:
            shorter = _shorten(source, content, at, entered[number], depth + 1, larger_than_bytes, excision)
            instead = None if shorter is None else _field(number, shorter)
        if instead is not None:
            pieces += (source[kept:field_start], instead)
            kept = at
    if not pieces:
        return None
    return b"".join([*pieces, source[kept:end]])


def _field_at(source: memoryview, at: int, end: int) -> tuple[int, int, int, int]:
    """The field that begins there: number, wire type, its value (varint) or where its content begins, and where it ends."""
    begin = at
    tag, at = _varint(source, at, end)
    number, wire_type = tag >> 3, tag & 7
    if number == 0:
        raise WireError(f"field number 0 at byte {begin}")
    content = at
    if wire_type == 0:
        content, at = _varint(source, at, end)
    elif wire_type in _FIXED_BYTES:
        at += _FIXED_BYTES[wire_type]
    elif wire_type == 2:
        length, content = _varint(source, at, end)
        at = content + length
        if at > end:
            raise WireError(f"a field of {length} bytes at byte {begin}, where only {end - content} are left")
    else:
        raise WireError(f"wire type {wire_type} at byte {begin}")
    if at > end:
        raise WireError(f"a field at byte {begin} is cut off")
    return number, wire_type, content, at


def _varint(source: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = source[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise WireError(f"a number that does not end before byte {at}")


def _field(number: int, content: bytes) -> bytes:
    head = bytearray()
    for value in (number << 3 | 2, len(content)):
        rest = value
        while rest > 0x7F:
            head.append(rest & 0x7F | 0x80)
            rest >>= 7
        head.append(rest)
    return bytes(head) + content


def _entry(key: str, value: str) -> bytes:
    """One StringStringEntryProto {key 1, value 2} as TensorProto.external_data."""
    return _field(_EXTERNAL_DATA, _field(1, key.encode()) + _field(2, value.encode()))
