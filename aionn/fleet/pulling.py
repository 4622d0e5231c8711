"""Pull artifacts from a store into a local cache, and have the drivers adopt them (`aionn fleet pull`). An app's first start is then a hit.

A pull takes artifacts for the devices of this machine, in the versions that run here, that builders have signed whom the user trusts. A
driver checks each artifact and records it, so the cache and the records must lie where the app will look for them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import anyio

from aionn import Runtime
from aionn.caching.keyring import keyring_folder, read_keyring
from aionn.caching.manifest import Manifest
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store import CacheStore
from aionn.errors import AionnError, CallerError, text_of
from aionn.fleet.adopting import adopt
from aionn.fleet.artifact_store import ArtifactStore
from aionn.fleet.asking import fetch_offer
from aionn.fleet.judging import statement_at
from aionn.fleet.places import StatementPlace, fingerprint
from aionn.fleet.records import Vouched, believed_entry, manifests_of
from aionn.hal.trust import Keyring, encode_keyring


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
