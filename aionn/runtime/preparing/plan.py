"""Which device runs a model: the first, best first, that can run every node of it.

A device that was asked for by name and is not there, or fails, is an error, never a silent fallback. Without names every installed
device is a candidate: one whose package is missing is passed over, and so is one that cannot prepare the model or dies over it. The
log warns of either, the trace counts it, and `Compilation.device` tells which one it became. The plan is kept with the cache: what
a device could not run is remembered there, so a second start neither asks it nor sends it the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from aionn import trace
from aionn.caching import CacheOutcome
from aionn.errors import (
    AionnError,
    CallerError,
    CompilationError,
    DeviceUnavailableError,
    DriverDiedError,
    DriverHungError,
    MemoryAllocationError,
)
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.preparing.preparation import CacheChoice, UnsupportedOperationError, prepare
from aionn.runtime.processes.devices import Devices

logger = logging.getLogger("aionn.runtime")


async def prepare_on_best(
    devices: Devices, model: Model, names: Sequence[str] | None, options: PrepareOptions, cache: CacheChoice | None
) -> tuple[RemotePreparedModel, CacheOutcome]:
    """Prepare the whole model on the first device that can run it.

    Raises:
        CallerError: `names` is empty.
        DeviceUnavailableError: a named device is not there; or none at all is.
        CompilationError: no candidate can run every node; the first missing one is `.node`.
        CompilationError, MemoryAllocationError, DriverDiedError, DriverHungError: the best that can run every node failed; without
            `names` all the others, too, and notes tell of them.
    """
    if names is not None:
        if isinstance(names, str | bytes) or not isinstance(names, Iterable) or not (names := list(names)):
            raise CallerError(f"devices={names!r}: give a sequence of device names, as in ('onnxruntime',), or None for every device")
        for name in names:
            devices.find(name)
    shortfalls: list[UnsupportedOperationError] = []
    unavailable: list[DeviceUnavailableError] = []
    failures: list[AionnError] = []
    try:
        for name in names if names is not None else devices.installed:
            try:
                return await prepare(devices, name, model, options, cache)
            except DeviceUnavailableError as error:
                if names is not None:
                    raise
                unavailable.append(error)
                logger.warning("device %r is passed over: %s", name, error)
                trace.count("plan.device_unavailable", device=name)
            except UnsupportedOperationError as error:
                shortfalls.append(error)
                trace.count("plan.device_cannot", device=name)
            except (CompilationError, MemoryAllocationError, DriverDiedError, DriverHungError) as error:
                if names is not None or devices.closed:
                    raise
                failures.append(error)
                # Its text alone: who keeps log records would keep the model with the error's traceback.
                logger.warning("device %r failed to prepare the model and is passed over: %s", name, str(error))
                trace.count("plan.device_failed", device=name, error=type(error).__name__)
        raise _why_none(shortfalls, unavailable, failures)
    finally:
        # Each error's traceback has this call in it: with these lists the model would be kept until a collection.
        shortfalls.clear()
        unavailable.clear()
        failures.clear()


def _why_none(
    shortfalls: Sequence[UnsupportedOperationError], unavailable: Sequence[DeviceUnavailableError], failures: Sequence[AionnError]
) -> AionnError:
    if failures:
        for other in (*failures[1:], *shortfalls, *unavailable):
            failures[0].add_note(str(other))
        return failures[0]
    if not shortfalls:
        why = "; ".join(map(str, unavailable)) or "no package offers an engine (entry points of the group aionn.engines)"
        return DeviceUnavailableError("", f"no device is there that could run a model: {why}")
    first = shortfalls[0]
    told = "; ".join(map(str, shortfalls))
    return CompilationError(f"no device can run every node of the model: {told}", node=first.node, reason=first.reason)
