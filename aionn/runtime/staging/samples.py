"""Inputs on which stages are compared: copies of a few recent ones, or made-up ones if the app has executed nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from aionn.errors import AionnError
from aionn.hal.model import Model
from aionn.runtime.executing.frame_layout import as_array
from aionn.runtime.executing.placement import contents_of
from aionn.runtime.staging.measuring import Inputs

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

    model: Model
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
                self.model.inputs, {name: placed[name] if name in placed else inputs[name] for name in self.model.inputs}
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


def samples_of(model: Model) -> Samples:
    """Return an empty collection of samples for a model, with the usual bounds."""
    return Samples(model, SAMPLES, SAMPLES_BYTES)


def guessed_inputs(model: Model) -> Iterator[Inputs]:
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
