"""`KeptModel`: keeps the model of one compilation prepared. It prepares it at the first use, and anew when its driver has died.

A model that was given back after idle time (`Idling`) is prepared anew in the same way.

A just-in-time compilation begins without a prepared model, and its first use prepares it. NNAPI has a driver keep the descriptors of
cache files from `prepareModel` until the first execution. Here the app's side keeps the entry's name instead, and opens the files when
they are used. Entries are published by renaming, so a kept descriptor would write to a file that cannot be found any more. It would
have to be locked for as long as the app does not execute. And an artifact that another process has stored meanwhile would go unseen.
What is promised holds: one compile however many callers wait, read and written under the entry's locks, through descriptors that the
driver keeps until it is done.

Bursts and device memories hold the kept model, so a compilation stays usable while one of them lives. The tasks of the runtime do not
hold it. When it is collected, the driver frees the model.

`Idling` gives the driver's memory of a compilation back while the app does not use it (`compile(idle_s=)`). A task looks at the compilation
`LOOKS` times within `idle_s`. It compares counters that exist anyway, so an execution pays nothing. After `LOOKS` looks in a row without a
use, everything that the compilation has in its driver is freed: the links of open bursts, then the prepared model. The `Serving` is marked
`asleep`. From then on it is treated like one whose driver has died: the next use finds it not alive, prepares the model again
(`KeptModel.live`), and bursts connect anew. Between the last look and the mark nothing is awaited, so a use comes before all of it or after
all of it.

A driver process in which nothing is left is ended, by the same task. While the compilation sleeps, the task looks for such processes.

What keeps a compilation awake
    Requests: an execution in flight or sent since the look before; calls that wait (`Gate`); a leased frame; a connection that is made.
    Acts: a swap, a stage in the making, a call that waits for a stage (`Use.hold`).
    State: a device memory that the app has not closed, because its contents would be lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from msgspec.structs import replace

from aionn import trace
from aionn.caching.outcomes import CacheOutcome
from aionn.errors import (
    AionnError,
    CallerError,
    CompilationError,
    DeadlineError,
    DeviceUnavailableError,
    DriverDiedError,
    DriverHungError,
    MemoryAllocationError,
    again,
)
from aionn.graph.steps import Step
from aionn.hal.model import PooledModel
from aionn.hal.types import Priority
from aionn.loopless import call_soon_from_anywhere, seconds_until
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.preparing.compile_acts import CompileRequest
from aionn.runtime.preparing.plan import prepare_on_best
from aionn.runtime.preparing.preparation import Found, check_kept
from aionn.runtime.record import Cause, Progress
from aionn.runtime.serving.serving import CompiledModel, Rest, Serving
from aionn.runtime.session import Session

if TYPE_CHECKING:
    from aionn.runtime.serving.planned_model import Prepared

_FALL_BACK_ON = (CompilationError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError)
"""Errors of a better device after which the next one is tried."""


def device_names(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the devices that run a prepared model, each once."""
    steps = [prepared] if isinstance(prepared, RemotePreparedModel) else [planned.prepared for planned in prepared.steps]
    return tuple(dict.fromkeys(step.device.name for step in steps))


MOST_JOINED_DEATHS = 2
"""After so many deaths of drivers within joined runs, the requests of a model are joined no more."""


