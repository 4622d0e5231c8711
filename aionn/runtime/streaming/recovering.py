"""`RecurrentStream`: a stream whose state stays in the driver and survives the driver's end.

The stream keeps the state as it was at the last snapshot, and copies of the inputs of all frames since. If the driver ends, a new one
gets the snapshot and computes these frames again. So its state is the same, bit for bit, as if nothing had happened.

Each frame that an app has given is in the state once, in order. A caller that is cancelled or late leaves its frame in the stream, and
the next call computes it first. A frame whose call raises another error is not in the state, and may be given again.

`KeptState` is the state: in device memory, and the app's copy of the last snapshot.

Invariants
    `kept` holds one array for each state, all from the same moment of the stream.
    `inputs` is empty while the state is not in a driver. `filled` is set while the device memories hold the stream's state.
    `_heard` and then `_waiting` are the frames since the snapshot, in order. The state has heard those in `_heard`.
    One task at a time works on the state: the call that holds `_turn`, or the task that takes a snapshot (`_saving`).
    `_unsure` is set while a frame may be with the driver. It holds how often the state had advanced before that frame.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from aionn import trace
from aionn.errors import AionnError, CallerError, DeadlineError, DriverDiedError, DriverHungError, ExecutionError
from aionn.hal.types import ErrorStatus, Operand
from aionn.loopless import AsyncOnly, deadline_of
from aionn.runtime.executing.arguments import Outputs, as_array, check_mapping
from aionn.runtime.executing.device_buffers import BufferPair, DeviceRoles, ModelRoles
from aionn.runtime.executing.device_memory import DeviceMemory, allocate
from aionn.runtime.executing.placement import state_of
from aionn.runtime.preparing.kept_model import KeptModel
from aionn.runtime.streaming import stream
from aionn.runtime.streaming.burst import Burst
from aionn.runtime.streaming.connection import BurstConnection
from aionn.tasks import ending_by

logger = logging.getLogger("aionn.runtime")

Arrays = dict[str, NDArray[Any]]
Roles = Callable[[Iterable[str], Iterable[str]], ModelRoles]


class KeptState:
    """The recurrent state of one stream.

    Attributes:
        initial: what the stream begins with, by the name of the input. kept: what the last snapshot has.
        inputs, outputs: the device memories, by the names of inputs and outputs. Empty while the state is not in a driver.
        filled: whether the device memories hold the stream's state.
        recovered: how often a new driver has got the state.
    """

    def __init__(
        self, kept_model: KeptModel, roles: Roles, names: Mapping[str, str], initial: Mapping[str, Any] | None, stream: str = ""
    ) -> None:
        """Check what the app gives.

        Args:
            names: of the output, by that of the input.
            initial: arrays by the name of the input; those left out are zeros.
            stream: its name.

        Raises:
            CallerError: names, types or shapes do not fit the model.
        """
        self._kept_model = kept_model
        self._roles = roles
        self._names = _checked_names(names)
        given = dict(initial or {})
        for name in given:
            if name not in self._names:
                raise CallerError(f"recurrent: initial[{name!r}]: the states are {list(self._names)}; give arrays for these only")
        self.initial: Arrays = {}
        for name, output in self._names.items():
            DeviceRoles([roles((name,), (output,))], None)  # refuses names, types and shapes that do not go together
            self.initial[name] = _first(name, kept_model.model.inputs[name], given.get(name))
        self.kept = dict(self.initial)
        self.inputs: dict[str, DeviceMemory] = {}
        self.outputs: dict[str, DeviceMemory] = {}
        self.filled = False
        self.recovered = 0
        self._lost = False
        self._stream = stream
        self._pair: BufferPair | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the last snapshot."""
        return sum(array.nbytes for array in self.kept.values())

    @property
    def turns(self) -> int:
        """How many executions have advanced the state in its present memories."""
        return 0 if self._pair is None else self._pair.turns

    def begin_anew(self) -> None:
        """Keep the initial state as the last snapshot. The device memories are to be filled then."""
        self.kept, self.filled = dict(self.initial), False

    def copied(self, inputs: Mapping[str, Any]) -> Arrays:
        """Return copies of a frame's inputs.

        Raises:
            CallerError: a state is among them, or one of them is not an array.
        """
        check_mapping(inputs)
        for name in self._names:
            if name in inputs:
                raise CallerError(f"input {name!r} is a state of this stream, which the stream gives itself; leave it out")
        return {name: as_array(name, value).copy() for name, value in inputs.items()}

    async def wait_idle(self) -> None:
        """Return when the driver is done with an execution whose caller has left.

        Raises:
            DeviceMemoryLostError: the driver has ended.
        """
        for memory in self.inputs.values():
            await state_of(memory).ready()

    async def fill(self) -> None:
        """Let the driver hold what `kept` has. Allocate the device memories first if this stream has not got them yet.

        Raises:
            AionnError: the driver cannot have them, or has ended.
        """
        began_ns = time.monotonic_ns()
        self.filled = False
        if not self.inputs:
            await self._allocate()
        for name, memory in self.inputs.items():
            await memory.copy_from(self.kept[name])
        self.filled = True
        if self._lost:
            self._lost = False
            self.recovered += 1
            device, took_ms = self._kept_model.device, (time.monotonic_ns() - began_ns) / 1e6
            named = {"aionn_device": device, "aionn_burst": self._stream}
            logger.info("device %r has the state of a stream again after %.0f ms", device, took_ms, extra=named)
            trace.count("recurrent.recovered", device=device)

    async def _allocate(self) -> None:
        memories: dict[str, DeviceMemory] = {}
        async with AsyncExitStack() as made:
            for name, output in self._names.items():
                # The roles are made anew each time, because the model may have been swapped.
                memory = await allocate([self._kept_model], DeviceRoles([self._roles((name,), (output,))], None), None)
                memories[name] = await made.enter_async_context(memory)
            made.pop_all()
        self.inputs = memories
        self.outputs = {self._names[name]: memory for name, memory in memories.items()}
        self._pair = state_of(next(iter(memories.values()))).buffers  # all states advance together

    async def save(self) -> None:
        """Take a snapshot. If this fails, `kept` stays as it is.

        Raises:
            AionnError: the driver has ended, or there is no memory for the copies.
        """
        self.kept = {name: await memory.snapshot() for name, memory in self.inputs.items()}

    async def lose(self) -> None:
        """Note that the driver has ended."""
        self._lost = True
        await self.leave()

    async def leave(self) -> None:
        """Free the device memories. `kept` stays."""
        memories, self.inputs, self.outputs, self.filled = self.inputs, {}, {}, False
        self._pair = None
        async with AsyncExitStack() as ending:
            for memory in memories.values():
                ending.push_async_callback(memory.aclose)


