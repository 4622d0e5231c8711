"""Which builders an app trusts to compile for it. The app reads the keys from its user's configuration, and drivers check with them.

A driver believes an artifact of another machine only if its statement (`caching.statement`) is signed by one of these keys. The keys come
with the call. They never come from a store, from an artifact or from the driver's records.
"""

from __future__ import annotations

import msgspec
from blake3 import blake3

from aionn.errors import CallerError

__all__ = ["KEY_BYTES", "MAX_KEYS", "Keyring", "TrustedKey", "decode_keyring", "encode_keyring"]

KEY_BYTES = 32
"""Bytes of an ed25519 public key, and of a key's id."""

MAX_KEYS = 64
"""The most keys of one keyring."""

_PRIME = 2**255 - 19
_OF_ORDER_8 = 0x5FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_WEAK = {0, 1, _PRIME - 1, _OF_ORDER_8, _PRIME - _OF_ORDER_8}
"""The y of the ed25519 points of order 1, 2, 4 and 8."""


class TrustedKey(msgspec.Struct, frozen=True):
    """The public key of a builder, and what it may sign.

    Attributes:
        public_key: ed25519, 32 bytes.
        name: of the builder, for people.
        devices: names of the devices that it may compile for. Empty: every device.
        not_after_s: seconds since the epoch, after which nothing that it signed is adopted. None: it does not expire. What was adopted
            before stays, until the key is removed.

    Raises:
        CallerError: the key has another length, or anyone can sign for it, as for a key of 32 zeros.
    """

    public_key: bytes
    name: str
    devices: tuple[str, ...] = ()
    not_after_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.public_key) != KEY_BYTES:
            raise CallerError(f"the key of builder {self.name!r} has {len(self.public_key)} bytes; an ed25519 public key has {KEY_BYTES}")
        # OpenSSL accepts these keys. A signature that it accepts can be made for them without a private key.
        if int.from_bytes(self.public_key, "little") % 2**255 % _PRIME in _WEAK:
            raise CallerError(f"the key of builder {self.name!r} is a weak one, for which anyone can sign")

    @property
    def id(self) -> bytes:
        """32 bytes that name the key, made of the public key alone."""
        return blake3(self.public_key, derive_key_context="aionn 1 builder key").digest()

    def allows(self, device: str) -> bool:
        """Return whether the key may sign for a device."""
        return not self.devices or device in self.devices


class Keyring(msgspec.Struct, frozen=True):
    """The keys that an app trusts at this moment.

    Attributes:
        keys: no two have the same id.
        fault: why the keyring cannot be used, or empty. A keyring with a fault has no keys.
        missing: the path of the keyring's folder if there is no such folder, or empty. Such a keyring has no keys. It revokes none,
            because the folder may lie on a volume that is not mounted yet.

    Raises:
        CallerError: there are too many keys, or one is given twice, or there are keys beside a fault or a missing folder.
    """

    keys: tuple[TrustedKey, ...] = ()
    fault: str = ""
    missing: str = ""

    def __post_init__(self) -> None:
        unusable = self.fault or self.missing
        if len(self.keys) > MAX_KEYS or len({key.public_key for key in self.keys}) < len(self.keys) or (self.keys and unusable):
            raise CallerError(f"a keyring of {len(self.keys)} keys: at most {MAX_KEYS}, each once, and none beside a fault ({unusable!r})")

    def find(self, key_id: bytes) -> TrustedKey | None:
        """Return the key of that id, or None."""
        return next((key for key in self.keys if key.id == key_id), None)


_decoder = msgspec.msgpack.Decoder(Keyring)


def encode_keyring(keyring: Keyring) -> bytes:
    """Return a keyring as bytes for a message."""
    return msgspec.msgpack.encode(keyring)


def decode_keyring(encoded: bytes) -> Keyring:
    """Return the keyring of a message. One that cannot be read has a fault, and no keys."""
    try:
        return _decoder.decode(encoded)
    except (msgspec.MsgspecError, ValueError) as error:
        return Keyring(fault=f"the keyring cannot be read: {error}")
