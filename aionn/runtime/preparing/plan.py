"""Which device runs a model: the first, best first, that can run every node of it.

If a device that the app named is not installed, or fails, that is an error, never a silent fallback. Without names every installed
device is a candidate. A candidate is passed over if its package is missing, or if it cannot prepare the model, or if it dies
meanwhile. The log warns of each such device, the trace counts it, and `Compilation.device` names the device that was chosen. The
plan is kept with the cache. The cache remembers what a device could not run, so a second start neither asks the device nor sends the model.
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
from aionn.runtime.model import is_read
from aionn.runtime.preparing.cached import CacheChoice, wants_lanes
from aionn.runtime.preparing.compiling import UnsupportedOperationError
from aionn.runtime.preparing.preparation import prepare
from aionn.runtime.processes.devices import Devices

logger = logging.getLogger("aionn.runtime")


def checked_names(devices: Devices, names: Iterable[str] | None) -> Sequence[str] | None:
    """Return the names that an app gives, after checking that each device is there. None stands for every device.

    Raises:
        CallerError: `names` is not a sequence of names, or is empty.
        DeviceUnavailableError: a device is not installed.
    """
    if names is None:
        return None
    if isinstance(names, str | bytes) or not isinstance(names, Iterable) or not (found := tuple(names)):
        raise CallerError(f"devices={names!r}: give a sequence of device names, as in ('onnxruntime',), or None for every device")
    return tuple(devices.find(name).name for name in found)


async def prepare_on_best(
    devices: Devices, model: Model, names: Sequence[str] | None, options: PrepareOptions, cache: CacheChoice | None
) -> tuple[RemotePreparedModel, CacheOutcome]:
    """Prepare the whole model on the first device that can run it.

    Args:
        names: as `checked_names` returns them.

    Raises:
        DeviceUnavailableError: a named device cannot be used here, or no device is installed.
        CompilationError: no candidate can run every node. `.node` is the first node that the best candidate cannot run.
        CompilationError, MemoryAllocationError, DriverDiedError, DriverHungError: the best candidate that can run every node failed.
            Without `names` all the others have failed, too, and their errors are notes of this one.
    """
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
                if names is not None or devices.closed or (not is_read(model) and not wants_lanes(error)):
                    raise  # with a model that is not read, the fault lies in its graph, and no device can help
                failures.append(error)
                # The text alone: a log record with the error would keep its traceback, and with the traceback the model.
                logger.warning("device %r failed to prepare the model and is passed over: %s", name, str(error))
                trace.count("plan.device_failed", device=name, error=type(error).__name__)
        raise _why_none(shortfalls, unavailable, failures)
    finally:
        # Each error's traceback refers to this call. These lists would keep the model until a collection.
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
        return DeviceUnavailableError("", f"no installed device can run a model: {why}")
    first = shortfalls[0]
    each = "; ".join(map(str, shortfalls))
    return CompilationError(f"no device can run every node of the model: {each}", node=first.node, reason=first.reason)