def _checked_names(names: object) -> dict[str, str]:
    if not isinstance(names, Mapping) or not names or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise CallerError(f"recurrent: states={names!r}; give the output that follows each state, as in states={{'state': 'stateN'}}")
    if len(set(names.values())) < len(names):
        raise CallerError(f"recurrent: states={dict(names)!r} names an output twice; each state has an output that follows it")
    return dict(names)


def _first(name: str, operand: Operand, given: Any) -> NDArray[Any]:
    """Return what a state begins with.

    Raises:
        CallerError: its shape is open and nothing is given, or what is given does not fit the input.
    """
    if given is None:
        if operand.dimensions is None or 0 in operand.dimensions:
            raise CallerError(f"recurrent: the shape of state {name!r} is open, {operand.dimensions}; give initial={{{name!r}: array}}")
        return np.zeros(operand.dimensions, operand.type.dtype)
    if not isinstance(given, np.ndarray) or given.dtype != operand.type.dtype or not operand.accepts(given.shape):
        found = f"{given.dtype} {given.shape}" if isinstance(given, np.ndarray) else type(given).__name__
        raise CallerError(
            f"recurrent: initial[{name!r}] is {found}; give an array of {operand.type.value} with dimensions {operand.dimensions}"
        )
    return given.copy()


logger = logging.getLogger("aionn.runtime")

MOST_WAITING = 64
"""So many frames may wait for their answers at once. It bounds the memory for frames whose callers have left."""

_LATE = "the frame was not answered"
_CLOSED = "this stream is not open; use it inside `async with compilation.recurrent(...) as stream`"


@dataclass(slots=True, eq=False)
class _Frame:
    """One frame of the stream.

    Attributes:
        inputs: copies of the app's arrays, without the states.
        utterance: how often the stream had been reset before it.
        known: whether a driver has answered it. deaths: how many drivers have ended while they computed it.
    """

    inputs: Arrays
    utterance: int
    known: bool = False
    deaths: int = 0


class _Saving:
    """A snapshot that is taken in the background.

    Attributes:
        over: set at its end. scope: ends it early.
    """

    __slots__ = ("over", "scope")

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.scope = anyio.CancelScope()


