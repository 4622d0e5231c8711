"""Engines that report each run, and hold back those that a test wants to be held, until the test opens their gates.

An input is full of one number, which is the name of its call. So a test knows which calls the driver has run, in which order, and whether
another call wrote into the memory of one that was under way. Outputs are the inputs, plus `NEWER` where a node is named "newer".
From `LARGE` on, the output "y" has the rows that `rows_of` says, so it does not fit where the app expects it.

The names of the calls come through a FIFO beside the orders of the fake device. A gate is a FIFO, too. The engine opens it for reading,
which the kernel holds back until the test opens it for writing.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from aionn.hal import Artifact, CompileOptions, DeviceType, ExecutionReport, Model
from aionn.testing import FakeDevice
from aionn.testing.fake_engine import VARIABLE, FakeEngine, FakeExecutable
from tests.runtime.partial_engines import LeftFake, RightFake

NEWER = 0.5
LARGE = 1000


def rows_of(number: int) -> int:
    """Return how many rows "y" has. Each number from `LARGE` on needs more room than the one before has left behind."""
    return 1 if number < LARGE else int(200 * 3.0 ** (number - LARGE))


class GatedExecutable(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        named = inputs.get("x", next(iter(inputs.values())))
        number = int(named.flat[0])
        self._pass(number)
        if number and not (named == number).all():  # 0: made-up inputs, between 0 and 1
            self._gated.report(-1)
        self._engine.act("run")  # it may fail on demand
        made: dict[str, NDArray[Any]] = {}
        for index, name in enumerate(self.operands):
            result = list(inputs.values())[index % len(inputs)] + np.float32(self.newer)
            if name == "y" and number >= LARGE:
                result = np.repeat(result, rows_of(number), axis=0)
            if name in outputs and outputs[name].shape == result.shape:
                np.copyto(outputs[name], result)
            else:
                made[name] = result
        return ExecutionReport(made, 1000 if timing else None)

    def run_values(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        number = int(inputs["x"][0])
        self._pass(number)
        return {"y": np.array([str(number + self.newer)], object)}

    @property
    def _gated(self) -> Gated:
        assert isinstance(self._engine, Gated)
        return self._engine

    @property
    def newer(self) -> float:
        return NEWER if self.weights == b"newer" else 0.0

    def _pass(self, number: int) -> None:
        """Report the run, and wait if its gate is closed."""
        count = self._gated.report(number)
        with suppress(FileNotFoundError):
            os.close(os.open(self._gated.beside(f"gate-{number}-{count}"), os.O_RDONLY | os.O_CLOEXEC))


class Gated(FakeEngine):
    """Mixed into an engine, whose executables are `GatedExecutable` then."""

    def compile(self, model: Model, options: CompileOptions) -> GatedExecutable:
        made = super().compile(model, options)
        newer = any("newer" in operation.name for operation in model.operations)
        return GatedExecutable(self, made.operands, b"newer" if newer else b"older")

    def load(self, artifact: Artifact, options: CompileOptions) -> GatedExecutable:
        made = super().load(artifact, options)
        return GatedExecutable(self, made.operands, made.weights)

    def beside(self, name: str) -> Path:
        """Return the path of a file beside the orders of the fake device."""
        assert self.folder is not None
        return self.folder / name

    def report(self, number: int) -> int:
        """Tell the test of a run of that call. Returns how many there have been in this driver process."""
        counts = self.__dict__.setdefault("counts", {})
        counts[number] = counts.get(number, 0) + 1
        with suppress(OSError):  # the test is over
            fifo = os.open(self.beside("given"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(fifo, f"{number}\n".encode())
            os.close(fifo)
        return int(counts[number])


class GatedEngine(Gated):
    name = "gated"
    variable = f"{VARIABLE}_GATED"


class GatedLeft(Gated, LeftFake):
    name = "gated_left"
    variable = f"{VARIABLE}_GATED_LEFT"


class GatedRight(Gated, RightFake):
    name = "gated_right"
    variable = f"{VARIABLE}_GATED_RIGHT"


class GatedCpu(Gated):
    """A CPU device, to which failing executions fall back."""

    name = "gated_cpu"
    variable = f"{VARIABLE}_GATED_CPU"
    device_type = DeviceType.CPU

    def supported_operations(self, model: Model) -> Sequence[bool]:
        self.act("supported")
        return [True] * len(model.operations)


class Runs:
    """What a gated driver was given to run, in order, and the gates before it.

    Attributes:
        given: the number of each call, at each of its runs; -1 if the input was not full of one number.
    """

    def __init__(self, device: FakeDevice, engine: type[FakeEngine]) -> None:
        self.device = device
        self.given: list[int] = []
        self._folder = Path(os.environ[engine.variable]).parent
        os.mkfifo(self._folder / "given")
        self._fd = os.open(self._folder / "given", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._gates: list[Path] = []
        self._rest = b""

    def hold(self, number: int, time: int = 1) -> None:
        """Hold back the run of that call, or the second, third run of it in that driver process."""
        gate = self._folder / f"gate-{number}-{time}"
        os.mkfifo(gate)
        self._gates.append(gate)

    def open(self, number: int | None = None) -> None:
        """Let that call run, or all."""
        for gate in list(self._gates):
            if number is None or gate.name.startswith(f"gate-{number}-"):
                self._gates.remove(gate)
                fd = os.open(gate, os.O_RDWR | os.O_CLOEXEC)  # wakes a run that waits; a run that comes now passes
                gate.unlink()  # a run that comes later finds no gate
                os.close(fd)

    def close(self) -> None:
        self.open()
        os.close(self._fd)

    def look(self) -> list[int]:
        """Return what was given until now."""
        with suppress(BlockingIOError):
            self._rest += os.read(self._fd, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        self.given += map(int, lines)
        return self.given

    async def begun(self, number: int, times: int = 1) -> None:
        """Return when the driver has begun to run that call so many times."""
        with anyio.fail_after(30):
            while self.look().count(number) < times:
                await anyio.wait_readable(self._fd)

    def begun_without_loop(self, number: int) -> None:
        """Do the same as `begun` while the event loop stands still."""
        until = time.monotonic() + 30
        while number not in self.look():
            assert select.select([self._fd], [], [], until - time.monotonic())[0], f"call {number} did not begin"
