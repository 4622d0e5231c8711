"""What the caching rows share: devices in this process and in a driver's, cache files as the HAL passes them, executions."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from aionn.driver.device import EngineDevice
from aionn.driver.registry import find_engine
from aionn.errors import AionnError, CallerError, CompilationError
from aionn.hal import CacheFiles, CacheHandles, ErrorStatus, IDevice, IPreparedModel, Model, PrepareOptions, Request, RequestArgument
from aionn.hal.types import DataLocation
from aionn.memory.region import Region
from aionn.runtime.processes.devices import Devices
from tests.conformance import caching_models

ROOT = Path(__file__).parents[2]
TOKEN = bytes(32)
IN_PROCESS, DRIVER_PROCESS = "in process", "driver process"


@pytest.fixture(autouse=True, scope="module")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Drivers keep their records in this module's own directory, and find engines that are written in tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@asynccontextmanager
async def open_device(engine: str, place: str) -> AsyncIterator[IDevice]:
    async with anyio.create_task_group() as tasks:
        if place == IN_PROCESS:
            device = EngineDevice(find_engine(engine), tasks)
            yield device
            device.close()
        else:
            devices = Devices(tasks)
            try:
                yield await devices.get(engine)
            finally:
                await devices.aclose()
        tasks.cancel_scope.cancel()


class Files:
    """One set of cache files in a directory. Descriptors are opened as asked for, and closed with the set."""

    def __init__(self, directory: Path, needed: CacheFiles) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.needed = directory, needed
        self._fds: list[int] = []

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def path(self, kind: str, index: int) -> Path:
        return self.directory / f"{kind}{index}"

    @property
    def model_paths(self) -> list[Path]:
        return [self.path("model", index) for index in range(self.needed.model)]

    @property
    def data_paths(self) -> list[Path]:
        return [self.path("data", index) for index in range(self.needed.data)]

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        fd = os.open(path, flags | os.O_CREAT, 0o600)
        self._fds.append(fd)
        return fd

    def handles(self, token: bytes = TOKEN, *, more_model: int = 0, more_data: int = 0) -> CacheHandles:
        model = [self.path("model", index) for index in range(self.needed.model + more_model)]
        data = [self.path("data", index) for index in range(self.needed.data + more_data)]
        return CacheHandles(tuple(map(self.open, model)), tuple(map(self.open, data)), token)


async def save(device: IDevice, model: Model, handles: CacheHandles) -> IPreparedModel:
    return await device.prepare_model(model, PrepareOptions(), handles)


async def saved(device: IDevice, model: Model, handles: CacheHandles) -> None:
    """Save, and drop the prepared model."""
    prepared = await save(device, model, handles)
    assert prepared.save_outcome == "saved", prepared.save_outcome
    await prepared.aclose()


async def load(device: IDevice, handles: CacheHandles) -> IPreparedModel:
    return await device.prepare_model_from_cache(PrepareOptions(), handles)


async def refused(device: IDevice, handles: CacheHandles) -> CompilationError:
    """Loading is exactly GENERAL_FAILURE, and gives no model."""
    with pytest.raises(CompilationError) as caught:
        await load(device, handles)
    return caught.value


async def invalid(device: IDevice, handles: CacheHandles) -> AionnError:
    """Loading is INVALID_ARGUMENT or GENERAL_FAILURE, and gives no model."""
    with pytest.raises((CallerError, CompilationError)) as caught:
        await load(device, handles)
    return caught.value


async def execute(prepared: IPreparedModel, x: NDArray[Any]) -> NDArray[Any]:
    """Run a model of one static input and one static output through shared memory."""
    ((_, out),) = prepared.outputs.items()
    assert out.size_bytes is not None
    assert out.dimensions is not None
    input_bytes = -(-x.nbytes // 64) * 64
    region = Region.allocate(input_bytes + out.size_bytes)
    try:
        np.frombuffer(region.view(), x.dtype, x.size)[:] = x.ravel()
        request = Request(
            (RequestArgument(DataLocation(0, 0, x.nbytes), x.shape),),
            (RequestArgument(DataLocation(0, input_bytes, out.size_bytes), out.dimensions),),
        )
        result = await prepared.execute(request, [region], deadline_ns=time.monotonic_ns() + 30_000_000_000)
        assert result.status is ErrorStatus.NONE, result.message
        content = bytes(region.view()[input_bytes : input_bytes + out.size_bytes])
        return np.frombuffer(content, out.type.dtype).reshape(out.dimensions)
    finally:
        region.close()


async def runs_as(prepared: IPreparedModel, model: Model, kind: caching_models.Kind, expected: NDArray[Any]) -> None:
    """The prepared model computes what is expected, then is dropped."""
    (operand,) = model.inputs.values()
    assert operand.dimensions is not None
    found = await execute(prepared, caching_models.input_of(kind, operand.dimensions))
    # One unit of a quantised output is a rounding of two ways to add the same numbers.
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=1e-4, atol=1e-5 if kind == "float32" else 1.0)
    await prepared.aclose()
