"""A signed statement says what an artifact is and who compiled it. This module encodes, signs and checks it. No I/O, no clock.

A statement has what a driver must know before it loads the bytes of another machine: the entry, the device and its version, the model, and
the length and digest of each file. A process that can write to a store can replace the files and the statement. Only the holder of the
builder's private key can make a statement that passes `verified_statement`.

    signed statement    key id, 32 bytes | ed25519 signature of DOMAIN + body, 64 bytes | body
    body                msgpack array of `Statement`'s fields, in the one form that msgspec writes

Nothing of the body is parsed before its signature is verified. The key id stands in the body again, so the head cannot name another key.
A body that another encoder writes differently is refused, so a statement has one form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from aionn.caching.manifest import MAX_PARTS_BYTES, Manifest, StoredFile
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.token import decode_parts, encoded_keys
from aionn.errors import CallerError
from aionn.hal.trust import KEY_BYTES, Keyring, TrustedKey
from aionn.hal.types import MAX_CACHE_FILES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = 1
DOMAIN = b"aionn.artifact\x01"
"""Begins what is signed, so that no signature for another purpose can pass for one of a statement."""
MAX_SIGNED_BYTES = 64 * 1024
_SIGNATURE_BYTES = 64
_HEAD_BYTES = KEY_BYTES + _SIGNATURE_BYTES
MISSING = "signatures of artifacts need the package 'cryptography'; install aionn[fleet]"

_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Files = Annotated[tuple[StoredFile, ...], msgspec.Meta(max_length=MAX_CACHE_FILES)]


class Statement(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What a builder says of one artifact.

    Attributes:
        key, family, device, device_version, model_digest, model, data, compile_ns, created_ns: as in `Manifest`.
        parts: what the key was made of (`token.encode_parts`). The key, the family, the device and its version follow from it.
        builder: the builder's name, for people. Nothing is decided by it.
        key_id: of the key that signs.
    """

    format: int = FORMAT
    key: _Bytes32
    family: _Bytes32
    device: str
    device_version: str
    model_digest: _Bytes32
    model: _Files
    data: _Files
    compile_ns: _Count
    created_ns: _Count
    parts: Annotated[bytes, msgspec.Meta(max_length=MAX_PARTS_BYTES)]
    builder: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    key_id: _Bytes32

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """Model files, then data files."""
        return self.model + self.data


_decoder = msgspec.msgpack.Decoder(Statement)
_encoder = msgspec.msgpack.Encoder()


def statement_of(manifest: Manifest, builder: str, key_id: bytes) -> Statement:
    """Return the statement for an entry of a cache, to be signed.

    Raises:
        CallerError: the entry is a declined one, or its manifest does not say what its key was made of.
    """
    if manifest.declined:
        raise CallerError(f"entry {manifest.key.hex()[:16]} has no artifact, because device {manifest.device!r} does not cache that model")
    shared = {field: getattr(manifest, field) for field in Statement.__struct_fields__ if field in Manifest.__struct_fields__}
    statement = Statement(**shared | {"format": FORMAT}, builder=builder, key_id=key_id)
    if fault := _fault(statement):
        raise CallerError(f"entry {manifest.key.hex()[:16]} cannot be signed: {fault}; compile the model again")
    return statement


def _fault(statement: Statement) -> str:
    """Return what contradicts itself in a statement, or an empty text."""
    if statement.format != FORMAT:
        return f"its format is {statement.format}, and this release reads {FORMAT}"
    try:
        parts = decode_parts(statement.parts)
    except CallerError as error:
        return str(error)
    encoded, key, family = encoded_keys(parts)
    named = key, family, parts.device, parts.device_version
    if named != (statement.key, statement.family, statement.device, statement.device_version) or encoded != statement.parts:
        return "its key is not made of the parts that it gives"
    return ""


