"""What a comparison of two stages has found, kept with the cache, so that the next start knows.

A verdict is an entry without files in the same directory: its detail says why the stage must not serve, or that it may
(`APPROVED`). It holds for one model, one version of the device, one set of options, after one stage. Without a verdict a stored
stage does not serve from the start: it may have been stored by an app that ended before it had compared anything, or over which its
driver crashed. It is then loaded, compared and swapped in behind the stream like any other.
"""

from __future__ import annotations

import dataclasses

from blake3 import blake3

from aionn.caching import Wanted
from aionn.caching.store import Declined, Miss
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.hal.types import CacheFiles
from aionn.remote.device import RemoteDevice
from aionn.runtime import preparation
from aionn.runtime.preparation import CacheChoice

APPROVED = "it may serve"


def _entry(cache: CacheChoice, remote: RemoteDevice, model: Model, options: PrepareOptions, base: str) -> Wanted:
    wanted = preparation._wanted(remote, model, options, cache.token)
    key = blake3(wanted.key + model.token + base.encode(), derive_key_context="aionn 1 verdict on a stage").digest()
    return dataclasses.replace(wanted, key=key, files=CacheFiles(1, 0))


async def known(cache: CacheChoice, remote: RemoteDevice, model: Model, options: PrepareOptions, base: str) -> str | None:
    """`APPROVED`, or why the stage on `remote` must not serve after the one named `base`; None: nobody knows."""
    async with await cache.store.open(_entry(cache, remote, model, options, base), wait_s=0.0) as found:
        return found.manifest.detail if isinstance(found, Declined) else None


async def remember(cache: CacheChoice, remote: RemoteDevice, model: Model, options: PrepareOptions, base: str, verdict: str) -> None:
    """Keep a verdict, unless there is one. A directory that cannot be written to keeps none."""
    async with await cache.store.open(_entry(cache, remote, model, options, base), wait_s=0.0) as found:
        if isinstance(found, Miss) and found.publisher is not None:
            await found.publisher.decline(verdict)
