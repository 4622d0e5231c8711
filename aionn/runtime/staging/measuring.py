"""How long a run takes on one of two stages, under equal conditions, while the app's stream goes on.

A run that shares the machine with the stream says more about the stream than about itself. A run in another process shares more of
the machine than a run in the same queue. So each measured run has the machine to itself, as far as this compilation goes.

A measured run also keeps the stream's rhythm. An engine that has just run is quicker than one whose threads sleep, or slower where
cores heat up. What counts is its speed in this stream. The old stage has run as the stream's last execution. The new stage first
makes a run beside the stream that does not count. Both are then measured after a pause, as cheaply as possible:

    in a gap    Where pauses between executions are usually more than twice as long as a run, the run begins in the middle of one.
                Nothing is held back. The run counts unless an execution came before it was over.
    held        Where pauses are shorter, or do not come (`_DISTURBED` times in a row), the stream is held for single runs. The gate
                is closed, and executions in flight end. The next execution comes and waits, one run is made in its place, and the
                gate opens.

The rule for holding, all of it
    How long    Never longer than one run of the stage that serves. For the new stage that is the time which this pair's run on the old
                stage has taken. A new stage that takes longer has lost the pair, so the gate opens and the run ends beside the stream.
                For the old stage it is twice the least time that a run has taken. A new stage that hangs delays the stream by that
                much, once.
    How often   At least `_FRAMES_BETWEEN` executions lie between two holds. A camera's stream has caught up by then.
    Never       On a stream whose deadlines leave too little room. Each of the last few executions with a deadline
                (`Use.least_left_s`) must have been answered earlier than a hold may last.
    Counted     `Meter.holds` and `held_s`. Each hold is an event "stage.held" and a span "stage.hold".

Where holding is not allowed and gaps are too short, the runs are made beside the stream. Only the new stage is slower beside the stream
than alone, because the old stage's driver runs one request after the other. So such a pair can prove that the new stage is faster,
and never that it is not.

The inputs on which stages are compared are copies of a few recent ones, or made-up ones if the app has executed nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from aionn import trace
from aionn.errors import AionnError, DeadlineError
from aionn.hal.model import PooledModel
from aionn.loopless import deadline_of
from aionn.runtime.executing.arguments import as_array
from aionn.runtime.executing.placement import contents_of
from aionn.runtime.preparing.compile_acts import CompileRequest
from aionn.runtime.processes.devices import Devices
from aionn.runtime.serving.serving import CompiledModel, Serving
from aionn.tasks import ungrouped

Inputs = Mapping[str, NDArray[Any]]
Run = Callable[[Serving, Inputs, int | None], Awaitable[Mapping[str, NDArray[Any]]]]
"""Runs inputs on one prepared model until a deadline (CLOCK_MONOTONIC, ns)."""

RUN_TIMEOUT_S = 30.0
"""How long one run may take that decides about a model. A stage that takes longer is rejected."""

_GAP_S = 0.2
"""How long to wait for a gap in a stream."""

_QUIET_S = 0.2
"""A compilation that has not been used for so long is quiet. A run need not wait for a gap in it."""

_DISTURBED = 2
"""After so many runs in a row without a gap that was long enough, the stream is held."""

_FRAMES_BETWEEN = 8
"""Executions between two holds. A stream that uses four fifths of the machine has caught up after four."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One run.

    Attributes:
        outputs: of the run.
        seconds: from the request to the answer, as the app sees it. If `late`, the seconds until the stream went on.
        alone: whether no execution of the app's began before the run was over. None was in flight when the run began, in any case.
        late: whether the stream was held for the run, and went on before the run was over.
    """

    outputs: Mapping[str, NDArray[Any]]
    seconds: float
    alone: bool
    late: bool = False


class Meter:
    """Times runs beside one stream.

    Attributes:
        holds, held_s: how often the stream was held, and for how long in all.
    """

    def __init__(self, run: Run, compiled: CompiledModel, stream: Serving) -> None:
        """Make a meter beside the stream that `stream` serves."""
        self._run = run
        self._compiled = compiled
        self._stream = stream
        self._disturbed = 0
        self._due = 0
        self._least_s = math.inf
        self.holds = 0
        self.held_s = 0.0

    @property
    def _quiet(self) -> bool:
        """Whether the app does not use the compilation at the moment."""
        return not self._stream.users and time.monotonic_ns() - self._stream.use.last_ns > _QUIET_S * 1e9

    async def gap(self) -> bool:
        """Wait for the end of an execution, if the stream is not quiet. Returns False if the stream left no gap."""
        stream = self._stream
        if self._quiet:
            return True
        with anyio.move_on_after(_GAP_S if stream.users else _QUIET_S):
            await stream.next_gap()
        return not stream.users

    async def _middle_of_gap(self) -> bool:
        """Wait for the middle of a gap, if the stream is not quiet. Returns False if there was no gap, or only a short one."""
        use = self._stream.use
        if self._quiet:
            return True
        pause_s = use.idle_s / 2
        if pause_s < self._least_s or not await self.gap():
            return False
        began = use.executions
        await anyio.sleep(min(pause_s, _QUIET_S))
        return began == use.executions and not self._stream.users

    def may_hold(self, most_s: float) -> bool:
        """Return whether the stream may be held for so many seconds."""
        left_s = self._stream.use.least_left_s
        return left_s is None or left_s >= most_s

    async def time(self, serving: Serving, inputs: Inputs, most_s: float | None = None) -> Timed | None:
        """Run once on one of the stages. Returns None if there was no moment for a run.

        Args:
            most_s: for how long the stream may be held. None for a run on the stage that serves: the rule gives the time.

        Raises:
            AionnError: the run failed.
            DeadlineError: the run took longer than `RUN_TIMEOUT_S`.
        """
        if most_s is None:
            most_s = 2 * self._least_s
        await self._spread()
        if serving is not self._stream or self._quiet:
            await self.beside(serving, inputs)
        if self._disturbed >= _DISTURBED and self.may_hold(most_s):
            await self.gap()
            return await self._held(serving, inputs, most_s)
        if not await self._middle_of_gap() and (self.may_hold(most_s) or not await self.gap()):
            self._disturbed += 1
            return None
        use = self._stream.use
        began = use.executions
        outputs, seconds = await self._once(serving, inputs)
        alone = began == use.executions
        self._disturbed = 0 if alone else self._disturbed + 1
        if not alone:
            self._due = use.executions + _FRAMES_BETWEEN
        return Timed(outputs, seconds, alone)

    async def beside(self, serving: Serving, inputs: Inputs) -> tuple[Mapping[str, NDArray[Any]], float]:
        """Run once in the next gap, if there is one soon, while the stream goes on. Returns outputs and seconds that prove nothing."""
        await self.gap()
        return await self._once(serving, inputs)

    async def _once(self, serving: Serving, inputs: Inputs) -> tuple[Mapping[str, NDArray[Any]], float]:
        began_ns = time.monotonic_ns()
        outputs = await self._run(serving, inputs, deadline_of(RUN_TIMEOUT_S))
        took_s = (time.monotonic_ns() - began_ns) / 1e9
        if took_s > RUN_TIMEOUT_S:
            raise DeadlineError(f"a run took {took_s:.3f} s, longer than {RUN_TIMEOUT_S} s")
        if serving is self._stream:
            self._least_s = min(self._least_s, took_s)
        return outputs, took_s

    async def _held(self, serving: Serving, inputs: Inputs, most_s: float) -> Timed | None:
        found: list[tuple[Mapping[str, NDArray[Any]], float]] = []
        late = False
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                over = anyio.Event()

                async def once() -> None:
                    found.append(await self._once(serving, inputs))
                    over.set()

                async with self._compiled.held(self._stream) as idle:
                    with anyio.move_on_after(_GAP_S):
                        await self._compiled.gate.wait_for_arrival()
                    began_ns = time.monotonic_ns()
                    if idle:
                        tasks.start_soon(once)
                        with anyio.move_on_after(most_s):
                            await over.wait()
                        late = not over.is_set()
                self._count_hold(serving, began_ns)
        self._due = self._stream.use.executions + _FRAMES_BETWEEN
        if not found:
            return None
        outputs, seconds = found[0]
        return Timed(outputs, most_s if late else seconds, alone=not late, late=late)

    def _count_hold(self, serving: Serving, began_ns: int) -> None:
        now_ns = time.monotonic_ns()
        self.holds += 1
        self.held_s += (now_ns - began_ns) / 1e9
        trace.span_at("stage.hold", began_ns, now_ns, stage=serving.stage)
        trace.count("stage.held", stage=serving.stage)

    async def _spread(self) -> None:
        """Wait until the stream has gone on for `_FRAMES_BETWEEN` executions, or has paused."""
        use = self._stream.use
        while use.executions < self._due:
            seen = use.executions
            with anyio.move_on_after(_QUIET_S):
                await use.wait_for(self._due)
            if use.executions == seen and not self._stream.users:
                return


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a compilation for which stages are made.

    Staging refers to the parts and never to the compilation. So a compilation that the app no longer holds is collected, and
    its staging ends.

    Attributes:
        devices: all devices of the runtime.
        compiled: what serves, and the swap.
        live: returns what serves, which is prepared again if it does not live. It holds the compilation only while it runs.
        request: what was asked for, without a deadline.
        run: runs inputs on one prepared model.
        stages: names of all stages. A stage whose device cannot run the whole model shares it with their devices.
    """

    devices: Devices
    compiled: CompiledModel
    live: Callable[[], Awaitable[Serving]]
    request: CompileRequest
    run: Run
    stages: tuple[str, ...]