class KeptModel:
    """The prepared model of one compilation.

    Attributes:
        compiled: what serves.
        request: what was asked for. Its model and its cache change when the app swaps in another model.
        outcomes: one per step of the plan, of the last preparation.
        record: how the compilation is shown.
        preparation: the preparation that is under way, unless it is the first one in `Runtime.compile`.
        joined_deaths: how many drivers have died within a joined run of the model, since the app swapped it in.
        disproved: gives the names of outputs that came out in another shape than the model declares.
    """

    def __init__(self, session: Session, request: CompileRequest, first: Found | None) -> None:
        """`first`: what was prepared already, or None to prepare it at the first use."""
        self.session = session
        self.request = request
        self.record = request.record
        self.compiled = CompiledModel(session.tasks)
        session.models.add(self.compiled)
        self.outcomes: tuple[CacheOutcome, ...] = ()
        self.disproved: Callable[[], tuple[str, ...]] = tuple
        self._first_device = request.candidates[0] if request.candidates else session.devices.installed[0]
        self.preparation: Progress | None = None
        self._preparing: _Preparing | None = None
        self._storing = anyio.Lock()
        self.joined_deaths = 0
        if first is not None:
            first[0].remember(request.model)
            self.compiled.serving = Serving(first[0], request.model, self.compiled.use, request.stage)
            self.outcomes = first[1]
        if request.idle_s is not None:
            idling = Idling(session, self.compiled, request.candidates or (), request.options.priority)
            session.tasks.start_soon(idling.watch, request.idle_s, name="idling")
        self._finalizer = weakref.finalize(self, call_soon_from_anywhere, session.loop, self.compiled.release)
        self._finalizer.atexit = False

    @property
    def model(self) -> PooledModel:
        """What is computed."""
        return self.request.model

    @property
    def device(self) -> str:
        """Name of the device that runs the next execution. While nothing is compiled yet, that of the first candidate."""
        serving = self.compiled.serving
        return self._first_device if serving is None else serving.device

    @property
    def plan(self) -> tuple[Step, ...]:
        """The steps of the model that serves, or nothing while nothing is prepared yet."""
        from aionn.runtime.preparing.partition import plan_of  # most apps do not ask

        serving = self.compiled.serving
        return () if serving is None else plan_of(serving.prepared, serving.model)

    def devices_of(self, serving: Serving) -> tuple[str, ...]:
        """Return the devices that a new model may be cut over, if the first cannot run it whole: those that serve, then the others."""
        candidates = self.session.devices.installed if self.request.candidates is None else self.request.candidates
        return tuple(dict.fromkeys((*device_names(serving.prepared), *candidates)))

    def close(self) -> None:
        """Stop what works for the compilation. `CompiledModel.release` is the caller's from now on."""
        self._finalizer.detach()
        self.compiled.cancel()

    async def live(self, deadline_ns: int | None = None) -> Serving:
        """Return what executions run on now. The model is prepared first if it is not yet, if its driver is gone, or if it was given back.

        One preparation runs at a time, however many callers wait. It belongs to the runtime, so a caller that leaves does not end it.
        """
        self.check_usable()
        self.compiled.use.touches += 1
        serving = self.compiled.serving
        if serving is not None and serving.alive:
            return serving
        preparing = self._preparing
        if preparing is None:
            preparing = self._preparing = _Preparing()
            self.session.tasks.start_soon(self._prepare, preparing, name="preparing")
        with self.compiled.use.hold(), anyio.move_on_after(seconds_until(deadline_ns)):
            await preparing.over.wait()
        if preparing.serving is not None:
            self.check_usable()
            return preparing.serving
        if preparing.error is not None:
            raise again(preparing.error)
        raise DeadlineError("the model was not prepared by the deadline; it is still being prepared for the next call")

    async def store_tuned(self) -> None:
        """Store a better artifact, if the engine that serves offers one. It raises nothing."""
        serving, cache = self.compiled.serving, self.request.cache
        if cache is None or serving is None or not serving.alive or self._storing.locked():
            return
        prepared = serving.prepared
        if not isinstance(prepared, RemotePreparedModel) or not prepared.tunes:
            return  # a plan's steps are not asked
        from aionn.runtime.preparing.compile_acts import store_tuned  # most engines offer nothing

        async with self._storing:
            await store_tuned(prepared, self.request.without_deadline(), cache)

    def check_usable(self) -> None:
        """Return if the compilation may be used.

        Raises:
            CallerError: it, or the runtime, has been closed; or this is another process or another event loop.
        """
        self.session.check_open()
        self.check_not_closed()

    def check_not_closed(self) -> None:
        """Return if the compilation has not been closed. Any thread may ask.

        Raises:
            CallerError: it has.
        """
        if self.compiled.closed:
            raise CallerError("this compilation has been closed; compile the model again")

    async def _prepare(self, preparing: _Preparing) -> None:
        error: BaseException = CallerError("the runtime was closed")
        compiled, dead = self.compiled, self.compiled.serving
        try:
            name = "compilation.prepare" if dead is None else "compilation.prepare_again"
            if dead is not None and dead.lost and not dead.prepared.device.restarted:
                ended_by = dead.ended_by
                self.joined_deaths += isinstance(ended_by, DriverDiedError) and dead.prepared.was_joining
                if isinstance(ended_by, DriverDiedError | DriverHungError):
                    compiled.failed(dead, ended_by)
            with (
                trace.about(model=self.record.name),
                trace.span(name, device=self.device),
                Progress(self.record, self.device, cause=_cause(dead)) as self.preparation,
            ):
                stage, (prepared, self.outcomes) = await self._preparation()
                self.preparation.outcomes = self.outcomes
            if compiled.closed:
                prepared.release()
                error = CallerError("this compilation has been closed; compile the model again")
            elif compiled.serving is not dead:
                prepared.release()  # a better stage has been swapped in meanwhile
                preparing.serving = compiled.serving
            else:
                prepared.remember(self.model)
                preparing.serving = compiled.serving = Serving(prepared, self.model, compiled.use, stage)
                if dead is not None:
                    self.session.tasks.start_soon(_release_steps, dead, name="a dead plan")
                    if compiled.replaced is not None:
                        compiled.replaced(dead, preparing.serving)
        except Exception as failed:  # every caller gets it
            error = failed
        finally:
            self._preparing = self.preparation = None
            if preparing.serving is None:
                preparing.error = error
            preparing.over.set()

    async def _preparation(self) -> tuple[str | None, Found]:
        """Prepare the model. Returns also the name of the stage, or None where it is named after its device."""
        serving, devices, request = self.compiled.serving, self.session.devices, self.request.without_deadline(self.disproved())
        if self.joined_deaths >= MOST_JOINED_DEATHS:
            request = replace(request, options=replace(request.options, batching=None))
        if serving is None:
            return None, check_kept(request, await prepare_on_best(devices, request))
        from aionn.runtime.preparing.partition import prepare_again, prepare_on

        if self.compiled.devices_for is None:
            return None, await prepare_again(devices, serving.prepared, request)
        names = self.compiled.devices_for(serving)
        for name in names[:-1]:
            with suppress(*_FALL_BACK_ON):
                return name, await prepare_on(devices, stage_devices(name, request.candidates), request)
        return names[-1], await prepare_on(devices, stage_devices(names[-1], request.candidates), request)


