"""`BuilderKey`: a builder's private key. It lies in a file that only this account can read, and signs the entries of a cache."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from aionn.caching.manifest import Manifest
from aionn.caching.statement import MISSING, sign_statement, statement_of
from aionn.errors import CallerError
from aionn.hal.trust import KEY_BYTES, TrustedKey

_MAX_FILE_BYTES = 4096


class _PrivateKeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A private key file."""

    ed25519_private: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


_decoder = msgspec.json.Decoder(_PrivateKeyFile)


@dataclass(frozen=True, slots=True)
class BuilderKey:
    """A key that signs artifacts.

    Attributes:
        name: of the builder, for people.
        private_key: 32 secret bytes (ed25519). They are not printed.
    """

    name: str
    private_key: bytes = field(repr=False)

    @classmethod
    def generate(cls, name: str) -> BuilderKey:
        """Make a new key.

        Raises:
            CallerError: the name is empty or has more than 200 characters, or 'cryptography' is not installed.
        """
        if not 1 <= len(name) <= 200:
            raise CallerError(f"a builder's name has 1 to 200 characters, got {len(name)}")
        key = cls(name, os.urandom(KEY_BYTES))
        _ = key.public  # fails now if signatures cannot be made here
        return key

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BuilderKey:
        """Read a private key file.

        Raises:
            CallerError: the file cannot be read, is not a private key, or other accounts may read it.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status, content = os.fstat(fd), os.read(fd, _MAX_FILE_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            raise CallerError(f"the private key {os.fspath(path)!r} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
            raise CallerError(f"other accounts may read the private key {os.fspath(path)!r}; take that away with chmod 600")
        try:
            file = _decoder.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CallerError(f"{os.fspath(path)!r} is not a private key file: {error}; make one with `aionn fleet keygen`") from error
        return cls(file.name, bytes.fromhex(file.ed25519_private))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the private key to a new file of mode 0600.

        Raises:
            CallerError: the file exists already, or cannot be made.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CallerError(f"the private key cannot be written to {os.fspath(path)!r}: {error.strerror}") from error
        with open(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_PrivateKeyFile(self.private_key.hex(), self.name))) + b"\n")

    @property
    def public(self) -> TrustedKey:
        """The public key, which may sign for every device and does not expire.

        Raises:
            CallerError: 'cryptography' is not installed.
        """
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError as error:
            raise CallerError(MISSING) from error
        return TrustedKey(Ed25519PrivateKey.from_private_bytes(self.private_key).public_key().public_bytes_raw(), self.name)

    def sign(self, manifest: Manifest) -> bytes:
        """Return the signed statement for an entry of a cache.

        Raises: as `statement_of` and `sign_statement`.
        """
        return sign_statement(statement_of(manifest, self.name, self.public.id), self.private_key)
