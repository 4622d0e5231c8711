"""The acts of a compile: name an entry, look it up, load it, or make it. `CompileRequest` is what an app asks of it.

    name it       `wanted_of`: the entry of a model on a device
    look it up    `look_up`: a hit, a miss with the right to store the entry, or the note that the device declined
    load it       `load`: the driver takes the files of a hit; the model is not sent
    make it       `compile_and_publish`, or `adopting` if a compile backend offers it

A save that fails does not fail the compile: the failure is `outcome.save_failure`. The cache also
remembers which models a device cannot run at all (`_UNSUPPORTED`), so a second start need not ask the device again.

Which model an entry is for. The token that names an entry is the app's claim. Drivers get another token and keep digests
under it. That token is made of the entry's key and the model's own digest (`bound`). So the driver does not know an artifact of
another model, whatever the directory or the app's token says. The digest of a loaded model may be unknown, because the app gave another
token. Then the entry says which model it was stored for, and the driver still takes the bytes only if it stored them so.

Deadlines. A cache must leave the compiler its time. Looking the entry up ends after half of the time that is left, although
another compiler may be waited for. Loading ends after half of what is left then, unless compiling took longer last time. Storing ends
in time for the caller's answer, and the publishing of an entry goes on after a caller's deadline.

A better artifact that an engine offers while it runs takes the place of the stored one, late, as a just-in-time compilation is stored.
The driver is asked when a burst has ended and before the model is released. Nothing here fails a caller: what goes wrong is a log
line. Another process that stores the entry at the same time goes first, and the offer is made again later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import anyio
import msgspec
from msgspec.structs import replace

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, KeyParts, MissReason, Refusal, Wanted, encoded_keys
from aionn.caching.store import CacheStore, Declined, Hit, Miss, Publisher
from aionn.caching.token import device_token
from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError, DriverDiedError, DriverHungError
from aionn.file_ranges import until
from aionn.graph.digest import NOTHING
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.model import OPAQUE, Operation, PooledModel, known_token
from aionn.hal.types import MAX_CACHE_FILES, NO_LANES
from aionn.loopless import seconds_until
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.model import Source, adopt, is_read, source_of
from aionn.runtime.processes.devices import Devices
from aionn.runtime.record import ASKING, COMPILING, LOADING, NO_FAULT, READING, CompilationRecord, about, current
from aionn.tasks import in_time


class CacheChoice(msgspec.Struct, frozen=True):
    """Where an app wants a compilation kept, and under which token.

    Attributes:
        token: the app's, 32 bytes.
        operations: indices of the operations, for one step of a plan. None for a whole model.
        required: whether the first preparation fails if the cache cannot keep the compilation.
    """

    store: CacheStore
    token: bytes
    operations: tuple[int, ...] | None = None
    required: bool = False


class CompileRequest(msgspec.Struct, frozen=True):
    """What an app asks of one compile. All of it has been checked.

    Attributes:
        model: what is compiled, or one step of it.
        options: how to prepare the model, and until when.
        record: how the compilation is shown.
        candidates: names of the devices that may be used, best first, or None for every installed one. For mode "staged" the stages.
        cache: where the compilation is kept, or None.
        idle_s: after so long without use, the driver's memory is given back. None: never.
        stage: the stage that serves from the start, in mode "staged". None: the stage is named after its device.
    """

    model: PooledModel
    options: PrepareOptions
    record: CompilationRecord
    candidates: Sequence[str] | None = None
    cache: CacheChoice | None = None
    idle_s: float | None = None
    stage: str | None = None

    def of(self, model: PooledModel, cache: CacheChoice | None, open_outputs: tuple[str, ...] = ()) -> CompileRequest:
        """Return the same for another model, or one step of the model, kept elsewhere."""
        return replace(self, model=model, cache=cache, options=replace(self.options, open_outputs=open_outputs))

    def without_deadline(self, open_outputs: tuple[str, ...] = ()) -> CompileRequest:
        """Return the same for work that no caller waits for. `open_outputs`: as in `PrepareOptions`."""
        return replace(self, options=replace(self.options, deadline_ns=None, open_outputs=open_outputs))

    def left_s(self, share: float = 1.0) -> float | None:
        """Return that share of the seconds until the caller's deadline. Returns None without a deadline."""
        deadline_ns = self.options.deadline_ns
        return None if deadline_ns is None else seconds_until(deadline_ns) * share

    def ending_in(self, seconds: float) -> CompileRequest:
        """Return the same for an act that may take so long."""
        deadline_ns = time.monotonic_ns() + int(seconds * 1e9)
        return replace(self, options=replace(self.options, deadline_ns=deadline_ns))

    def unkept(self, refusal: Refusal) -> str:
        """Return the sentence for an app that requires the cache, which does not keep the compilation. Returns an empty text for others."""
        if self.cache is None or not self.cache.required:
            return ""
        kept = f"cache_required: cache {self.cache.store.path} cannot keep compilation {self.record.name!r} ({refusal})"
        return f"{kept}; mend that, give another cache_dir, or leave cache_required out"


