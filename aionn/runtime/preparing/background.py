"""A better stage is made behind the live stream: compiled by a worker process, loaded by the driver that will serve it.

    stored already         prepare_model_from_cache in the serving driver                    ("cache")
    not stored             a second driver process at the lowest priority compiles it into the cache under the entry's
                           compile lock, is ended, and the serving driver loads it from there ("worker")
    no directory, or it    the same through anonymous files (memfd), which no other process sees ("worker")
    cannot be written to
    device never caches    the device's driver compiles it; the stage that serves is in another process ("driver")

A device without cache files has nothing that could be carried from one process to another, so a worker would not help it. Its
driver compiles at the priority of the app. That priority cannot be lowered for a compile, because an unprivileged process must
not raise it again. The stage that serves runs in another process. The compile does not stop it, but shares the CPUs with it. An
engine whose compiles take long should export its artifacts. Only the engine `reference` does not, and it compiles nothing.

The worker is a driver like any other, with the same verbs. It gets SIGKILL when its time is over, when its caller is cancelled
and when the app ends. It then leaves an unpublished file, which the store sweeps. The serving driver verifies what it loads,
as always.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.caching.store import Declined, Hit
from aionn.errors import AionnError, CompilationError, DeadlineError
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.model import Model
from aionn.hal.types import CACHE_TOKEN_BYTES, CacheFiles
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.preparations import COMPILING, LOADING, LOOKING, STARTING
from aionn.runtime.preparing.cached import (
    CacheChoice,
    bound,
    leave,
    load_files,
    log_refusal,
    open_entry,
    refusal_from,
    refusal_of,
    wanted_of,
    wants_lanes,
)
from aionn.runtime.preparing.compiling import UnsupportedOperationError, check_supported, compile_model, raise_if_unsupported
from aionn.runtime.preparing.partition import prepare_on
from aionn.runtime.preparing.progress import Progress
from aionn.runtime.preparing.reading import digested
from aionn.runtime.processes.devices import Devices
from aionn.runtime.processes.process import DriverProcess
from aionn.runtime.serving.planned_model import Prepared
from aionn.tasks import bounded_shield

logger = logging.getLogger("aionn.runtime")

_END_WORKER_S = 5.0
"""How long to wait for the end of a killed worker."""

_REFUSALS = 2
"""After so many refusals of a stored artifact by the device that stored it, the stage is given up."""


@dataclass(frozen=True, slots=True)
class Made:
    """A prepared model.

    Attributes:
        prepared: in the driver that will serve it.
        by: where it came from: "cache", "worker" or "driver". Of the steps of a plan, that of the slowest way.
    """

    prepared: Prepared
    by: str


async def make(
    devices: Devices,
    names: Sequence[str],
    model: Model,
    options: PrepareOptions,
    cache: CacheChoice | None,
    *,
    threads: int,
    timeout_s: float,
    progress: Progress,
) -> Made:
    """Prepare `model` on the first of these devices without compiling it in the process that will serve it.

    If the device cannot run every node, the model is cut over it and the others, and each step is made in the same way.

    Args:
        threads: the number of threads of the worker.
        timeout_s: for the whole call. A worker that still compiles then is killed.
        progress: where the steps are reported.

    Raises:
        DeadlineError: the call took longer than `timeout_s`.
        CompilationError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError
    """
    ways: set[str] = set()

    async def one(
        name: str, part: Model, options: PrepareOptions, cache: CacheChoice | None, progress: Progress
    ) -> tuple[RemotePreparedModel, CacheOutcome]:
        with progress.on(name) as attempt:
            try:
                prepared, by, missed = await _make(devices, name, part, options, cache, threads, progress)
            except UnsupportedOperationError:
                attempt.unfit = True
                raise
            attempt.outcome = missed or CacheOutcome(CacheOutcomeKind.HIT if by == "cache" else CacheOutcomeKind.NO_CACHE, None, name)
        ways.add(by)
        return prepared, attempt.outcome

    with anyio.move_on_after(timeout_s):
        prepared, outcomes = await prepare_on(devices, names, model, options, cache, progress, one)
        progress.prepared(outcomes)
        return Made(prepared, max(ways, key=("cache", "worker", "driver").index))
    raise DeadlineError(f"device {names[0]!r} did not make the stage within {timeout_s} s; the process that still compiled it was killed")


async def _make(
    devices: Devices,
    name: str,
    model: Model,
    options: PrepareOptions,
    cache: CacheChoice | None,
    threads: int,
    progress: Progress,
) -> tuple[RemotePreparedModel, str, CacheOutcome | None]:
    """Make a model that one device runs whole, or one step. Returns also where it came from, and the first look's miss."""
    with devices.kept(name, options.priority):
        await digested(devices.tasks, model)
        serving = await progress.driver(devices, name, options.priority)
        if not serving.cache_files.supported:
            return await compile_model(devices.tasks, serving, model, options, progress), "driver", None
        making = _Making(devices, name, model, options, threads, progress)
        if cache is not None:
            made = await making.through_cache(cache)
            if made is not None:
                return *made, making.missed
        return *await making.through_memory(), making.missed


