"""Is a new stage as right as the one that serves, and faster? Asked on inputs that the app really sent.

`Samples` keeps a few recent inputs, copied, within a bound of bytes. `compare` runs them on both prepared models.

    right    every output of every run within the tolerance of its dtype, elementwise: |new - old| <= absolute + relative * |old|; both NaN
             is equal. Each sample is run once on both first, which also warms them up: first runs allocate, and make kernels for shapes.
    faster   pairs of runs on one input, the old stage first, then the new one, each alone on the machine as far as this compilation
             goes (`measuring` has the rule). The new stage is to be faster by the wanted gain in more than half of `runs` pairs: that
             is, in the median of the ratios. It ends as soon as the majority is sure, so what is clearly slower costs few runs.
    sure     a speed is remembered if undisturbed runs decided, or the new stage was faster all the same. What was measured on inputs that
             were made up can be looked at, and decides nothing at a later start.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from aionn.errors import AionnError
from aionn.hal.model import Model
from aionn.memory.hardware_buffer import HardwareBuffer
from aionn.memory.memory import Memory
from aionn.runtime.executing.device_memory import DeviceMemory
from aionn.runtime.serving.compiled_model import CompiledModel
from aionn.runtime.serving.serving import Serving
from aionn.runtime.staging.measuring import Inputs, Meter, Run, Timed

SAMPLE_EVERY_S = 0.25
"""Two samples of a stream are at least this far apart: neighbouring frames are alike."""


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
        worst: per output the largest absolute difference, where there is a finite one.
        tolerances: per output what was allowed.
        differs: the output that differed by more than that; empty if none did.
        before_s, after_s: seconds of one run on the stage before, and on the new one: medians, of the pairs if there were any.
        pairs: pairs of runs that counted.
        gain: the new stage is faster by this share in the median pair; -1 stands for "half as fast or slower". None if the speed was not
            measured, or could not be decided.
        holds, held_s: how often the app's executions were held back for a run, and for how many seconds in all.
        made_up: nothing had been executed yet, so the inputs were made up from the model's operands.
        refused: why the new stage is not to serve; empty if it may.
    """

    samples: int
    worst: Mapping[str, float]
    tolerances: Mapping[str, Tolerance]
    before_s: float
    after_s: float
    pairs: int = 0
    holds: int = 0
    held_s: float = 0.0
    made_up: bool = False
    refused: str = ""
    differs: str = ""
    gain: float | None = None


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


@dataclass
class _Pairs:
    """Seconds of both sides, pair by pair."""

    wanted: int
    gain: float
    before_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    wins: int = 0
    unsure: bool = False
    cut: bool = False

    @property
    def measured(self) -> float | None:
        """The gain of the median pair; None while nothing is decided, or if disturbed runs decided against the new stage."""
        if not (self.won or (self.lost and not self.unsure)):
            return None
        # A run that was cut off took at least as long as the one before, and nobody knows how much longer.
        return max(-1.0, statistics.median(self.gains))

    def add(self, before: Timed, after: Timed) -> None:
        self.gains.append(-math.inf if after.late else 1 - after.seconds / before.seconds if before.seconds else 0.0)
        won = not after.late and after.seconds <= (1 - self.gain) * before.seconds
        self.wins += won
        self.unsure |= not won and not after.alone and not after.late
        self.cut |= after.late
        self.before_s.append(before.seconds)
        self.after_s.append(after.seconds)

    @property
    def count(self) -> int:
        return len(self.after_s)

    @property
    def won(self) -> bool:
        return 2 * self.wins > self.wanted

    @property
    def lost(self) -> bool:
        return 2 * (self.count - self.wins) >= self.wanted


