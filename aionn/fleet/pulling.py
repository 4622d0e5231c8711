"""Artifacts between a local cache and a store: `aionn fleet pull` and `push`.

A pull takes artifacts from a store into a local cache, and has the drivers adopt them. An app's first start is then a hit.

A pull takes artifacts for the devices of this machine, in the versions that run here, that builders have signed whom the user trusts. A
driver checks each artifact and records it, so the cache and the records must lie where the app will look for them.

A push brings the entries of a local cache to an artifact store, each with a signed statement.

A signature says "this machine's driver has stored these bytes". So each entry is compared with the driver's records first:
the files are copied into private memory, that copy is digested and compared, and that copy is uploaded. An entry without a
record is not signed. Nor is an entry that the driver has adopted, because another builder has signed it.

The records of this machine's drivers are read without a driver process (`believed_entry`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from aionn import Runtime
from aionn.caching.integrity import IntegrityStore
from aionn.caching.keyring import keyring_folder, read_keyring
from aionn.caching.manifest import Manifest, StoredFile, Wanted
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.private_folder import device_folder
from aionn.caching.state import device_database, state_path
from aionn.caching.statement import claimed_statement
from aionn.caching.store import CacheStore, Hit
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.token import device_token
from aionn.engines.installed import installed_engines
from aionn.errors import AionnError, CallerError, text_of
from aionn.fleet.adopting import adopt
from aionn.fleet.artifact_store import ArtifactStore, FilesOf, Pushed, place_of, statement_at, trusted_files
from aionn.fleet.asking import fetch_offer
from aionn.fleet.keys import BuilderKey
from aionn.fleet.places import StatementPlace, fingerprint
from aionn.hal.interfaces import CacheHandles
from aionn.hal.trust import Keyring, encode_keyring
from aionn.hal.types import CacheFiles


@dataclass(frozen=True, slots=True)
class EntryPushed:
    """What became of one entry.

    Attributes:
        key, device: of the entry.
        size_bytes: bytes of its files.
        pushed: what the store did, or None if the entry was not signed.
        refusal: why it was not signed. None if it was signed here, or by the builder from whom the driver has adopted it.
    """

    key: bytes
    device: str
    size_bytes: int
    pushed: Pushed | None
    refusal: Refusal | None = None


async def push_cache(
    cache_dir: str | os.PathLike[str], store: ArtifactStore, key: BuilderKey, *, state_dir: str | os.PathLike[str] | None = None
) -> list[EntryPushed]:
    """Sign and push every entry of a cache that this machine's drivers have stored. Entries of declined models are left out.

    Args:
        cache_dir: an existing cache directory.
        state_dir: the folder of the drivers' records. None: the user's.

    Returns:
        One value for each entry, ordered by key.

    Raises:
        StoreError: the store cannot be used. Some entries may have been pushed.
        CallerError: the package cryptography is not installed.
        OSError: the cache directory cannot be read.
    """
    judge = trusted_files(Keyring((key.public,)))
    keyring = encode_keyring(await anyio.to_thread.run_sync(read_keyring))
    done: list[EntryPushed] = []
    async with CacheStore(cache_dir) as cache:
        for manifest in await anyio.to_thread.run_sync(manifests_of, os.fspath(cache_dir)):
            if isinstance(manifest, UnreadableEntry):
                done.append(EntryPushed(manifest.key, "", 0, None, manifest.refusal))
                continue
            vouched = await believed_entry(cache, manifest, state_dir, keyring)
            if isinstance(vouched, Refusal):
                done.append(_not_signed(manifest, vouched))
            elif vouched.key_id:
                done.append(_not_signed(manifest, None))
            else:
                done.append(await _push(store, key, judge, manifest, vouched))
    return done


async def _push(store: ArtifactStore, key: BuilderKey, judge: FilesOf, manifest: Manifest, vouched: Vouched) -> EntryPushed:
    try:
        signed = await anyio.to_thread.run_sync(key.sign, manifest)
    except CallerError as error:  # the entry does not say what its key was made of
        return _not_signed(manifest, Refusal(MissReason.UNREADABLE, str(error)))
    statement = claimed_statement(signed)
    if isinstance(statement, Refusal):
        return _not_signed(manifest, statement)
    pushed = await store.push(place_of(statement), signed, vouched.files, judge)
    return EntryPushed(manifest.key, manifest.device, manifest.size_bytes, pushed)


def _not_signed(manifest: Manifest, why: Refusal | None) -> EntryPushed:
    return EntryPushed(manifest.key, manifest.device, manifest.size_bytes, None, why)


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
    folder = Path(device_folder(state_path(state_dir), manifest.device))
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


@dataclass(frozen=True, slots=True)
class EntryPulled:
    """What became of one artifact.

    Attributes:
        key, device, builder: of the statement.
        size_bytes: bytes of its files.
        present: the cache had an entry of that key already, and nothing was read.
        refusal: why it was not adopted, or None.
    """

    key: bytes
    device: str
    builder: str
    size_bytes: int = 0
    present: bool = False
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull did.

    Attributes:
        entries: one value for each artifact for this machine, ordered by key.
        others: how many statements are for other devices or versions, or by builders that are not trusted.
        fingerprints: of this machine's devices, by name.
    """

    entries: tuple[EntryPulled, ...]
    others: int
    fingerprints: dict[str, str]