logger = logging.getLogger("aionn.runtime")

Opened = Hit | Miss | Declined

_CACHE_SHARE = 0.5
"""The share of the time that is left which the cache may take. The compiler gets the rest."""

_PUBLISH_SHARE = 0.8
"""The share of the time that is left after compiling, for which the caller waits for the entry to be published."""

_UNSUPPORTED = "cannot run "
_DECLINED = "the device does not cache this model"


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
    request: CompileRequest
    wanted: Wanted
    miss: Miss
    store: CacheStore | None


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


# --- name it ------------------------------------------------------------------------------------------------------------


def bound(handles: CacheHandles, model_digest: bytes) -> CacheHandles:
    """Return the same files under the token by which a device knows them: the entry's key and a model's digest in one."""
    return replace(handles, token=device_token(handles.token, model_digest))


def wanted_of(remote: RemoteDevice, request: CompileRequest, token: bytes, operations: tuple[int, ...] | None) -> Wanted:
    """Return the name that the entry of this model on this device has under an app's token. `operations`: as in `CacheChoice`."""
    options = request.options
    parts = KeyParts(
        app_token=token,
        device=remote.name,
        device_version=remote.version,
        preference=options.preference,
        priority=options.priority if remote.priority_matters else None,
        options=_key_options(options, remote.name),
        operations=None if operations is None else tuple((0, index) for index in operations),
    )
    encoded, key, family = encoded_keys(parts)
    return Wanted(
        key,
        family,
        remote.name,
        remote.version,
        known_token(request.model),
        remote.cache_files,
        encoded,
        getattr(request.model, "name", ""),
    )


def _key_options(options: PrepareOptions, device: str) -> tuple[tuple[str, bytes], ...]:
    """Return what the key of an entry has beside the preference. No option of an engine has a name with a space."""
    own = options.of(device).encoded
    return own if options.batching is None else tuple(sorted((*own, ("joined rows", options.batching.encoded))))


def why_not_cached(remote: RemoteDevice) -> str:
    """Return why a device whose cache files are not supported gets no cache. Log a warning if the device asks for too many files."""
    files = remote.cache_files
    if 0 <= max(files.model, files.data) <= MAX_CACHE_FILES:
        return "the device does not cache"
    detail = f"the device asks for {files.model} and {files.data} files, at most {MAX_CACHE_FILES} are given"
    logger.warning("no cache for device %r: %s", remote.name, detail, extra=about(device=remote.name))
    return detail


async def look_up(devices: Devices, request: CompileRequest, store: CacheStore, wanted: Wanted, bad: tuple[Hit, Refusal] | None) -> Opened:
    """Open an entry within the time that a cache may take.

    Args:
        bad: a hit that the driver has refused, and why.

    Returns:
        A miss with the reason TOO_SLOW if the cache directory did not answer in time.
    """
    patience_s = request.left_s(_CACHE_SHARE)
    give_up_at = None if patience_s is None else time.monotonic() + patience_s
    if bad is None:
        # The usual case waits for no other process. It needs no `in_time` and no task.
        with nullcontext() if patience_s is None else anyio.move_on_after(patience_s):
            there = await store.open_now(wanted)
            if there is not None:
                return there
        devices.check_open()
    more_s = None if give_up_at is None else give_up_at - time.monotonic()
    if more_s is None or more_s > 0:
        # A little less for waiting, so that a store in good health says BUSY itself.
        wait_s = store.wait_s if more_s is None else min(store.wait_s, more_s * 0.9)
        found = await in_time(devices.tasks, lambda: open_entry(store, wanted, bad, wait_s), more_s, _close_opened)
        if found is not None:
            return found
    assert patience_s is not None  # without a deadline the call waits for the store
    slow = Refusal(MissReason.TOO_SLOW, f"the cache directory did not answer within {patience_s:.3f} s of the deadline")
    store.warn(slow)
    missed = CacheOutcome(CacheOutcomeKind.MISS, slow.reason, wanted.device, slow.detail, wanted.key, patience_s, save_failure=slow)
    return Miss(missed, None)