def sign_statement(statement: Statement, private_key: bytes) -> bytes:
    """Return the signed statement.

    Args:
        private_key: the 32 secret bytes of an ed25519 key, whose public key has the id `statement.key_id`.

    Raises:
        CallerError: the key is another one; or the statement contradicts itself; or 'cryptography' is not installed.
    """
    key = _private(private_key)
    if TrustedKey(key.public_key().public_bytes_raw(), statement.builder).id != statement.key_id:
        raise CallerError(f"the statement names key {statement.key_id.hex()[:16]}, which is not the key that signs it")
    if fault := _fault(statement):
        raise CallerError(f"the statement cannot be signed: {fault}")
    body = _encoder.encode(statement)
    signed = statement.key_id + key.sign(DOMAIN + body) + body
    if len(signed) > MAX_SIGNED_BYTES:
        raise CallerError(f"the signed statement has {len(signed)} bytes, at most {MAX_SIGNED_BYTES} are allowed")
    return signed


def _private(private_key: bytes) -> Ed25519PrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise CallerError(MISSING) from error
    if len(private_key) != KEY_BYTES:
        raise CallerError(f"the private key has {len(private_key)} bytes; an ed25519 private key has {KEY_BYTES}")
    return Ed25519PrivateKey.from_private_bytes(private_key)


def claimed_statement(signed: bytes) -> Statement | Refusal:
    """Return what a signed statement claims, without a look at its signature. It decides nothing; a driver uses `verified_statement`."""
    if not _HEAD_BYTES < len(signed) <= MAX_SIGNED_BYTES:
        return Refusal(MissReason.BAD_SIGNATURE, f"a signed statement has {_HEAD_BYTES + 1} to {MAX_SIGNED_BYTES} bytes, got {len(signed)}")
    body = signed[_HEAD_BYTES:]
    try:
        statement = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Refusal(MissReason.UNREADABLE, f"statement: {error}")
    if _encoder.encode(statement) != body:
        return Refusal(MissReason.UNREADABLE, "statement: not in the one form that it may have")
    if statement.key_id != signed[:KEY_BYTES]:
        return Refusal(MissReason.BAD_SIGNATURE, "the statement names another key than the one that signed it")
    if fault := _fault(statement):
        return Refusal(MissReason.UNREADABLE, f"statement: {fault}")
    return statement


def verified_statement(signed: bytes, keyring: Keyring, now_s: float) -> Statement | Refusal:
    """Return the statement if a key of the keyring signed it and may sign for its device, or why not.

    Args:
        now_s: seconds since the epoch, to compare with `TrustedKey.not_after_s`.
    """
    if keyring.fault:
        return Refusal(MissReason.UNSAFE, f"no builder is trusted: {keyring.fault}")
    if not _HEAD_BYTES < len(signed) <= MAX_SIGNED_BYTES:
        return Refusal(MissReason.BAD_SIGNATURE, f"a signed statement has {_HEAD_BYTES + 1} to {MAX_SIGNED_BYTES} bytes, got {len(signed)}")
    key = keyring.find(signed[:KEY_BYTES])
    if key is None:
        return Refusal(MissReason.UNTRUSTED_BUILDER, f"no trusted key has the id {signed[:KEY_BYTES].hex()[:16]}")
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return Refusal(MissReason.UNTRUSTED_BUILDER, MISSING)
    try:
        Ed25519PublicKey.from_public_bytes(key.public_key).verify(signed[KEY_BYTES:_HEAD_BYTES], DOMAIN + signed[_HEAD_BYTES:])
    except (InvalidSignature, ValueError):
        return Refusal(MissReason.BAD_SIGNATURE, f"the signature is not one of builder {key.name!r}")
    statement = claimed_statement(signed)
    if isinstance(statement, Refusal):
        return statement
    if not key.allows(statement.device):
        return Refusal(MissReason.UNTRUSTED_BUILDER, f"builder {key.name!r} is not trusted for device {statement.device!r}")
    if key.not_after_s is not None and now_s > key.not_after_s:
        return Refusal(MissReason.UNTRUSTED_BUILDER, f"the key of builder {key.name!r} has expired")
    return statement