async def pull_cache(
    store: ArtifactStore,
    cache_dir: str | os.PathLike[str],
    *,
    devices: Sequence[str] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
) -> Pulled:
    """Fetch what trusted builders have compiled for this machine, and have its drivers adopt it.

    Args:
        cache_dir: made if it is missing.
        devices: names of devices. None: every installed one that starts.
        state_dir: the folder of the drivers' records. None: the user's.

    Raises:
        StoreError: the store cannot be used.
        CallerError: the keyring has no key, or a device is not installed.
        AionnError: a device that was named cannot start.
    """
    keys = await anyio.to_thread.run_sync(read_keyring)
    if not keys.keys:
        folder = keyring_folder()
        where = "adopting is switched off by AIONN_ADOPT" if folder is None else f"put the builder's .pub file into {folder}"
        raise CallerError(f"no builder is trusted: {keys.fault or f'there are no keys; {where}'}")
    trusted = {key.id for key in keys.keys}
    listed = [place for place, _ in await store.statements()]
    wanted: list[StatementPlace] = []
    done: list[EntryPulled] = []
    fingerprints: dict[str, str] = {}
    async with Runtime(state_dir=None if state_dir is None else os.fspath(state_dir), start=()) as runtime:
        async for name, version in _versions(runtime, devices):
            fingerprints[name] = fingerprint(name, version)
        of = {digits: name for name, digits in fingerprints.items()}
        wanted = sorted(place for place in listed if place.fingerprint in of and place.builder in trusted)
        there = await _believed(cache_dir, {place.key for place in wanted}, state_dir, keys)
        for place in wanted:
            if place.key in there:
                done.append(EntryPulled(place.key, of[place.fingerprint], "", there[place.key], present=True))
                continue
            pulled = await _pull(store, place, keys, runtime, cache_dir)
            done.append(pulled)
            if pulled.refusal is None:
                there[place.key] = pulled.size_bytes
    await store.mark_seen(fingerprints.values())
    return Pulled(tuple(done), len(listed) - len(wanted), fingerprints)


async def _versions(runtime: Runtime, devices: Sequence[str] | None) -> AsyncIterator[tuple[str, str]]:
    """Start devices, and yield the name and version of each."""
    known = {device.name: device for device in runtime.devices}
    missing = [name for name in devices or () if name not in known]
    if missing:
        raise CallerError(f"device {missing[0]!r} is not installed; installed are {', '.join(map(repr, known)) or 'none'}")
    for name in known if devices is None else dict.fromkeys(devices):
        try:
            await known[name].restart()  # none runs yet, so this only starts it
        except AionnError:
            if devices is not None:
                raise
            continue  # installed, and not usable here
        version = known[name].version
        if version:
            yield name, version


async def _believed(
    cache_dir: str | os.PathLike[str], keys: set[bytes], state_dir: str | os.PathLike[str] | None, keyring: Keyring
) -> dict[bytes, int]:
    """Return the sizes of the entries that a driver would load already, by key."""
    found: dict[bytes, int] = {}
    if not keys:
        return found
    encoded = encode_keyring(keyring)
    async with CacheStore(cache_dir) as cache:
        for manifest in await anyio.to_thread.run_sync(manifests_of, os.fspath(cache_dir)):
            if isinstance(manifest, Manifest) and manifest.key in keys:
                believed = await believed_entry(cache, manifest, state_dir, encoded)
                if isinstance(believed, Vouched):
                    found[manifest.key] = manifest.size_bytes
    return found


async def _pull(
    store: ArtifactStore, place: StatementPlace, keyring: Keyring, runtime: Runtime, cache_dir: str | os.PathLike[str]
) -> EntryPulled:
    signed = await store.statement(place)
    if signed is None:
        return EntryPulled(place.key, "", "", refusal=Refusal(MissReason.ABSENT, "the statement was removed meanwhile"))
    statement = await anyio.to_thread.run_sync(statement_at, place, signed, keyring)
    if isinstance(statement, Refusal):
        return EntryPulled(place.key, "", "", refusal=statement)
    size_bytes = sum(file.length for file in statement.files)
    offer = await fetch_offer(store, signed, statement)
    if isinstance(offer, Refusal):
        return EntryPulled(place.key, statement.device, statement.builder, size_bytes, refusal=offer)
    refusal: Refusal | None
    try:
        outcome = await adopt(runtime, cache_dir, offer)
        refusal = outcome.save_failure if outcome.reason is None else Refusal(outcome.reason, outcome.detail)
    except AionnError as error:  # such as: the driver died while it loaded the artifact
        refusal = Refusal(MissReason.REFUSED_BY_DEVICE, text_of(error))
    return EntryPulled(place.key, statement.device, statement.builder, size_bytes, refusal=refusal)
