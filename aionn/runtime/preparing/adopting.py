"""An artifact of another machine in place of a compile: a miss asks the runtime's `CompileBackend`, and the driver judges what is offered.

What a backend says is not believed, and neither are its files. The driver checks the signed statement with the keys that the app trusts,
and the bytes with the statement (`IDevice.adopt`). Only then it loads them, and takes the same bytes from the cache from then on. So
an offer that is wrong, late or missing costs time, and the model is compiled here.

The driver comes first, the cache directory second. If the app dies in between, the driver believes files that no entry names.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, MissReason, Refusal, Wanted
from aionn.caching.keyring import current_keyring
from aionn.caching.offers import CompileRequest, Offered
from aionn.caching.outcomes import refusal_of_os_error
from aionn.caching.statement import Statement, claimed_statement, verified_statement
from aionn.caching.store import CacheStore, Hit, Miss, Publisher
from aionn.caching.store.files import copy_into
from aionn.caching.store.threads import run_in_thread
from aionn.caching.token import decode_parts
from aionn.errors import AionnError, CompilationError
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.model import Model
from aionn.hal.trust import decode_keyring
from aionn.hal.types import Priority
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.logs import about
from aionn.runtime.model import adopt as take_operands
from aionn.runtime.preparations import LOADING
from aionn.runtime.preparing.cached import bound, refusal_from, refusal_of
from aionn.runtime.preparing.in_time import in_time
from aionn.runtime.preparing.progress import Progress
from aionn.runtime.preparing.reading import digested
from aionn.runtime.processes.devices import Devices
from aionn.tasks import seconds_until

logger = logging.getLogger("aionn.runtime")

Adopted = tuple[RemotePreparedModel, CacheOutcome]

_SHARE = 0.5
"""The share of the time that is left which asking and adopting may each take. The compiler gets the rest."""


async def offered_instead(
    devices: Devices,
    remote: RemoteDevice,
    model: Model,
    options: PrepareOptions,
    wanted: Wanted,
    miss: Miss,
    store: CacheStore,
    progress: Progress,
) -> Adopted | Refusal | None:
    """Return the model as another machine has compiled it, why the offer is refused, or None if there is no offer.

    Raises:
        CallerError: the model's file is broken, or has changed; or the runtime was closed.
    """
    backend = devices.backend
    if backend is None:
        return None
    keyring = await current_keyring()
    if refusal := _no_builder(keyring):
        if refusal.reason is not MissReason.UNSAFE:  # that has been logged with the keyring
            store.warn(refusal)
        return refusal
    digest = await digested(devices.tasks, model)
    request = CompileRequest(wanted.key, wanted.parts, remote.name, remote.version, digest, remote.cache_files, options, model)
    left_s = seconds_until(options.deadline_ns)
    wait_s = backend.wait_s if left_s is None else min(backend.wait_s, left_s * _SHARE)

    async def ask() -> tuple[Offered | None]:
        return (await backend.compile(request),)

    try:
        answer = await in_time(devices.tasks, ask, wait_s, _close)
    except Exception as error:
        devices.check_open()
        what = "the compile backend failed, so model %r is compiled here: %s"
        logger.warning(what, progress.model, error, extra=about(device=remote.name, model=progress.model))
        return None
    if answer is None:
        store.warn(Refusal(MissReason.TOO_SLOW, f"the compile backend did not answer within {wait_s:.3f} s"))
    if answer is None or answer[0] is None:
        return None
    wanted = dataclasses.replace(wanted, model_digest=digest)
    progress.step(remote.name, LOADING)
    found = await Adoption(devices, store, remote, options, wanted, keyring).take(answer[0], miss, model)
    if isinstance(found, Refusal):
        what = "device %r did not adopt the offered compilation of model %r, which is compiled here: %s"
        logger.warning(what, remote.name, progress.model, found, extra=about(device=remote.name, model=progress.model))
    return found


async def _close(answer: tuple[Offered | None]) -> None:
    if answer[0] is not None:
        answer[0].close()


def _no_builder(keyring: bytes) -> Refusal | None:
    """Return why no builder is trusted, or None."""
    found = decode_keyring(keyring)
    if found.fault:
        return Refusal(MissReason.UNSAFE, f"no builder is trusted: {found.fault}")
    if not found.keys:
        return Refusal(MissReason.UNTRUSTED_BUILDER, "no builder is trusted, because the keyring is empty or adopting is switched off")
    return None


@dataclass(frozen=True, slots=True)
class Adoption:
    """What is to be adopted, where, and with which keys.

    Attributes:
        wanted: the entry, with the digest of its model.
        keyring: the keys that the app trusts, encoded.
    """

    devices: Devices
    store: CacheStore
    remote: RemoteDevice
    options: PrepareOptions
    wanted: Wanted
    keyring: bytes

    async def take(self, offered: Offered, miss: Miss, model: Model | None) -> Adopted | Refusal:
        """Let the driver adopt an artifact, and keep it in the cache if the miss has a publisher. Closes what is offered.

        Args:
            model: takes its operands from the artifact. None if only the cache is to have it.
        """
        with offered:
            try:
                prepared = await self._prepared(offered, model)
            except AionnError as error:
                if seconds_until(self.options.deadline_ns) == 0.0 or self.devices.closed:
                    raise
                return refusal_of(error)
            statement = claimed_statement(offered.signed)  # which the driver has verified
            assert not isinstance(statement, Refusal)
            failure = miss.outcome.save_failure
            try:
                if prepared.save_outcome != "saved":
                    failure = refusal_from(prepared.save_outcome, MissReason.IO_ERROR)
                elif miss.publisher is not None:
                    publisher, miss.publisher = miss.publisher, None  # publishing closes the publisher
                    failure = await self._kept(publisher, offered, statement.compile_ns)
            except BaseException:
                prepared.release()  # the caller gets no model
                raise
        if failure is not None:
            self.store.warn(failure)
        trace.count("compile.adopted", device=self.remote.name, builder=statement.builder)
        detail = f"compiled by builder {statement.builder!r}"
        saved_s, waited_s = statement.compile_ns / 1e9, miss.outcome.waited_s
        return prepared, CacheOutcome(
            CacheOutcomeKind.HIT, None, self.remote.name, detail, self.wanted.key, waited_s, saved_s, save_failure=failure
        )

    async def _prepared(self, offered: Offered, model: Model | None) -> RemotePreparedModel:
        """Have the driver judge and load an artifact, within a part of the time that is left."""
        options, left_s = self.options, seconds_until(self.options.deadline_ns)
        if left_s is not None:
            options = dataclasses.replace(options, deadline_ns=time.monotonic_ns() + int(left_s * _SHARE * 1e9))
        with trace.span("prepare.adopt", device=self.remote.name):
            handles = CacheHandles(offered.model, offered.data, self.wanted.key, self.keyring)
            prepared = await self.remote.adopt(options, handles, self.wanted.model_digest, offered.signed)
        if model is not None and not take_operands(model, prepared.inputs, prepared.outputs):
            prepared.release()
            reason = str(Refusal(MissReason.OTHER_MODEL, "its inputs or outputs are not this model's"))
            raise CompilationError("the offered compilation has other inputs or outputs than the model", reason=reason)
        return prepared

    async def _kept(self, publisher: Publisher, offered: Offered, compile_ns: int) -> Refusal | None:
        """Copy the files into the cache and publish them. Returns why they are not stored, or None.

        Storing goes on in the background if the deadline comes before the disk is done.
        """
        publisher.wanted = self.wanted
        mine = offered.taken()

        async def publish() -> tuple[Refusal | None]:
            with mine, self.store.in_use():
                try:
                    targets = publisher.handles
                    await run_in_thread(copy_into, (*targets.model, *targets.data), (*mine.model, *mine.data))
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


async def adopt_entry(devices: Devices, store: CacheStore, offered: Offered, device: str | None) -> CacheOutcome:
    """Adopt an artifact into a cache, without a model. Closes what is offered.

    The driver loads it once, with the preference and priority that it was compiled for, and without engine options. The signature is
    verified here, too: a statement says which device is meant, and no stranger may choose what is started or imported.

    Args:
        device: the device that shall adopt it. None: the installed device that the statement names.

    Returns:
        A HIT if the cache has it now, or a MISS with the reason why not.

    Raises:
        DeviceUnavailableError, DriverDiedError, DriverHungError: the device cannot be started.
    """
    with offered:
        keyring = await current_keyring()
        statement = _no_builder(keyring) or verified_statement(offered.signed, decode_keyring(keyring), time.time())
        if isinstance(statement, Statement) and device is None and statement.device not in devices.installed:
            statement = Refusal(MissReason.OTHER_FINGERPRINT, f"signed for device {statement.device!r}, which is not installed here")
        if isinstance(statement, Refusal):
            return CacheOutcome(CacheOutcomeKind.MISS, statement.reason, device or "", statement.detail, save_failure=statement)
        parts = decode_parts(statement.parts)
        options = PrepareOptions(parts.preference, parts.priority or Priority.MEDIUM)
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
                        return dataclasses.replace(found.outcome, reason=made.reason, detail=made.detail, save_failure=made)
                    made[0].release()
                    return made[1]
                return found.outcome
