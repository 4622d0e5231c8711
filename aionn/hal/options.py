"""`EngineOptions`: what an app asks of one engine beyond what every engine knows, as plain values by name. `CallOptions`: of one execution.

Equality follows the types: 1, 1.0 and True are three options, although Python calls them equal. A value that names a file stands for
the file's content: its digest is in the encoding, and its path is not.

    encoded value   one byte for the kind, then the value
        b  0x00 or 0x01     i  decimal digits     f  float64, little-endian     s  UTF-8     p  digest of a file
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from aionn.errors import CallerError

__all__ = ["NO_OPTIONS", "CallOptions", "EngineOptions", "OptionValue", "decode_options", "is_unicode"]

OptionValue = str | int | float | bool

_MOST_DIGITS = 20
"""Of an integer of 64 bits, with its sign."""


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 has the text. A path with stray bytes has surrogates, which no message can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class IOptionFile(Protocol):
    """An open file that an option names."""

    def fileno(self) -> int:
        """Return the descriptor. Raise `CallerError` once the file is closed."""


class EngineOptions(Mapping[str, OptionValue]):
    """Options of one engine by name. They do not change.

    Attributes:
        files: the digest of each file that a value names, by the option's name.
        opened: these files, where the app has opened them for a driver process, which cannot open a path of the app's. They are open
            while the call lasts that brought the options. Read them with `os.pread`, because threads may share an offset.
        encoded: names and encoded values, sorted by name. Two options are equal if these are.
    """

    __slots__ = ("_values", "encoded", "files", "opened")

    def __init__(
        self,
        values: Mapping[str, OptionValue],
        files: Mapping[str, bytes],
        opened: Mapping[str, IOptionFile] = MappingProxyType({}),
    ) -> None:
        self._values = MappingProxyType(dict(sorted(values.items())))
        self.files = MappingProxyType(dict(files))
        self.opened = MappingProxyType(dict(opened))
        self.encoded = tuple((name, _encoded(value, files.get(name))) for name, value in self._values.items())

    def __getitem__(self, name: str) -> OptionValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineOptions) and self.encoded == other.encoded

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __repr__(self) -> str:
        return f"EngineOptions({dict(self._values)!r})"


def _encoded(value: OptionValue, digest: bytes | None) -> bytes:
    if digest is not None:
        return b"p" + digest
    match value:
        case bool():
            return b"b" + bytes((value,))
        case int():
            return b"i%d" % value
        case float():
            return b"f" + struct.pack("<d", value)
        case _:
            return b"s" + value.encode("utf-8", "surrogatepass")


def decode_options(encoded: Iterable[tuple[str, bytes]]) -> EngineOptions:
    """Return the options that `EngineOptions.encoded` stands for.

    Raises:
        CallerError: a value is not one that was encoded; or it names a file, which has no path here.
    """
    pairs = tuple(encoded)
    options = EngineOptions({name: _decoded(name, value) for name, value in pairs}, {})
    if options.encoded != pairs:
        raise CallerError("the options are not in the one form that they are encoded in")
    return options


def _decoded(name: str, encoded: bytes) -> OptionValue:
    kind, value = encoded[:1], encoded[1:]
    if not is_unicode(name):
        raise CallerError(f"option {name!r} is not Unicode")
    try:
        if kind == b"b" and value in (b"\0", b"\1"):
            return value == b"\1"
        if kind == b"i" and len(value) <= _MOST_DIGITS and -(2**63) <= int(value) < 2**63:
            return int(value)
        if kind == b"f":
            return float(struct.unpack("<d", value)[0])
        if kind == b"s":
            return value.decode("utf-8")
    except (ValueError, struct.error) as error:
        raise CallerError(f"option {name!r}: {error}") from error
    if kind == b"p":
        raise CallerError(f"option {name!r} names a file, of which only the digest is known")
    raise CallerError(f"option {name!r} has a value that cannot be read")


NO_OPTIONS = EngineOptions({}, {})


class CallOptions(msgspec.Struct, frozen=True):
    """How an execution is to run.

    Attributes:
        measure_timing: whether its answer has times.
        deadline_ns: when its caller stops waiting, in CLOCK_MONOTONIC, or None. It bounds all of it: turn, frame, connection and retries.
    """

    measure_timing: bool = False
    deadline_ns: int | None = None
