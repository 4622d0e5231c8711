"""Verify the entries of a cache directory: read every file and compare it with its manifest (`aionn cache verify`)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import msgspec
from blake3 import blake3

from aionn.caching.manifest import file_names
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.files import FoundEntry, close_all, refusal_of
from aionn.caching.store.housekeeping import Housekeeping
from aionn.hal.types import CacheFiles
from aionn.tasks import run_in_thread

__all__ = ["BadEntry", "verify"]

_CHUNK_BYTES = 4 << 20


class BadEntry(msgspec.Struct, frozen=True):
    """An entry, or a file of one, that could not serve."""

    key: bytes
    device: str
    reason: MissReason
    detail: str


async def verify(house: Housekeeping) -> AsyncIterator[BadEntry]:
    """Yield every entry that could not serve, with what is wrong with it. A cancelled caller leaves between two chunks of a file."""
    directory = await run_in_thread(house.current)
    if isinstance(directory, Refusal):
        yield BadEntry(b"", "", directory.reason, directory.detail)
        return
    try:
        keys = await run_in_thread(directory.all_keys)
    except OSError as error:
        refusal = refusal_of(error, f"cache directory {house.path}")
        yield BadEntry(b"", "", refusal.reason, refusal.detail)
        return
    for key in keys:
        bad = await _verify_entry(directory, key)
        if bad is not None and bad.reason is not MissReason.ABSENT and await _verify_entry(directory, key) is not None:
            # Twice: an entry that was replaced or removed while it was read is not bad.
            yield bad


async def _verify_entry(directory: CacheDirectory, key: bytes) -> BadEntry | None:
    device = ""
    try:
        found = await run_in_thread(directory.find, key, undo=_close_found)
        if isinstance(found, Refusal):
            return BadEntry(key, device, found.reason, found.detail)
        manifest = found.manifest
        device = manifest.device
        try:
            if manifest.key != key:
                return BadEntry(key, device, MissReason.WRONG_TOKEN, f"its manifest is of key {manifest.key.hex()[:16]}")
            if manifest.declined:
                return None
            fds, lengths = await run_in_thread(found.open_files, os.O_RDONLY, undo=lambda opened: close_all(opened[0]))
        finally:
            found.close()
    except OSError as error:
        refusal = refusal_of(error, "its files")
        return BadEntry(key, device, refusal.reason, refusal.detail)
    try:
        names = file_names(CacheFiles(len(manifest.model), len(manifest.data)))
        for name, fd, length, stored in zip(names, fds, lengths, manifest.files, strict=True):
            if length is None:
                return BadEntry(key, device, MissReason.PARTIAL, f"file {name} is gone")
            if length != stored.length:
                return BadEntry(key, device, MissReason.WRONG_LENGTH, f"file {name} has {length} bytes, {stored.length} were stored")
            import aiofiles

            hasher = blake3()
            async with aiofiles.open(fd, "rb", buffering=0, closefd=False) as file:
                while chunk := await file.read(_CHUNK_BYTES):
                    hasher.update(chunk)
            if hasher.digest() != stored.digest:
                return BadEntry(key, device, MissReason.WRONG_BYTES, f"file {name} does not have the contents that were stored")
    except OSError as error:
        return BadEntry(key, device, MissReason.IO_ERROR, str(error))
    finally:
        close_all(fds)
    return None


def _close_found(found: FoundEntry | Refusal) -> None:
    if isinstance(found, FoundEntry):
        found.close()
