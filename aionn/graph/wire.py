"""Protobuf's wire format, as far as it takes to find the tensors of a serialized model. No I/O, no protobuf library.

    field   tag varint (number << 3 | type), then by type: 0 varint, 1 eight bytes, 2 length varint + bytes, 5 four bytes

`survey` walks over a ModelProto by small reads, from a file or from memory. It steps over the bytes of weights. It finds two things.

    spans    each `raw_data` of more than `LARGE_BYTES`, wherever a tensor may stand
    outside  each tensor whose bytes lie in a file beside the model

`operator_sets` reads which versions of the operators a model is written for.

`_ENTERED` lists the fields that lead to tensors, with their numbers from onnx.proto; a test compares it with the schema. A message
within `LARGE_BYTES` can only hold a tensor that lies outside, and such a tensor holds the word "location". So a walk enters no other.

Protobuf merges the parts of a message that stands twice in a field for one message. A tensor could then consist of two halves, and
neither half shows what the whole is. No exporter writes that, so the walk refuses it.

Within the shortened message one .external_data 13 entry stands in the place of each span. Its key is a word made for this one
message, its value the number of the span. The word is random, so a file cannot carry it and point into bytes of its choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

LARGE_BYTES = 4096
"""More bytes of raw_data than this are a span. For fewer bytes, a place in a file costs more than a copy."""

Read = Callable[[int, int], bytes]
"""Returns the bytes of the source from an offset on, and of a length."""

_ENTERED: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "function": {7: "node", 11: "attribute"},
}
_SINGLE: dict[str, frozenset[int]] = {
    "model": frozenset({7}),
    "training": frozenset({1, 2}),
    "sparse": frozenset({1, 2}),
    "attribute": frozenset({5, 6, 22}),
}
"""The fields of `_ENTERED` that hold one message."""

_OPSET_IMPORT, _FUNCTION = 8, 25
_DIMS, _DATA_TYPE, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 9, 13, 14
_FIXED_BYTES = {1: 8, 5: 4}
_MAX_DEPTH = 100  # protobuf's own limit; a deeper message is refused by every parser
_WINDOW_BYTES = 64 * 1024
_HEADER_BYTES = 20
"""Two varints."""


class WireError(ValueError):
    """The bytes are not a protobuf message, or not a whole one."""


class Outside(msgspec.Struct, frozen=True):
    """A tensor in a file beside the model, as it stands in the message.

    Attributes:
        entries: its external_data. A text that is not UTF-8 stays bytes, as protobuf's own library gives it.
        dims, data_type: what its size follows from where the entries do not give a length.
    """

    entries: dict[str | bytes, str | bytes]
    dims: tuple[int, ...]
    data_type: int


class _Cut(msgspec.Struct, frozen=True):
    """A field whose content is changed: a span, or a message with spans in it."""

    start: int
    content: int
    end: int
    number: int
    inner: tuple[_Cut, ...]
    span: int


class Survey(msgspec.Struct):
    """What a walk has found.

    Attributes:
        size: bytes of the whole message.
        spans: [start, end) of each large `raw_data`, in the order in which they stand.
        outside: the tensors in files beside the model, in the same order.
    """

    size: int
    spans: list[tuple[int, int]] = msgspec.field(default_factory=list)
    outside: list[Outside] = msgspec.field(default_factory=list)
    cuts: tuple[_Cut, ...] = ()

    @property
    def kept(self) -> list[tuple[int, int]]:
        """Return what is left of the message beside the spans: one range before each span, and one behind the last."""
        ends = [0, *(end for _, end in self.spans)]
        starts = [*(start for start, _ in self.spans), self.size]
        return list(zip(ends, starts, strict=True))


class Excision(msgspec.Struct, frozen=True):
    """A serialized ModelProto without its large `raw_data`.

    Attributes:
        message: what is left; a valid ModelProto.
        key: the external_data key that marks a tensor without its bytes; the value is an index into the survey's spans.
    """

    message: bytes
    key: str


def survey(read: Read, size: int) -> Survey:
    """Find the tensors of a serialized ModelProto.

    Raises:
        WireError: the bytes cannot be a protobuf message.
    """
    found = Survey(size)
    walk = _Walk(read, found)
    found.cuts = walk.message(0, size, "model", 0)
    return found


def operator_sets(message: bytes) -> dict[str, int] | None:
    """Return the version of each operator set that a serialized ModelProto imports, by domain. None if the model has functions.

    Raises:
        ValueError: the bytes cannot be a ModelProto.
    """
    return _Walk(lambda at, length: message[at : at + length], Survey(len(message))).operator_sets()


def excise(found: Survey, kept: Sequence[bytes]) -> Excision:
    """Return the message without its spans. `kept` holds the bytes of `found.kept`."""
    key = f"span-{os.urandom(8).hex()}"
    if not found.cuts:
        return Excision(kept[0], key)
    starts = [start for start, _ in found.kept]
    pieces: list[bytes] = []

    def copy(begin: int, end: int, index: int) -> bytes:
        """The bytes between two cuts: no span lies between them, so they stand in one kept range."""
        start = starts[index]
        return kept[index][begin - start : end - start]

    def shorten(at: int, end: int, cuts: tuple[_Cut, ...], index: int) -> tuple[bytes, int]:
        """Return the message in [at, end) with its cuts, and the number of spans up to its end. `index`: of spans before it."""
        parts: list[bytes] = []
        for cut in cuts:
            parts.append(copy(at, cut.start, index))
            if cut.inner:
                content, index = shorten(cut.content, cut.end, cut.inner, index)
                parts.append(_field(cut.number, content))
            else:
                parts.append(_entry(key, str(cut.span)))
                index = cut.span + 1
            at = cut.end
        parts.append(copy(at, end, index))
        return b"".join(parts), index

    pieces.append(shorten(0, found.size, found.cuts, 0)[0])
    return Excision(b"".join(pieces), key)


class _Walk:
    """One walk over a message, through a window that moves forward."""

    def __init__(self, read: Read, found: Survey) -> None:
        self._read, self._found = read, found
        self._window = b""
        self._base = 0
        self._names_a_file = False

    def _show(self, at: int, length: int) -> None:
        """Have the window hold these bytes, as far as the source has them."""
        if self._base <= at and at + length <= self._base + len(self._window):
            return
        length = min(max(length, _WINDOW_BYTES), self._found.size - at)
        self._window = self._read(at, length)
        self._base = at
        if len(self._window) < length:
            raise WireError(f"it ends at byte {at + len(self._window)} of {self._found.size}")
        self._names_a_file = b"location" in self._window

    def _leads_to_tensors(self, content: int, end: int) -> bool:
        if end - content > LARGE_BYTES:
            return True
        self._show(content, end - content)
        return self._names_a_file and b"location" in self._window[content - self._base : end - self._base]

    def message(self, at: int, end: int, kind: str, depth: int) -> tuple[_Cut, ...]:
        """Walk over the message in [at, end). Returns the fields in it that change without the spans."""
        if depth > _MAX_DEPTH:
            raise WireError(f"messages nested more than {_MAX_DEPTH} deep")
        if kind == "tensor":
            return self._tensor(at, end)
        entered, single = _ENTERED[kind], _SINGLE.get(kind, frozenset())
        cuts: list[_Cut] = []
        seen: set[int] = set()
        while at < end:
            start = at
            number, wire_type, content, at = self._field_at(at, end)
            if wire_type != 2 or number not in entered:
                continue
            if number in single:
                if number in seen:
                    raise WireError(f"a message of kind {kind!r} has its field {number} twice, at byte {start} again")
                seen.add(number)
            if not self._leads_to_tensors(content, at):
                continue
            inner = self.message(content, at, entered[number], depth + 1)
            if inner:
                cuts.append(_Cut(start, content, at, number, inner, -1))
        return tuple(cuts)

    def operator_sets(self) -> dict[str, int] | None:
        """Return what the function of that name does."""
        versions: dict[str, int] = {}
        at, end = 0, self._found.size
        while at < end:
            number, wire_type, content, at = self._field_at(at, end)
            if number == _FUNCTION:
                return None
            if number == _OPSET_IMPORT and wire_type == 2:
                domain, version = self._operator_set(content, at)
                versions[domain] = version
        return versions

    def _operator_set(self, at: int, end: int) -> tuple[str, int]:
        """Return domain and version of an OperatorSetIdProto."""
        domain, version = "", 0
        while at < end:
            number, wire_type, content, at = self._field_at(at, end)
            if number == 1 and wire_type == 2:
                domain = self._read(content, at - content).decode()
            elif number == 2 and wire_type == 0:
                version = _signed(content, 64)
        return domain, version

    def _tensor(self, at: int, end: int) -> tuple[_Cut, ...]:
        cuts: list[_Cut] = []
        entries: dict[str | bytes, str | bytes] = {}
        dims: list[int] = []
        data_type = is_outside = 0
        while at < end:
            start = at
            number, wire_type, content, at = self._field_at(at, end)
            if number == _RAW_DATA and wire_type == 2:
                if at - content > LARGE_BYTES:
                    cuts.append(_Cut(start, content, at, number, (), len(self._found.spans)))
                    self._found.spans.append((content, at))
            elif number == _EXTERNAL_DATA and wire_type == 2:
                key, value = self._entry_at(content, at)
                entries[key] = value
            elif number == _DIMS and wire_type == 2:
                begin = content
                while begin < at:
                    extent, begin = self._varint(begin, at)
                    dims.append(_signed(extent, 64))
            elif number == _DIMS and wire_type == 0:
                dims.append(_signed(content, 64))
            elif number == _DATA_TYPE and wire_type == 0:
                data_type = _signed(content, 32)
            elif number == _DATA_LOCATION and wire_type == 0 and _signed(content, 32) in (0, 1):  # a closed enum ignores other values
                is_outside = _signed(content, 32)
        if is_outside:
            self._found.outside.append(Outside(entries, tuple(dims), data_type))
        return tuple(cuts)

    def _entry_at(self, at: int, end: int) -> tuple[str | bytes, str | bytes]:
        """Return key and value of a StringStringEntryProto."""
        words: dict[int, str | bytes] = {1: "", 2: ""}
        while at < end:
            number, wire_type, content, at = self._field_at(at, end)
            if wire_type == 2 and number in words:
                raw = self._read(content, at - content)
                try:
                    words[number] = raw.decode()
                except UnicodeDecodeError:
                    words[number] = raw
        return words[1], words[2]

    def _field_at(self, at: int, end: int) -> tuple[int, int, int, int]:
        """The field that begins there: number, wire type, its value (varint) or where its content begins, and where it ends."""
        begin = at
        self._show(at, min(_HEADER_BYTES, end - at))
        tag, at = self._varint(at, end)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise WireError(f"field number 0 at byte {begin}")
        content = at
        if wire_type == 0:
            content, at = self._varint(at, end)
        elif wire_type in _FIXED_BYTES:
            at += _FIXED_BYTES[wire_type]
        elif wire_type == 2:
            length, content = self._varint(at, end)
            at = content + length
            if at > end:
                raise WireError(f"a field of {length} bytes at byte {begin}, where only {end - content} are left")
        else:
            raise WireError(f"wire type {wire_type} at byte {begin}")
        if at > end:
            raise WireError(f"a field at byte {begin} is cut off")
        return number, wire_type, content, at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        self._show(at, min(_HEADER_BYTES, end - at))
        window, base = self._window, self._base
        value = shift = 0
        while at < end and shift < 70:
            byte = window[at - base]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise WireError(f"a number that does not end before byte {at}")


def _signed(value: int, bits: int) -> int:
    """Return the lowest bits of a varint as protobuf's signed type of that size."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


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
