"""A model is compiled on a device, and its cache entry is published.

A save that fails does not fail the compile: the failure is `outcome.save_failure`. The cache also remembers which models a
device cannot run at all (`_UNSUPPORTED`), so a second start need not ask the device again.

Storing ends in time for the caller's answer. The publishing of an entry goes on after a caller's deadline.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import msgspec

from aionn import trace
from aionn.caching import CacheOutcome, MissReason, Refusal, Wanted
from aionn.caching.store import CacheStore, Declined, Miss, Publisher
from aionn.errors import CallerError, CompilationError
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import OPAQUE, Model, Operation
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.model import check_compiled, is_read
from aionn.runtime.preparations import ASKING, COMPILING, READING
from aionn.runtime.preparing.cached import bound, refusal_from
from aionn.runtime.preparing.in_time import in_time
from aionn.runtime.preparing.progress import Progress
from aionn.runtime.preparing.reading import digested, read, unread
from aionn.runtime.preparing.step_model import StepModel
from aionn.runtime.processes.devices import Devices
from aionn.tasks import Tasks, seconds_until

_UNSUPPORTED = "cannot run "

_PUBLISH_SHARE = 0.8
"""The share of the time that is left after compiling, for which the caller waits for the entry to be published."""


class Missed(msgspec.Struct):
    """A model that the cache does not have on a device, and all that its compile needs.

    Attributes:
        remote: the live device.
        wanted: the entry that is missing.
        miss: what the cache said. Its publisher, if there is one, has the right to store the entry.
        store: the cache, or None without a cache directory.
    """

    devices: Devices
    remote: RemoteDevice
    model: Model
    options: PrepareOptions
    wanted: Wanted
    miss: Miss
    store: CacheStore | None
    progress: Progress


class UnsupportedOperationError(CompilationError):
    """The device cannot run a node; another device may.

    Attributes:
        device: its name.
        supported: for each operation whether the device can run it, or None if a cache remembered that it cannot run them all.
    """

    def __init__(self, device: str, reason: str, *, node: str | None = None, supported: Sequence[bool] | None = None) -> None:
        super().__init__(f"device {device!r} {reason}", node=node, reason=reason)
        self.device = device
        self.supported = supported


async def supported_by(tasks: Tasks, remote: RemoteDevice, model: Model, options: PrepareOptions, progress: Progress) -> Sequence[bool]:
    """Read the model if it has not been read, and return for each operation whether the device can run it.

    Raises:
        CallerError, CompilationError: the model's file is broken, or has changed.
    """
    if unread(model):
        progress.step(remote.name, READING)
    await read(tasks, model)
    progress.step(remote.name, ASKING)
    with trace.span("plan.supported_operations", device=remote.name):
        return await remote.get_supported_operations(model, options.deadline_ns, options=options.of(remote.name))


async def check_supported(tasks: Tasks, remote: RemoteDevice, model: Model, options: PrepareOptions, progress: Progress) -> None:
    """Ask the device whether it can run every node.

    Raises: as `supported_by`, and
        UnsupportedOperationError: the first node that the device cannot run is `.node`.
    """
    supported = await supported_by(tasks, remote, model, options, progress)
    for operation, fits in zip(model.operations, supported, strict=True):
        if not fits:
            raise UnsupportedOperationError(remote.name, f"{_UNSUPPORTED}{_described(operation)}", node=operation.name, supported=supported)


def raise_if_unsupported(remote: RemoteDevice, model: Model, declined: Declined) -> None:
    """Raise `UnsupportedOperationError` if the cache remembers that the device cannot run the model. A model that is not read stays so."""
    what = declined.outcome.detail
    if what.startswith(_UNSUPPORTED):
        raise UnsupportedOperationError(remote.name, what, node=node_of(model, what) if is_read(model) else None)


def node_of(model: Model, reason: str) -> str | None:
    """Return the node that the reason of an `UnsupportedOperationError` is about. The model is read."""
    return next((operation.name for operation in model.operations if reason == f"{_UNSUPPORTED}{_described(operation)}"), None)


def _described(operation: Operation) -> str:
    if operation.op_type == OPAQUE:
        return f"a model of the format {operation.domain!r}"
    return f"operator {operation.domain or 'ai.onnx'}.{operation.op_type} (node {operation.name!r})"


async def compile_model(
    tasks: Tasks, remote: RemoteDevice, model: Model, options: PrepareOptions, progress: Progress
) -> RemotePreparedModel:
    """Compile a model on a device, without a cache.

    Raises:
        CallerError: the weights of a loaded model are others than before.
        UnsupportedOperationError: the device cannot run every node.
        CompilationError, DeadlineError, DriverDiedError, DriverHungError, MemoryAllocationError
    """
    await check_supported(tasks, remote, model, options, progress)
    progress.step(remote.name, COMPILING)
    with trace.span("prepare", device=remote.name, model=progress.model):
        prepared = await remote.prepare_model(model, options)
    try:
        if isinstance(model, StepModel):
            model.check_compiled(prepared.contents)
        else:
            check_compiled(model, prepared.contents)
    except CallerError:
        prepared.release()
        raise
    return prepared


async def compile_and_publish(missed: Missed) -> tuple[RemotePreparedModel, CacheOutcome]:
    """Compile a model on a device, and publish its entry if the miss has a publisher.

    Raises: as `compile_model`.
    """
    tasks, remote, model, options, progress = missed.devices.tasks, missed.remote, missed.model, missed.options, missed.progress
    miss, store = missed.miss, missed.store
    publisher = miss.publisher
    if publisher is None or store is None:
        return await compile_model(tasks, remote, model, options, progress), miss.outcome
    # The digest first, so that what is read is compared with it.
    publisher.wanted = dataclasses.replace(publisher.wanted, model_digest=await digested(tasks, model))
    try:
        await check_supported(tasks, remote, model, options, progress)
    except UnsupportedOperationError as error:
        await publisher.decline(error.reason)
        raise
    progress.step(remote.name, COMPILING, publisher.last_compile_s)
    began_ns = time.monotonic_ns()
    with trace.span("prepare", device=remote.name, model=progress.model):
        prepared = await remote.prepare_model(model, options, bound(publisher.handles, model.token))
    took_ns = time.monotonic_ns() - began_ns
    if prepared.save_outcome not in ("saved", "declined"):
        failure: Refusal | None = refusal_from(prepared.save_outcome, MissReason.IO_ERROR)
    else:
        miss.publisher = None  # publishing closes the publisher
        try:
            failure = await _publish(tasks, store, publisher, prepared.save_outcome == "declined", took_ns, options)
        except BaseException:
            prepared.release()  # the caller gets no model
            raise
    if failure is not None:
        store.warn(failure)
    return prepared, dataclasses.replace(miss.outcome, save_failure=failure)


async def _publish(
    tasks: Tasks, store: CacheStore, publisher: Publisher, declined: bool, compile_ns: int, options: PrepareOptions
) -> Refusal | None:
    """Publish an entry. Returns why the entry was not stored, or None.

    Publishing goes on in the background if the deadline comes before the disk is done.
    """

    async def publish() -> tuple[Refusal | None]:
        with store.in_use():
            if declined:
                return (await publisher.decline("the device does not cache this model"),)
            return (await publisher.publish(compile_ns=compile_ns),)

    left_s = seconds_until(options.deadline_ns)
    if left_s is None:
        return (await publish())[0]
    published = await in_time(tasks, publish, left_s * _PUBLISH_SHARE, None)
    return published[0] if published is not None else Refusal(MissReason.TOO_SLOW, "it is still being stored at the deadline")
