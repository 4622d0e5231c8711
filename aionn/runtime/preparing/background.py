"""Make a better stage while another one serves: another process compiles it, and the driver that will serve it loads it.

The words at the end of a line are `Made.by`.

    in the cache           the serving driver loads the entry: "cache"
    not in the cache       a compile backend is asked, if there is one. The serving driver adopts what the backend offers, which is then
                           published: "backend"
                           otherwise a worker (`LocalWorker`) compiles it into the cache, under the entry's compile lock. The serving driver
                           loads the files, which are then published: "worker"
    no directory, or it    the same through anonymous files (memfd), which no other process sees: "worker"
    cannot be written to
    device never caches    the device's driver compiles it, while the stage that serves is in another process: "driver"

A device without cache files has nothing that could be carried from one process to another, so neither a backend nor a worker would help it.
Its driver compiles at the priority of the app. That priority cannot be lowered for a compile, because an unprivileged process must not
raise it again. The stage that serves runs in another process. The compile does not stop it, but shares the CPUs with it. An engine whose
compiles take long should export its artifacts. Only the engine `reference` does not, and it compiles nothing.

The backend and the worker are `CompileBackend`s. `adopting.Adoption` has the serving driver load what either offers, and the driver
verifies what it loads, as always. It loads before the entry is published, so a disk that is full costs the entry and not a second compile.

The worker is a driver process at the lowest priority that compiles for the driver process that will serve the model. It runs the same
program as any driver. It gets SIGKILL when its compile has ended, when its caller's time is over or its caller is cancelled, and when the
app ends. It may then leave an unpublished file, which the cache store sweeps.

`LocalWorker` is the worker as a `CompileBackend`. What it offers has no signed statement, because this machine has no builder's key.
Instead the worker has recorded the digests of the files in this user's state directory, and the serving driver reads these records. So the
serving driver loads these bytes from the worker, and refuses others.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

import anyio
import msgspec

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.caching.offers import ArtifactRequest, CompileBackend, Offered
from aionn.caching.store import Declined, Hit, Miss
from aionn.errors import AionnError, CompilationError, DeadlineError
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.types import CACHE_TOKEN_BYTES, CacheFiles
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.preparing.adopting import Adoption, NotTaken, offered_instead, request_of
from aionn.runtime.preparing.compile_acts import (
    CacheChoice,
    CompileRequest,
    Missed,
    UnsupportedOperationError,
    bound,
    check_supported,
    compile_model,
    digested,
    leave,
    load_files,
    log_refusal,
    note_miss,
    open_entry,
    raise_if_unsupported,
    read,
    refusal_from,
    refusal_of,
    wanted_of,
    wants_lanes,
)
from aionn.runtime.preparing.partition import prepare_on
from aionn.runtime.processes.devices import Devices, introduced
from aionn.runtime.processes.process import DriverProcess
from aionn.runtime.record import COMPILING, LOADING, LOOKING, STARTING, current
from aionn.runtime.serving.planned_model import Prepared
from aionn.tasks import bounded_shield

_REFUSALS = 2
"""The stage is given up after the device has refused so many artifacts that it has stored itself."""

_BACKEND_SHARE = 0.5
"""A compile backend may take this share of the time that is left. The rest is for the worker."""


def _ignore_reason(reason: str) -> None:
    """Ignore the reason, as a caller does that shows no stage."""


@dataclass(frozen=True, slots=True)
class Effort:
    """At what cost a model is prepared while another stage serves.

    Attributes:
        threads: the number of engine threads, and of CPUs, of the worker.
        timeout_s: seconds for the whole call. A worker that still compiles then is killed.
        backend: is asked before the worker compiles. None: the runtime's backend, if it has one.
        compiles_here: called with the reason if the worker compiles although a backend could be asked.
    """

    threads: int
    timeout_s: float
    backend: CompileBackend | None = None
    compiles_here: Callable[[str], None] = _ignore_reason


@dataclass(frozen=True, slots=True)
class Made:
    """A prepared model.

    Attributes:
        prepared: in the driver that will serve it.
        by: where it came from: "cache", "backend", "worker" or "driver". For a plan of several steps, the last of these that a step has.
        not_kept: why the cache does not keep it, as `CacheOutcome.not_kept`.
    """

    prepared: Prepared
    by: str
    not_kept: Refusal | None


_WAYS = ("cache", "backend", "worker", "driver")
_Way = tuple[RemotePreparedModel, str, CacheOutcome]
"""One model or step, where it came from, and the outcome that is shown."""


async def make(devices: Devices, names: Sequence[str], request: CompileRequest, effort: Effort) -> Made:
    """Prepare a model on the first of these devices without compiling it in the process that will serve it.

    If the device cannot run every node, the model is cut over it and the others, and each step is made in the same way. Call it in the
    `with` block of a `Progress`.

    Raises:
        DeadlineError: the call took longer than `effort.timeout_s`.
        CompilationError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError
    """
    ways: set[str] = set()
    ends_s = anyio.current_time() + effort.timeout_s

    async def one(name: str, request: CompileRequest) -> tuple[RemotePreparedModel, CacheOutcome]:
        with current.get().on(name) as attempt, devices.kept(name, request.options.priority):
            making = _Making(devices, name, request, effort, ends_s)
            try:
                prepared, by, outcome = await making.make()
            except UnsupportedOperationError:
                attempt.unfit = True
                raise
            attempt.outcome = outcome
        ways.add(by)
        return prepared, outcome

    with anyio.move_on_after(effort.timeout_s):
        prepared, outcomes = await prepare_on(devices, names, request, one)
        current.get().outcomes = outcomes
        not_kept = next((outcome.not_kept for outcome in outcomes if outcome.not_kept is not None), None)
        return Made(prepared, max(ways, key=_WAYS.index), not_kept)
    raise DeadlineError(
        f"device {names[0]!r} did not make the stage within {effort.timeout_s} s; the process that still compiled it was killed"
    )


class _Next(Enum):
    """What a miss may ask for."""

    AGAIN = "look into the cache again"


class _Making:
    """The ways in which one model, or one step, is prepared behind the stream on one device."""

    def __init__(self, devices: Devices, name: str, request: CompileRequest, effort: Effort, ends_s: float) -> None:
        """`ends_s`: when the time is over, on anyio's clock."""
        self._devices = devices
        self._name = name
        self._request = request
        self._model, self._options = request.model, request.options
        self._effort = effort
        self._ends_s = ends_s
        self._backend = effort.backend if effort.backend is not None else devices.backend
        self._first_miss: CacheOutcome | None = None

    async def make(self) -> _Way:
        """Prepare the model in one of the ways."""
        cache = self._request.cache
        await digested(self._devices, self._model)
        serving = await self._serving()
        if not serving.cache_files.supported:
            return await self._in_driver(serving)
        made = None if cache is None else await self._through_cache(cache)
        return made if made is not None else await self._through_memory()

    async def _serving(self) -> RemoteDevice:
        return await self._devices.get(self._name, self._options.priority)

    async def _in_driver(self, serving: RemoteDevice) -> _Way:
        return self._way(await compile_model(self._devices, serving, self._request), "driver")

    def _way(self, prepared: RemotePreparedModel, by: str) -> _Way:
        kind = CacheOutcomeKind.HIT if by == "cache" else CacheOutcomeKind.NO_CACHE
        return prepared, by, self._first_miss or CacheOutcome(kind, None, self._name)

    async def _through_cache(self, cache: CacheChoice) -> _Way | None:
        """Prepare the model through the cache. Returns None if the cache cannot store the worker's artifact."""
        bad: tuple[Hit, Refusal] | None = None
        refusals = 0
        while True:
            serving = await self._serving()
            wanted = wanted_of(serving, self._request, cache.token, cache.operations)
            # A hit shares the entry with every reader. A miss holds its compile lock, so that no other process compiles the model.
            current.get().enter(self._name, LOOKING)
            found = await open_entry(cache.store, wanted, bad, cache.store.wait_s)
            made: _Way | None = None
            try:
                if isinstance(found, Declined):
                    raise_if_unsupported(serving, self._model, found)
                    made = await self._in_driver(serving)
                    return made
                if isinstance(found, Hit):
                    load = partial(self._stored, serving, found)
                else:
                    self._note_miss(cache, found, bad)
                    missed = Missed(self._devices, serving, self._request, wanted, found, cache.store)
                    ready = await self._artifact(missed)
                    if ready is _Next.AGAIN:
                        continue
                    if not isinstance(ready, Offered):
                        made = ready
                        return made
                    load = partial(self._loaded, missed, ready)
                try:
                    made = await load()
                    return made
                except AionnError as error:
                    refusals += 1
                    if refusals >= _REFUSALS or wants_lanes(error):
                        raise
                    refusal = refusal_of(error)
                    bad = (found, refusal) if isinstance(found, Hit) else None
                    log_refusal(cache.store, serving, refusal, error)
            finally:
                await leave(found, None if made is None else made[0])

    def _note_miss(self, cache: CacheChoice, found: Miss, bad: tuple[Hit, Refusal] | None) -> None:
        """Keep the first miss, which is the outcome that is shown."""
        if self._first_miss is None and found.outcome.reason is not None:
            self._first_miss = found.outcome
            if bad is None:
                note_miss(cache.store, found.outcome)

    async def _artifact(self, missed: Missed) -> _Way | Offered | _Next | None:
        """End a miss of the cache.

        Returns:
            The model as a backend has compiled it; or the artifact of the worker, in the publisher's files; or AGAIN if the cache has to be
            asked again; or None if the cache cannot store the worker's artifact.
        """
        publisher = missed.miss.publisher
        if publisher is None and missed.miss.outcome.reason is MissReason.BUSY:
            return _Next.AGAIN  # another process still compiles it; `make` bounds the wait
        made = await self._from_backend(missed)
        if made is not None or publisher is None:
            return made
        if missed.remote.connection.ended_by is not None:  # the offer ended the driver, and the next one may have another version
            return _Next.AGAIN
        try:
            offered = await self._from_worker(missed, publisher.handles, publisher.last_compile_s)
        except UnsavedError as error:
            self._not_kept(missed, refusal_from(error.reason, MissReason.IO_ERROR))
            return None
        if offered is None:
            await publisher.decline("the device does not cache this model")
            return _Next.AGAIN
        return offered

    async def _through_memory(self) -> _Way:
        """Prepare the model without a cache."""
        serving = await self._serving()
        nothing = Miss(CacheOutcome(CacheOutcomeKind.NO_CACHE, None, self._name), None)
        wanted = wanted_of(serving, self._request, self._model.token, None)
        missed = Missed(self._devices, serving, self._request, wanted, nothing, None)
        made = await self._from_backend(missed)
        if made is not None:
            return made
        # A key that no other process has: a driver keeps few records of one key, and other processes may compile the same model.
        missed.wanted = msgspec.structs.replace(wanted, key=os.urandom(CACHE_TOKEN_BYTES))
        offered = await self._from_worker(missed)
        if offered is None:
            return await self._in_driver(await self._serving())
        return await self._loaded(missed, offered)

    # --- backends ------------------------------------------------------------------------------------------------------------

    async def _from_backend(self, missed: Missed) -> _Way | None:
        """Take the model from the backend, which is asked once. Returns None if the worker has to compile it."""
        backend, self._backend = self._backend, None
        if backend is None:
            return None
        most_s = max(0.0, self._ends_s - anyio.current_time()) * _BACKEND_SHARE
        found = await offered_instead(missed, backend, most_s)
        if isinstance(found, NotTaken):
            self._effort.compiles_here(found.reason)
            if found.refusal is not None and missed.store is not None:
                current.get().refused(missed.store.path, self._name, found.refusal)
            return None
        prepared, outcome = found
        self._not_kept(missed, outcome.save_failure)
        return prepared, "backend", outcome

    async def _from_worker(self, missed: Missed, targets: CacheHandles | None = None, expected_s: float | None = None) -> Offered | None:
        """Have the worker compile the model. Arguments and result are as for `LocalWorker`."""
        local: CompileBackend = LocalWorker(self._devices, self._effort.threads, targets, expected_s)
        return await local.compile(request_of(missed, self._model.token))

    # --- loading -------------------------------------------------------------------------------------------------------------

    async def _stored(self, serving: RemoteDevice, hit: Hit) -> _Way:
        """Load an entry of the cache."""
        with self._loading():
            return self._way(await load_files(serving, self._request, hit), "cache")

    async def _loaded(self, missed: Missed, offered: Offered) -> _Way:
        """Load the worker's artifact, then publish it if there is a publisher. Closes `offered`."""
        with offered:
            serving = await self._serving()  # which may have ended while the worker compiled
            wanted = msgspec.structs.replace(missed.wanted, model_digest=self._model.token)
            adoption = Adoption(self._devices, missed.store, serving, self._options, wanted)
            with self._loading():
                prepared = await adoption.load(offered, self._model)
            outcome = await adoption.keep(prepared, offered, missed.miss)
        self._not_kept(missed, outcome.save_failure)
        return self._way(prepared, "worker")

    @contextmanager
    def _loading(self) -> Iterator[None]:
        current.get().enter(self._name, LOADING)
        with trace.span("stage.load", device=self._name, model=current.get().name):
            yield

    def _not_kept(self, missed: Missed, failure: Refusal | None) -> None:
        """Report why the cache does not have an artifact, if it does not."""
        if failure is not None and missed.store is not None:
            if self._first_miss is not None:
                self._first_miss = msgspec.structs.replace(self._first_miss, save_failure=failure)
            missed.store.warn(failure)
            current.get().refused(missed.store.path, self._name, failure)


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
        options = PrepareOptions(asked.preference, asked.priority, None, self._threads, options=asked.options, batching=asked.batching)
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
    process: DriverProcess = await devices.start_worker(name, threads)
    try:
        yield await process.ready()
    finally:
        # An engine in the middle of a compile reads no message, and the process holds nothing worth keeping.
        process.send_sigkill(None)
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
