"""One model on one device: from the cache if it can be, compiled if it must be; with the outcome as a value.

    NO_CACHE  no directory was given, or the device does not cache        prepare_model(model)
    HIT       the store gave files, the driver took them                  prepare_model_from_cache(handles): the model is not sent
    MISS      nothing there, or refused: by the store or by the driver    prepare_model(model, handles), then the entry is published
    DECLINED  remembered: the device does not cache this model            prepare_model(model)

Whatever goes wrong on the way of a HIT is a refusal, and the model is compiled; a driver that dies over cached contents too:
by a new one. A failed save never fails the compile: it is `outcome.save_failure`. What a device cannot run at all is
remembered too (`_UNSUPPORTED`), so that a second start need not ask it again.

Which model it is. The token that names an entry is the app's claim. The one that drivers get, and keep digests under, is made
of the entry's key and the model's own digest (`bound`): an artifact of another model is unknown to the driver, whatever stands
in the directory or in the app's token.

Deadlines. A cache must leave the compiler its time: looking the entry up (another compiler may be waited for) ends after half
of what is left, and so does loading it, unless compiling it took longer than that last time. Storing ends in time for the
answer; an entry that is still being published then goes on behind the caller's back.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import anyio
from blake3 import blake3

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, KeyParts, MissReason, Refusal, Wanted, encoded_keys
from aionn.caching.store import CacheStore, Declined, Hit, Miss, Publisher
from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError, DriverDiedError, DriverHungError
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.model import Model, Operation
from aionn.hal.types import MAX_CACHE_FILES
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.processes.devices import Devices
from aionn.tasks import Answer, Tasks, running_loop

logger = logging.getLogger("aionn.runtime")

T = TypeVar("T")
_Opened = Hit | Miss | Declined

_UNSUPPORTED = "cannot run "
_CACHE_SHARE = 0.5
"""Of the time that is left, what the cache may take before the compiler gets the rest."""

_PUBLISH_SHARE = 0.8
"""Of the time that is left after compiling, how long the caller waits for the entry to be published."""


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """Where an app wants a compilation kept, and under which token of its own (32 bytes)."""

    store: CacheStore
    token: bytes


class UnsupportedOperationError(CompilationError):
    """The device cannot run a node; another device may."""


async def prepare(
    devices: Devices, name: str, model: Model, options: PrepareOptions, cache: CacheChoice | None
) -> tuple[RemotePreparedModel, CacheOutcome]:
    """Prepare `model` on the device of that name. The outcome is counted as "compile.cache", with kind, reason and device.

    Raises:
        UnsupportedOperationError: the device cannot run every node.
        CompilationError, DeadlineError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError
    """
    with nullcontext() if cache is None else cache.store.in_use():
        prepared, outcome = await _prepare(devices, name, model, options, cache)
    reason = outcome.reason.value if outcome.reason is not None else ""
    trace.count("compile.cache", kind=outcome.kind.value, reason=reason, detail=outcome.detail, device=name)
    if outcome.save_failure is not None:
        trace.count("compile.save_failed", reason=outcome.save_failure.reason.value, detail=outcome.save_failure.detail, device=name)
    return prepared, outcome


async def _prepare(
    devices: Devices, name: str, model: Model, options: PrepareOptions, cache: CacheChoice | None
) -> tuple[RemotePreparedModel, CacheOutcome]:
    remote = await devices.get(name)
    if cache is None:
        return await _compile(remote, model, options), CacheOutcome(CacheOutcomeKind.NO_CACHE, None, name)
    refused: tuple[Hit, Refusal] | None = None
    while True:
        if not remote.cache_files.supported:
            return await _compile(remote, model, options), CacheOutcome(CacheOutcomeKind.NO_CACHE, None, name, _why_not(remote))
        wanted = _wanted(remote, model, options, cache.token)
        found = await _open(devices, cache.store, wanted, options, refused)
        prepared: RemotePreparedModel | None = None
        outcome = found.outcome
        try:
            if isinstance(found, Miss):
                prepared, outcome = await _compile_and_publish(devices._tasks, remote, model, options, found, cache.store)
            elif isinstance(found, Declined):
                _raise_if_unsupported(remote, model, found)
                prepared = await _compile(remote, model, options)
            else:
                try:
                    prepared = await _load(remote, model, options, found)
                except AionnError as error:
                    # What the deadline of the whole ends is the caller's; so is a runtime that closes.
                    if _left_s(options) == 0.0 or devices.closed:
                        raise
                    refused = found, _refusal_of(error)
                    _tell_refusal(cache.store, remote, refused[1], error)
        finally:
            await _leave(found, prepared)
        if prepared is not None:
            return prepared, outcome
        # The driver may have ended over it, and the next one may be of another version: it is asked, and looked up, anew.
        remote = await devices.get(name)


async def _leave(found: _Opened, prepared: RemotePreparedModel | None) -> None:
    """Done with the entry. Who is cancelled meanwhile gets no model, so it is released."""
    try:
        if isinstance(found, Hit) and prepared is not None:
            found.leave()
        else:
            await found.aclose()
    except BaseException:
        if prepared is not None:
            prepared.release()
        raise


def bound(handles: CacheHandles, model: Model) -> CacheHandles:
    """The same files under the token that a device knows them by: the entry's key and this model's digest in one."""
    both = blake3(handles.token + model.token, derive_key_context="aionn 1 cache entry and model")
    return dataclasses.replace(handles, token=both.digest())


def _wanted(remote: RemoteDevice, model: Model, options: PrepareOptions, token: bytes) -> Wanted:
    parts = KeyParts(
        app_token=token,
        device=remote.name,
        device_version=remote.version,
        preference=options.preference,
        priority=options.priority if remote.priority_matters else None,
    )
    encoded, key, family = encoded_keys(parts)
    return Wanted(key, family, remote.name, remote.version, model.token, remote.cache_files, encoded)


def _why_not(remote: RemoteDevice) -> str:
    files = remote.cache_files
    if 0 <= max(files.model, files.data) <= MAX_CACHE_FILES:
        return "the device does not cache"
    detail = f"the device asks for {files.model} and {files.data} files, at most {MAX_CACHE_FILES} are given"
    logger.warning("no cache for device %r: %s", remote.name, detail)
    return detail


# --- looking up and loading ------------------------------------------------------------------------------------------


async def _open(
    devices: Devices, store: CacheStore, wanted: Wanted, options: PrepareOptions, refused: tuple[Hit, Refusal] | None
) -> _Opened:
    left_s = _left_s(options)
    patience_s = None if left_s is None else left_s * _CACHE_SHARE
    give_up_ns = None if patience_s is None else time.monotonic_ns() + int(patience_s * 1e9)
    if refused is None:
        there = await _glance(store, wanted, patience_s)
        if there is not None:
            return there
        devices.check_open()
    more_s = None if give_up_ns is None else (give_up_ns - time.monotonic_ns()) / 1e9
    if more_s is None or more_s > 0:
        # A little less for waiting, so that a store in good health says BUSY itself.
        wait_s = store.wait_s if more_s is None else min(store.wait_s, more_s * 0.9)
        found = await _in_time(devices._tasks, lambda: _open_refused(store, wanted, refused, wait_s), more_s, _give_back)
        if found is not None:
            return found
    assert patience_s is not None  # without a deadline nothing is given up
    slow = Refusal(MissReason.TOO_SLOW, f"the cache directory did not answer within {patience_s:.3f} s of the deadline")
    store.warn(slow)
    missed = CacheOutcome(CacheOutcomeKind.MISS, slow.reason, wanted.device, slow.detail, wanted.key, patience_s, save_failure=slow)
    return Miss(missed, None)


async def _glance(store: CacheStore, wanted: Wanted, seconds: float | None) -> Hit | Declined | None:
    # The usual case, a whole entry that nobody is publishing, without `_in_time` and its task.
    if seconds is None:
        return await store.glance(wanted)
    with anyio.move_on_after(seconds):
        return await store.glance(wanted)
    return None


async def _open_refused(store: CacheStore, wanted: Wanted, refused: tuple[Hit, Refusal] | None, wait_s: float) -> _Opened:
    with store.in_use():  # whoever waits for this may leave before it ends
        if refused is None:
            return await store.open(wanted, wait_s=wait_s)
        hit, refusal = refused
        if hit.manifest.key == wanted.key:
            return await hit.refuse(refusal, wait_s=wait_s)
        return await store.open(wanted, wait_s=wait_s)


async def _load(remote: RemoteDevice, model: Model, options: PrepareOptions, hit: Hit) -> RemotePreparedModel:
    left_s = _left_s(options)
    if left_s is not None and hit.outcome.saved_s <= left_s * _CACHE_SHARE:
        options = dataclasses.replace(options, deadline_ns=time.monotonic_ns() + int(left_s * _CACHE_SHARE * 1e9))
    with trace.span("prepare.from_cache", device=remote.name):
        prepared = await remote.prepare_model_from_cache(options, bound(hit.handles, model))
    _check_operands(prepared, model)
    return prepared


def _check_operands(prepared: RemotePreparedModel, model: Model) -> None:
    """What came out of the cache must be this model's, in this order, whatever a device says that it has loaded."""
    if list(prepared.inputs.items()) != list(model.inputs.items()) or list(prepared.outputs.items()) != list(model.outputs.items()):
        prepared.release()
        raise CompilationError(
            "the cached compilation has other inputs or outputs than the model",
            reason=str(Refusal(MissReason.OTHER_MODEL, "its inputs or outputs are not this model's")),
        )