async def _close_opened(found: Opened) -> None:
    await found.aclose()  # to its end, although the task is cancelled: no other code closes what the task has opened


async def open_entry(store: CacheStore, wanted: Wanted, bad: tuple[Hit, Refusal] | None, wait_s: float) -> Opened:
    """Open an entry, or refuse the hit that a driver has refused. A hit shares the entry with every reader.

    Args:
        bad: a hit that the driver has refused, and why.
        wait_s: how long to wait for another compiler.
    """
    with store.in_use():  # a caller that waits for this task may leave before the task ends
        tell = partial(current.get().waits, wanted.device)
        if bad is not None and bad[0].manifest.key == wanted.key:
            return await bad[0].reopen_as_miss(bad[1], wait_s=wait_s, waits=tell)
        return await store.open(wanted, wait_s=wait_s, waits=tell)


async def leave(found: Opened, prepared: RemotePreparedModel | None) -> None:
    """Close an entry. A caller that is cancelled meanwhile gets no model, so the model is released."""
    try:
        if isinstance(found, Hit) and prepared is not None:
            found.leave()
        else:
            await found.aclose()
    except BaseException:
        if prepared is not None:
            prepared.release()
        raise


# --- load it ------------------------------------------------------------------------------------------------------------


async def load(remote: RemoteDevice, request: CompileRequest, hit: Hit) -> RemotePreparedModel:
    """Load an entry in the driver, within the time that a cache may take.

    Raises:
        AionnError: the driver refused the entry, or took too long.
    """
    most_s = request.left_s(_CACHE_SHARE)
    if most_s is not None and hit.outcome.saved_s <= most_s:
        request = request.ending_in(most_s)
    current.get().enter(remote.name, LOADING)
    with trace.span("prepare.from_cache", device=remote.name, model=current.get().name):
        return await load_files(remote, request, hit)


async def load_files(remote: RemoteDevice, request: CompileRequest, hit: Hit) -> RemotePreparedModel:
    """Load the files of an entry in the driver, whatever the time. A model whose operands are not known yet takes them from there.

    Raises:
        AionnError: the driver refused the files.
        CompilationError: the driver loaded a model with other inputs or outputs, or with another order of them.
    """
    prepared = await remote.prepare_model_from_cache(request.options, bound(hit.handles, hit.manifest.model_digest))
    if not adopt(request.model, prepared.inputs, prepared.outputs):
        prepared.release()
        raise CompilationError(
            "the cached compilation has other inputs or outputs than the model",
            reason=str(Refusal(MissReason.OTHER_MODEL, "its inputs or outputs are not this model's")),
        )
    return prepared


# --- or make it ---------------------------------------------------------------------------------------------------------


async def supported_by(remote: RemoteDevice, model: PooledModel, options: PrepareOptions) -> Sequence[bool]:
    """Return for each operation whether the device can run it. The model is read."""
    current.get().enter(remote.name, ASKING)
    with trace.span("plan.supported_operations", device=remote.name):
        return await remote.get_supported_operations(model, options.deadline_ns, options=options.of(remote.name))


async def check_supported(remote: RemoteDevice, model: PooledModel, options: PrepareOptions) -> None:
    """Ask the device whether it can run every node. The model is read.

    Raises:
        UnsupportedOperationError: the first node that the device cannot run is `.node`.
    """
    supported = await supported_by(remote, model, options)
    for operation, fits in zip(model.operations, supported, strict=True):
        if not fits:
            raise UnsupportedOperationError(remote.name, f"{_UNSUPPORTED}{_described(operation)}", node=operation.name, supported=supported)


def raise_if_unsupported(remote: RemoteDevice, model: PooledModel, declined: Declined) -> None:
    """Raise `UnsupportedOperationError` if the cache remembers that the device cannot run the model. A model that is not read stays so."""
    what = declined.outcome.detail
    if what.startswith(_UNSUPPORTED):
        raise UnsupportedOperationError(remote.name, what, node=node_of(model, what) if is_read(model) else None)


def node_of(model: PooledModel, reason: str) -> str | None:
    """Return the node that the reason of an `UnsupportedOperationError` is about. The model is read."""
    return next((operation.name for operation in model.operations if reason == f"{_UNSUPPORTED}{_described(operation)}"), None)


def _described(operation: Operation) -> str:
    if operation.op_type == OPAQUE:
        return f"a model of the format {operation.domain!r}"
    return f"operator {operation.domain or 'ai.onnx'}.{operation.op_type} (node {operation.name!r})"


