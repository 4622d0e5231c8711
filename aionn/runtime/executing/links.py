"""A burst's connection to all that serves: a `Link` to one driver, or a `PlannedLink` to those of a plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aionn.errors import CallerError
from aionn.pages import BurstSlot
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.link import Link, LinkOptions, driver_ended, open_queues
from aionn.runtime.serving.compiled_model import CompiledModel
from aionn.runtime.serving.serving import Serving

if TYPE_CHECKING:
    from aionn.runtime.executing.planned_link import PlannedLink

    AnyLink = Link | PlannedLink


async def open_link(serving: Serving, compiled: CompiledModel, frames: Frames, options: LinkOptions, counts: BurstSlot) -> AnyLink:
    """Connect to the drivers of `serving`. `counts`: what the burst's requests are counted in.

    Raises:
        AionnError: a driver is gone, or cannot open a burst; nothing is left.
    """
    prepared = serving.prepared
    if isinstance(prepared, RemotePreparedModel):
        controller, context = await open_queues(prepared, frames, options, counts)
        prepared.device.connection.when_ended(controller, partial(driver_ended, serving, controller))
        return Link(serving, prepared, controller, context, compiled, frames)
    from aionn.runtime.executing.planned_link import open_planned_link  # only plans need it

    return await open_planned_link(serving, prepared, compiled, frames, options, counts)


def release(frames: Frames, held: list[AnyLink]) -> None:
    """Free the queues, the frames and the drivers' part of a burst that is over, or has been collected."""
    for link in held:
        link.release(CallerError("the burst was closed while this call waited"))
    held.clear()
    frames.close()
