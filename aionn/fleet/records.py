"""The entries of a local cache, and what the records of this machine's drivers say about them. No driver process is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from aionn.caching.integrity import IntegrityStore
from aionn.caching.manifest import Manifest, StoredFile, Wanted
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.private_folder import device_folder
from aionn.caching.state import device_database, state_path
from aionn.caching.store import CacheStore, Hit
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.token import device_token
from aionn.engines.installed import installed_engines
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import CacheFiles

_RECORD_BYTES = 8 + 32


@dataclass(frozen=True, slots=True)
class Vouched:
    """The files of an entry that a driver's records vouch for.

    Attributes:
        files: length and digest of each file, and a private copy of it.
        key_id: of the builder who signed what the driver has adopted, or empty for what a driver of this machine has compiled.
    """

    files: list[tuple[StoredFile, bytes | memoryview]]
    key_id: bytes


@dataclass(frozen=True, slots=True)
class UnreadableEntry:
    """An entry whose manifest cannot be read."""

    key: bytes
    refusal: Refusal


def manifests_of(cache_dir: str) -> list[Manifest | UnreadableEntry]:
    """Return the manifests of all entries of a cache that have files, ordered by key. Blocking.

    Raises:
        OSError: the cache directory cannot be read, or is not safe to use.
    """
    found: list[Manifest | UnreadableEntry] = []
    with CacheDirectory(cache_dir) as directory:
        for key in sorted(directory.all_keys()):
            manifest = directory.manifest(key)
            if isinstance(manifest, Manifest):
                if not manifest.declined:
                    found.append(manifest)
            elif manifest.reason is not MissReason.ABSENT:
                found.append(UnreadableEntry(key, manifest))
    return found


async def believed_entry(
    cache: CacheStore, manifest: Manifest, state_dir: str | os.PathLike[str] | None, keyring: bytes = b""
) -> Vouched | Refusal:
    """Return private copies of an entry's files if a driver of this machine would load them, or why it would not.

    Args:
        state_dir, keyring: as for `vouched_files`.
    """
    files = CacheFiles(len(manifest.model), len(manifest.data))
    name = manifest.device, manifest.device_version, manifest.model_digest
    hit = await cache.glance(Wanted(manifest.key, manifest.family, *name, files, manifest.parts))
    if not isinstance(hit, Hit):
        return Refusal(MissReason.PARTIAL, "a file is missing, or the entry is being replaced")
    try:
        return await anyio.to_thread.run_sync(vouched_files, hit.manifest, hit.handles, state_dir, keyring)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(partial(hit.close_here, used=False))


def vouched_files(
    manifest: Manifest, handles: CacheHandles, state_dir: str | os.PathLike[str] | None, keyring: bytes = b""
) -> Vouched | Refusal:
    """Compare the files of an entry with the drivers' records. Return private copies of what the records vouch for. Blocking.

    Args:
        handles: of the entry's files.
        state_dir: the folder of the records. None: the user's.
        keyring: keys of builders, encoded (`hal.trust`). What a driver has adopted counts only if one of these has signed it.
    """
    refusal = Refusal(MissReason.NO_INTEGRITY_RECORD, f"no driver has records of this device's version in {state_path(state_dir)}")
    token = device_token(manifest.key, manifest.model_digest)
    folder = device_folder(state_path(state_dir), manifest.device)
    for engine in _engines(manifest.device, folder):
        # Looked for first, because opening a store of records that is missing would make it.
        if not device_database(folder, "integrity", engine, manifest.device_version).exists():
            continue
        files = CacheFiles(len(manifest.model), len(manifest.data))
        version, name = manifest.device_version, manifest.device
        records = IntegrityStore(engine, version, files, state_directory=folder, known_as=name, confined=False)
        try:
            verified = records.verify(CacheHandles(handles.model, handles.data, token, keyring))
        finally:
            records.close()
        if isinstance(verified, Refusal):
            refusal = verified
            continue
        assert verified.artifact is not None  # nothing is known
        copies = [*verified.artifact.model, *verified.artifact.data]
        stored = [*_recorded(verified.digests)]
        if stored != [*manifest.files]:
            return Refusal(MissReason.WRONG_BYTES, "the manifest names other files than the driver's record")
        return Vouched([*zip(stored, copies, strict=True)], verified.key_id)
    return refusal


def _recorded(digests: bytes) -> Iterator[StoredFile]:
    """Yield what a record says of each file (`integrity.Verified.digests`)."""
    for at in range(0, len(digests), _RECORD_BYTES):
        yield StoredFile(int.from_bytes(digests[at : at + 8], "little"), digests[at + 8 : at + _RECORD_BYTES])


def _engines(device: str, folder: Path) -> list[str]:
    """Return the engines that may have compiled for a device: the one with the device's name, then the others.

    An app may give a device a name of its choice, and may name an engine by its class. Such an engine is found by the name of its records.
    """
    recorded = {path.name.split("-")[1] for path in folder.glob("integrity-*-*.sqlite")}
    return [device, *sorted((installed_engines().keys() | recorded) - {device})]