async def compile_model(devices: Devices, remote: RemoteDevice, request: CompileRequest) -> RemotePreparedModel:
    """Compile a model on a device, without a cache.

    Raises:
        CallerError: the weights of a loaded model are others than before.
        UnsupportedOperationError: the device cannot run every node.
        CompilationError, DeadlineError, DriverDiedError, DriverHungError, MemoryAllocationError
    """
    model, options, source = request.model, request.options, source_of(request.model)
    await read(devices, model, remote.name)
    await check_supported(remote, model, options)
    current.get().enter(remote.name, COMPILING)
    with trace.span("prepare", device=remote.name, model=current.get().name):
        prepared = await remote.prepare_model(model, options)
    try:
        if source is not None:
            source.compiled(model, prepared.contents)
    except CallerError:
        prepared.release()
        raise
    return prepared


async def compile_and_publish(missed: Missed) -> tuple[RemotePreparedModel, CacheOutcome]:
    """Compile a model on a device, and publish its entry if the miss has a publisher.

    Raises: as `compile_model`.
    """
    devices, remote, request, miss, store = missed.devices, missed.remote, missed.request, missed.miss, missed.store
    model, options, publisher = request.model, request.options, miss.publisher
    if publisher is None or store is None:
        return await compile_model(devices, remote, request), miss.outcome
    await read(devices, model, remote.name, digest=True)
    publisher.wanted = replace(publisher.wanted, model_digest=model.token)
    try:
        await check_supported(remote, model, options)
    except UnsupportedOperationError as error:
        await publisher.decline(error.reason)
        raise
    current.get().enter(remote.name, COMPILING, publisher.last_compile_s)
    began_ns = time.monotonic_ns()
    with trace.span("prepare", device=remote.name, model=current.get().name):
        prepared = await remote.prepare_model(model, options, bound(publisher.handles, model.token))
    took_ns = time.monotonic_ns() - began_ns
    if prepared.save_outcome not in ("saved", "declined"):
        failure: Refusal | None = refusal_from(prepared.save_outcome, MissReason.IO_ERROR)
    else:
        miss.publisher = None  # publishing closes the publisher
        try:
            failure = await _publish(missed, store, publisher, prepared.save_outcome == "declined", took_ns)
        except BaseException:
            prepared.release()  # the caller gets no model
            raise
    if failure is not None:
        store.warn(failure)
    return prepared, replace(miss.outcome, save_failure=failure)


async def _publish(missed: Missed, store: CacheStore, publisher: Publisher, declined: bool, compile_ns: int) -> Refusal | None:
    """Publish an entry. Returns why the entry was not stored, or None.

    Publishing goes on in the background if the deadline comes before the disk is done.
    """

    publish = partial(publisher.decline, _DECLINED) if declined else partial(publisher.publish, compile_ns=compile_ns)

    async def keep() -> tuple[Refusal | None]:
        with store.in_use():
            return (await publish(),)

    most_s = missed.request.left_s(_PUBLISH_SHARE)
    if most_s is None:
        return await publish()
    published = await in_time(missed.devices.tasks, keep, most_s, None)
    return published[0] if published is not None else Refusal(MissReason.TOO_SLOW, "it is still being stored at the deadline")


# --- digest and read a model ---------------------------------------------------------------------------------------------


async def digested(devices: Devices, model: PooledModel) -> bytes:
    """Return the model's token, made now if it is not known.

    Raises:
        CallerError: a file is broken, or has changed; or the runtime was closed.
    """
    source = source_of(model)
    if source is not None:
        devices.check_open()
        known = NOTHING if devices.service is None else await devices.service.digests(await devices.disk.ask(source.to_read))
        # The thread goes on if its caller leaves, for the next one. It ends when the runtime closes.
        await devices.disk.ask(until, lambda: devices.closed, partial(source.digest, model, known))
    return model.token


async def read(devices: Devices, model: PooledModel, device: str = "", *, digest: bool = False) -> None:
    """Have the model's graph read, if it has not been.

    Args:
        device: for which it is read. It shows that step.
        digest: have the model digested before, so that what is read is compared with it.

    Raises:
        CallerError, CompilationError: a file is broken, or has changed; or the runtime was closed.
    """
    source = source_of(model)
    if source is not None:
        if device and not is_read(model):
            current.get().enter(device, READING)
        devices.check_open()
        await devices.disk.ask(until, lambda: devices.closed, partial(_read, source, model, digest))


