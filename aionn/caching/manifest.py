"""The manifest says what was stored under one key. This module encodes it, and gives the reason to miss. No I/O, no clock.

A manifest is the entry. Files that no manifest names do not exist for a reader. Replacing the manifest is the one act that switches an
entry from its old generation to the new one. A manifest begins with a digest of the text that follows, so a torn or edited manifest is
UNREADABLE. That digest does not prove an origin: a process that may write the directory may write a manifest. The driver proves the origin.
It compares the files' bytes with digests in a private store (`integrity`).

    manifest file    64 hex digits of BLAKE3(text), newline, text (JSON)
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated

import msgspec
from blake3 import blake3

from aionn.caching.outcomes import MissReason, Refusal
from aionn.hal.types import CACHE_TOKEN_BYTES, MAX_CACHE_FILES, CacheFiles

FORMAT = 1
MAX_MANIFEST_BYTES = 64 * 1024
MAX_PARTS_BYTES = 16 * 1024
MAX_NAME_LENGTH = 255
_HEAD = 65

_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Directory = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")]


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of an entry, with its length in bytes and its BLAKE3 digest when it was published."""

    length: _Count
    digest: _Bytes32


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry.

    Attributes:
        key, family: as `token` makes them.
        device, device_version: the device that wrote it.
        model_digest: `Model.token` of the model that was compiled; 32 bytes.
        model, data: the files of either kind, in the device's order. Both are empty in a declined entry.
        directory: where the files lie within the entry's directory. It is empty in a declined entry.
        generation: grows by one with every publication under this key.
        compile_ns: how long compiling took, and thus what a hit saves.
        created_ns: wall clock since the epoch, for people. It is never compared with a deadline.
        declined: the device said that it does not cache this model.
        detail: why it declined, or empty.
        parts: what the key was made of (`encode_parts`), to explain a miss. It is empty if that is not known.
        model_name: the name of the file that the model was read from, for people. It is empty if that is not known.
    """

    format: int = FORMAT
    key: _Bytes32
    family: _Bytes32
    device: str
    device_version: str
    model_digest: _Bytes32
    model: Annotated[tuple[StoredFile, ...], msgspec.Meta(max_length=MAX_CACHE_FILES)]
    data: Annotated[tuple[StoredFile, ...], msgspec.Meta(max_length=MAX_CACHE_FILES)]
    directory: _Directory
    generation: _Count
    compile_ns: _Count
    created_ns: _Count
    declined: bool = False
    detail: str = ""
    parts: Annotated[bytes, msgspec.Meta(max_length=MAX_PARTS_BYTES)] = b""
    model_name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] = ""

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """Model files, then data files: the order of `file_names`."""
        return self.model + self.data

    @property
    def size_bytes(self) -> int:
        """Bytes of the files, without the manifest."""
        return sum(file.length for file in self.files)


class Wanted(msgspec.Struct, frozen=True):
    """What a lookup expects of an entry beyond its key; a publication records the same.

    `model_digest` is empty where the model has not been digested, because the app gave another token. Then the key alone says which
    model is wanted. The digest is made before an entry is published. `parts` explains a miss and decides nothing. It is what the
    key was made of, see `Manifest`. `model_name` decides nothing either.
    """

    key: bytes
    family: bytes
    device: str
    device_version: str
    model_digest: bytes
    files: CacheFiles
    parts: bytes = b""
    model_name: str = ""


def file_names(files: CacheFiles) -> tuple[str, ...]:
    """Return the names within a generation's directory: model files, then data files."""
    return (*(f"model{index}" for index in range(files.model)), *(f"data{index}" for index in range(files.data)))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest file."""
    text = msgspec.json.encode(manifest)
    return blake3(text).hexdigest().encode() + b"\n" + text


_decoder = msgspec.json.Decoder(Manifest)


def decode_manifest(encoded: bytes) -> Manifest | Refusal:
    """Return the manifest, or UNREADABLE with what is wrong. The digest shows any byte that was changed, cut off or appended."""
    text = encoded[_HEAD:]
    if not hmac.compare_digest(encoded[:_HEAD], blake3(text).hexdigest().encode() + b"\n"):
        return Refusal(MissReason.UNREADABLE, f"the manifest of {len(encoded)} bytes does not match the digest that it begins with")
    try:
        manifest = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the names of fields are read as UTF-8 before msgspec looks at them
        return Refusal(MissReason.UNREADABLE, f"manifest: {error}")
    if manifest.format != FORMAT:
        return Refusal(MissReason.UNREADABLE, f"manifest of format {manifest.format}, this release reads {FORMAT}")
    if manifest.declined is not (manifest.directory == "") or (manifest.declined and manifest.files):
        return Refusal(MissReason.UNREADABLE, "manifest: a declined entry has no files, and every other entry has a directory")
    return manifest


def reason_to_miss(manifest: Manifest, wanted: Wanted, lengths: Sequence[int | None] | None = None) -> Refusal | None:
    """Return why this entry cannot serve, or None if it can.

    Args:
        lengths: bytes of each file as it is now, None for a missing file. Leave it out to judge the manifest alone.

    The most important reason comes first: whose entry it is, then which device wrote it, then which files are left.
    """
    if len(wanted.key) != CACHE_TOKEN_BYTES or not hmac.compare_digest(manifest.key, wanted.key):
        return Refusal(MissReason.WRONG_TOKEN, f"entry of key {manifest.key.hex()[:16]}, wanted {wanted.key.hex()[:16]}")
    if manifest.device != wanted.device:
        return Refusal(MissReason.WRONG_TOKEN, f"entry of device {manifest.device!r}, wanted {wanted.device!r}")
    if manifest.device_version != wanted.device_version:
        return Refusal(MissReason.OTHER_DRIVER_VERSION, f"stored by driver {manifest.device_version!r}, now {wanted.device_version!r}")
    if wanted.model_digest and not hmac.compare_digest(manifest.model_digest, wanted.model_digest):
        return Refusal(
            MissReason.OTHER_MODEL,
            f"stored for model {manifest.model_digest.hex()[:16]}, this is {wanted.model_digest.hex()[:16]}: the token is not unique",
        )
    if manifest.declined:
        return None
    have = CacheFiles(len(manifest.model), len(manifest.data))
    if have != wanted.files:
        return Refusal(
            MissReason.WRONG_FILES,
            f"{have.model} model and {have.data} data files, the device asks for {wanted.files.model} and {wanted.files.data}",
        )
    for name, file, length in zip(file_names(have), manifest.files, lengths or (), strict=False):
        if length is None:
            return Refusal(MissReason.PARTIAL, f"file {name} is gone")
        if length != file.length:
            return Refusal(MissReason.WRONG_LENGTH, f"file {name} has {length} bytes, {file.length} were stored")
    return None