def refusal_from(told: str, otherwise: MissReason) -> Refusal:
    """A refusal as a driver words it ("reason: detail"), back as a value."""
    word, _, detail = told.partition(": ")
    try:
        return Refusal(MissReason(word), detail)
    except ValueError:
        return Refusal(otherwise, told)


def _refusal_of(error: AionnError) -> Refusal:
    if isinstance(error, CompilationError):
        return refusal_from(error.reason, MissReason.REFUSED_BY_DEVICE)
    if isinstance(error, DeadlineError):
        return Refusal(MissReason.TOO_SLOW, f"loading it left too little time for compiling: {error}")
    if isinstance(error, DriverDiedError | DriverHungError):
        return Refusal(MissReason.REFUSED_BY_DEVICE, f"the driver ended over it: {error}")
    return Refusal(MissReason.WRONG_FILES if isinstance(error, CallerError) else MissReason.REFUSED_BY_DEVICE, str(error))


def _tell_refusal(store: CacheStore, remote: RemoteDevice, refusal: Refusal, error: AionnError) -> None:
    """Log why a model is compiled again. Lost records are one warning per cache: each entry of it is then refused once."""
    if refusal.reason is MissReason.NO_INTEGRITY_RECORD and not isinstance(error, DriverDiedError):
        way_out = "keep that folder as long as the cache, or choose one that lasts with Runtime(state_dir=) or --state-dir"
        store.warn(Refusal(refusal.reason, f"the records that vouch for it are lost: {refusal.detail}; {way_out}"))
        return
    logger.warning("device %r did not take a cached compilation, the model is compiled again: %s", remote.name, refusal)


