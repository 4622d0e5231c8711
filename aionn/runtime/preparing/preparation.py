"""One model on one device: from the cache if possible, compiled otherwise. The outcome is a value.

    NO_CACHE  no directory was given, or the device does not cache        prepare_model(model)
    HIT       the store gave files, the driver took them                  prepare_model_from_cache(handles): the model is not sent
              or a compile backend gave files, the driver adopted them    adopt(handles, statement), then the entry is published
    MISS      nothing there, or refused: by the store or by the driver    prepare_model(model, handles), then the entry is published
    DECLINED  remembered: the device does not cache this model            prepare_model(model)

An error while an entry is loaded is a refusal of the entry, and the model is compiled. If the driver dies while it loads an entry,
a new driver compiles the model. `compile_acts` has what is done in each case.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import msgspec

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, Refusal
from aionn.caching.store import Declined, Hit
from aionn.errors import AionnError, CallerError
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.preparing.compile_acts import (
    CacheChoice,
    CompileRequest,
    Missed,
    UnsupportedOperationError,
    compile_and_publish,
    compile_model,
    leave,
    load,
    log_refusal,
    look_up,
    note_miss,
    raise_if_unsupported,
    refusal_of,
    wanted_of,
    wants_lanes,
    why_not_cached,
)
from aionn.runtime.processes.devices import Devices
from aionn.runtime.record import LOOKING, current

if TYPE_CHECKING:
    from aionn.runtime.serving.planned_model import Prepared

Found = tuple["Prepared", tuple[CacheOutcome, ...]]
"""What was prepared, and the outcome of each step."""


async def prepare(devices: Devices, name: str, request: CompileRequest) -> tuple[RemotePreparedModel, CacheOutcome]:
    """Prepare the model on the device of that name. The outcome is counted, on the page and as "compile.cache" in the trace.

    Raises:
        UnsupportedOperationError: the device cannot run every node.
        CompilationError, DeadlineError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError
    """
    cache = request.cache
    in_use = nullcontext() if cache is None else cache.store.in_use()
    with devices.kept(name, request.options.priority) as device, in_use, current.get().on(name) as attempt:
        try:
            remote = await devices.live(device)
            if cache is None:
                prepared = await compile_model(devices, remote, request)
                outcome = CacheOutcome(CacheOutcomeKind.NO_CACHE, None, name)
            else:
                prepared, outcome = await _through_cache(devices, remote, request, cache)
        except UnsupportedOperationError:
            attempt.unfit = True
            raise
        attempt.outcome = outcome
    reason = outcome.reason.value if outcome.reason is not None else ""
    trace.count("compile.cache", kind=outcome.kind.value, reason=reason, detail=outcome.detail, device=name)
    if outcome.save_failure is not None:
        if cache is not None:
            current.get().refused(cache.store.path, name, outcome.save_failure)
        trace.count("compile.save_failed", reason=outcome.save_failure.reason.value, detail=outcome.save_failure.detail, device=name)
    return prepared, outcome


async def _through_cache(
    devices: Devices, remote: RemoteDevice, request: CompileRequest, cache: CacheChoice
) -> tuple[RemotePreparedModel, CacheOutcome]:
    name, store = remote.name, cache.store
    bad: tuple[Hit, Refusal] | None = None
    while remote.cache_files.supported:
        wanted = wanted_of(remote, request, cache.token, cache.operations)
        current.get().enter(name, LOOKING)
        found = await look_up(devices, request, cache.store, wanted, bad)
        made: RemotePreparedModel | None = None
        outcome = found.outcome
        try:
            if isinstance(found, Hit):
                try:
                    made = await load(remote, request, found)
                except AionnError as error:
                    # An error by the deadline of the whole call is the caller's. So is the error of a runtime that closes, and of a
                    # device that cannot run so many instances: the entry is right.
                    if request.left_s() == 0.0 or devices.closed or wants_lanes(error):
                        raise
                    bad = found, refusal_of(error)
                    log_refusal(store, remote, bad[1], error)
            elif isinstance(found, Declined):
                raise_if_unsupported(remote, request.model, found)
                made = await compile_model(devices, remote, request)
            else:
                if bad is None:
                    note_miss(store, outcome)
                made, outcome = await _missed(Missed(devices, remote, request, wanted, found, store))
        finally:
            await leave(found, made)
        if made is not None:
            return made, outcome
        # The driver may have ended because of the entry. The next driver may have another version, so the entry is looked up again.
        remote = await devices.get(name, request.options.priority)
    made = await compile_model(devices, remote, request)
    return made, CacheOutcome(CacheOutcomeKind.NO_CACHE, None, name, why_not_cached(remote))


async def _missed(missed: Missed) -> tuple[RemotePreparedModel, CacheOutcome]:
    """Adopt what the runtime's compile backend offers, or compile the model and publish its entry."""
    devices, remote, miss, request = missed.devices, missed.remote, missed.miss, missed.request
    if devices.backend is not None:
        from aionn.runtime.preparing.adopting import NotTaken, offered_instead  # few apps have a backend

        found = await offered_instead(missed, devices.backend)
        if not isinstance(found, NotTaken):
            return found
        if found.refusal is not None and missed.store is not None:
            current.get().refused(missed.store.path, remote.name, found.refusal)
            miss.outcome = msgspec.structs.replace(miss.outcome, reason=found.refusal.reason, detail=found.refusal.detail)
        if remote.connection.ended_by is not None:  # the offer ended the driver
            missed.remote = await devices.get(remote.name, request.options.priority)
            if missed.remote.version != missed.wanted.device_version:
                return await compile_model(devices, missed.remote, request), miss.outcome
    return await compile_and_publish(missed)


def check_kept(request: CompileRequest, found: Found) -> Found:
    """Return what was prepared first. Releases it if the app requires a cache that does not keep it.

    Raises:
        CallerError: the cache cannot be used as the app requires.
    """
    for outcome in found[1]:
        if outcome.not_kept is not None and (unkept := request.unkept(outcome.not_kept)):
            found[0].release()
            raise CallerError(unkept)
    return found
