"""Apps on the nodes of a cluster, for F11: Ray tasks whose compiles find nothing in their caches."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aionn
from aionn.caching import KeyParts, encoded_keys
from aionn.fleet import ArtifactRequest
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.types import CacheFiles

Named = tuple[str, str, str, str]
"""Paths of a model, of a store and of a FIFO, and the name of a device."""


def misses(count: int, named: Named, version: str, runtime_env: dict[str, Any]) -> int:
    """Ask the farm `count` times at once, as so many apps would. Each writes a byte into the FIFO when it waits. Returns the artifacts."""
    from aionn.ray import Farm

    model_path, store, fifo, device = named

    async def miss() -> bool:
        model = await aionn.Model.load(model_path)
        encoded, key, _ = encoded_keys(KeyParts(await model.digest(), device, version))
        waits: list[str] = []

        def report(text: str) -> None:
            if not waits and "sending" not in text:
                waits.append(text)
                with open(fifo, "wb", buffering=0) as file:
                    file.write(b".")

        request = ArtifactRequest(key, encoded, device, version, model.token, CacheFiles(1, 1), PrepareOptions(), model, report)
        offered = await Farm(store, runtime_env=runtime_env).compile(request)
        if offered is None:
            return False
        with offered:
            return os.fstat(offered.model[0]).st_size > 0

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(miss() for _ in range(count))))

    return aionn.run(all_of_them)
