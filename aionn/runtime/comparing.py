"""Is a new stage as right as the one that serves, and faster? Asked on inputs that the app really sent.

`Samples` keeps a few recent inputs, copied, within a bound of bytes. `compare` runs them on both prepared models in turns,
each run in a gap of the stream (right after an execution has ended, for then the next is farthest away), one at a time.

    right    every output within the tolerance of its dtype, elementwise: |new - old| <= absolute + relative * |old|; both NaN is equal
    faster   the median of the new runs is below the median of the old ones by at least the wanted gain. Runs during which an execution
             of the app was in flight do not count: they say more about the other than about themselves. A stream that leaves no
             room for two others is judged by the least time of each side, and the verdict is not `sure`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from aionn.errors import AionnError, DeadlineError
from aionn.hal.model import Model
from aionn.memory.hardware_buffer import HardwareBuffer
from aionn.memory.memory import Memory
from aionn.runtime.compiled_model import Serving
from aionn.runtime.device_memory import DeviceMemory

Inputs = Mapping[str, NDArray[Any]]
Run = Callable[[Serving, Inputs, int], Awaitable[Mapping[str, NDArray[Any]]]]
"""Runs inputs on one prepared model until a deadline (CLOCK_MONOTONIC, ns)."""

SAMPLE_EVERY_S = 0.25
"""Two samples of a stream are at least this far apart: neighbouring frames are alike."""

_GAP_S = 0.2
"""A stream without gaps is not waited for longer: the run then shares the machine with it."""

_QUIET_S = 0.2
"""Unused for that long, the compilation need not be waited for at all."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Elementwise: |new - old| <= absolute + relative * |old|."""

    absolute: float = 0.0
    relative: float = 0.0


TOLERANCES: Mapping[str, Tolerance] = {
    # Engines order sums differently. Measured between ONNX Runtime and OpenVINO at float32: up to 1.5e-4 absolute where outputs
    # are below 10, 9e-5 where they reach 320; bfloat16 in place of float32 is off by 1e-2 and must be noticed.
    "float32": Tolerance(1e-3, 1e-3),
    "float64": Tolerance(1e-3, 1e-3),  # engines compute it in float32 now and then
    "float16": Tolerance(5e-3, 5e-3),
}
"""By element type; one that is not listed must be equal: a class, an index or a flag is right or wrong."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found.

    Attributes:
        samples: inputs that were compared.
        worst: per output the largest absolute difference.
        tolerances: per output what was allowed.
        before_s, after_s: seconds of one run on the stage before, and on the new one; see the module.
        made_up: nothing had been executed yet, so the inputs were made up from the model's operands.
        refused: why the new stage is not to serve; empty if it may.
        sure: outputs decided, or runs that had the machine to themselves as far as this stream goes.
    """

    samples: int
    worst: Mapping[str, float]
    tolerances: Mapping[str, Tolerance]
    before_s: float
    after_s: float
    made_up: bool = False
    refused: str = ""
    sure: bool = True


@dataclass
class Samples:
    """The last few real inputs, as copies; the oldest go."""

    model: Model
    most: int
    most_bytes: int
    kept: deque[Inputs] = field(default_factory=deque)
    due_ns: int = 0
    arrived: anyio.Event = field(default_factory=anyio.Event)

    def take(self, inputs: Mapping[str, Any]) -> None:
        """Keep copies of an execution's inputs, if a sample is due: at most every SAMPLE_EVERY_S."""
        if time.monotonic_ns() >= self.due_ns:
            self._add({name: np.array(inputs[name]) for name in self.model.inputs})

    async def take_placed(self, inputs: Mapping[str, Any], placed: Mapping[str, Any]) -> None:
        """The same where some inputs are memory: what stands in it now."""
        if time.monotonic_ns() < self.due_ns:
            return
        copies = {}
        try:
            for name, operand in self.model.inputs.items():
                value = placed.get(name, inputs.get(name))
                if isinstance(value, DeviceMemory):
                    copies[name] = await value.snapshot()
                elif isinstance(value, Memory | HardwareBuffer):
                    part, shape = value.locate(operand)
                    with part:
                        copies[name] = part.array(operand.type.dtype, shape).copy()
                else:
                    copies[name] = np.array(value if name in placed else inputs[name])
        except AionnError:
            return  # it is no sample; the execution itself tells what is wrong
        self._add(copies)

    def _add(self, copies: Inputs) -> None:
        self.kept.append(copies)
        while len(self.kept) > 1 and (len(self.kept) > self.most or self.size_bytes > self.most_bytes):
            self.kept.popleft()
        self.due_ns = time.monotonic_ns() + int(SAMPLE_EVERY_S * 1e9)
        self.arrived.set()

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for inputs in self.kept for array in inputs.values())


async def wait_for_gap(serving: Serving) -> bool:
    """Return right after an execution, or at once if there are none. False: the stream left no gap."""
    if not serving.users and time.monotonic_ns() - serving.use.last_ns > _QUIET_S * 1e9:
        return True
    with anyio.move_on_after(_QUIET_S if not serving.users else _GAP_S):
        await serving.next_gap()
    return not serving.users


