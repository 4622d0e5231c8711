"""`Compilation`: a model prepared on a device, as an app uses it.

It outlives its driver: when that dies, awaiting calls end with `DriverDiedError`, and the next use starts a new driver and
prepares the model there again, once, whoever asks.

JIT is the same with no driver to begin with: the first use prepares the model (`_live`). NNAPI has a driver keep the descriptors
of cache files from `prepareModel` until the first execution. Here the app's side keeps the place instead, and opens the files
when they are used. Entries are published by renaming, so a kept descriptor would write to a file that nobody finds any more; it
would have to be locked for as long as the app pleases not to execute; and an artifact that another process has stored meanwhile
would go unseen. What is kept until then is the entry's name, and what is promised holds: one compile however many wait, read and
written under the entry's locks, through descriptors that the driver keeps until it is done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import weakref
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import anyio

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
    ExecutionError,
    MemoryAllocationError,
    again,
)
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.hal.types import ExecutionPreference, Priority, Result
from aionn.memory import pool as memory_pool
from aionn.memory.region import Region
from aionn.remote.device import RemoteBuffer, RemotePreparedModel
from aionn.runtime.executing.arguments import Arguments, Outputs, Shapes, Way, check_mapping, raise_for
from aionn.runtime.executing.device_memory import DeviceMemory, DeviceRoles
from aionn.runtime.executing.frames import Frames, Spare, fill
from aionn.runtime.executing.link import CLOSE_S
from aionn.runtime.executing.placement import Placement, is_placed, place
from aionn.runtime.preparing.plan import prepare_on_best
from aionn.runtime.preparing.preparation import CacheChoice, prepare
from aionn.runtime.serving.compiled_model import CompiledModel, Serving
from aionn.runtime.staging.stage import Stage, StagePolicy
from aionn.runtime.staging.stages import Staging
from aionn.runtime.streaming.burst import QUEUE_CAPACITY, Burst
from aionn.tasks import bounded_shield, call_soon_from_anywhere, deadline_of, ending_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aionn.runtime.runtime import Runtime


_IN_FLIGHT = 64
"""So many executions without a burst are in flight, each with descriptors of its own in the driver. Further callers wait, in order."""


class Compilation:
    """A model prepared on a device. Made by `Runtime.compile`; freed by `aclose`, with the runtime, or when collected.

    Attributes:
        model: what was compiled.
        outcomes: one `CacheOutcome` per step of the plan; of the last preparation, if a driver had to be started anew.
        preference, priority: as they were chosen.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: Model,
        options: PrepareOptions,
        cache: CacheChoice | None,
        candidates: Sequence[str] | None,
        prepared: RemotePreparedModel | None = None,
        outcomes: tuple[CacheOutcome, ...] = (),
    ) -> None:
        """`prepared` None: at the first execution, on the best of `candidates`."""
        self._runtime = runtime
        self.model = model
        self._candidates = candidates
        self._first_device = candidates[0] if candidates else runtime._devices.installed[0]
        self.outcomes = outcomes
        self.preference: ExecutionPreference = options.preference
        self.priority: Priority = options.priority
        self._options = options
        self._cache = cache
        self._compiled = CompiledModel(runtime._tasks)
        if prepared is not None:
            prepared.remember(model)
            self._compiled.serving = Serving(prepared, model, self._compiled.use)
        self._flight: _Flight | None = None
        self._staging: Staging | None = None
        self._arguments = Arguments(model)
        self._static = all(operand.size_bytes is not None for operand in (*model.inputs.values(), *model.outputs.values()))
        self._frames = Frames(exact=self._static, max_frames=_IN_FLIGHT)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._finalizer = weakref.finalize(self, call_soon_from_anywhere, self._loop, self._compiled.release)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"Compilation(device={self.device!r}, outcomes={self.outcomes!r})"

    async def __aenter__(self) -> Compilation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close its bursts and let the driver free the model, which it does once executions in flight are over.

        Returns after `CLOSE_S` per burst and for the model at the latest: a driver that is long busy frees it later. A caller that is
        cancelled leaves nothing behind: all of it is asked for at once, and not waited for.
        """
        if self._closed or self._runtime._inherited:
            return
        self._runtime._check_loop()
        self._closed = True
        self._finalizer.detach()
        bursts = list(self._compiled.bursts)
        try:
            self._compiled.abandon()
            if self._staging is not None:
                await self._staging.stop()
            for burst in bursts:
                await burst.aclose()
            with bounded_shield(CLOSE_S):
                if self._compiled.serving is not None:
                    await self._compiled.serving.prepared.aclose()
        except AionnError as error:
            trace.count("compilation.release_failed", reason=str(error))  # the driver is gone, and the model with it
        finally:
            for burst in bursts:
                burst._end()
            self._compiled.release()
            self._frames.close()

    def _end(self) -> None:
        """The runtime has closed, and every driver has ended: give the memory back."""
        for burst in list(self._compiled.bursts):
            burst._end()
        self._frames.close()

    # --- stages --------------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One `aionn.Stage` each (state, reason, times), from quick to best, as they are now; empty outside mode "staged"."""
        return () if self._staging is None else self._staging.stages

    async def wait_for_stage(self, name: str, timeout_s: float | None = None) -> None:
        """Return when that stage serves, has served, or is not needed because a better one is stored.

        Waiting for it is use that warrants it: it is made at once, whatever the policy says. It is compared on inputs of
        executions; as long as there has been none, on made up ones.

        Raises:
            CallerError: there is no such stage.
            StageRejected: it will not serve; `.reason` says why.
            DeadlineError: it is not decided after `timeout_s` seconds.
        """
        if self._staging is None:
            raise CallerError("this compilation has no stages; compile the model with mode='staged'")
        await self._staging.wait_for(name, timeout_s)

    def _begin_stages(self, stages: Sequence[Stage], policy: StagePolicy) -> None:
        myself = weakref.ref(self)

        async def run(serving: Serving, inputs: Mapping[str, Any], deadline_ns: int) -> Outputs:
            compilation = myself()
            if compilation is None:
                raise CallerError("the compilation has been collected")
            return await compilation._compute_on(serving, compilation._arguments.shapes_of(inputs), inputs, deadline_ns=deadline_ns)

        devices = self._runtime._devices
        self._staging = Staging(devices, self._compiled, self.model, self._options, self._cache, stages, policy, run)
        self._runtime._tasks.start_soon(self._staging.work, name="stages")

    # --- what serves ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """Name of the device that runs the next execution; of the one that is asked first, while nothing is compiled yet."""
        serving = self._compiled.serving
        return self._first_device if serving is None else serving.device

    async def _live(self, deadline_ns: int | None = None) -> Serving:
        """What executions run on now; prepared if it is not yet, or anew on a new driver if the old one is gone.

        One preparation at a time, whoever asks; it belongs to the runtime, so a caller who leaves does not end it.
        """
        self._runtime._check_open()
        self._check_not_closed()
        serving = self._compiled.serving
        if serving is not None and serving.alive:
            return serving
        flight = self._flight
        if flight is None:
            flight = self._flight = _Flight()
            self._runtime._tasks.start_soon(self._prepare, flight, name="preparing")
        seconds = None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        with anyio.move_on_after(seconds):
            await flight.landed.wait()
        if flight.serving is not None:
            self._check_not_closed()
            return flight.serving
        if flight.error is not None:
            raise again(flight.error)
        raise DeadlineError("the model was not prepared by the deadline; it is still being prepared for the next call")

    def _check_not_closed(self) -> None:
        if self._closed:
            raise CallerError("this compilation has been closed; compile the model again")

    async def _prepare(self, flight: _Flight) -> None:
        error: BaseException = CallerError("the runtime was closed")
        compiled, dead = self._compiled, self._compiled.serving
        try:
            name = "compilation.prepare" if dead is None else "compilation.prepare_again"
            if dead is not None and isinstance(ended_by := dead.prepared.device.connection.ended_by, DriverDiedError | DriverHungError):
                compiled.failed(dead, ended_by)
            with trace.span(name, device=self.device):
                prepared, self.outcomes = await self._preparation()
            if self._closed:
                prepared.release()
                error = CallerError("this compilation has been closed; compile the model again")
            elif compiled.serving is not dead:
                prepared.release()  # a better stage has been swapped in meanwhile
                flight.serving = compiled.serving
            else:
                prepared.remember(self.model)
                flight.serving = compiled.serving = Serving(prepared, self.model, compiled.use)
                if dead is not None and compiled.replaced is not None:
                    compiled.replaced(dead, flight.serving)
        except Exception as failed:  # every caller gets it
            error = failed
        finally:
            self._flight = None
            if flight.serving is None:
                flight.error = error
            flight.landed.set()

    async def _preparation(self) -> tuple[RemotePreparedModel, tuple[CacheOutcome, ...]]:
        serving, devices = self._compiled.serving, self._runtime._devices
        options = dataclasses.replace(self._options, deadline_ns=None, open_outputs=self._arguments.disproved)
        if serving is None:
            prepared, outcome = await prepare_on_best(devices, self.model, self._candidates, options, self._cache)
            return prepared, (outcome,)
        names = [serving.device] if self._compiled.devices_for is None else self._compiled.devices_for(serving)
        for name in names[:-1]:
            with suppress(CompilationError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError):
                prepared, outcome = await prepare(devices, name, self.model, options, self._cache)
                return prepared, (outcome,)
        prepared, outcome = await prepare(devices, names[-1], self.model, options, self._cache)
        return prepared, (outcome,)

    async def allocate(
        self,
        *,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        shape: tuple[int, ...] | None = None,
        timeout_s: float | None = None,
    ) -> DeviceMemory:
        """Memory in the driver that may stand for those inputs and outputs of this model (a memory domain).

        Args:
            inputs, outputs: names; all have one element type, and shapes that fit each other.
            shape: to fill in what the operands leave open.
            timeout_s: seconds after which the call ends with `DeadlineError`.

        Returns:
            Uninitialized memory: fill it by `copy_from`, `reset`, or an execution that writes it.

        Raises:
            CallerError: the names, types or shapes do not go together.
            MemoryAllocationError: the driver cannot have that memory now.
            DeadlineError: it was not allocated in time.
            DriverDiedError, DriverHungError: the driver is gone.

        NNAPI: ANeuralNetworksMemory_createFromDesc.
        """
        roles = DeviceRoles(self, inputs, outputs, shape)
        deadline_ns = deadline_of(timeout_s)
        with ending_by(deadline_ns, "the device memory was not allocated"):
            return await self._allocate(roles, deadline_ns)

    async def _allocate(self, roles: DeviceRoles, deadline_ns: int | None) -> DeviceMemory:
        while True:
            serving = await self._live(deadline_ns)
            with trace.span("allocate", device=serving.device):
                buffer = await roles.allocate(serving.prepared)
            if serving is self._compiled.serving:
                memory = DeviceMemory(self, serving.prepared, buffer, roles)
                self._compiled.memories.add(memory)
                return memory
            buffer.release()  # another stage has been swapped in meanwhile

    def burst(self, *, depth: int = 8, queue_capacity: int = QUEUE_CAPACITY) -> Burst:
        """A stream of executions to the driver: `async with compilation.burst() as burst`.

        Args:
            depth: so many requests may be in flight at once; further callers wait, in order.
            queue_capacity: datums of 24 bytes per queue; a request needs about 4, and 1 per argument and dimension.

        Raises:
            CallerError: a number is not positive.
        """
        if depth < 1 or queue_capacity < 8:
            raise CallerError(f"burst of depth {depth} with a queue of {queue_capacity} datums: at least 1 and 8 are needed")
        return Burst(self, depth=depth, queue_capacity=queue_capacity)

    async def compute(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Mapping[str, Any] | None = None,
        measure_timing: bool = False,
        timeout_s: float | None = None,
    ) -> Outputs:
        """Run the model once, without a burst: the request goes over the control socket, the arrays through shared memory.

        Args:
            inputs: one array per model input, by name. Shapes and dtypes as `Model.inputs` says.
            outputs: where outputs are to be written instead, by name, as for `Burst.compute`.
            measure_timing: fill `.timing` of the result.
            timeout_s: as for `Burst.compute`.

        Returns:
            One array per output, by name, owned by the caller.

        Raises:
            CallerError: a name, shape or dtype does not fit; nothing was sent.
            DeadlineError: no answer in time.
            ExecutionError: the driver answered that it failed.
            MemoryAllocationError: there is no memory for arrays of these shapes.
            DriverDiedError, DriverHungError: the driver is gone; the next call starts a new one. `DeviceMemoryLostError` as there.

        NNAPI: ANeuralNetworksExecution_compute.
        """
        check_mapping(inputs)
        deadline_ns = deadline_of(timeout_s)
        with ending_by(deadline_ns, "the driver's answer did not come"):
            return await self._compute(inputs, outputs, measure_timing, deadline_ns)

    async def _compute(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None, measure_timing: bool, deadline_ns: int | None
    ) -> Outputs:
        placing = bool(outputs) or any(is_placed(value) for value in inputs.values())
        shapes = () if placing else self._arguments.shapes_of(inputs)
        while True:
            if self._compiled.gate.shut:
                await self._compiled.gate.passed(deadline_ns)
            serving = await self._live(deadline_ns)
            if not self._compiled.gate.closed:
                break
        with serving.used():
            if (sampling := self._compiled.sampling) is not None:
                await sampling.take_placed(inputs, inputs)
            try:
                return await self._compute_on(serving, shapes, inputs, outputs, measure_timing, deadline_ns)
            except ExecutionError as error:
                self._compiled.failed(serving, error, inputs)
                raise

    async def _compute_on(
        self,
        serving: Serving,
        shapes: Shapes,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any] | None = None,
        measure_timing: bool = False,
        deadline_ns: int | None = None,
    ) -> Outputs:
        placing = bool(outputs) or any(is_placed(value) for value in inputs.values())
        model = serving.model
        wider: Way | None = None
        with Spare(self._frames, deadline_ns) as spare:
            while True:
                placement = frame = None
                placed_shapes: dict[str, tuple[int, ...]] = {}
                try:
                    if placing:
                        placement, placed_shapes = await place(model, self._arguments.outputs, serving.prepared, inputs, outputs)
                        shapes = self._arguments.shapes_of(inputs, placed_shapes)
                    way = wider or self._arguments.way(shapes)
                    pool = self._frames.pool(way)
                    frame = await self._frames.lease(way, deadline_ns) if placement is None else spare.lease(pool)
                    fill(frame, way, inputs, placement.inputs if placement else ())
                except BaseException as error:
                    if placement is not None:
                        placement.release()
                    if frame is not None:
                        pool.unpin(frame)
                    if not isinstance(error, memory_pool.FramesInFlightError):
                        raise
                    await spare.wait(error.pool)
                    continue
                try:
                    with nullcontext() if placement is None else placement.awaited():
                        result = await self._execute(serving, way, frame, placement, measure_timing, deadline_ns)
                    if not self._arguments.may_retry(way, result, placement.outputs if placement else ()):
                        raise_for(result, model, serving.device)
                        found = way.outputs_in(frame, result.output_shapes, outputs or ())
                        arrays = [(name, array.copy()) for name, array in found.items()]
                        arrays += placement.arrays(model, result) if placement else []
                        return Outputs(arrays, serving.stage, result.timing if measure_timing else None)
                    wider = self._arguments.widen(shapes, result.output_shapes)
                finally:
                    pool.unpin(frame)

    async def _execute(
        self,
        serving: Serving,
        way: Way,
        frame: memory_pool.Frame,
        placement: Placement | None,
        measure_timing: bool,
        deadline_ns: int | None,
    ) -> Result:
        pool = self._frames.pool(way)
        pool.pin(frame)

        def settled(result: Result | None) -> None:
            pool.unpin(frame)
            if placement is not None:
                placement.settled(result)

        pools: list[Region | RemoteBuffer] = [frame.region, *(placement.pools if placement else ())]
        request = placement.request(way, frame.offset) if placement else way.request(frame.offset)
        with trace.span("compute", device=serving.device), ending_by(deadline_ns, "the driver's answer did not come"):
            return await serving.prepared.execute(request, pools, measure_timing, deadline_ns, serving.entered(settled))


class _Flight:
    """One preparation, however many calls wait for it."""

    def __init__(self) -> None:
        self.landed = anyio.Event()
        self.serving: Serving | None = None
        self.error: BaseException | None = None
