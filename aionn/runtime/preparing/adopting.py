"""Adopt an artifact instead of compiling: a miss asks a `CompileBackend`, and the driver that will serve checks what is offered.

Neither the backend nor its files are trusted. The driver checks the signed statement with the keys that the app trusts, and the files with
the statement (`IDevice.adopt`). Only then does it load them and record their digests. From then on it loads the same bytes from the cache.
So an offer that is wrong, late or missing costs time, and the model is compiled here.

A miss of a first compile asks the runtime's backend. A better stage and a swap ask that of the `StagePolicy`, or else the runtime's. The
worker process that compiles a stage here (`LocalWorker`) is a backend, too, whose artifacts have no statement. The serving driver loads
those if its records have them, and then the entry is published. A first compile does not use the worker: its model serves in the driver
that compiles it, which needs no artifact.

The driver records an artifact before the cache has it. If the app dies in between, the records name files that no entry has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, MissReason, Refusal, Wanted
from aionn.caching.keyring import current_keyring
from aionn.caching.offers import ArtifactRequest, CompileBackend, Offered
from aionn.caching.outcomes import refusal_of_os_error
from aionn.caching.statement import Statement, claimed_statement, verified_statement
from aionn.caching.store import CacheStore, Hit, Miss, Publisher
from aionn.caching.store.directory import copy_into
from aionn.caching.token import decode_parts
from aionn.errors import AionnError, CallerError, CompilationError
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.model import PooledModel
from aionn.hal.options import decode_options
from aionn.hal.trust import decode_keyring
from aionn.hal.types import Priority
from aionn.loopless import seconds_until
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.model import adopt as take_operands
from aionn.runtime.preparing.compile_acts import Missed, bound, digested, refusal_from, refusal_of, wants_lanes
from aionn.runtime.preparing.options import may_name_file
from aionn.runtime.processes.devices import Devices
from aionn.runtime.record import ASKING_BACKEND, LOADING, about, current
from aionn.tasks import in_time, run_in_thread

logger = logging.getLogger("aionn.runtime")

Adopted = tuple[RemotePreparedModel, CacheOutcome]

_SHARE = 0.5
"""Asking, loading and storing may each take this share of the time that is left before the deadline. The rest is for compiling."""


@dataclass(frozen=True, slots=True)
class NotTaken:
    """Why the model is compiled here although a backend could be asked.

    Attributes:
        reason: in words.
        refusal: of the keyring or of the driver. None if nothing was offered.
    """

    reason: str
    refusal: Refusal | None = None


async def offered_instead(missed: Missed, backend: CompileBackend, most_s: float = math.inf) -> Adopted | NotTaken:
    """Ask a backend for the model, and have the driver adopt its answer. Failures are logged.

    Args:
        most_s: seconds that the backend may take, if that is less than its `wait_s`.

    Returns:
        The prepared model and its outcome, or why the model has to be compiled here.

    Raises:
        CallerError: the model's file is broken or has changed, or the runtime was closed.
    """
    remote, request, store = missed.remote, missed.request, missed.store
    keyring = await current_keyring()
    if refusal := _no_builder(keyring):
        if refusal.reason is not MissReason.UNSAFE:  # that has been logged with the keyring
            _warn(missed, refusal)
        return NotTaken(str(refusal), refusal)
    digest = await digested(missed.devices, request.model)
    wanted = msgspec.structs.replace(missed.wanted, model_digest=digest)
    current.get().enter(remote.name, ASKING_BACKEND)
    offered = await _answer(missed, backend, digest, most_s)
    if isinstance(offered, NotTaken):
        return offered
    current.get().enter(remote.name, LOADING)
    found = await Adoption(missed.devices, store, remote, request.options, wanted, keyring).take(offered, missed.miss, request.model)
    if isinstance(found, Refusal):
        what = "device %r did not adopt the offered compilation of model %r, which is compiled here: %s"
        logger.warning(what, remote.name, current.get().name, found, extra=about(device=remote.name, model=current.get().name))
        return NotTaken(f"the offered compilation was refused: {found}", found)
    return found


async def _answer(missed: Missed, backend: CompileBackend, digest: bytes, most_s: float) -> Offered | NotTaken:
    """Ask the backend. An error of the backend is logged, and never raised."""
    devices, remote = missed.devices, missed.remote
    progress, name, waits = current.get(), current.get().name, True

    def report(words: str) -> None:
        if waits:
            progress.says(remote.name, str(words))

    request = request_of(missed, digest, report)
    extra = about(device=remote.name, model=name)
    try:
        left_s = missed.request.left_s(_SHARE)
        wait_s = min(backend.wait_s, most_s, math.inf if left_s is None else left_s)
        with trace.span("prepare.ask", device=remote.name):
            answer = await in_time(devices.tasks, partial(_asked, backend, request), None if wait_s == math.inf else wait_s, _close)
    except Exception as error:
        devices.check_open()
        what = "the compile backend failed, so model %r is compiled here: %s"
        logger.warning(what, name, error or type(error).__name__, extra=extra)
        return NotTaken(f"the compile backend failed: {error or type(error).__name__}")
    finally:
        waits = False
    if answer is None:
        slow = Refusal(MissReason.TOO_SLOW, f"the compile backend did not answer within {wait_s:.3f} s")
        _warn(missed, slow)
        return NotTaken(slow.detail)
    if answer[0] is None:
        logger.info("the compile backend has no compilation of model %r, which is compiled here", name, extra=extra)
        return NotTaken("the compile backend has no such compilation")
    return answer[0]


def request_of(missed: Missed, digest: bytes, report: Callable[[str], None] | None = None) -> ArtifactRequest:
    """Return the request for a backend. `report` shows the backend's words."""
    wanted, remote = missed.wanted, missed.remote
    request = ArtifactRequest(
        wanted.key, wanted.parts, remote.name, remote.version, digest, remote.cache_files, missed.request.options, missed.request.model
    )
    return request if report is None else dataclasses.replace(request, report=report)


