"""What another machine has signed, and what names the keys that may: keyrings, key files, statements, options in a statement."""

from __future__ import annotations

from functools import cache

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aionn.caching.keyring import decode_public_key, encode_public_key
from aionn.caching.manifest import StoredFile
from aionn.caching.outcomes import Refusal
from aionn.caching.statement import DOMAIN, Statement, claimed_statement, sign_statement, verified_statement
from aionn.caching.token import KeyParts, decode_parts, encode_parts, encoded_keys
from aionn.errors import CallerError
from aionn.hal.options import EngineOptions, decode_options
from aionn.hal.trust import MAX_KEYS, Keyring, TrustedKey, decode_keyring, encode_keyring
from aionn.hal.types import Priority
from tests.fuzz.choices import Choices

_PRIVATE = bytes(range(32))
_NOW_S = 2_000_000_000.0


@cache
def _private() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(_PRIVATE)


@cache
def _key() -> TrustedKey:
    return TrustedKey(_private().public_key().public_bytes_raw(), "ci")


# ---- keyrings -----------------------------------------------------------------------------------------------------------


def keyring_seeds() -> list[bytes]:
    limited = msgspec.structs.replace(_key(), devices=("onnxruntime", ""), not_after_s=_NOW_S)
    known = (Keyring(), Keyring((_key(),)), Keyring((limited,)), Keyring(fault="open"), Keyring(missing="/keys"))
    return [encode_keyring(keyring) for keyring in known]


def keyrings(data: bytes) -> None:
    """A keyring of a message, or one with a fault and without keys."""
    keyring = decode_keyring(data)
    assert isinstance(keyring, Keyring)
    assert len(keyring.keys) <= MAX_KEYS
    assert not ((keyring.fault or keyring.missing) and keyring.keys)
    for key in keyring.keys:
        assert len(key.public_key) == 32
        assert keyring.find(key.id) == key
    if not keyring.fault:
        assert encode_keyring(decode_keyring(encode_keyring(keyring))) == encode_keyring(keyring)


def public_key_seeds() -> list[bytes]:
    limited = msgspec.structs.replace(_key(), devices=("onnxruntime",), not_after_s=_NOW_S)
    return [encode_public_key(_key()), encode_public_key(limited), b"{}", b'{"name": "a", "ed25519": "00", "not_after": "2030-01-01"}']


def public_keys(data: bytes) -> None:
    """The content of a `.pub` file is one key, or a caller's error."""
    try:
        key = decode_public_key(data)
    except CallerError:
        return
    assert len(key.public_key) == 32
    assert 1 <= len(key.name) <= 200
    assert decode_public_key(encode_public_key(key)) == key


# ---- statements -----------------------------------------------------------------------------------------------------------


@cache
def _signed() -> tuple[bytes, ...]:
    """Statements as a builder makes them, signed."""
    found = []
    for parts in (
        KeyParts(bytes(32), "npu", "1"),
        KeyParts(bytes(32), "npu", "1", priority=Priority.HIGH, operations=((0, 1),), options=EngineOptions({"level": 3}, {}).encoded),
    ):
        encoded, entry, family = encoded_keys(parts)
        statement = Statement(
            key=entry, family=family, device="npu", device_version="1", model_digest=bytes(32), model=(StoredFile(5, bytes(32)),),
            data=(), compile_ns=1, created_ns=2, parts=encoded, builder="ci", key_id=_key().id,
        )  # fmt: skip
        found.append(sign_statement(statement, _PRIVATE))
    return tuple(found)


def statement_seeds() -> list[bytes]:
    return [b"\0" + signed for signed in _signed()] + [b"\1" + signed[96:] for signed in _signed()] + [b"\2\1\2\3", b"\3\5\1"]


def statements(data: bytes) -> None:
    """Any bytes; any body under a true signature; a good statement with a few bytes changed. Only what was signed is believed."""
    choices, keyring = Choices(data), Keyring((_key(),))
    act = choices.byte() % 4
    if act == 0:
        signed = choices.rest()
    elif act == 1:  # a builder whose key was stolen signs whatever it likes
        body = choices.rest()
        signed = _key().id + _private().sign(DOMAIN + body) + body
    else:
        changed = bytearray(choices.of(_signed()))
        for _ in range(1 + choices.below(3)):
            changed[choices.below(len(changed))] ^= choices.byte()
        signed = bytes(changed)
    claimed, found = claimed_statement(signed), verified_statement(signed, keyring, _NOW_S)
    assert isinstance(found, Statement | Refusal)
    assert isinstance(verified_statement(signed, Keyring(), _NOW_S), Refusal)
    if isinstance(found, Refusal):
        return
    assert found == claimed
    assert act == 1 or signed in _signed()
    parts = decode_parts(found.parts)
    assert (parts.device, parts.device_version) == (found.device, found.device_version)
    assert encode_parts(parts) == found.parts
    try:
        options = decode_options(parts.options)
    except CallerError:
        return
    assert options.encoded == parts.options
    assert not options.files


def option_seeds() -> list[bytes]:
    return [value for _, value in EngineOptions({"a": True, "b": 3, "c": 0.5, "d": "text"}, {}).encoded] + [b"p" + bytes(32)]


def options(data: bytes) -> None:
    """The one encoding of a plain value, or a caller's error."""
    try:
        found = decode_options([("level", data)])
    except CallerError:
        return
    assert found.encoded == (("level", data),)
    assert isinstance(found["level"], str | int | float | bool)
