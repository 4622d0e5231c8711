"""What `aionn cache` asks of a directory, for people: list its entries, read every file and compare it with its manifest, and prune.

Pruning removes old versions, damaged entries and rubbish, then the least valuable entries. All functions except `verify` block, so they
run in threads.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import msgspec
from blake3 import blake3

from aionn.caching.manifest import Manifest, file_names
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory, FoundEntry, close_all, is_shortage, refusal_of
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.writing import empty_trash
from aionn.hal.types import CacheFiles
from aionn.tasks import run_in_thread

__all__ = ["BadEntry", "EntryInfo", "PruneReport", "list_entries", "prune", "verify"]


class EntryInfo(msgspec.Struct, frozen=True):
    """One entry, for people. `used_s` and `created_s` are wall-clock seconds since the epoch; `used_s` is None if not known."""

    key: bytes
    device: str
    device_version: str
    model_digest: bytes
    generation: int
    size_bytes: int
    saves_s: float
    created_s: float
    used_s: float | None
    declined: bool
    superseded: bool


def list_entries(house: Housekeeping) -> list[EntryInfo] | Refusal:
    """Return all entries with a readable manifest, oldest first."""
    directory = house.current()
    if isinstance(directory, Refusal):
        return directory
    try:
        with directory, house.indexed():
            return _listed(house, directory)
    except OSError as error:
        return refusal_of(error, f"cache directory {house.path}")


def _listed(house: Housekeeping, directory: CacheDirectory) -> list[EntryInfo]:
    used_s = house.with_index(lambda index: index.used_s()) or {}
    superseded = set(house.with_index(lambda index: index.superseded(0.0)) or [])
    found = []
    for key in directory.all_keys():
        try:
            manifest = directory.manifest(key)
        except OSError as error:
            if is_shortage(error):
                raise
            continue
        if isinstance(manifest, Manifest):
            found.append(
                EntryInfo(
                    key=key,
                    device=manifest.device,
                    device_version=manifest.device_version,
                    model_digest=manifest.model_digest,
                    generation=manifest.generation,
                    size_bytes=manifest.size_bytes,
                    saves_s=manifest.compile_ns / 1e9,
                    created_s=manifest.created_ns / 1e9,
                    used_s=used_s.get(key),
                    declined=manifest.declined,
                    superseded=key in superseded,
                )
            )
    return sorted(found, key=lambda entry: (entry.created_s, entry.key))


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


class PruneReport(msgspec.Struct, frozen=True):
    """What pruning did.

    Attributes:
        removed: entries removed.
        freed_bytes: bytes they had.
        in_use: entries that stayed because a process uses them.
        left_bytes: bytes of the entries that are left.
        measurements: stage measurements removed.
    """

    removed: int
    freed_bytes: int
    in_use: int
    left_bytes: int
    measurements: int = 0


def prune(house: Housekeeping, max_bytes: int | None, *, measurements: bool = False) -> PruneReport | Refusal:
    """Remove entries of older driver versions, unreadable ones and what dead processes left. Then evict down to `max_bytes`.

    Stage measurements that are too old are removed, too. With `measurements`, all of them are.
    """
    directory = house.current()
    if isinstance(directory, Refusal):
        return directory
    if not directory.writable:
        return directory.not_writable
    try:
        with directory, house.indexed():
            return _pruned(house, directory, max_bytes, measurements)
    except OSError as error:
        return refusal_of(error, f"cache directory {house.path}")


def _pruned(house: Housekeeping, directory: CacheDirectory, max_bytes: int | None, measurements: bool) -> PruneReport:
    empty_trash(directory)
    before = house.left_bytes()
    removed = in_use = 0
    doomed = set(house.with_index(lambda index: index.superseded(0.0)) or [])
    for key in directory.all_keys():
        try:
            manifest = directory.manifest(key)
            if isinstance(manifest, Manifest) or manifest.reason is MissReason.ABSENT:
                house.clean_if_free(directory, key)
            else:
                doomed.add(key)
        except OSError as error:
            if is_shortage(error):
                raise
            doomed.add(key)
    for key in doomed:
        if house.remove_if_free(directory, key):
            removed += 1
        else:
            in_use += 1
    more_removed, more_in_use = house.evict(directory, max_bytes)
    for key in directory.orphaned_locks():
        house.remove_if_free(directory, key)
    house.note_usage()
    left = house.left_bytes()
    forgotten = house.with_index(lambda index: index.history.forget_measurements(all_of_them=measurements)) or 0
    return PruneReport(removed + more_removed, max(before - left, 0), in_use + more_in_use, left, forgotten)