class RecurrentStream(AsyncOnly):
    """A stream whose recurrent state stays in the driver and survives the driver's end. Made by `Compilation.recurrent()`.

    Examples:
        >>> async with compilation.recurrent({"state": "stateN"}) as stream:
        ...     outputs = await stream.compute({"input": x})
        ...     await stream.reset()  # a new utterance
    """

    def __init__(self, connection: BurstConnection, state: KeptState, snapshot_every: int) -> None:
        self._connection = connection
        self._burst = Burst(connection)
        self._state = state
        self._every = snapshot_every
        self._heard: list[_Frame] = []
        self._waiting: deque[_Frame] = deque()
        self._utterance = self._utterance_in_state = 0
        self._unsure: int | None = None
        self._turn = anyio.Lock(fast_acquire=True)
        self._saving: _Saving | None = None
        self._open = False
        self._counts = {"answered": 0, "replayed": 0, "snapshots": 0}

    @property
    def recovered(self) -> int:
        """How often a new driver has taken over."""
        return self._state.recovered

    async def __aenter__(self) -> RecurrentStream:
        await self._connection.open()
        try:
            await self._state.fill()
        except BaseException:
            try:
                await self._connection.aclose()
            finally:
                await self._state.leave()
            raise
        self._open = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream and free its state. Calls that still wait get `CallerError`."""
        if not self._open or self._connection.session.inherited:
            return
        self._open = False
        if self._saving is not None:
            self._saving.scope.cancel()
        try:
            await self._connection.aclose()
        finally:
            await self._state.leave()

    async def compute(self, inputs: Mapping[str, Any], *, measure_timing: bool = False, timeout_s: float | None = None) -> Outputs:
        """Run the model on the next frame and advance the state. Several tasks may call at once; frames go in the order of the calls.

        If the driver ends, a new one gets the last snapshot and the frames since then, and computes this frame. A second end of a driver
        within the same call is raised.

        Args:
            inputs: one array per model input, by name, without the states. The stream copies them.
            measure_timing: fill `.timing` of the result.
            timeout_s: seconds after which this call ends with `DeadlineError`, a recovery included. The frame stays in the stream: the
                next call computes it first.

        Returns:
            One array per output, by name, without the states; as for `Burst.compute`.

        Raises:
            CallerError: a name, shape or dtype does not fit, or the stream is not open.
            DeadlineError: no answer in time.
            DeviceBusyError: too many calls wait (`Batching.max_waiting`). The frame is not in the stream.
            ExecutionError: the driver answered that it failed, and the state is as before. Or 64 frames wait for the driver.
            MemoryAllocationError: there is no memory for the frame, or for a snapshot.
            DriverDiedError, DriverHungError: the driver ended twice, or no new one could be started. The next call tries again.
        """
        self._check_open()
        deadline_ns = None if timeout_s is None else deadline_of(timeout_s)
        frame = _Frame(self._state.copied(inputs), self._utterance)
        if len(self._waiting) >= MOST_WAITING and sum(not waiting.known for waiting in self._waiting) >= MOST_WAITING:
            raise ExecutionError(
                f"{MOST_WAITING} frames of this stream wait for the driver; give frames more slowly, or call reset()",
                status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
            )
        self._waiting.append(frame)
        reach, executor = partial(self._reach, frame.utterance, frame, measure_timing), self._connection.executor
        try:
            if executor.admission is not None:
                reach = partial(executor.admission.run, reach, timeout_s, executor.ended)
            if deadline_ns is None:
                return await reach()
            with ending_by(deadline_ns, _LATE):
                return await reach()
        except (asyncio.CancelledError, DeadlineError):
            raise  # the frame stays
        except BaseException:
            if frame in self._waiting:
                self._waiting.remove(frame)
            raise

    def map(
        self, frames: stream.Frames, *, policy: stream.Policy = "block", depth: int = 2, deadline_s: float | None = None
    ) -> AsyncGenerator[stream.StreamResult, None]:
        """Run a stream of inputs, as `Burst.map` does: `async for result in voice.map(microphone())`.

        Frames are arrays by name without the states, alone or in an `aionn.Item`. A frame that the policy drops before it is sent is not
        in the state. A frame from `Burst.lease()` does not fit, because the stream copies its inputs.

        Raises:
            CallerError: as `Burst.map`. While iterating: whatever `compute` or the source raises.
        """
        return stream.Stream(self.compute, self._connection, frames, stream.StreamOptions(policy, depth, deadline_s)).results()

    async def reset(self, *, timeout_s: float | None = None) -> None:
        """Begin anew with the initial state, as for a new utterance. Frames whose callers have left are forgotten.

        A call that is cancelled or late is made good by the next `compute`.

        Raises:
            CallerError: the stream is not open.
            DeadlineError: the state was not reset in time.
            DriverDiedError, DriverHungError: the driver ended twice, or no new one could be started.
        """
        self._check_open()
        self._utterance += 1
        with ending_by(deadline_of(timeout_s), "the stream was not reset"):
            await self._reach(self._utterance)

    def statistics(self) -> dict[str, int]:
        """Return counts since the stream was made: those of `Burst.statistics`, and these.

        answered: frames. recovered: new drivers that took over. replayed: frames that were computed again for that.
        snapshots: taken. kept_bytes: the app's memory for the snapshot and for copies of inputs.
        """
        frames = [*self._heard, *self._waiting]
        kept = self._state.kept_bytes + sum(array.nbytes for frame in frames for array in frame.inputs.values())
        return {**self._burst.statistics(), **self._counts, "recovered": self.recovered, "kept_bytes": kept}

    # --- frames ----------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        self._connection.session.check_open()
        if not self._open:
            raise CallerError(_CLOSED)

    def _note_heard(self) -> None:
        frame = self._waiting.popleft()
        self._counts["replayed" if frame.known else "answered"] += 1
        frame.known = True
        self._heard.append(frame)

    # --- the state ---------------------------------------------------------------------------------------------------------

    async def _reach(self, utterance: int, frame: _Frame | None = None, measure_timing: bool = False) -> Outputs:
        """Bring the state to that utterance, and compute up to `frame`. Returns the outputs of `frame`, or no outputs."""
        async with self._turn:
            failed = False
            while True:
                self._check_open()
                try:
                    await self._make_ready(utterance)
                    outputs = Outputs({}, "")
                    while frame is not None and frame in self._waiting:
                        outputs = await self._step(frame, measure_timing)
                    if len(self._heard) >= self._every and self._saving is None:
                        self._save_soon()
                    return outputs
                except (DriverDiedError, DriverHungError):
                    await self._lose()
                    if failed:
                        raise
                    failed = True

    async def _make_ready(self, utterance: int) -> None:
        """Return when the driver has the state after `_heard`, and the first of `_waiting` may be sent."""
        if self._saving is not None:
            await self._saving.over.wait()
        if self._unsure is not None:
            await self._state.wait_idle()
            self._be_sure()
        if self._utterance_in_state != utterance:
            self._begin(utterance)
        if not self._state.filled:
            await self._state.fill()
        if len(self._heard) >= self._every:  # the snapshot in the background has failed
            await self._save()

    def _be_sure(self) -> None:
        """Note whether the driver has heard the first of `_waiting`: it is done with that frame."""
        if self._state.turns != self._unsure:
            self._note_heard()
        self._unsure = None

    def _begin(self, utterance: int) -> None:
        """Forget the frames of utterances before. The state is to be filled then."""
        while self._waiting and self._waiting[0].utterance != utterance:
            self._waiting.popleft()
        self._heard.clear()
        self._state.begin_anew()
        self._utterance_in_state = utterance

    async def _step(self, wanted: _Frame, measure_timing: bool) -> Outputs:
        """Compute the first frame that waits. Its outputs are of use only if it is `wanted`."""
        frame, state = self._waiting[0], self._state
        self._unsure = state.turns
        try:
            inputs: dict[str, Any] = {**frame.inputs, **state.inputs}
            outputs = await self._burst.compute(inputs, outputs=state.outputs, measure_timing=measure_timing)
        except asyncio.CancelledError:
            raise  # the driver may still be busy with the frame
        except (DriverDiedError, DriverHungError):
            frame.deaths += 1
            raise
        except (CallerError, ExecutionError) as error:
            self._be_sure()
            if frame is wanted or frame.known:
                raise
            self._waiting.popleft()
            logger.warning("a frame of a stream whose caller had left could not be computed, and is left out: %s", error)
            return Outputs({}, "")
        except BaseException:
            self._be_sure()
            raise
        self._unsure = None
        self._note_heard()
        return outputs

    # --- the end of a driver -----------------------------------------------------------------------------------------------

    async def _lose(self) -> None:
        """Note that the driver has ended. All frames since the snapshot wait again."""
        if self._waiting and self._waiting[0].deaths > 1 and not self._waiting[0].known:
            self._waiting.popleft()
            logger.warning("two drivers ended while they computed the same frame of a stream; the frame is left out")
        self._waiting.extendleft(reversed(self._heard))
        self._heard.clear()
        self._unsure = None
        await self._state.lose()

    # --- snapshots -----------------------------------------------------------------------------------------------------------

    def _save_soon(self) -> None:
        """Take a snapshot while the app waits for its next frame."""
        saving = _Saving()
        self._connection.session.tasks.start_soon(self._save_aside, saving, name="snapshot of a stream")
        self._saving = saving

    async def _save_aside(self, saving: _Saving) -> None:
        try:
            with saving.scope:
                await self._save()
        except AionnError as error:
            trace.count("recurrent.snapshot_failed", reason=str(error))  # the next call meets the reason
        finally:
            self._saving = None
            saving.over.set()

    async def _save(self) -> None:
        if self._open:
            await self._state.save()
            self._heard.clear()
            self._counts["snapshots"] += 1
