"""A model from the cache: its entry is looked up, and the driver loads it.

Which model an entry is for. The token that names an entry is the app's claim. Drivers get another token and keep digests
under it. That token is made of the entry's key and the model's own digest (`bound`). So the driver does not know an artifact of
another model, whatever the directory or the app's token says. The digest of a loaded model may be unknown, because the app gave another
token. Then the entry says which model it was stored for, and the driver still takes the bytes only if it stored them so.

Deadlines. A cache must leave the compiler its time. Looking the entry up ends after half of the time that is left, although
another compiler may be waited for. Loading ends after half of what is left then, unless compiling took longer last time.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from functools import partial

import anyio
import msgspec

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, KeyParts, MissReason, Refusal, Wanted, encoded_keys
from aionn.caching.store import CacheStore, Declined, Hit, Miss
from aionn.caching.token import device_token
from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError, DriverDiedError, DriverHungError
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.model import Model
from aionn.hal.types import MAX_CACHE_FILES, NO_LANES
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.logs import about
from aionn.runtime.model import adopt
from aionn.runtime.preparations import LOADING
from aionn.runtime.preparing.in_time import in_time
from aionn.runtime.preparing.progress import Progress
from aionn.runtime.processes.devices import Devices
from aionn.tasks import seconds_until

logger = logging.getLogger("aionn.runtime")

Opened = Hit | Miss | Declined

_CACHE_SHARE = 0.5
"""The share of the time that is left which the cache may take. The compiler gets the rest."""


class CacheChoice(msgspec.Struct, frozen=True):
    """Where an app wants a compilation kept, and under which token.

    Attributes:
        token: the app's, 32 bytes.
        operations: indices of the operations, for one step of a plan. None for a whole model.
    """

    store: CacheStore
    token: bytes
    operations: tuple[int, ...] | None = None


# --- looking up ------------------------------------------------------------------------------------------------------


def bound(handles: CacheHandles, model_digest: bytes) -> CacheHandles:
    """Return the same files under the token by which a device knows them: the entry's key and a model's digest in one."""
    return dataclasses.replace(handles, token=device_token(handles.token, model_digest))


def wanted_of(remote: RemoteDevice, model: Model, options: PrepareOptions, cache: CacheChoice) -> Wanted:
    """Return the name of the entry of this model on this device."""
    return wanted_under(cache.token, remote, model, options, cache.operations)


def wanted_under(
    token: bytes, remote: RemoteDevice, model: Model, options: PrepareOptions, operations: tuple[int, ...] | None = None
) -> Wanted:
    """Return the name that the entry of this model has under an app's token. `operations`: as in `CacheChoice`."""
    parts = KeyParts(
        app_token=token,
        device=remote.name,
        device_version=remote.version,
        preference=options.preference,
        priority=options.priority if remote.priority_matters else None,
        options=options.of(remote.name).encoded,
        operations=None if operations is None else tuple((0, index) for index in operations),
    )
    encoded, key, family = encoded_keys(parts)
    return Wanted(key, family, remote.name, remote.version, model.known_token, remote.cache_files, encoded)


def why_not_cached(remote: RemoteDevice) -> str:
    """Return why a device whose cache files are not supported gets no cache. Log a warning if the device asks for too many files."""
    files = remote.cache_files
    if 0 <= max(files.model, files.data) <= MAX_CACHE_FILES:
        return "the device does not cache"
    detail = f"the device asks for {files.model} and {files.data} files, at most {MAX_CACHE_FILES} are given"
    logger.warning("no cache for device %r: %s", remote.name, detail, extra=about(device=remote.name))
    return detail


async def look_up(
    devices: Devices, store: CacheStore, wanted: Wanted, options: PrepareOptions, refused: tuple[Hit, Refusal] | None, progress: Progress
) -> Opened:
    """Open an entry within the time that a cache may take.

    Args:
        refused: a hit that the driver has refused, and why.

    Returns:
        A miss with the reason TOO_SLOW if the cache directory did not answer in time.
    """
    left_s = seconds_until(options.deadline_ns)
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
        found = await in_time(devices.tasks, lambda: open_entry(store, wanted, refused, wait_s, progress), more_s, _give_back)
        if found is not None:
            return found
    assert patience_s is not None  # without a deadline the call waits for the store
    slow = Refusal(MissReason.TOO_SLOW, f"the cache directory did not answer within {patience_s:.3f} s of the deadline")
    store.warn(slow)
    missed = CacheOutcome(CacheOutcomeKind.MISS, slow.reason, wanted.device, slow.detail, wanted.key, patience_s, save_failure=slow)
    return Miss(missed, None)


