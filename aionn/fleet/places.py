"""Where objects lie in an artifact store, as paths. No I/O.

    blake3/<64 hex>              one file of an artifact, named by the digest of its contents
    statement/<key, 64 hex>/<fingerprint, 32 hex>/<builder, 64 hex>
                                 the signed statement about one artifact, which names its files; written after them
    model/<64 hex>               a model that a farm compiles, named by its token
    seen/<fingerprint, 32 hex>   an empty note that a machine with this fingerprint has pulled; its age says when

The key is that of the cache entry. A fingerprint is the digest of a device's name and version. The version names the engine's version and
the CPU's instruction set, so two machines with one fingerprint can load the same artifacts. The builder is the id of the public key that
verifies the statement. So a reader asks only for statements of keys that it trusts, and needs no list.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from blake3 import blake3

FILES = "blake3"
STATEMENTS = "statement"
MODELS = "model"
SEEN = "seen"
_STATEMENT = re.compile(rf"{STATEMENTS}/([0-9a-f]{{64}})/([0-9a-f]{{32}})/([0-9a-f]{{64}})")
_FILE = re.compile(rf"{FILES}/([0-9a-f]{{64}})")
_SEEN = re.compile(rf"{SEEN}/([0-9a-f]{{32}})")
_MODEL = re.compile(rf"{MODELS}/([0-9a-f]{{64}})")


def fingerprint(device: str, device_version: str) -> str:
    """Return the fingerprint of a device in a version: 32 hexadecimal digits of the BLAKE3 digest of both."""
    name = device.encode("utf-8", "surrogatepass")
    return blake3(len(name).to_bytes(8, "little") + name + device_version.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class StatementPlace(NamedTuple):
    """Where one statement lies.

    Attributes:
        key: of the cache entry, 32 bytes.
        fingerprint: of the device and its version.
        builder: the id of the key that signed it, 32 bytes.
    """

    key: bytes
    fingerprint: str
    builder: bytes

    @property
    def path(self) -> str:
        return f"{STATEMENTS}/{self.key.hex()}/{self.fingerprint}/{self.builder.hex()}"


def statement_place(path: str) -> StatementPlace | None:
    """Return the place that a path stands for, or None if the path is not that of a statement."""
    found = _STATEMENT.fullmatch(path)
    return None if found is None else StatementPlace(bytes.fromhex(found[1]), found[2], bytes.fromhex(found[3]))


def file_path(digest: bytes) -> str:
    """Return the path of the file with this BLAKE3 digest."""
    return f"{FILES}/{digest.hex()}"


def model_path(token: bytes) -> str:
    """Return the path of the model with this token."""
    return f"{MODELS}/{token.hex()}"


def seen_path(of: str) -> str:
    """Return the path of the note that a machine with fingerprint `of` has pulled."""
    return f"{SEEN}/{of}"


def digest_in(path: str) -> bytes | None:
    """Return the digest that the path of a file, a model or a note holds. Another path has None."""
    found = _FILE.fullmatch(path) or _MODEL.fullmatch(path) or _SEEN.fullmatch(path)
    return None if found is None else bytes.fromhex(found[1])
