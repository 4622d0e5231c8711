"""Push the entries of a local cache to an artifact store, each with a signed statement.

A signature says "this machine's driver has stored these bytes". So each entry is compared with the driver's records first
(`records`): the files are copied into private memory, that copy is digested and compared, and that copy is uploaded. An entry without a
record is not signed. Nor is an entry that the driver has adopted, because another builder has signed it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import anyio

from aionn.caching.keyring import read_keyring
from aionn.caching.manifest import Manifest
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.statement import claimed_statement
from aionn.caching.store import CacheStore
from aionn.errors import CallerError
from aionn.fleet.artifact_store import ArtifactStore, FilesOf, Pushed
from aionn.fleet.judging import place_of, trusted_files
from aionn.fleet.keys import BuilderKey
from aionn.fleet.records import UnreadableEntry, Vouched, believed_entry, manifests_of
from aionn.hal.trust import Keyring, encode_keyring


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