def _cause(before: Serving | None) -> Cause:
    """Return why a model is prepared. `before`: what has served, or None."""
    return "first" if before is None else "idle" if before.asleep else "death"


def stage_devices(name: str, stages: Sequence[str] | None) -> tuple[str, ...]:
    """Return the devices that a stage may be cut over: its own first, then those of the other stages."""
    return (name, *(other for other in stages or () if other != name))


async def _release_steps(dead: Serving) -> None:
    """Let the drivers that still live free their steps of a plan of which one driver is dead."""
    await dead.wait_idle()
    with suppress(AionnError):
        await dead.aclose()


class _Preparing:
    """One preparation, however many calls wait for it."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.serving: Serving | None = None
        self.error: BaseException | None = None


LOOKS = 4
"""So many looks in a row without a use end the service. The memory is given back after `idle_s` to 1.25 times `idle_s`."""

_LEAST_S = 0.005
"""The least time between two looks, so that a tiny `idle_s` does not keep the loop busy."""


class Idling:
    """Watches the use of one compilation. Between two looks its task holds no part of the compilation but `CompiledModel`."""

    def __init__(self, session: Session, compiled: CompiledModel, names: Sequence[str], priority: Priority) -> None:
        """`names`: of the devices that the app has chosen, if it has. Their drivers are ended when they are not needed."""
        self._session = session
        self._compiled = compiled
        self._names = names
        self._priority = priority
        self._seen: object = None
        self._quiet = 0

    async def watch(self, idle_s: float) -> None:
        """Look again and again, until the compilation is closed or collected."""
        over = self._compiled.use.over
        while True:
            with anyio.move_on_after(max(idle_s / LOOKS, _LEAST_S)):
                await over.wait()
            if over.is_set() or self._session.inherited:
                return
            await self._look()

    async def _look(self) -> None:
        serving = self._compiled.serving
        if serving is None or not (serving.asleep or self._fell_asleep(serving)):
            return
        await self._release(serving)
        for name in {*device_names(serving.prepared), *self._names}:
            self._session.devices.end_unused(name, self._priority)

    def _fell_asleep(self, serving: Serving) -> bool:
        """Give the links of open bursts back if the compilation was not used for `LOOKS` looks. Returns whether it did so."""
        rests = self._rested()
        if rests is None:
            return False
        serving.asleep = True
        for rest in rests:
            rest.give_back()
        trace.count("compilation.idle", device=serving.device)
        return True

    def _rested(self) -> list[Rest] | None:
        """Return what can be given back, if the compilation was not used for `LOOKS` looks."""
        rests, compiled = self._compiled.rests(), self._compiled
        seen = None if rests is None else (compiled.use.touches, compiled.swaps, sum(rest.sent for rest in rests))
        self._quiet = 0 if seen is None or seen != self._seen else self._quiet + 1
        self._seen = seen
        return rests if self._quiet >= LOOKS else None

    async def _release(self, serving: Serving) -> None:
        """Let the driver free the model, if that is not done yet."""
        try:
            await serving.aclose()
        except AionnError as error:
            trace.count("compilation.release_failed", reason=str(error))  # the driver is gone, and the model with it