async def _asked(backend: CompileBackend, request: ArtifactRequest) -> tuple[Offered | None]:
    """Ask a backend, whose code is not aionn's. If that code cancels its own work, this raises an error, and is not cancelled."""
    try:
        offered = await backend.compile(request)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise BackendError("its own work was cancelled") from error
    if not isinstance(offered, Offered | None):
        raise BackendError(f"it answered {type(offered).__name__}, expected Offered or None")
    return (offered,)


class BackendError(CompilationError):
    """A compile backend did not keep to its protocol. The error is logged, and never reaches the app."""


def _warn(missed: Missed, refusal: Refusal) -> None:
    if missed.store is not None:
        missed.store.warn(refusal)
    else:
        logger.warning("no compilation of another machine is used: %s", refusal, extra=about(device=missed.remote.name))


async def _close(answer: tuple[Offered | None]) -> None:
    if answer[0] is not None:
        answer[0].close()


def _no_builder(keyring: bytes) -> Refusal | None:
    """Return why no builder is trusted, or None."""
    found = decode_keyring(keyring)
    if found.fault:
        return Refusal(MissReason.UNSAFE, f"no builder is trusted: {found.fault}")
    if found.missing:
        return Refusal(MissReason.UNTRUSTED_BUILDER, f"no builder is trusted, because there is no keyring folder {found.missing}")
    if not found.keys:
        return Refusal(MissReason.UNTRUSTED_BUILDER, "no builder is trusted, because the keyring is empty or adopting is switched off")
    return None


