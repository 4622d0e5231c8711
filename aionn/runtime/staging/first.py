"""Which stage serves from the start: the best one that is stored and approved, else the quickest one that can be prepared."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import anyio

from aionn.caching import CacheOutcomeKind
from aionn.caching.store import Hit
from aionn.engines.processor import run_threads
from aionn.errors import AionnError, CompilationError, DriverDiedError, DriverHungError
from aionn.runtime.preparing.compile_acts import CompileRequest, load, wanted_of
from aionn.runtime.preparing.partition import prepare_on
from aionn.runtime.preparing.preparation import Found
from aionn.runtime.preparing.renewal import stage_devices
from aionn.runtime.preparing.worker import version_of
from aionn.runtime.processes.devices import Devices
from aionn.runtime.record import LOOKING, CompilationRecord, about, current
from aionn.runtime.staging import verdicts
from aionn.runtime.staging.stage import Stage, StagePolicy, enter_state, reported_stage
from aionn.tasks import in_time, ungrouped

logger = logging.getLogger("aionn.stages")

_STORED_SHARE = 0.5
"""The share of the time that is left which the search for stored stages may take, before the first stage is prepared."""


def stages_of(names: Sequence[str], record: CompilationRecord) -> list[Stage]:
    """Return the stages of those names, which wait."""
    return [reported_stage(name, record.stage_entered) for name in names]


async def prepare_first(devices: Devices, stages: Sequence[Stage], request: CompileRequest, policy: StagePolicy) -> Found:
    """Prepare the stage that serves from the start. A device that cannot run every node gets the other stages' devices for the rest.

    Raises:
        CompilationError, DriverDiedError, DriverHungError: no stage can be prepared.
    """
    names, options, cache = [stage.name for stage in stages], request.options, request.cache
    patience_s = request.left_s(_STORED_SHARE / max(1, len(names) - 1))
    for index in range(len(names) - 1, 0, -1):
        if cache is None:
            break
        # A disk may hang in any of this, and the app's deadline does not wait for it.
        work = partial(_stored, devices, names[index], names[:index], request, policy)
        with devices.kept(names[index], options.priority):
            found = await in_time(devices.tasks, work, patience_s, _release)
        if found is not None:
            for stage in stages[:index]:
                enter_state(stage, "skipped", f"stage {names[index]!r} was stored already")
            stages[index].made_by = "cache"
            enter_state(stages[index], "serving")
            return found
    for stage in stages:
        try:
            found = await prepare_on(devices, stage_devices(stage.name, names), request)
        except (CompilationError, DriverDiedError, DriverHungError) as error:
            enter_state(stage, "rejected", str(error))
            if stage is stages[-1]:
                raise
            extra = about(model=current.get().name, stage=stage.name)
            logger.warning("stage %r of model %r cannot serve first: %s", stage.name, current.get().name, error, extra=extra)
            continue
        stage.made_by = "cache" if all(outcome.kind is CacheOutcomeKind.HIT for outcome in found[1]) else "driver"
        enter_state(stage, "serving")
        return found
    raise AssertionError("the last stage returns or raises")


async def _release(found: Found | None) -> None:
    if found is not None:
        found[0].release()


async def _stored(devices: Devices, name: str, bases: Sequence[str], request: CompileRequest, policy: StagePolicy) -> Found | None:
    """Load a stage if it is stored and the policy approves of its measurements. Returns None otherwise.

    No driver is started for a stage that the policy does not approve of.
    """
    model, options, cache = request.model, request.options, request.cache
    assert cache is not None  # without one nothing is stored
    threads = run_threads(options)
    found = await cache.store.remembered.measurements(verdicts.scope(request, name))
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
        current.get().enter(name, LOOKING)
        async with await cache.store.open(wanted_of(remote, request, cache.token, cache.operations), wait_s=0.0) as stored:
            if not isinstance(stored, Hit):
                return None
            with current.get().on(name) as attempt:
                loaded = await load(remote, request, stored)
                attempt.outcome = stored.outcome
            return loaded, (stored.outcome,)
    except AionnError as error:
        model_name = request.record.name
        words = "stage %r of model %r is stored and cannot serve from the start: %s"
        logger.info(words, name, model_name, error, extra=about(model=model_name, stage=name))
        return None