async def compare(
    run: Run,
    before: Serving,
    new: Serving,
    samples: Sequence[Inputs],
    *,
    runs: int,
    min_gain: float | None,
    tolerances: Mapping[str, Tolerance],
    run_timeout_s: float,
    made_up: bool = False,
) -> Comparison:
    """Run every sample on both, `runs` times in all each, in turns.

    Raises:
        AionnError: an execution on the new one failed, hung or killed its driver. What fails on the one before is no verdict on the
            new one: that sample is left out.
        DeadlineError: a run took longer than `run_timeout_s`.
    """
    allowed = {name: tolerances.get(operand.type.value, Tolerance()) for name, operand in new.model.outputs.items()}
    worst: dict[str, float] = {}
    times: dict[Serving, list[tuple[bool, float]]] = {before: [], new: []}
    compared: set[int] = set()

    def comparison(refused: str) -> Comparison:
        return Comparison(len(compared), worst, allowed, _typical_s(times[before]), _typical_s(times[new]), made_up, refused)

    rounds = max(runs, len(samples))
    # One run each that does not count: first runs allocate, and make kernels for the shapes.
    for number in range(-1, rounds):
        inputs = samples[max(number, 0) % len(samples)]
        try:
            expected, old_time = await _timed(run, before, before, inputs, run_timeout_s)
        except AionnError:
            if not before.alive:
                raise
            continue
        outputs, new_time = await _timed(run, new, before, inputs, run_timeout_s)
        if number >= 0:
            times[before].append(old_time)
            times[new].append(new_time)
        compared.add(max(number, 0) % len(samples))
        for name, difference in _differences(expected, outputs, allowed):
            if isinstance(difference, str):
                return comparison(f"output {name!r}: {difference}")
            worst[name] = max(worst.get(name, 0.0), difference)
    if not compared:
        return comparison("the stage before could not run any of the inputs, so there is nothing to compare with")
    before_s, new_s = _typical_s(times[before]), _typical_s(times[new])
    if min_gain is not None and not new_s <= (1 - min_gain) * before_s:
        refused = comparison(f"it is not faster by {min_gain:.0%}: a run takes {new_s * 1e3:.3f} ms instead of {before_s * 1e3:.3f} ms")
        return dataclasses.replace(refused, sure=len(_alone(times[before])) >= 2 and len(_alone(times[new])) >= 2)
    return comparison("")


async def _timed(
    run: Run, serving: Serving, stream: Serving, inputs: Inputs, timeout_s: float
) -> tuple[Mapping[str, NDArray[Any]], tuple[bool, float]]:
    alone = await wait_for_gap(stream)
    before, began_ns = stream.use.executions, time.monotonic_ns()
    outputs = await run(serving, inputs, began_ns + int(timeout_s * 1e9))
    took_s = (time.monotonic_ns() - began_ns) / 1e9
    if took_s > timeout_s:
        raise DeadlineError(f"a run took {took_s:.3f} s, longer than {timeout_s} s")
    return outputs, (alone and before == stream.use.executions, took_s)


def _alone(times: Sequence[tuple[bool, float]]) -> list[float]:
    return [seconds for alone, seconds in times if alone]


def _typical_s(times: Sequence[tuple[bool, float]]) -> float:
    alone = _alone(times)
    if len(alone) >= 2:
        return statistics.median(alone)
    return min((seconds for _, seconds in times), default=0.0)


def _differences(
    expected: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], allowed: Mapping[str, Tolerance]
) -> Iterator[tuple[str, float | str]]:
    """Per output the largest absolute difference, or what is wrong with it."""
    for name, old in expected.items():
        new, tolerance = outputs.get(name), allowed[name]
        if new is None:
            yield name, "it is missing"
        elif new.shape != old.shape:
            yield name, f"it has shape {new.shape} instead of {old.shape}"
        elif tolerance == Tolerance():
            wrong = int(np.count_nonzero(new != old))
            yield name, 0.0 if not wrong else f"{wrong} of {old.size} elements are not equal"
        else:
            yield name, _difference(old.astype(np.float64), new.astype(np.float64), tolerance)


def _difference(old: NDArray[np.float64], new: NDArray[np.float64], tolerance: Tolerance) -> float | str:
    equal = (old == new) | (np.isnan(old) & np.isnan(new))
    with np.errstate(invalid="ignore"):
        off = np.where(equal, 0.0, np.abs(new - old))
        wrong = ~(equal | (off <= tolerance.absolute + tolerance.relative * np.abs(old)))
    count = int(np.count_nonzero(wrong))
    if count:
        largest = float(np.max(np.nan_to_num(off[wrong], nan=np.inf)))
        allowed = f"{tolerance.absolute:g} + {tolerance.relative:g} |old|"
        return f"{count} of {old.size} elements are off by up to {largest:.3g}, allowed are {allowed}"
    return float(off.max()) if off.size else 0.0


def made_up_inputs(model: Model) -> Iterator[Inputs]:
    """Inputs that a model may take, for when the app has sent none: seeded, several guesses where shapes are open."""
    guesses: tuple[tuple[int, ...], ...] = ((1, 3, 64, 64), (1, 1, 64, 64), (1, 16, 16, 16), (1, 1, 1, 1))
    if all(operand.size_bytes is not None for operand in model.inputs.values()):
        guesses = guesses[:1]
    for guess in guesses:
        random = np.random.default_rng(0)
        inputs = {}
        for name, operand in model.inputs.items():
            extents = operand.dimensions if operand.dimensions is not None else (0,)
            shape = [extent or (guess[axis] if axis < len(guess) else 1) for axis, extent in enumerate(extents)]
            dtype = operand.type.dtype
            inputs[name] = random.random(shape).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype)
        yield inputs