def _read(source: Source, model: PooledModel, digest: bool) -> None:
    if digest:
        source.digest(model)
    source.read(model)


# --- refusals -----------------------------------------------------------------------------------------------------------


def refusal_from(words: str, otherwise: MissReason) -> Refusal:
    """Return a driver's words ("reason: detail") as a refusal."""
    word, _, detail = words.partition(": ")
    try:
        return Refusal(MissReason(word), detail)
    except ValueError:
        return Refusal(otherwise, words)


def refusal_of(error: AionnError) -> Refusal:
    """Return the error of a load as a refusal of the entry."""
    if isinstance(error, CompilationError):
        return refusal_from(error.reason, MissReason.REFUSED_BY_DEVICE)
    if isinstance(error, DeadlineError):
        return Refusal(MissReason.TOO_SLOW, f"loading it left too little time for compiling: {error}")
    if isinstance(error, DriverDiedError | DriverHungError):
        return Refusal(MissReason.REFUSED_BY_DEVICE, f"the driver ended over it: {error}")
    return Refusal(MissReason.WRONG_FILES if isinstance(error, CallerError) else MissReason.REFUSED_BY_DEVICE, str(error))


def wants_lanes(error: AionnError) -> bool:
    """Return whether the device cannot run as many instances as were asked for. Another compile of the model would not help."""
    return isinstance(error, CompilationError) and error.reason == NO_LANES


def note_miss(store: CacheStore, outcome: CacheOutcome) -> None:
    """Report why the cache did not serve, and log it if an entry is at fault.

    A directory that cannot be used has a warning of the cache, once for each reason.
    """
    if outcome.reason is None:
        return
    refusal, name = Refusal(outcome.reason, outcome.detail), current.get().name
    current.get().refused(store.path, outcome.device, refusal)
    if outcome.reason not in NO_FAULT and outcome.save_failure is None:
        what = "the cached compilation of model %r for device %r is not used, and the model is compiled again: %s; `aionn cache verify %s`"
        what += " checks the other entries"
        logger.warning(what, name, outcome.device, refusal, store.path, extra=about(device=outcome.device, model=name))


def log_refusal(store: CacheStore, remote: RemoteDevice, refusal: Refusal, error: AionnError) -> None:
    """Report and log why a model is compiled again.

    Lost records are one warning per cache, because each of its entries is then refused once.
    """
    current.get().refused(store.path, remote.name, refusal)
    if refusal.reason is MissReason.NO_INTEGRITY_RECORD and not isinstance(error, DriverDiedError):
        way_out = "keep that folder as long as the cache, or choose one that lasts with Runtime(state_dir=) or --state-dir"
        store.warn(Refusal(refusal.reason, f"the records that vouch for it are lost: {refusal.detail}; {way_out}"))
        return
    what = "device %r did not take the cached compilation of model %r, which is compiled again: %s"
    logger.warning(what, remote.name, current.get().name, refusal, extra=about(device=remote.name, model=current.get().name))


async def store_tuned(prepared: RemotePreparedModel, request: CompileRequest, cache: CacheChoice) -> None:
    """Ask for a better artifact of a model, and publish it in place of the stored one."""
    try:
        with cache.store.in_use():
            if await prepared.export_again(None) == "offered":
                await _store(prepared, request, cache)
    except AionnError as error:
        logger.info("device %r was not asked for a better artifact: %s", prepared.device.name, error)


async def _store(prepared: RemotePreparedModel, request: CompileRequest, cache: CacheChoice) -> None:
    device = prepared.device
    found = await cache.store.open(wanted_of(device, request, cache.token, cache.operations), wait_s=0.0)
    if isinstance(found, Hit):
        digest = found.manifest.model_digest
        found = await found.reopen_as_miss(Refusal(MissReason.SUPERSEDED, "the engine offers a better artifact"), wait_s=0.0)
    else:
        digest = b""  # nothing is stored that could be replaced
    async with found:
        if not digest or not isinstance(found, Miss) or found.publisher is None:
            logger.info("a better artifact of device %r is not stored now: there is no entry, or another process has it", device.name)
            return
        publisher = found.publisher
        publisher.wanted = msgspec.structs.replace(publisher.wanted, model_digest=digest)
        outcome = await prepared.export_again(bound(publisher.handles, digest))
        if outcome == "saved":
            refusal = await publisher.publish()
            outcome = "saved" if refusal is None else str(refusal)
    trace.count("compile.stored_again", device=device.name, outcome=outcome)
    logger.info("a better artifact of device %r: %s", device.name, outcome)