# --- compiling and publishing ----------------------------------------------------------------------------------------


async def _compile(remote: RemoteDevice, model: Model, options: PrepareOptions) -> RemotePreparedModel:
    await check_supported(remote, model, options)
    with trace.span("prepare", device=remote.name):
        return await remote.prepare_model(model, options)


async def _compile_and_publish(
    tasks: Tasks, remote: RemoteDevice, model: Model, options: PrepareOptions, miss: Miss, store: CacheStore
) -> tuple[RemotePreparedModel, CacheOutcome]:
    publisher = miss.publisher
    if publisher is None:
        return await _compile(remote, model, options), miss.outcome
    try:
        await check_supported(remote, model, options)
    except UnsupportedOperationError as error:
        await publisher.decline(error.reason)
        raise
    began_ns = time.monotonic_ns()
    with trace.span("prepare", device=remote.name):
        prepared = await remote.prepare_model(model, options, bound(publisher.handles, model))
    took_ns = time.monotonic_ns() - began_ns
    if prepared.save_outcome not in ("saved", "declined"):
        failure: Refusal | None = refusal_from(prepared.save_outcome, MissReason.IO_ERROR)
    else:
        miss.publisher = None  # whoever publishes closes it
        try:
            failure = await _publish(tasks, store, publisher, prepared.save_outcome == "declined", took_ns, options)
        except BaseException:
            prepared.release()  # nobody will have it
            raise
    if failure is not None:
        store.warn(failure)
    return prepared, dataclasses.replace(miss.outcome, save_failure=failure)