class _Making:
    """The ways in which one model is prepared behind the stream.

    Attributes:
        missed: what the cache said when it was asked first, if it missed.
    """

    def __init__(self, devices: Devices, name: str, model: Model, options: PrepareOptions, threads: int, progress: Progress) -> None:
        self._devices = devices
        self._name = name
        self._model = model
        self._options = options
        self._threads = devices.bounded_threads(threads)
        self._progress = progress
        self.missed: CacheOutcome | None = None

    async def _serving(self) -> RemoteDevice:
        return await self._progress.driver(self._devices, self._name, self._options.priority)

    async def through_cache(self, cache: CacheChoice) -> tuple[RemotePreparedModel, str] | None:
        """Prepare the model through the cache. Returns None if the cache did not store the worker's artifact."""
        by, refused, refusals = "cache", None, 0
        while True:
            serving = await self._serving()
            wanted = wanted_of(serving, self._model, self._options, cache)
            # A hit shares the entry with every reader. A miss holds its compile lock, so that no other process compiles the model.
            self._progress.step(self._name, LOOKING)
            found = await open_entry(cache.store, wanted, refused, cache.store.wait_s, self._progress)
            prepared: RemotePreparedModel | None = None
            try:
                if isinstance(found, Hit):
                    try:
                        prepared = await self._load(serving, bound(found.handles, found.manifest.model_digest))
                        return prepared, by
                    except AionnError as error:
                        refusals += 1
                        if refusals >= _REFUSALS or wants_lanes(error):
                            raise
                        refused = found, refusal_of(error)
                        log_refusal(cache.store, serving, refused[1], error, self._progress)
                        continue
                if isinstance(found, Declined):
                    raise_if_unsupported(serving, self._model, found)
                    prepared = await compile_model(self._devices.tasks, serving, self._model, self._options, self._progress)
                    return prepared, "driver"
                if self.missed is None and found.outcome.reason is not None:
                    self.missed = found.outcome
                    if refused is None:
                        self._progress.refused(cache.store.path, self._name, Refusal(found.outcome.reason, found.outcome.detail))
                publisher = found.publisher
                if publisher is None:
                    if found.outcome.reason is MissReason.BUSY:
                        continue  # another process still compiles it; `make` bounds the wait
                    return None
                began_ns = time.monotonic_ns()
                outcome = await self._compile(publisher.handles, publisher.last_compile_s)
                if outcome == "declined":
                    await publisher.decline("the device does not cache this model")
                    continue
                if outcome != "saved":
                    unsaved = refusal_from(outcome, MissReason.IO_ERROR)
                    cache.store.warn(unsaved)
                    self._progress.refused(cache.store.path, self._name, unsaved)
                    return None
                refusal: Refusal | None = await publisher.publish(compile_ns=time.monotonic_ns() - began_ns)
                self._progress.refused(cache.store.path, self._name, refusal)
                if refusal is not None and refusal.reason is not MissReason.SUPERSEDED:
                    return None
                by, refused = "worker", None
            finally:
                await leave(found, prepared)

    async def through_memory(self) -> tuple[RemotePreparedModel, str]:
        """Prepare the model through anonymous files."""
        with _anonymous((await self._serving()).cache_files) as handles:
            outcome = await self._compile(handles)
            if outcome == "saved":
                return await self._load(await self._serving(), bound(handles, self._model.token)), "worker"
            if outcome != "declined":
                raise CompilationError(f"the artifact of device {self._name!r} could not be stored: {outcome}", reason=outcome)
        return await compile_model(self._devices.tasks, await self._serving(), self._model, self._options, self._progress), "driver"

    async def _load(self, serving: RemoteDevice, handles: CacheHandles) -> RemotePreparedModel:
        self._progress.step(self._name, LOADING)
        with trace.span("stage.load", device=self._name, model=self._progress.model):
            return await load_files(serving, self._model, self._options, handles)

    async def _compile(self, handles: CacheHandles, expected_s: float | None = None) -> str:
        """Compile in a worker, into those files. Returns the save outcome. `expected_s`: what it took the last time, if known."""
        with trace.span("stage.compile", device=self._name, model=self._progress.model):
            self._progress.step(self._name, STARTING)
            async with worker(self._devices, self._name, self._threads) as remote:
                options = PrepareOptions(
                    self._options.preference, self._options.priority, None, self._threads, options=self._options.options
                )
                await check_supported(self._devices.tasks, remote, self._model, options, self._progress)
                self._progress.step(self._name, COMPILING, expected_s)
                prepared = await remote.prepare_model(self._model, options, bound(handles, self._model.token))
                return prepared.save_outcome


@asynccontextmanager
async def worker(devices: Devices, name: str, threads: int) -> AsyncIterator[RemoteDevice]:
    """Run a driver process of that device at the lowest priority, for the body. It is killed when the body ends.

    Args:
        threads: the number of CPUs for the process. 0 gives the process as many as any driver, and the app's priority.
    """
    process: DriverProcess = devices.start_worker(name, threads)
    try:
        yield await process.ready()
    finally:
        # An engine in the middle of a compile reads no message, and the process holds nothing worth keeping.
        process.kill(None)
        with bounded_shield(_END_WORKER_S):
            await process.wait_ended()
        devices.forget_worker(process)


async def version_of(devices: Devices, name: str) -> str | None:
    """Return the version of a device, or None if its driver cannot be started.

    If the device has had no driver yet, a driver is started and ended again.
    """
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
    """Make cache files without names. The system frees them with their last descriptor."""
    fds: list[int] = []
    try:
        for number in range(files.model + files.data):
            fds.append(os.memfd_create(f"aionn-stage-{number}", os.MFD_CLOEXEC))
        yield CacheHandles(tuple(fds[: files.model]), tuple(fds[files.model :]), secrets.token_bytes(CACHE_TOKEN_BYTES))
    finally:
        for fd in fds:
            os.close(fd)
