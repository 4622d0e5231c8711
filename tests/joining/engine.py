"""An engine whose runs a test counts, and that fails, dies or waits in joined runs on demand. It doubles the input of a single addition.

It writes the rows of each run into the file that AIONN_JOINED_RUNS names. What it does stands in AIONN_JOINED_ACT.

    raise   a run with several rows fails, after it was compiled
    mix     a run with several rows is wrong from its 20th time on, as of a kernel that mixes rows now and then
    die     a run with several rows kills the process
    cancel  a run with several rows fails as a cancelled task does
    fault   joining itself raises at the first request, as a fault of aionn would
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.driver.joining.joined_runs import Joining
from aionn.hal import Artifact, CacheFiles, CompileOptions, Executable, ExecutionReport, Model, Needs

NAME, BETTER = "tests.joining.engine:Doubling", "tests.joining.engine:BetterDoubling"
PROBE_RUNS = 16
"""Runs of `probing` are at most so many; orders begin afterwards."""
SLOW = 500.0
"""A row with this value takes 0.2 s."""
BAD = 700.0
"""A row with this value fails, alone and beside others, as an index beyond a table does."""
HELD = 600.0
"""A row with this value takes as long as the test wants: until the file AIONN_JOINED_RUNS with the suffix .go is there."""


class Doubled:
    def __init__(self, model: Model) -> None:
        self._outputs = list(model.outputs)
        self._factor = len(model.operations) + 1
        self._runs = self._joined = 0

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        (x,) = inputs.values()
        self._runs += 1
        probing = self._runs <= PROBE_RUNS and not outputs
        with open(os.environ["AIONN_JOINED_RUNS"], "a", encoding="ascii") as file:
            if not probing:
                file.write(" ".join(f"{row[0]:g}" for row in x) + "\n")
        if (x == SLOW).any():
            time.sleep(0.2)
        elif (x == HELD).any():
            while not os.path.exists(os.environ["AIONN_JOINED_RUNS"] + ".go"):
                time.sleep(0.001)
        elif not probing:
            time.sleep(0.001)
        if (x == BAD).any():
            raise RuntimeError("this row cannot be computed")
        y = self._factor * x
        act = os.environ.get("AIONN_JOINED_ACT")
        if len(x) > 1 and not probing:
            self._joined += 1
            if act == "raise":
                raise RuntimeError("this kernel takes one row")
            if act == "cancel":
                raise asyncio.CancelledError
            if act == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if act == "mix" and self._joined > 20:
                y = y + x.sum()
        (name,) = self._outputs
        if name in outputs and outputs[name].shape == y.shape:
            np.copyto(outputs[name], y)
            return ExecutionReport({}, 1000 if timing else None)
        return ExecutionReport({name: y}, 1000 if timing else None)


class Doubling:
    name = "doubling"
    version = "1"
    cache_files = CacheFiles(0, 0)
    needs = Needs()

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return [True] * len(model.operations)

    def compile(self, model: Model, options: CompileOptions) -> Doubled:
        if os.environ.get("AIONN_JOINED_ACT") == "fault":
            Joining.run = None  # type: ignore[method-assign, assignment]
        return Doubled(model)

    def export(self, executable: Executable) -> Artifact | None:
        return None

    def load(self, artifact: Artifact, options: CompileOptions) -> Doubled:
        raise NotImplementedError


class BetterDoubling(Doubling):
    """Another device of the same kind, for a second stage."""

    name = "better doubling"
