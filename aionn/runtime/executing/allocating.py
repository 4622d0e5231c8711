"""Device memory is allocated for one compilation, or for several of one driver."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from aionn import trace
from aionn.runtime.executing.device_buffers import BufferPair
from aionn.runtime.executing.device_memory import DeviceMemory
from aionn.runtime.executing.device_roles import DeviceRoles
from aionn.runtime.preparing.renewal import Renewal


async def allocate(renewals: Sequence[Renewal], roles: DeviceRoles, deadline_ns: int | None) -> DeviceMemory:
    """Return device memory in the driver that serves. `renewals`: of the compilations, one for each part of `roles`.

    Raises:
        CallerError: several drivers run these inputs and outputs.
        AionnError: the driver cannot have it.
    """
    with ExitStack() as held:
        for renewal in renewals:
            held.enter_context(renewal.compiled.use.hold())
        while True:
            servings = [await renewal.live(deadline_ns) for renewal in renewals]
            with trace.span("allocate", device=servings[0].device):
                buffer = await roles.allocate([serving.prepared for serving in servings])
            if all(serving is renewal.compiled.serving for serving, renewal in zip(servings, renewals, strict=True)):
                return DeviceMemory(renewals, BufferPair([serving.prepared for serving in servings], buffer, roles))
            buffer.release()  # another stage has been swapped in meanwhile
