"""Every way to hold an `IDevice`: in process, through a service over a socket pair, in a driver process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from aionn.driver import EngineDevice, find_engine
from aionn.hal.interfaces import IDevice
from aionn.runtime.processes.devices import Devices
from tests.remote.pair import remote_device

ENGINES = {"fake": "aionn.testing.fake_engine:FakeEngine", "reference": "reference", "onnxruntime": "onnxruntime"}


@asynccontextmanager
async def in_process(name: str) -> AsyncIterator[IDevice]:
    async with anyio.create_task_group() as tasks:
        device = EngineDevice(find_engine(name), tasks)
        try:
            yield device
        finally:
            device.close()
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def over_a_socket(name: str) -> AsyncIterator[IDevice]:
    async with remote_device(find_engine(name)) as device:
        yield device


@asynccontextmanager
async def in_a_driver(name: str) -> AsyncIterator[IDevice]:
    async with anyio.create_task_group() as tasks:
        devices = Devices(tasks)
        try:
            yield await devices.get(name)
        finally:
            await devices.aclose()
            tasks.cancel_scope.cancel()


HOLDERS: dict[str, Callable[[str], object]] = {"in_process": in_process, "over_a_socket": over_a_socket, "in_a_driver": in_a_driver}
