"""A better artifact that an engine offers while it runs takes the place of the stored one, late, as a just-in-time compilation is stored.

The driver is asked when a burst has ended and before the model is released. Nothing here fails a caller: what goes wrong is a log
line. Another process that stores the entry at the same time goes first, and the offer is made again later.
"""

from __future__ import annotations

import logging

import msgspec

from aionn import trace
from aionn.caching import MissReason, Refusal
from aionn.caching.store import Hit, Miss
from aionn.errors import AionnError
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.preparing.compile_acts import CacheChoice, CompileRequest, bound, wanted_of

logger = logging.getLogger("aionn.runtime")


async def store_tuned(prepared: RemotePreparedModel, request: CompileRequest, cache: CacheChoice) -> None:
    """Ask for a better artifact of a model, and publish it in place of the stored one."""
    try:
        with cache.store.in_use():
            if await prepared.export_again(None) == "offered":
                await _store(prepared, request, cache)
    except AionnError as error:
        logger.info("device %r was not asked for a better artifact: %s", prepared.device.name, error)


async def _store(prepared: RemotePreparedModel, request: CompileRequest, cache: CacheChoice) -> None:
    device = prepared.device
    found = await cache.store.open(wanted_of(device, request, cache.token, cache.operations), wait_s=0.0)
    if isinstance(found, Hit):
        digest = found.manifest.model_digest
        found = await found.refuse(Refusal(MissReason.SUPERSEDED, "the engine offers a better artifact"), wait_s=0.0)
    else:
        digest = b""  # nothing is stored that could be replaced
    async with found:
        if not digest or not isinstance(found, Miss) or found.publisher is None:
            logger.info("a better artifact of device %r is not stored now: there is no entry, or another process has it", device.name)
            return
        publisher = found.publisher
        publisher.wanted = msgspec.structs.replace(publisher.wanted, model_digest=digest)
        outcome = await prepared.export_again(bound(publisher.handles, digest))
        if outcome == "saved":
            refusal = await publisher.publish()
            outcome = "saved" if refusal is None else str(refusal)
    trace.count("compile.stored_again", device=device.name, outcome=outcome)
    logger.info("a better artifact of device %r: %s", device.name, outcome)
