"""Whether a new stage is as right as the one that serves, and faster, on inputs that the app really sent.

`compare` runs the inputs on both prepared models.

    right    Every output of every run is within the tolerance of its element type: |new - old| <= absolute + relative * |old|. Two NaN
             are equal. Each sample is first run once on both models. These runs also warm the models up: first runs allocate, and
             make kernels for shapes.
    faster   Pairs of runs on one input are timed, the old stage first and then the new one. Each run is alone on the machine as far as
             this compilation goes (`measuring` has the rule). The new stage must be faster by the wanted gain in more than half of
             `runs` pairs, that is in the median of the ratios. Timing ends as soon as the majority is sure, so a stage that is clearly
             slower costs few runs.
    sure     A speed is remembered if undisturbed runs decided, or if the new stage was faster all the same. A measurement on made-up
             inputs is kept for information, and decides nothing at a later start.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from aionn.errors import AionnError
from aionn.runtime.serving.serving import CompiledModel, Serving
from aionn.runtime.staging.measuring import Inputs, Meter, Run, Timed

RUNS = 11
"""The most pairs of runs that are timed. With eleven, a stage is decided on within seconds, and one disturbed run decides nothing."""

COMPARE_S = 300.0
"""Timing ends after so long. A stream that has left no room for it by then will hardly leave any later."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an output may differ, by element: |new - old| <= absolute + relative * |old|."""

    absolute: float = 0.0
    relative: float = 0.0


