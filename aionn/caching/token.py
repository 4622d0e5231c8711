"""Make the 32 bytes that name one compilation. No I/O.

NNAPI hashes un-delimited bytes, so device "npu1" version ".0" and device "npu" version "1.0" share an entry. Here every field has
a tag and a length, the encoding has a version, and `decode_parts` reads it back: a function with an inverse cannot map two
inputs to one encoding.

    encoding   "aionn.key" 0x01, then fields in rising order of tag, each at most once
    field      tag u8, length u64, payload
    tag  payload
     1   app token, 32 bytes
     2   operations of this device in a plan of several steps: (sub-graph u32, operation u32) each, in the plan's order;
         the field is absent when one device runs the whole model
     3   device name, UTF-8
     4   device version, UTF-8
     5   execution preference i32
     6   priority i32; absent unless the device says that it matters
     7   options: per item, sorted by name: name length u64, name UTF-8, value length u64, value as `hal.options` encodes it
    All integers little-endian on every machine.

The key is BLAKE3 of the encoding. The *content* of a model belongs into the manifest, not into the key. The app's token is a claim about
that content, and a false claim must differ from an unknown entry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
from blake3 import blake3

from aionn.errors import CallerError
from aionn.hal.types import CACHE_TOKEN_BYTES, ExecutionPreference, Priority

_MAGIC = b"aionn.key\x01"
_FAMILY_MAGIC = b"aionn.family\x01"
_FIELD = struct.Struct("<BQ")
_LENGTH = struct.Struct("<Q")
_INT = struct.Struct("<i")
_OPERATION = struct.Struct("<II")
_TOKEN, _OPERATIONS, _DEVICE, _VERSION, _PREFERENCE, _PRIORITY, _OPTIONS = range(1, 8)


class KeyParts(msgspec.Struct, frozen=True):
    """All that shapes one step's artifact.

    Attributes:
        app_token: 32 bytes, unique to the model within the app.
        device, device_version: as the device names them.
        preference: as the app asks.
        priority: as the app asks. None if the device ignores it; then all priorities share an entry.
        operations: (sub-graph, operation) indices that this device runs, in the plan's order. None stands for the whole model.
        options: compile-time options by name, sorted, no name twice.
    """

    app_token: bytes
    device: str
    device_version: str
    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER
    priority: Priority | None = None
    operations: tuple[tuple[int, int], ...] | None = None
    options: tuple[tuple[str, bytes], ...] = ()

    def __post_init__(self) -> None:
        if len(self.app_token) != CACHE_TOKEN_BYTES:
            raise CallerError(f"cache token of {len(self.app_token)} bytes: a token has {CACHE_TOKEN_BYTES}; take model.token or a SHA-256")
        if self.operations and not all(0 <= index < 2**32 for operation in self.operations for index in operation):
            raise CallerError("operations of a cache key: an index does not fit into 32 bits")
        if self.options and (names := [name for name, _ in self.options]) != sorted(set(names)):
            raise CallerError(f"options of a cache key {names}: sort them by name, and give each name once")


def _sized(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def encode_parts(parts: KeyParts) -> bytes:
    """Return the canonical encoding, which is the same on every run and machine."""
    return _encoded(_MAGIC, _payloads(parts))


def _payloads(parts: KeyParts) -> dict[int, bytes]:
    """Return the payloads by their tags, in rising order."""
    found = {_TOKEN: bytes(parts.app_token)}
    if parts.operations is not None:
        found[_OPERATIONS] = b"".join([_OPERATION.pack(*operation) for operation in parts.operations])
    # surrogatepass: a device name read from the file system may hold bytes that are not UTF-8.
    found[_DEVICE] = parts.device.encode("utf-8", "surrogatepass")
    found[_VERSION] = parts.device_version.encode("utf-8", "surrogatepass")
    found[_PREFERENCE] = _INT.pack(parts.preference)
    if parts.priority is not None:
        found[_PRIORITY] = _INT.pack(parts.priority)
    if parts.options:
        options = [_sized(name.encode("utf-8", "surrogatepass")) + _sized(value) for name, value in parts.options]
        found[_OPTIONS] = b"".join(options)
    return found


def _encoded(magic: bytes, payloads: Mapping[int, bytes]) -> bytes:
    encoded = magic
    for tag, payload in payloads.items():
        encoded += _FIELD.pack(tag, len(payload)) + payload
    return encoded


def _fields(encoded: bytes) -> Iterator[tuple[int, bytes]]:
    at, last = len(_MAGIC), 0
    while at < len(encoded):
        tag, length = _FIELD.unpack_from(encoded, at)
        at += _FIELD.size
        if tag <= last or at + length > len(encoded):
            raise CallerError(f"cache key encoding: field {tag} at byte {at} is out of order or cut off")
        yield tag, encoded[at : at + length]
        at, last = at + length, tag


def decode_parts(encoded: bytes) -> KeyParts:
    """Return the parts of an encoding, as the inverse of `encode_parts`.

    Raises:
        CallerError: these bytes do not encode any `KeyParts`.
    """
    if not encoded.startswith(_MAGIC):
        raise CallerError(f"cache key encoding: begins with {encoded[: len(_MAGIC)]!r}, expected {_MAGIC!r}")
    try:
        fields = dict(_fields(encoded))
        options: list[tuple[str, bytes]] = []
        rest = fields.get(_OPTIONS, b"")
        while rest:
            pair = []
            for _ in range(2):
                (length,) = _LENGTH.unpack_from(rest)
                pair.append(rest[_LENGTH.size : _LENGTH.size + length])
                rest = rest[_LENGTH.size + length :]
            options.append((pair[0].decode("utf-8", "surrogatepass"), pair[1]))
        operations = fields.get(_OPERATIONS)
        parts = KeyParts(
            app_token=fields[_TOKEN],
            device=fields[_DEVICE].decode("utf-8", "surrogatepass"),
            device_version=fields[_VERSION].decode("utf-8", "surrogatepass"),
            preference=ExecutionPreference(_INT.unpack(fields[_PREFERENCE])[0]),
            priority=Priority(_INT.unpack(fields[_PRIORITY])[0]) if _PRIORITY in fields else None,
            operations=None if operations is None else tuple((a, b) for a, b in _OPERATION.iter_unpack(operations)),
            options=tuple(options),
        )
    except CallerError:
        raise
    except (struct.error, KeyError, ValueError) as error:
        raise CallerError(f"cache key encoding: {error}") from error
    if encode_parts(parts) != encoded:
        raise CallerError("cache key encoding: not in canonical form")
    return parts


class Keys(NamedTuple):
    """What a compilation is stored under.

    Attributes:
        encoded: see `encode_parts`.
        entry: 32 bytes that name this compilation.
        family: 32 bytes that all versions of one device share. They distinguish an updated driver from a model never seen.
    """

    encoded: bytes
    entry: bytes
    family: bytes


def encoded_keys(parts: KeyParts) -> Keys:
    """Encode the parts once, and return their keys."""
    payloads = _payloads(parts)
    encoded = _encoded(_MAGIC, payloads)
    del payloads[_VERSION]
    return Keys(encoded, blake3(encoded).digest(), blake3(_encoded(_FAMILY_MAGIC, payloads)).digest())


def device_token(key: bytes, model_digest: bytes) -> bytes:
    """Return the token by which a device knows an artifact: made of the entry's key and the digest of the model."""
    return blake3(key + model_digest, derive_key_context="aionn 1 cache entry and model").digest()


def changed_parts(before: KeyParts, after: KeyParts) -> tuple[str, ...]:
    """Return the names of the fields that make two keys differ. They explain a miss."""
    return tuple(name for name in KeyParts.__struct_fields__ if getattr(before, name) != getattr(after, name))


def described_change(before: KeyParts, after: KeyParts) -> str:
    """Return `changed_parts` in words, such as "preference was LOW_POWER and is SUSTAINED_SPEED"."""
    return ", ".join(
        f"{name} was {_in_words(getattr(before, name))} and is {_in_words(getattr(after, name))}" for name in changed_parts(before, after)
    )


def _in_words(value: object) -> str:
    match value:
        case ExecutionPreference() | Priority():
            return value.name
        case bytes():
            return value.hex()[:16]
        case tuple():
            return f"a list of {len(value)}"
        case _:
            return repr(value)