async def _publish(
    tasks: Tasks, store: CacheStore, publisher: Publisher, declined: bool, compile_ns: int, options: PrepareOptions
) -> Refusal | None:
    """What kept the entry from being stored, if anything did. Goes on behind the caller's back if the deadline comes before the disk
    is done."""

    async def publish() -> tuple[Refusal | None]:
        with store.in_use():
            if declined:
                return (await publisher.decline("the device does not cache this model"),)
            return (await publisher.publish(compile_ns=compile_ns),)

    left_s = _left_s(options)
    if left_s is None:
        return (await publish())[0]
    published = await _in_time(tasks, publish, left_s * _PUBLISH_SHARE, None)
    return published[0] if published is not None else Refusal(MissReason.TOO_SLOW, "it is still being stored at the deadline")


def _raise_if_unsupported(remote: RemoteDevice, model: Model, declined: Declined) -> None:
    what = declined.outcome.detail
    if what.startswith(_UNSUPPORTED):
        node = next((operation.name for operation in model.operations if what == f"{_UNSUPPORTED}{described(operation)}"), None)
        raise UnsupportedOperationError(f"device {remote.name!r} {what}", node=node, reason=what)


async def check_supported(remote: RemoteDevice, model: Model, options: PrepareOptions) -> None:
    """Ask the device whether it can run every node.

    Raises:
        UnsupportedOperationError: the first one it cannot run is `.node`.
    """
    with trace.span("plan.supported_operations", device=remote.name):
        supported = await remote.get_supported_operations(model, options.deadline_ns)
    for operation, fits in zip(model.operations, supported, strict=True):
        if not fits:
            what = f"{_UNSUPPORTED}{described(operation)}"
            raise UnsupportedOperationError(f"device {remote.name!r} {what}", node=operation.name, reason=what)


def described(operation: Operation) -> str:
    return f"operator {operation.domain or 'ai.onnx'}.{operation.op_type} (node {operation.name!r})"


# --- time ------------------------------------------------------------------------------------------------------------


def _left_s(options: PrepareOptions) -> float | None:
    """Seconds until the deadline, at least 0; None without one."""
    return None if options.deadline_ns is None else max(0.0, (options.deadline_ns - time.monotonic_ns()) / 1e9)


async def _give_back(found: _Opened) -> None:
    await found.aclose()  # to its end, though the task is cancelled: what it opened is nobody else's to close


async def _in_time(
    tasks: Tasks, work: Callable[[], Awaitable[T]], seconds: float | None, late: Callable[[T], Awaitable[None]] | None
) -> T | None:
    """What `work` gives, or None if it takes longer than that.

    It runs as a task of the runtime's: a thread in it may wait for a disk that hangs, which its caller need not wait for, and when
    the runtime closes it ends with `CallerError`. Nobody waiting any more, it is cancelled and what it still gives goes to `late`;
    or, without `late`, it goes on.
    """
    answer: Answer[T] = Answer(running_loop())
    scope = anyio.CancelScope()

    async def run() -> None:
        try:
            with scope:
                result = await work()
                if not answer.settled:
                    answer.set(result)
                elif late is not None:
                    await late(result)
        except Exception as error:
            answer.fail(error)
        except BaseException:
            answer.fail(CallerError("the runtime was closed"))
            raise

    tasks.start_soon(run, name="cache")
    try:
        with anyio.move_on_after(seconds):
            return await answer.wait()
    except BaseException:
        if late is not None:
            scope.cancel()
            if answer.result is not None:  # it came together with the cancellation
                await late(answer.result)
        raise
    result = answer.result
    answer.abandon()
    if result is None and late is not None:
        scope.cancel()
    return result