async def _glance(store: CacheStore, wanted: Wanted, seconds: float | None) -> Hit | Declined | None:
    # The usual case is a whole entry that no process is publishing. It needs no `in_time` and no task.
    if seconds is None:
        return await store.glance(wanted)
    with anyio.move_on_after(seconds):
        return await store.glance(wanted)
    return None


async def _give_back(found: Opened) -> None:
    await found.aclose()  # to its end, although the task is cancelled: no other code closes what the task has opened


async def open_entry(store: CacheStore, wanted: Wanted, refused: tuple[Hit, Refusal] | None, wait_s: float, progress: Progress) -> Opened:
    """Open an entry, or refuse the hit that a driver has refused. A hit shares the entry with every reader.

    Args:
        refused: a hit that the driver has refused, and why.
        wait_s: how long to wait for another compiler.
    """
    with store.in_use():  # a caller that waits for this task may leave before the task ends
        waits = partial(progress.waits, wanted.device)
        if refused is not None and refused[0].manifest.key == wanted.key:
            return await refused[0].refuse(refused[1], wait_s=wait_s, waits=waits)
        return await store.open(wanted, wait_s=wait_s, waits=waits)


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


# --- loading ---------------------------------------------------------------------------------------------------------


async def load(remote: RemoteDevice, model: Model, options: PrepareOptions, hit: Hit, progress: Progress) -> RemotePreparedModel:
    """Load an entry in the driver, within the time that a cache may take.

    Raises:
        AionnError: the driver refused the entry, or took too long.
    """
    left_s = seconds_until(options.deadline_ns)
    if left_s is not None and hit.outcome.saved_s <= left_s * _CACHE_SHARE:
        options = dataclasses.replace(options, deadline_ns=time.monotonic_ns() + int(left_s * _CACHE_SHARE * 1e9))
    progress.step(remote.name, LOADING)
    with trace.span("prepare.from_cache", device=remote.name, model=progress.model):
        return await load_files(remote, model, options, bound(hit.handles, hit.manifest.model_digest))


async def load_files(remote: RemoteDevice, model: Model, options: PrepareOptions, handles: CacheHandles) -> RemotePreparedModel:
    """Load cache files in the driver, whatever the time. A model whose operands are not known yet takes them from there.

    Args:
        handles: as `bound` returns them.

    Raises:
        AionnError: the driver refused the files.
        CompilationError: the driver loaded a model with other inputs or outputs, or with another order of them.
    """
    prepared = await remote.prepare_model_from_cache(options, handles)
    if not adopt(model, prepared.inputs, prepared.outputs):
        prepared.release()
        raise CompilationError(
            "the cached compilation has other inputs or outputs than the model",
            reason=str(Refusal(MissReason.OTHER_MODEL, "its inputs or outputs are not this model's")),
        )
    return prepared


# --- refusals --------------------------------------------------------------------------------------------------------


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


def log_refusal(store: CacheStore, remote: RemoteDevice, refusal: Refusal, error: AionnError, progress: Progress) -> None:
    """Report and log why a model is compiled again.

    Lost records are one warning per cache, because each of its entries is then refused once.
    """
    progress.refused(store.path, remote.name, refusal)
    if refusal.reason is MissReason.NO_INTEGRITY_RECORD and not isinstance(error, DriverDiedError):
        way_out = "keep that folder as long as the cache, or choose one that lasts with Runtime(state_dir=) or --state-dir"
        store.warn(Refusal(refusal.reason, f"the records that vouch for it are lost: {refusal.detail}; {way_out}"))
        return
    what = "device %r did not take the cached compilation of model %r, which is compiled again: %s"
    logger.warning(what, remote.name, progress.model, refusal, extra=about(device=remote.name, model=progress.model))