async def compare(
    run: Run,
    compiled: CompiledModel,
    before: Serving,
    new: Serving,
    samples: Sequence[Inputs],
    *,
    runs: int,
    min_gain: float | None,
    tolerances: Mapping[str, Tolerance],
    run_timeout_s: float,
    compare_s: float,
    hold: bool,
    made_up: bool = False,
) -> Comparison:
    """Run every sample on both, then time `runs` pairs at most, for `compare_s` seconds at most.

    Raises:
        AionnError: an execution on the new one failed, hung or killed its driver. What fails on the one before is no verdict on the
            new one: that sample is left out.
        DeadlineError: a run took longer than `run_timeout_s`.
    """
    meter = Meter(run, compiled, before, run_timeout_s=run_timeout_s, hold=hold)
    outputs = _Outputs({name: tolerances.get(operand.type.value, Tolerance()) for name, operand in new.model.outputs.items()})
    pairs = _Pairs(runs, min_gain or 0.0)
    warm: list[tuple[float, float]] = []

    def comparison(refused: str) -> Comparison:
        before_s, after_s = (pairs.before_s, pairs.after_s) if pairs.count else ([old for old, _ in warm], [new for _, new in warm])
        return Comparison(
            samples=len(warm),
            worst=outputs.worst,
            tolerances=outputs.allowed,
            before_s=statistics.median(before_s or [0.0]),
            after_s=statistics.median(after_s or [0.0]),
            pairs=pairs.count,
            holds=meter.holds,
            held_s=meter.held_s,
            made_up=made_up,
            refused=refused,
            differs=outputs.differs,
            gain=pairs.measured,
        )

    usable: list[Inputs] = []
    for inputs in samples:
        try:
            expected, old_s = await meter.beside(before, inputs)
        except AionnError:
            if not before.alive:
                raise
            continue
        found, new_s = await meter.beside(new, inputs)
        usable.append(inputs)
        warm.append((old_s, new_s))
        if wrong := await outputs.check(expected, found):
            return comparison(wrong)
    if not usable:
        return comparison("the stage before could not run any of the inputs, so there is nothing to compare with")
    if min_gain is None:
        return comparison("")
    with anyio.move_on_after(compare_s):
        while not pairs.won and not pairs.lost:
            inputs = usable[pairs.count % len(usable)]
            try:
                old = await meter.time(before, inputs)
            except AionnError:
                if not before.alive or len(usable) == 1:
                    raise
                usable.remove(inputs)
                continue
            if old is None or old.late:
                continue
            timed = await meter.time(new, inputs, old.seconds)
            if timed is None:
                continue
            if wrong := await outputs.check(old.outputs, timed.outputs):
                return comparison(wrong)
            # Disturbed it counts only where the stream cannot be held for it.
            if timed.alone or timed.late or not meter.may_hold(old.seconds):
                pairs.add(old, timed)
    if pairs.won:
        return comparison("")
    if pairs.lost:
        why = not_faster(min_gain, statistics.median(pairs.before_s), statistics.median(pairs.after_s), cut=pairs.cut)
        beside = ", measured beside the stream, which left no other room" if pairs.unsure else ""
        return comparison(f"{why}{beside}")
    return comparison(
        f"whether it is faster could not be told within {compare_s:g} s: {pairs.count} of {runs} pairs of runs had room in the stream",
    )


def not_faster(min_gain: float, before_s: float, after_s: float, *, cut: bool = False) -> str:
    """The reason why a stage is refused for its speed."""
    after = f"{after_s * 1e3:.3f} ms{' or longer' if cut else ''}"
    return f"it is not faster by {min_gain:.0%}: a run takes {after} instead of {before_s * 1e3:.3f} ms"


@dataclass
class _Outputs:
    """Outputs of both sides so far: per output what is allowed, and the largest absolute difference; and the one that differs too much."""

    allowed: Mapping[str, Tolerance]
    worst: dict[str, float] = field(default_factory=dict)
    differs: str = ""

    async def check(self, expected: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> str:
        """What is wrong; empty if nothing is. In a thread: large outputs take milliseconds, which the stream is not to wait for."""
        for name, largest, wrong in await anyio.to_thread.run_sync(lambda: list(_differences(expected, outputs, self.allowed))):
            if math.isfinite(largest):
                self.worst[name] = max(self.worst.get(name, 0.0), largest)
            else:
                self.worst.pop(name, None)
            if wrong:
                self.differs = name
                return f"output {name!r}: {wrong}"
        return ""


def _differences(
    expected: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], allowed: Mapping[str, Tolerance]
) -> Iterator[tuple[str, float, str]]:
    """Per output the largest absolute difference (infinite if there is none to name), and what is wrong with it."""
    for name, old in expected.items():
        new, tolerance = outputs.get(name), allowed[name]
        if new is None:
            yield name, math.inf, "it is missing"
        elif new.shape != old.shape:
            yield name, math.inf, f"it has shape {new.shape} instead of {old.shape}"
        elif tolerance == Tolerance():
            wrong = int(np.count_nonzero(new != old))
            yield name, math.inf if wrong else 0.0, f"{wrong} of {old.size} elements are not equal" if wrong else ""
        else:
            yield name, *_difference(old.astype(np.float64), new.astype(np.float64), tolerance)


def _difference(old: NDArray[np.float64], new: NDArray[np.float64], tolerance: Tolerance) -> tuple[float, str]:
    equal = (old == new) | (np.isnan(old) & np.isnan(new))
    with np.errstate(invalid="ignore"):
        off = np.where(equal, 0.0, np.abs(new - old))
        wrong = ~(equal | (off <= tolerance.absolute + tolerance.relative * np.abs(old)))
    count = int(np.count_nonzero(wrong))
    if count:
        largest = float(np.max(np.nan_to_num(off[wrong], nan=np.inf)))
        allowed = f"{tolerance.absolute:g} + {tolerance.relative:g} |old|"
        return largest, f"{count} of {old.size} elements are off by up to {largest:.3g}, allowed are {allowed}"
    return float(off.max()) if off.size else 0.0, ""


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