@dataclass(frozen=True, slots=True)
class Adoption:
    """How one device adopts an artifact for one cache entry.

    Attributes:
        store: the cache. None if the artifact is not kept.
        wanted: the entry, with the digest of its model.
        keyring: the keys that the app trusts, encoded (`hal.trust`). Not needed for an artifact without a statement.
    """

    devices: Devices
    store: CacheStore | None
    remote: RemoteDevice
    options: PrepareOptions
    wanted: Wanted
    keyring: bytes = b""

    async def take(self, offered: Offered, miss: Miss, model: PooledModel | None) -> Adopted | Refusal:
        """Have the driver adopt an artifact, and keep it in the cache if the miss has a publisher. Closes `offered`.

        Args:
            model: gets its inputs and outputs from the artifact. None if the artifact is only put into the cache.

        Raises:
            AionnError: the deadline has passed, the runtime was closed, or the device cannot run so many instances.
        """
        with offered:
            try:
                prepared = await self.load(offered, model)
            except AionnError as error:
                if seconds_until(self.options.deadline_ns) == 0.0 or self.devices.closed or wants_lanes(error):
                    raise
                return refusal_of(error)
            return prepared, await self.keep(prepared, offered, miss)

    async def load(self, offered: Offered, model: PooledModel | None) -> RemotePreparedModel:
        """Have the driver check and load an artifact, within half of the time that is left.

        Raises:
            AionnError: the driver refused the artifact, or took too long.
        """
        options, left_s = self.options, seconds_until(self.options.deadline_ns)
        if left_s is not None:
            options = msgspec.structs.replace(options, deadline_ns=time.monotonic_ns() + int(left_s * _SHARE * 1e9))
        handles = CacheHandles(offered.model, offered.data, self.wanted.key, self.keyring)
        if offered.signed is None:
            prepared = await self.remote.prepare_model_from_cache(options, bound(handles, self.wanted.model_digest))
        else:
            with trace.span("prepare.adopt", device=self.remote.name):
                prepared = await self.remote.adopt(options, handles, self.wanted.model_digest, offered.signed)
            claimed = claimed_statement(offered.signed)
            if isinstance(claimed, Refusal):  # a hostile model may have taken over the driver, which then accepts anything
                prepared.release()
                raise CompilationError("the driver adopted what is not a statement", reason=str(claimed))
        if model is not None and not take_operands(model, prepared.inputs, prepared.outputs):
            prepared.release()
            reason = str(Refusal(MissReason.OTHER_MODEL, "its inputs or outputs are not this model's"))
            raise CompilationError("the offered compilation has other inputs or outputs than the model", reason=reason)
        return prepared

    async def keep(self, prepared: RemotePreparedModel, offered: Offered, miss: Miss) -> CacheOutcome:
        """Publish what the driver has loaded, if the miss has a publisher. If this call fails, the prepared model is released."""
        statement: Statement | None = None
        if offered.signed is not None:
            claimed = claimed_statement(offered.signed)
            assert isinstance(claimed, Statement)  # `load` has checked that
            statement = claimed
        compile_ns = offered.compile_ns if statement is None else statement.compile_ns
        failure = miss.outcome.save_failure
        try:
            if statement is not None and prepared.save_outcome != "saved":
                failure = refusal_from(prepared.save_outcome, MissReason.IO_ERROR)
            elif miss.publisher is not None:
                publisher, miss.publisher = miss.publisher, None  # publishing closes the publisher
                lengths = None if statement is None else [file.length for file in statement.files]
                failure = await self._publish(publisher, offered, compile_ns, lengths)
        except BaseException:
            prepared.release()  # the caller gets no model
            raise
        if failure is not None and self.store is not None:
            self.store.warn(failure)
        if statement is None:
            return msgspec.structs.replace(miss.outcome, save_failure=failure)
        trace.count("compile.adopted", device=self.remote.name, builder=statement.builder)
        detail = f"compiled by builder {statement.builder!r}"
        waited_s = miss.outcome.waited_s
        return CacheOutcome(
            CacheOutcomeKind.HIT, None, self.remote.name, detail, self.wanted.key, waited_s, compile_ns / 1e9, save_failure=failure
        )

    async def _publish(self, publisher: Publisher, offered: Offered, compile_ns: int, lengths: Sequence[int] | None) -> Refusal | None:
        """Publish files, which are copied unless they are the publisher's. Return why they are not stored, or None.

        Storing goes on in the background if the deadline comes before the disk is done.
        """
        store = self.store
        assert store is not None  # it made the publisher
        publisher.wanted = self.wanted
        mine = offered.taken()

        async def publish() -> tuple[Refusal | None]:
            with mine, store.in_use():
                try:
                    targets = publisher.handles
                    await run_in_thread(_copy_others, (*targets.model, *targets.data), (*mine.model, *mine.data), lengths)
                except OSError as error:
                    return (refusal_of_os_error(error, "copying the adopted files"),)
                else:
                    return (await publisher.publish(compile_ns=compile_ns),)
                finally:
                    await publisher.aclose()

        left_s = seconds_until(self.options.deadline_ns)
        if left_s is None:
            return (await publish())[0]
        published = await in_time(self.devices.tasks, publish, left_s * _SHARE, None)
        return published[0] if published is not None else Refusal(MissReason.TOO_SLOW, "it is still being stored at the deadline")


