"""Devices of a script, for `runtime.preparation`: no process, no engine. They write cache files as told and note every call."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import anyio
from anyio.abc import TaskGroup

import aionn
from aionn.caching import CacheOutcome
from aionn.errors import AionnError, CallerError, DeviceUnavailableError
from aionn.hal import CacheFiles, CacheHandles, Model, PrepareOptions, Priority
from aionn.runtime.preparing.compile_acts import CacheChoice, CompileRequest
from aionn.runtime.preparing.preparation import prepare
from aionn.runtime.processes.devices import Devices
from aionn.tasks import ThreadWork
from aionn.testing import identity_model

NAME = "scripted"
MODEL_PAYLOAD = bytes(range(256))
DATA_PAYLOAD = bytes((value + 1) % 256 for value in range(256))


def some_model(width: int = 16) -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"input": (1, width)}))


class ScriptedPrepared:
    contents = b""

    def __init__(self, model: Model, save_outcome: str) -> None:
        self.inputs, self.outputs, self.save_outcome = model.inputs, model.outputs, save_outcome
        self.released = False

    def release(self) -> None:
        self.released = True


class ScriptedDevice:
    """What `preparation` uses of a `RemoteDevice`.

    Attributes:
        calls: what was asked, in order: "supported", "prepare", "prepare with handles", "from cache".
        handles: the numbers of model and data handles of the last preparation.
        contents: the bytes found in each file by the last `prepare_model_from_cache`.
        deadlines_ns: the deadline of each preparation.
        from_cache: raised there, if set.
        save_outcome: what a preparation with handles says of its save.
        declined_bytes: leave the files empty.
    """

    def __init__(self, files: CacheFiles = CacheFiles(1, 1), version: str = "1") -> None:  # noqa: B008 -- frozen
        self.name, self.version, self.cache_files, self.priority_matters = NAME, version, files, False
        self.calls: list[str] = []
        self.handles: CacheHandles | None = None
        self.counts = (0, 0)
        self.contents: list[bytes] = []
        self.deadlines_ns: list[int | None] = []
        self.from_cache: AionnError | None = None
        self.loaded_model: Model | None = None
        self.save_outcome = "saved"
        self.supports = True
        self.tokens: list[bytes] = []
        self.while_compiling: Callable[[], Awaitable[None]] | None = None
        self.prepared: list[ScriptedPrepared] = []
        self._stored: Model | None = None

    async def get_supported_operations(self, model: Model, deadline_ns: int | None = None, *, options: object = None) -> Sequence[bool]:
        self.calls.append("supported")
        return [self.supports] * len(model.operations)

    async def prepare_model(self, model: Model, options: PrepareOptions, cache: CacheHandles | None = None) -> ScriptedPrepared:
        self.calls.append("prepare" if cache is None else "prepare with handles")
        self.deadlines_ns.append(options.deadline_ns)
        if self.while_compiling is not None:
            await self.while_compiling()
        if cache is not None:
            self.counts = (len(cache.model), len(cache.data))
            self.tokens.append(cache.token)
            if self.save_outcome == "saved":
                for fds, payload in ((cache.model, MODEL_PAYLOAD), (cache.data, DATA_PAYLOAD)):
                    for fd in fds:
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, payload, 0)
        self.prepared.append(ScriptedPrepared(model, self.save_outcome if cache is not None else ""))
        self._stored = model
        return self.prepared[-1]

    async def prepare_model_from_cache(self, options: PrepareOptions, cache: CacheHandles) -> ScriptedPrepared:
        self.calls.append("from cache")
        self.deadlines_ns.append(options.deadline_ns)
        self.counts = (len(cache.model), len(cache.data))
        self.tokens.append(cache.token)
        self.contents = [os.pread(fd, 4096, 0) for fd in (*cache.model, *cache.data)]
        if self.from_cache is not None:
            raise self.from_cache
        model = self.loaded_model or self._stored
        assert model is not None, "the script does not say what is loaded"
        self.prepared.append(ScriptedPrepared(model, ""))
        return self.prepared[-1]


class ScriptedDevices:
    """What `preparation` uses of `Devices`: `get` hands out the next of the list, and the last one from then on."""

    backend = None

    def __init__(self, tasks: TaskGroup, *devices: ScriptedDevice, unavailable: bool = False) -> None:
        self.tasks, self.closed, self._devices, self._unavailable = tasks, False, list(devices), unavailable
        self.disk = ThreadWork()

    def check_open(self) -> None:
        if self.closed:
            raise CallerError("the runtime was closed")

    @contextmanager
    def kept(self, name: str, priority: Priority) -> Iterator[str]:
        """Nothing ends these devices."""
        yield name

    async def live(self, device: str) -> ScriptedDevice:
        return await self.get(device)

    async def get(self, name: str, priority: Priority = Priority.MEDIUM) -> ScriptedDevice:
        if self._unavailable:
            raise DeviceUnavailableError(name, f"device {name!r} does not answer")
        return self._devices.pop(0) if len(self._devices) > 1 else self._devices[0]

    async def prepare(
        self,
        model: Model,
        cache: CacheChoice | None,
        options: PrepareOptions = PrepareOptions(),  # noqa: B008 -- frozen
    ) -> tuple[Any, CacheOutcome]:
        request = CompileRequest(model, options, cast(Any, None), cache=cache)  # nothing shows this compile
        return await prepare(cast(Devices, self), NAME, request)


@asynccontextmanager
async def scripted(*devices: ScriptedDevice, unavailable: bool = False) -> AsyncIterator[ScriptedDevices]:
    async with anyio.create_task_group() as tasks:
        yield ScriptedDevices(tasks, *devices, unavailable=unavailable)
        tasks.cancel_scope.cancel()
