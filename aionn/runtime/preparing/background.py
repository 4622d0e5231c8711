"""A better stage is made behind the live stream: compiled by a worker process, loaded by the driver that will serve it.

    stored already         prepare_model_from_cache in the serving driver                    ("cache")
    not stored             a second driver process at the lowest priority compiles it into the cache under the entry's
                           compile lock, is ended, and the serving driver loads it from there ("worker")
    no directory, or it    the same through anonymous files (memfd), which nobody else sees   ("worker")
    cannot be written to
    device never caches    the device's own driver compiles it; the stage that serves is in another process ("driver")

A device without cache files has nothing that could be carried from one process to another, so a worker would be of no use to it. What it
compiles, it compiles in its own driver, at the priority of the app: it cannot be lowered for the while, for an unprivileged process
must not raise it again. The stage that serves runs in another process and is not stopped by it, but shares the CPUs with it. An
engine whose compiles take long should export them; the only one here that does not, `reference`, compiles nothing.

The worker is a driver like any other, with the same verbs; it gets SIGKILL when its time is over, its caller is cancelled or
the app ends. What it leaves then is an unpublished file that the store sweeps. The serving driver verifies what it loads,
as always.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio

from aionn import trace
from aionn.caching import MissReason, Refusal
from aionn.caching.store import Declined, Hit
from aionn.errors import AionnError, CompilationError, DeadlineError
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.model import Model
from aionn.hal.types import CACHE_TOKEN_BYTES, CacheFiles
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.preparing import preparation
from aionn.runtime.preparing.preparation import CacheChoice
from aionn.runtime.processes.devices import Devices, DriverProcess
from aionn.tasks import bounded_shield

logger = logging.getLogger("aionn.runtime")

_END_WORKER_S = 5.0
"""A killed worker is waited for this long."""

_REFUSALS = 2
"""So often a stored artifact may be refused by the device that stored it, before the stage is given up."""


@dataclass(frozen=True, slots=True)
class Made:
    """A prepared model, and who compiled it: "cache", "worker" or "driver"."""

    prepared: RemotePreparedModel
    by: str


async def make(
    devices: Devices,
    name: str,
    model: Model,
    options: PrepareOptions,
    cache: CacheChoice | None,
    *,
    threads: int,
    timeout_s: float,
    phase: Callable[[str], None],
) -> Made:
    """Prepare `model` on the device of that name without compiling it in the process that will serve it.

    Args:
        threads: of the worker.
        timeout_s: for all of it; whatever still compiles then is killed.
        phase: told "compiling" and "loading".

    Raises:
        DeadlineError: it took longer.
        CompilationError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError
    """
    with anyio.move_on_after(timeout_s):
        serving = await devices.get(name)
        if not serving.cache_files.supported:
            phase("compiling")
            return Made(await preparation._compile(serving, model, options), "driver")
        making = _Making(devices, name, model, options, threads, phase)
        if cache is not None:
            made = await making.through_cache(cache)
            if made is not None:
                return made
        return await making.through_memory()
    raise DeadlineError(f"device {name!r} did not make the stage within {timeout_s} s; what still compiled it has been killed")


class _Making:
    def __init__(
        self, devices: Devices, name: str, model: Model, options: PrepareOptions, threads: int, phase: Callable[[str], None]
    ) -> None:
        self._devices = devices
        self._name = name
        self._model = model
        self._options = options
        self._threads = threads
        self._phase = phase

    async def through_cache(self, cache: CacheChoice) -> Made | None:
        """None: the cache cannot be written to, or the worker's artifact did not get there."""
        by, refused, refusals = "cache", None, 0
        while True:
            serving = await self._devices.get(self._name)
            wanted = preparation._wanted(serving, self._model, self._options, cache.token)
            # A hit shares the entry with every reader; a miss makes us the only one who compiles it, in any process.
            found = await preparation._open_refused(cache.store, wanted, refused, cache.store.wait_s)
            prepared: RemotePreparedModel | None = None
            try:
                if isinstance(found, Hit):
                    try:
                        prepared = await self._load(serving, found.handles)
                        return Made(prepared, by)
                    except AionnError as error:
                        refusals += 1
                        if refusals >= _REFUSALS:
                            raise
                        refused = found, preparation._refusal_of(error)
                        preparation._tell_refusal(cache.store, serving, refused[1], error)
                        continue
                if isinstance(found, Declined):
                    preparation._raise_if_unsupported(serving, self._model, found)
                    self._phase("compiling")
                    prepared = await preparation._compile(serving, self._model, self._options)
                    return Made(prepared, "driver")
                publisher = found.publisher
                if publisher is None:
                    if found.outcome.reason is MissReason.BUSY:
                        continue  # somebody still compiles it; `make` bounds the wait
                    return None
                began_ns = time.monotonic_ns()
                outcome = await self._compile(publisher.handles)
                if outcome == "declined":
                    await publisher.decline("the device does not cache this model")
                    continue
                if outcome != "saved":
                    cache.store.warn(preparation.refusal_from(outcome, MissReason.IO_ERROR))
                    return None
                refusal: Refusal | None = await publisher.publish(compile_ns=time.monotonic_ns() - began_ns)
                if refusal is not None and refusal.reason is not MissReason.SUPERSEDED:
                    return None
                by, refused = "worker", None
            finally:
                await preparation._leave(found, prepared)

    async def through_memory(self) -> Made:
        with _anonymous((await self._devices.get(self._name)).cache_files) as handles:
            outcome = await self._compile(handles)
            if outcome == "saved":
                return Made(await self._load(await self._devices.get(self._name), handles), "worker")
            if outcome != "declined":
                raise CompilationError(f"the artifact of device {self._name!r} could not be stored: {outcome}", reason=outcome)
        return Made(await preparation._compile(await self._devices.get(self._name), self._model, self._options), "driver")

    async def _load(self, serving: RemoteDevice, handles: CacheHandles) -> RemotePreparedModel:
        self._phase("loading")
        with trace.span("stage.load", device=self._name):
            prepared = await serving.prepare_model_from_cache(self._options, preparation.bound(handles, self._model))
            preparation._check_operands(prepared, self._model)
            return prepared

    async def _compile(self, handles: CacheHandles) -> str:
        """Compile in a worker, into those files; what became of the saving."""
        self._phase("compiling")
        with trace.span("stage.compile", device=self._name):
            async with worker(self._devices, self._name, self._threads) as remote:
                options = PrepareOptions(self._options.preference, self._options.priority, None, self._threads)
                await preparation.check_supported(remote, self._model, options)
                prepared = await remote.prepare_model(self._model, options, preparation.bound(handles, self._model))
                return prepared.save_outcome


