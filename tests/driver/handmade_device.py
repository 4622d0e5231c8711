"""A device written by hand, without an engine: it doubles its inputs. Asked for as "tests.driver.handmade_device:DoublingDevice".

Its bursts are of its own: `DoublingBurst` answers through an `ExecutionBurstServer` that the device runs in its task group. A file of
the name in AIONN_TEST_HANDMADE gets a line for each burst that begins and ends, and when the device is entered and left.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import numpy as np
from anyio.abc import TaskGroup

from aionn.burst import ExecutionBurstServer
from aionn.errors import CallerError, CompilationError
from aionn.hal import (
    BufferDesc,
    BufferRole,
    CacheFiles,
    CacheHandles,
    DeviceType,
    ErrorStatus,
    IBuffer,
    IBurstCallback,
    IMemory,
    Model,
    MQDescriptor,
    Operand,
    PrepareOptions,
    Request,
    Result,
)

VARIABLE = "AIONN_TEST_HANDMADE"


def note(what: str) -> None:
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(f"{what}\n")


class DoublingDevice:
    """Satisfies `hal.IDevice`."""

    name = "doubling"
    version = "1"
    type = DeviceType.ACCELERATOR
    priority_matters = False

    def __init__(self) -> None:
        self.tasks: TaskGroup

    async def __aenter__(self) -> DoublingDevice:
        self.tasks = anyio.create_task_group()
        await self.tasks.__aenter__()
        note("entered")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.tasks.cancel_scope.cancel()
        await self.tasks.__aexit__(None, None, None)
        note("left")

    async def get_supported_operations(self, model: Model) -> Sequence[bool]:
        return [operation.op_type == "Identity" for operation in model.operations]

    async def get_number_of_cache_files_needed(self) -> CacheFiles:
        return CacheFiles(0, 0)

    async def prepare_model(self, model: Model, options: PrepareOptions, cache: CacheHandles | None = None) -> DoublingModel:
        return DoublingModel(self, model.inputs, model.outputs)

    async def prepare_model_from_cache(self, options: PrepareOptions, cache: CacheHandles) -> DoublingModel:
        raise CompilationError("this device stores nothing", reason="it does not cache")

    async def allocate(
        self, desc: BufferDesc, prepared_models: object, input_roles: Sequence[BufferRole], output_roles: Sequence[BufferRole]
    ) -> IBuffer:
        raise CallerError("device 'doubling' has no memory of its own; give arrays or an aionn.Memory")


class DoublingModel:
    """Satisfies `hal.IPreparedModel`."""

    save_outcome = ""

    def __init__(self, device: DoublingDevice, inputs: Mapping[str, Operand], outputs: Mapping[str, Operand]) -> None:
        self.device, self.inputs, self.outputs = device, inputs, outputs

    async def execute(
        self, request: Request, pools: Sequence[IMemory | IBuffer], measure_timing: bool = False, deadline_ns: int | None = None
    ) -> Result:
        for source, target in zip(request.inputs, request.outputs, strict=True):
            views = []
            for place in (source.location, target.location):
                pool = pools[place.pool_index]
                assert isinstance(pool, IMemory)
                views.append(np.frombuffer(pool.view(), np.float32, place.length // 4, place.offset))
            np.multiply(views[0], 2, out=views[1])
        return Result(ErrorStatus.NONE)

    async def configure_execution_burst(
        self, callback: IBurstCallback, request_channel: MQDescriptor, result_channel: MQDescriptor, anticipate: bool = False
    ) -> DoublingBurst:
        server = ExecutionBurstServer.create(callback, request_channel, result_channel, self)  # type: ignore[arg-type]  # no fences
        return DoublingBurst(self, server)

    async def aclose(self) -> None:
        note("released")


class DoublingBurst:
    """Satisfies `hal.IBurstContext`."""

    def __init__(self, model: DoublingModel, server: ExecutionBurstServer) -> None:
        self._server = server
        model.device.tasks.start_soon(server.serve)
        note("burst")

    async def free_memory(self, slot: int) -> None:
        await self._server.free_memory(slot)

    async def aclose(self) -> None:
        await self._server.aclose()
        note("burst over")


class Lame:
    """A device that lacks most of what one must have."""

    name = "lame"
    version = "1"

    async def prepare_model(self) -> None: ...
