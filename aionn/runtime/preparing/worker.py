"""The worker: a driver process at the lowest priority that compiles for the driver process that will serve the model.

The worker runs the same program as any driver. It gets SIGKILL when its compile has ended, when its caller's time is over or its caller is
cancelled, and when the app ends. It may then leave an unpublished file, which the cache store sweeps.

`LocalWorker` is the worker as a `CompileBackend`. What it offers has no signed statement, because this machine has no builder's key.
Instead the worker has recorded the digests of the files in this user's state directory, and the serving driver reads these records. So the
serving driver loads these bytes from the worker, and refuses others.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aionn import trace
from aionn.caching.offers import ArtifactRequest, Offered
from aionn.errors import AionnError, CompilationError
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.types import CacheFiles
from aionn.remote.device import RemoteDevice
from aionn.runtime.preparing.compile_acts import bound, check_supported, read
from aionn.runtime.processes.devices import Devices, introduced
from aionn.runtime.processes.process import DriverProcess
from aionn.runtime.record import COMPILING, STARTING, current
from aionn.tasks import bounded_shield

logger = logging.getLogger("aionn.runtime")

_END_WORKER_S = 5.0
"""Seconds to wait for the end of a killed worker."""


class UnsavedError(CompilationError):
    """The worker has compiled the model, but its artifact could not be stored. `reason` is the driver's save outcome."""


class LocalWorker:
    """A worker process of this machine as a `CompileBackend`.

    Attributes:
        wait_s: infinite, because `background.make` bounds the whole call.
    """

    wait_s = math.inf

    def __init__(self, devices: Devices, threads: int, targets: CacheHandles | None = None, expected_s: float | None = None) -> None:
        """Take what one compile needs. No process starts yet.

        Args:
            threads: engine threads of the worker, which gets as many CPUs.
            targets: empty files for the artifact, which their caller closes. The offer has duplicates of the descriptors. None: anonymous
                files (memfd).
            expected_s: seconds that the compile took the last time, if that is known.
        """
        self._devices, self._threads = devices, devices.bounded_threads(threads)
        self._targets, self._expected_s = targets, expected_s

    async def compile(self, request: ArtifactRequest) -> Offered | None:
        """Compile the model in a worker process. Returns None if the device does not cache this model.

        Raises:
            UnsavedError: the artifact could not be stored.
            UnsupportedOperationError: the device cannot run every node.
            CompilationError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError
        """
        began_ns = time.monotonic_ns()
        offered = _anonymous(request.files) if self._targets is None else _duplicates(self._targets)
        try:
            with trace.span("stage.compile", device=request.device, model=current.get().name):
                outcome = await self._saved(request, offered)
            if outcome == "saved":
                offered.compile_ns = time.monotonic_ns() - began_ns
                return offered.taken()
        finally:
            offered.close()
        if outcome == "declined":
            return None
        raise UnsavedError(f"the artifact of device {request.device!r} could not be stored: {outcome}", reason=outcome)

    async def _saved(self, request: ArtifactRequest, target: Offered) -> str:
        """Compile in a worker process, and write the artifact into the files of `target`. Return the driver's save outcome."""
        name, asked = request.device, request.options
        options = PrepareOptions(asked.preference, asked.priority, None, self._threads, options=asked.options)
        handles = bound(CacheHandles(target.model, target.data, request.key), request.model_digest)
        current.get().enter(name, STARTING)
        async with worker(self._devices, name, self._threads) as remote:
            await read(self._devices, request.model, name)
            await check_supported(remote, request.model, options)
            current.get().enter(name, COMPILING, self._expected_s)
            prepared = await remote.prepare_model(request.model, options, handles)
            return prepared.save_outcome


def _anonymous(files: CacheFiles) -> Offered:
    """Return anonymous files for an artifact, open for reading and writing. The system frees them with their last descriptor."""
    fds: list[int] = []
    try:
        for number in range(files.model + files.data):
            fds.append(os.memfd_create(f"aionn-stage-{number}", os.MFD_CLOEXEC))
    except BaseException:
        _close(fds)
        raise
    return Offered(None, fds[: files.model], fds[files.model :])


def _duplicates(handles: CacheHandles) -> Offered:
    fds: list[int] = []
    try:
        for fd in (*handles.model, *handles.data):
            fds.append(os.dup(fd))
    except BaseException:
        _close(fds)
        raise
    return Offered(None, fds[: len(handles.model)], fds[len(handles.model) :])


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@asynccontextmanager
async def worker(devices: Devices, name: str, threads: int) -> AsyncIterator[RemoteDevice]:
    """Run a driver process of a device at the lowest priority, for the body. The process is killed when the body ends.

    Args:
        threads: the number of CPUs for the process. 0 gives the process as many as any driver, and the app's priority.
    """
    process: DriverProcess = devices.start_worker(name, threads)
    try:
        yield await process.ready()
    finally:
        # An engine in the middle of a compile reads no message, and the process holds nothing worth keeping.
        process.kill(None)
        try:
            with bounded_shield(_END_WORKER_S):
                await process.wait_ended()
        finally:
            devices.forget_worker(process)  # also if the task is cancelled while it waits


async def version_of(devices: Devices, name: str) -> str | None:
    """Return the version of a device, or None if its driver cannot be started.

    If the device has had no driver yet, a driver is started and ended again.
    """
    device = devices.find(name)
    if device.version is None:
        try:
            async with worker(devices, name, 0) as remote:
                introduced(device, remote)
        except AionnError as error:
            logger.info("the version of device %r is not known: %s", name, error)
    return device.version