SAMPLE_EVERY_S = 0.25
"""The least time between two samples of a stream. Frames that are closer to each other are alike."""

SAMPLES = 3
"""How many recent inputs a stage is compared on. More inputs show little more, and each costs a run that warms up."""

SAMPLES_BYTES = 64 << 20
"""How many bytes the samples may take together. One sample is kept whatever its size."""


@dataclass
class Samples:
    """Copies of the last few real inputs. The oldest are dropped.

    Attributes:
        model: whose inputs they are.
        most, most_bytes: how many samples are kept at most, and how many bytes.
        kept: the samples, the oldest first.
        due_ns: when the next sample may be taken (CLOCK_MONOTONIC).
        arrived: set when there is a sample.
    """

    model: PooledModel
    most: int
    most_bytes: int
    kept: deque[Inputs] = field(default_factory=deque)
    due_ns: int = 0
    arrived: anyio.Event = field(default_factory=anyio.Event)

    def take(self, inputs: Mapping[str, Any]) -> None:
        """Keep copies of an execution's inputs if a sample is due, at most once every SAMPLE_EVERY_S."""
        if time.monotonic_ns() >= self.due_ns:
            self._add({name: np.array(as_array(name, inputs[name])) for name in self.model.inputs})

    async def take_placed(self, inputs: Mapping[str, Any], placed: Mapping[str, Any]) -> None:
        """Do the same as `take` where some inputs are memory. The copies are of the memory's present contents."""
        if time.monotonic_ns() < self.due_ns:
            return
        try:
            copies = await contents_of(
                self.model.inputs, {name: placed[name] if name in placed else inputs.get(name) for name in self.model.inputs}
            )
        except AionnError:
            return  # these inputs are not kept, and the execution itself raises the error
        self._add(copies)

    def _add(self, copies: Inputs) -> None:
        self.kept.append(copies)
        while len(self.kept) > 1 and (len(self.kept) > self.most or self.size_bytes > self.most_bytes):
            self.kept.popleft()
        self.due_ns = time.monotonic_ns() + int(SAMPLE_EVERY_S * 1e9)
        self.arrived.set()

    @property
    def size_bytes(self) -> int:
        """How many bytes the samples take together."""
        return sum(array.nbytes for inputs in self.kept for array in inputs.values())


def samples_of(model: PooledModel) -> Samples:
    """Return an empty collection of samples for a model, with the usual bounds."""
    return Samples(model, SAMPLES, SAMPLES_BYTES)


def guessed_inputs(model: PooledModel) -> Iterator[Inputs]:
    """Make inputs that a model may take, for when the app has sent none. They are seeded, with several guesses where shapes are open."""
    guesses: tuple[tuple[int, ...], ...] = ((1, 3, 64, 64), (1, 1, 64, 64), (1, 16, 16, 16), (1, 1, 1, 1))
    if all(operand.size_bytes is not None for operand in model.inputs.values()):
        guesses = guesses[:1]
    for guess in guesses:
        random = np.random.default_rng(0)
        inputs = {}
        for name, operand in model.inputs.items():
            if operand.default is not None:
                continue
            extents = operand.dimensions if operand.dimensions is not None else (0,)
            shape = [extent or (guess[axis] if axis < len(guess) else 1) for axis, extent in enumerate(extents)]
            dtype = operand.type.dtype
            inputs[name] = random.random(shape).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype)
        yield inputs