def _copy_others(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int] | None) -> None:
    """Copy files into empty ones, unless both are the same files, because the worker has written the publisher's files.

    Args:
        lengths: how many bytes of each file a statement names, and so the driver has checked. None: copy whole files.
    """
    if not all(map(os.path.sameopenfile, targets, sources)):
        copy_into(targets, sources, [os.fstat(fd).st_size for fd in sources] if lengths is None else lengths)


async def adopt_entry(devices: Devices, store: CacheStore, offered: Offered, device: str | None) -> CacheOutcome:
    """Adopt an artifact into a cache, without a model. Closes `offered`.

    The driver loads the artifact once, with the preference, priority and engine options that it was compiled with. This process verifies
    the signature, too, because the statement names the device whose driver is started. Options that may name a file are refused, so that
    no statement chooses which file is opened.

    Args:
        device: the device that shall adopt it. None: the installed device that the statement names.

    Returns:
        A HIT if the driver has loaded the artifact, or a MISS with the reason of the refusal.

    Raises:
        DeviceUnavailableError, DriverDiedError, DriverHungError: the device cannot be started.
    """
    with offered:
        keyring = await current_keyring()
        statement = _no_builder(keyring) or verified_statement(offered.signed or b"", decode_keyring(keyring), time.time())
        if isinstance(statement, Statement) and device is None and not devices.homes.home(statement.device):
            statement = Refusal(MissReason.OTHER_FINGERPRINT, f"signed for device {statement.device!r}, which is not installed here")
        if isinstance(statement, Refusal):
            return CacheOutcome(CacheOutcomeKind.MISS, statement.reason, device or "", statement.detail, save_failure=statement)
        asked = _signed_options(statement, device or statement.device)
        if isinstance(asked, Refusal):
            return CacheOutcome(CacheOutcomeKind.MISS, asked.reason, device or "", asked.detail, save_failure=asked)
        options = asked
        remote = await devices.get(device or statement.device, options.priority)
        of_statement = statement.key, statement.family, remote.name, remote.version, statement.model_digest
        wanted = Wanted(*of_statement, remote.cache_files, statement.parts)
        adoption = Adoption(devices, store, remote, options, wanted, keyring)
        refused: tuple[str, Refusal] | None = None
        while True:
            async with await store.open(wanted, refused=refused) as found:
                if isinstance(found, Hit):
                    try:
                        prepared = await remote.prepare_model_from_cache(options, bound(found.handles, wanted.model_digest))
                    except AionnError as error:
                        refused = found.manifest.directory, refusal_of(error)
                        continue
                    prepared.release()
                elif isinstance(found, Miss):
                    made = await adoption.take(offered, found, None)
                    if isinstance(made, Refusal):
                        return msgspec.structs.replace(found.outcome, reason=made.reason, detail=made.detail, save_failure=made)
                    made[0].release()
                    return made[1]
                return found.outcome


def _signed_options(statement: Statement, device: str) -> PrepareOptions | Refusal:
    """Return the options that an artifact was compiled with, or why they are not used here."""
    parts = decode_parts(statement.parts)
    try:
        options = decode_options(parts.options)
    except CallerError as error:
        return Refusal(MissReason.REFUSED_BY_DEVICE, f"{error}; have a compile with that option adopt the artifact (use_backend)")
    for name, value in options.items():
        if may_name_file(name, value):
            what = f"option {name!r} with the value {value!r} may name a file, and no file is opened because a statement names it"
            return Refusal(MissReason.REFUSED_BY_DEVICE, f"{what}; have a compile with that option adopt the artifact (use_backend)")
    return PrepareOptions(parts.preference, parts.priority or Priority.MEDIUM, options=((device, options),) if options else ())
