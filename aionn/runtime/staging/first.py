"""Which stage serves from the start: the best one that is stored and approved, else the quickest one that can be prepared."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import anyio

from aionn import trace
from aionn.caching import CacheOutcomeKind
from aionn.caching.store import Hit
from aionn.engines.processor import run_threads
from aionn.errors import AionnError, CallerError, CompilationError, DriverDiedError, DriverHungError
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.runtime.preparing.background import version_of
from aionn.runtime.preparing.cached import CacheChoice, load, wanted_of
from aionn.runtime.preparing.in_time import in_time
from aionn.runtime.preparing.partition import prepare_on
from aionn.runtime.preparing.preparation import Found
from aionn.runtime.preparing.renewal import stage_devices
from aionn.runtime.processes.devices import Devices
from aionn.runtime.staging import verdicts
from aionn.runtime.staging.stage import Stage, StagePolicy, enter_state
from aionn.tasks import seconds_until, ungrouped

logger = logging.getLogger("aionn.runtime")

_STORED_SHARE = 0.5
"""The share of the time that is left which the search for stored stages may take, before the first stage is prepared."""


async def prepare_first(
    devices: Devices, model: Model, names: Sequence[str], options: PrepareOptions, cache: CacheChoice | None, policy: StagePolicy
) -> tuple[Found, list[Stage]]:
    """Prepare the stage that serves from the start. A device that cannot run every node gets the other stages' devices for the rest.

    Raises:
        CallerError, DeviceUnavailableError: a name is wrong.
        CompilationError, DriverDiedError, DriverHungError: no stage can be prepared.
    """
    if isinstance(names, str) or len(set(names)) < len(names) or not names:
        raise CallerError(f"stages={names!r}: give the names of devices from quick to best, each once")
    for name in names:
        devices.find(name)
    stages = [Stage(name) for name in names]
    left_s = seconds_until(options.deadline_ns)
    patience_s = None if left_s is None else left_s * _STORED_SHARE / max(1, len(names) - 1)
    for index in range(len(names) - 1, 0, -1):
        if cache is None:
            break
        # A disk may hang in any of this, and the app's deadline does not wait for it.
        work = partial(_stored, devices, names[index], names[:index], model, options, cache, policy)
        with devices.kept(names[index], options.priority):
            found = await in_time(devices.tasks, work, patience_s, _release)
        if found is not None:
            for stage in stages[:index]:
                enter_state(stage, "skipped", f"stage {names[index]!r} was stored already")
            stages[index].made_by = "cache"
            enter_state(stages[index], "serving")
            return found, stages
    for stage in stages:
        try:
            found = await prepare_on(devices, stage_devices(stage.name, names), model, options, cache)
        except (CompilationError, DriverDiedError, DriverHungError) as error:
            enter_state(stage, "rejected", str(error))
            trace.count("stage.rejected", stage=stage.name, reason=str(error))
            if stage is stages[-1]:
                raise
            logger.warning("stage %r cannot serve first: %s", stage.name, error)
            continue
        stage.made_by = "cache" if all(outcome.kind is CacheOutcomeKind.HIT for outcome in found[1]) else "driver"
        enter_state(stage, "serving")
        return found, stages
    raise AssertionError("the last stage returns or raises")


async def _release(found: Found | None) -> None:
    if found is not None:
        found[0].release()


async def _stored(
    devices: Devices, name: str, bases: Sequence[str], model: Model, options: PrepareOptions, cache: CacheChoice, policy: StagePolicy
) -> Found | None:
    """Load a stage if it is stored and the policy approves of its measurements. Returns None otherwise.

    No driver is started for a stage that the policy does not approve of.
    """
    threads = run_threads(options)
    found = await cache.store.measurements(verdicts.scope(cache, model, options, name))
    found = [one for one in found if one.base in bases and one.threads == threads]
    if verdicts.judged(found, model, policy) != verdicts.APPROVED:
        return None
    versions: dict[str, str | None] = {}

    async def ask(base: str) -> None:
        versions[base] = await version_of(devices, base)

    try:
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                for base in {one.base for one in found}:
                    tasks.start_soon(ask, base)
                remote = await devices.get(name, options.priority)
        valid = [one for one in found if verdicts.holds(one, remote.version, versions[one.base], threads)]
        if not remote.cache_files.supported or verdicts.judged(valid, model, policy) != verdicts.APPROVED:
            return None
        async with await cache.store.open(wanted_of(remote, model, options, cache), wait_s=0.0) as stored:
            if not isinstance(stored, Hit):
                return None
            return await load(remote, model, options, stored), (stored.outcome,)
    except AionnError as error:
        logger.info("stage %r is stored and cannot serve from the start: %s", name, error)
        return None