TOLERANCES: Mapping[str, Tolerance] = {
    # Engines order sums differently. Between ONNX Runtime and OpenVINO at float32, the largest absolute differences were 1.5e-4
    # where outputs are below 10, and 9e-5 where they reach 320. With bfloat16 in place of float32 the difference is 1e-2, which
    # must be noticed.
    "float32": Tolerance(1e-3, 1e-3),
    "float64": Tolerance(1e-3, 1e-3),  # engines compute it in float32 now and then
    "float16": Tolerance(5e-3, 5e-3),
    "bfloat16": Tolerance(3e-2, 3e-2),
}
"""By element type. Outputs of other types must be equal, because a class, an index or a flag is right or wrong."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found.

    Attributes:
        samples: the number of inputs that were compared.
        worst: by output, the largest absolute difference, where there is a finite one.
        tolerances: by output, the difference that was allowed.
        differs: the output that differed by more than its tolerance, or empty.
        before_s, after_s: the median seconds of one run on the stage before, and on the new one. Of the pairs, if there were any.
        pairs: the number of pairs of runs that counted.
        gain: the share by which the new stage is faster in the median pair. -1 stands for "half as fast or slower". None if the speed
            was not measured, or could not be decided.
        holds, held_s: how often the app's executions were held back for a run, and for how many seconds in all.
        made_up: whether the inputs were made up from the model's operands, because nothing had been executed yet.
        refused: why the new stage must not serve, or empty if it may.
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
class _Pairs:
    """The seconds of both stages, pair by pair."""

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
        """The gain of the median pair. None while nothing is decided, or if disturbed runs decided against the new stage."""
        if not (self.won or (self.lost and not self.unsure)):
            return None
        # A run that was cut off took at least as long as the one before. How much longer is not known.
        return max(-1.0, statistics.median(self.gains))

    def add(self, before: Timed, after: Timed) -> None:
        """Count a pair of runs."""
        self.gains.append(-math.inf if after.late else 1 - after.seconds / before.seconds if before.seconds else 0.0)
        won = not after.late and after.seconds <= (1 - self.gain) * before.seconds
        self.wins += won
        self.unsure |= not won and not after.alone and not after.late
        self.cut |= after.late
        self.before_s.append(before.seconds)
        self.after_s.append(after.seconds)

    @property
    def count(self) -> int:
        """The number of pairs that counted."""
        return len(self.after_s)

    @property
    def won(self) -> bool:
        """Whether the new stage was faster in more than half of the pairs, whatever the missing pairs would show."""
        return 2 * self.wins > self.wanted

    @property
    def lost(self) -> bool:
        """Whether the new stage cannot win any more."""
        return 2 * (self.count - self.wins) >= self.wanted


@dataclass(frozen=True, slots=True)
class Rules:
    """What a new stage must show in a comparison.

    Attributes:
        min_gain: the share by which the new stage must be faster, or None if its outputs alone decide.
        tolerances: by element type. Types that are missing must be equal.
        runs: the most pairs of runs that are timed.
        compare_s: how long timing may take.
    """

    min_gain: float | None
    tolerances: Mapping[str, Tolerance]
    runs: int
    compare_s: float


async def compare(
    run: Run, compiled: CompiledModel, before: Serving, new: Serving, samples: Sequence[Inputs], rules: Rules, *, made_up: bool = False
) -> Comparison:
    """Run every sample on both stages, then time pairs of runs as `rules` says.

    Raises:
        AionnError: an execution on the new stage failed, hung or killed its driver. A sample that fails on the stage before says nothing
            about the new one, and is left out.
        DeadlineError: a run took longer than `RUN_TIMEOUT_S`.
    """
    comparing = _Comparing(Meter(run, compiled, before), before, new, rules, made_up)
    return comparing.found(await comparing.verdict(samples))


class _Comparing:
    """One comparison of two stages."""

    def __init__(self, meter: Meter, before: Serving, new: Serving, rules: Rules, made_up: bool) -> None:
        self._meter = meter
        self._before = before
        self._new = new
        self._rules = rules
        self._made_up = made_up
        types = {name: operand.type.value for name, operand in new.model.outputs.items()}
        self._outputs = _Outputs({name: rules.tolerances.get(kind, Tolerance()) for name, kind in types.items()})
        self._pairs = _Pairs(rules.runs, rules.min_gain or 0.0)
        self._warm: list[tuple[float, float]] = []
        self._usable: list[Inputs] = []

    def found(self, refused: str) -> Comparison:
        """Return what was found so far. `refused` is the verdict."""
        pairs, meter, outputs = self._pairs, self._meter, self._outputs
        before_s, after_s = [old for old, _ in self._warm], [new for _, new in self._warm]
        if pairs.count:
            before_s, after_s = pairs.before_s, pairs.after_s
        return Comparison(
            samples=len(self._warm),
            worst=outputs.worst,
            tolerances=outputs.allowed,
            before_s=statistics.median(before_s or [0.0]),
            after_s=statistics.median(after_s or [0.0]),
            pairs=pairs.count,
            holds=meter.holds,
            held_s=meter.held_s,
            made_up=self._made_up,
            refused=refused,
            differs=outputs.differs,
            gain=pairs.measured,
        )

    async def verdict(self, samples: Sequence[Inputs]) -> str:
        """Compare. Returns why the new stage must not serve; empty if it may."""
        if wrong := await self._warm_up(samples):
            return wrong
        if not self._usable:
            return "the stage before could not run any of the inputs, so there is nothing to compare with"
        if self._rules.min_gain is None:
            return ""
        with anyio.move_on_after(self._rules.compare_s):
            if wrong := await self._time():
                return wrong
        return self._speed(self._rules.min_gain)

    async def _warm_up(self, samples: Sequence[Inputs]) -> str:
        """Run each sample once on both stages. Returns what is wrong with an output; empty if nothing is."""
        for inputs in samples:
            try:
                expected, old_s = await self._meter.beside(self._before, inputs)
            except AionnError:
                if not self._before.alive:
                    raise
                continue
            found, new_s = await self._meter.beside(self._new, inputs)
            self._usable.append(inputs)
            self._warm.append((old_s, new_s))
            if wrong := await self._outputs.check(expected, found):
                return wrong
        return ""

    async def _time(self) -> str:
        """Time pairs until the speed is decided. Returns what is wrong with an output; empty if nothing is."""
        pairs, meter, usable = self._pairs, self._meter, self._usable
        while not pairs.won and not pairs.lost:
            inputs = usable[pairs.count % len(usable)]
            try:
                old = await meter.time(self._before, inputs)
            except AionnError:
                if not self._before.alive or len(usable) == 1:
                    raise
                usable.remove(inputs)
                continue
            if old is None or old.late:
                continue
            timed = await meter.time(self._new, inputs, old.seconds)
            if timed is None:
                continue
            if wrong := await self._outputs.check(old.outputs, timed.outputs):
                return wrong
            # A disturbed run counts only where the stream cannot be held for it.
            if timed.alone or timed.late or not meter.may_hold(old.seconds):
                pairs.add(old, timed)
        return ""

    def _speed(self, min_gain: float) -> str:
        """Return why the new stage is refused for its speed; empty if it is not."""
        pairs = self._pairs
        if pairs.won:
            return ""
        if pairs.lost:
            why = not_faster(min_gain, statistics.median(pairs.before_s), statistics.median(pairs.after_s), cut=pairs.cut)
            beside = ", measured beside the stream, which left no other room" if pairs.unsure else ""
            return f"{why}{beside}"
        within = f"within {self._rules.compare_s:g} s"
        return f"its speed could not be decided {within}: {pairs.count} of {pairs.wanted} pairs of runs had room in the stream"


def not_faster(min_gain: float, before_s: float, after_s: float, *, cut: bool = False) -> str:
    """Return the reason why a stage is refused for its speed."""
    after = f"{after_s * 1e3:.3f} ms{' or longer' if cut else ''}"
    return f"it is not faster by {min_gain:.0%}: a run takes {after} instead of {before_s * 1e3:.3f} ms"


@dataclass
class _Outputs:
    """The outputs of both stages so far.

    Attributes:
        allowed: by output, the difference that is allowed.
        worst: by output, the largest absolute difference.
        differs: the output that differs too much, or empty.
    """

    allowed: Mapping[str, Tolerance]
    worst: dict[str, float] = field(default_factory=dict)
    differs: str = ""

    async def check(self, expected: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> str:
        """Compare outputs. Returns what is wrong; empty if nothing is.

        A thread compares, because large outputs take milliseconds and the stream must not wait for them.
        """
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
    """Yield each output's name, its largest absolute difference, and what is wrong with it.

    The difference is infinite if it cannot be given as a number.
    """
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
