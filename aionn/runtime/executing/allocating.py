"""Device memory is allocated for one compilation, or for several of one driver."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from aionn import trace
from aionn.runtime.executing.device_buffers import BufferPair
from aionn.runtime.executing.device_memory import DeviceMemory
from aionn.runtime.executing.device_roles import DeviceRoles
from aionn.runtime.preparing.kept_model import KeptModel


async def allocate(kept_models: Sequence[KeptModel], roles: DeviceRoles, deadline_ns: int | None) -> DeviceMemory:
    """Return device memory in the driver that serves. `kept_models`: of the compilations, one for each part of `roles`.

    Raises:
        CallerError: several drivers run these inputs and outputs.
        AionnError: the driver cannot have it.
    """
    with ExitStack() as held:
        for kept_model in kept_models:
            held.enter_context(kept_model.compiled.use.hold())
        while True:
            servings = [await kept_model.live(deadline_ns) for kept_model in kept_models]
            with trace.span("allocate", device=servings[0].device):
                buffer = await roles.allocate([serving.prepared for serving in servings])
            if all(serving is kept_model.compiled.serving for serving, kept_model in zip(servings, kept_models, strict=True)):
                return DeviceMemory(kept_models, BufferPair([serving.prepared for serving in servings], buffer, roles))
            buffer.release()  # another stage has been swapped in meanwhile