@asynccontextmanager
async def worker(devices: Devices, name: str, threads: int) -> AsyncIterator[RemoteDevice]:
    """A driver process of that device at the lowest priority, for the body; killed at its end, whatever it does then.

    `threads`: CPUs that it may use; 0: as many as any driver, at the app's priority.
    """
    process: DriverProcess = devices.start_worker(name, threads)
    try:
        yield await process.ready()
    finally:
        # An engine in the middle of a compile hears nothing: there is nothing to wait for, and nothing in it worth keeping.
        process.kill(None)
        with bounded_shield(_END_WORKER_S):
            await process.wait_ended()
        devices.forget_worker(process)


async def version_of(devices: Devices, name: str) -> str | None:
    """The version of a device. If it has no driver yet, one is started to ask it and ended again; None if that does not work."""
    device = devices.find(name)
    if device.version is None:
        try:
            async with worker(devices, name, 0) as remote:
                device.introduced(remote)
        except AionnError as error:
            logger.info("the version of device %r is not known: %s", name, error)
    return device.version


@contextmanager
def _anonymous(files: CacheFiles) -> Iterator[CacheHandles]:
    """Cache files that have no name and go with the last descriptor."""
    fds: list[int] = []
    try:
        for number in range(files.model + files.data):
            fds.append(os.memfd_create(f"aionn-stage-{number}", os.MFD_CLOEXEC))
        yield CacheHandles(tuple(fds[: files.model]), tuple(fds[files.model :]), secrets.token_bytes(CACHE_TOKEN_BYTES))
    finally:
        for fd in fds:
            os.close(fd)
