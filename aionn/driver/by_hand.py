"""Devices that an author has written by hand (`hal.IDevice`), in place of an engine.

Such a device is found like an engine: by an entry point of the group `aionn.engines`, or as "package.module:Class". Each driver process
makes one, without arguments, in a thread. If it is an asynchronous context manager, the driver enters it in its event loop before
it greets, and leaves it when its client has gone. So a device may keep a task group there for the listeners of its bursts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from aionn.hal.interfaces import IDevice
from aionn.hal.types import DeviceType

if TYPE_CHECKING:
    from typing_extensions import TypeIs

VERBS = ("get_supported_operations", "get_number_of_cache_files_needed", "prepare_model", "prepare_model_from_cache", "allocate")
FACTS = (("name", str), ("version", str), ("type", DeviceType), ("priority_matters", bool))


def is_device(made: object) -> TypeIs[IDevice]:
    """Return whether an object is a device rather than an engine: it prepares models."""
    return callable(getattr(made, "prepare_model", None))


@asynccontextmanager
async def entered(device: IDevice) -> AsyncIterator[IDevice]:
    """Enter a device for the body, if it can be entered."""
    if isinstance(device, AbstractAsyncContextManager):
        async with device:
            yield device
    else:
        yield device
