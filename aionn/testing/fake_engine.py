"""An engine that only repeats its inputs and misbehaves on demand, in a real driver process.

Each output repeats the input at its own place (cyclically, in the output's shape and type), so frames can be distinguished. The outputs of
a `fake_model` are zeros. `FakeDevice.answer` replaces either.
Its orders stand in the file that AIONN_FAKE_DEVICE names. The engine reads them before each act, and while it hangs. It announces
each act in the FIFO beside the file. Without the variable it has no orders.

The file, the FIFO and the socket are out of reach for a confined driver. So the driver of an engine that a `FakeDevice` steers is hardly
confined. Without the variable it is confined as any other.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.errors import CompilationError
from aionn.hal import Artifact, CacheFiles, CompileOptions, Executable, ExecutionReport, Model, Operand, OperandType
from aionn.testing.answers import ask

VARIABLE = "AIONN_FAKE_DEVICE"
EVENTS_SUFFIX = ".events"
HOLD_SUFFIX = ".hold"
FAKE_DOMAIN = "aionn.testing"
"""The domain of the operator of a `fake_model`."""

_LOOK_S = 0.005
"""How often a waiting fake checks whether it may go on. Only tests wait for it."""


class Behaviour(msgspec.Struct, frozen=True):
    """The orders of the fake, per act ("start", "supported", "compile", "export", "load", "run").

    Attributes:
        hold: the byte of a file that is locked as long as this behaviour holds. An act that hangs waits for it, so it uses no CPU.
        after: so many acts of a kind succeed in each driver process before the orders for that kind begin.
        answer: whether the test answers runs itself (`answers`).
    """

    after: dict[str, int] = {}
    hang: tuple[str, ...] = ()
    hang_with_gil: bool = False
    crash: tuple[str, ...] = ()
    crash_signal: int = int(signal.SIGKILL)
    fail: tuple[str, ...] = ()
    fail_message: str = "failed on demand"
    delay_s: dict[str, float] = {}
    outputs_offset: float = 0.0
    answer: bool = False
    decline: bool = False
    version: str = "1"
    cache_files: tuple[int, int] = (1, 1)
    hold: int = 0


class FakeEngine:
    """Satisfies `hal.Engine`. Ask for it as "aionn.testing.fake_engine:FakeEngine"."""

    name = "fake"
    variable = VARIABLE

    def __init__(self) -> None:
        path = os.environ.get(self.variable)
        self._path = Path(path) if path else None
        self.folder = self._path.parent if self._path is not None else None
        self._acts: dict[str, Iterator[int]] = {}  # counted in several threads at once
        behaviour = self.act("start")
        self.version = behaviour.version
        self.cache_files = CacheFiles(*behaviour.cache_files)

    def behaviour(self) -> Behaviour:
        """Read the orders as they are now."""
        if self._path is None:
            return Behaviour()
        try:
            orders = self._path.read_bytes()
        except FileNotFoundError:
            return Behaviour()  # the test is over
        return msgspec.json.decode(orders, type=Behaviour)

    def announce(self, event: str) -> None:
        """Write an event into the FIFO, if a test listens."""
        if self._path is None:
            return
        try:
            fifo = os.open(f"{self._path}{EVENTS_SUFFIX}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return  # the test that listened has gone
        try:
            os.write(fifo, f"{event} {os.getpid()}\n".encode())
        except BlockingIOError:
            return  # thousands of acts that no test has read; `tell` makes room
        finally:
            os.close(fifo)

    def act(self, kind: str, options: CompileOptions | None = None) -> Behaviour:
        """Announce an act, then follow the orders for it."""
        behaviour = self.behaviour()
        number = next(self._acts.setdefault(kind, itertools.count(1)))
        self.announce(kind)
        if number <= behaviour.after.get(kind, 0):
            return msgspec.structs.replace(behaviour, outputs_offset=0.0, decline=False)
        if kind in behaviour.crash:
            os.kill(os.getpid(), behaviour.crash_signal)
            threading.Event().wait()  # a signal that does not kill at once must not let the act go on
        if delay_s := behaviour.delay_s.get(kind):
            self._wait(options, until=time.monotonic() + delay_s)
        while kind in (orders := self.behaviour()).hang:
            if options is not None and not orders.hang_with_gil:
                self._wait(options, until=time.monotonic() + _LOOK_S)
            else:
                self._stand_still(orders)
        if kind in behaviour.fail:
            raise CompilationError(behaviour.fail_message) if kind in ("compile", "load") else RuntimeError(behaviour.fail_message)
        return behaviour

    def _stand_still(self, behaviour: Behaviour) -> None:
        """Wait for the end of this behaviour, with the GIL held if the orders say so, as a careless extension does."""
        try:
            fd = os.open(f"{self._path}{HOLD_SUFFIX}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            lock = lock_of(fcntl.F_RDLCK, behaviour.hold)
            if behaviour.hang_with_gil:
                ctypes.PyDLL(None).fcntl(fd, fcntl.F_OFD_SETLKW, lock)
            else:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, lock)
        finally:
            os.close(fd)
        time.sleep(_LOOK_S)  # this loop must not spin if the test has died with its lock

    @staticmethod
    def _wait(options: CompileOptions | None, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            if options is not None and options.cancelled.is_set():
                raise CompilationError("cancelled")
            time.sleep(min(_LOOK_S, left))

    def supported_operations(self, model: Model) -> Sequence[bool]:
        self.act("supported")
        return [True] * len(model.operations)

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        self.act("compile", options)
        return FakeExecutable(self, model.outputs, weights_of(model), _symbols_of(model))

    def export(self, executable: Executable) -> Artifact | None:
        behaviour = self.act("export")
        if behaviour.decline or not isinstance(executable, FakeExecutable):
            return None
        graph = msgspec.msgpack.encode((_as_stored(executable.operands), executable.symbols))
        files = self.cache_files
        return Artifact((graph,) * files.model, (executable.weights,) * files.data)

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        self.act("load", options)
        stored, symbols = msgspec.msgpack.decode(artifact.model[0], type=tuple[_Stored, _Symbols | None])
        operands = {name: Operand(OperandType(kind), dimensions, names) for name, (kind, dimensions, names) in stored.items()}
        return FakeExecutable(self, operands, bytes(artifact.data[0]) if artifact.data else b"", symbols)


class SecondFakeEngine(FakeEngine):
    """Another device of the same kind with separate orders, for tests with two devices, such as stages."""

    name = "fake2"
    variable = f"{VARIABLE}_2"


_Stored: TypeAlias = dict[str, tuple[str, tuple[int, ...] | None, tuple[str | None, ...]]]
_Symbols: TypeAlias = dict[str, tuple[str | None, ...]]


class FakeExecutable:
    """Satisfies `hal.Executable`.

    Attributes:
        symbols: the names of the open dimensions of each input, for a `fake_model`, which answers zeros. None for any other model.
    """

    def __init__(self, engine: FakeEngine, operands: Mapping[str, Operand], weights: bytes, symbols: _Symbols | None = None) -> None:
        self._engine = engine
        self.operands = dict(operands)
        self.weights = weights
        self.symbols = symbols

    def lanes(self, count: int) -> list[FakeExecutable]:
        return [self] * count  # a run changes nothing here

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        began_ns = time.perf_counter_ns()
        behaviour = self._engine.act("run") if self._engine._path is not None else None
        answered = self._answer(behaviour, inputs)
        if answered is not None:
            made = {name: array for name, array in answered.items() if name not in outputs or outputs[name].shape != array.shape}
            for name in answered.keys() - made.keys():
                np.copyto(outputs[name], answered[name])
            return ExecutionReport(made, time.perf_counter_ns() - began_ns if timing else None)
        return ExecutionReport(self._repeat(behaviour, inputs, outputs), time.perf_counter_ns() - began_ns if timing else None)

    def _answer(self, behaviour: Behaviour | None, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]] | None:
        """Return what the test answers, zeros for a `fake_model`, or None to repeat the inputs."""
        if behaviour is not None and behaviour.answer and self._engine.folder is not None:
            answered = ask(self._engine.folder, inputs, self.operands)
            if answered is not None:
                return answered
        if self.symbols is None:
            return None
        extents = {
            symbol: extent
            for name, symbols in self.symbols.items()
            for symbol, extent in zip(symbols, inputs[name].shape if name in inputs else (), strict=False)
            if symbol
        }
        return {name: np.zeros(_shape_of(operand, extents), operand.type.dtype) for name, operand in self.operands.items()}

    def _repeat(
        self, behaviour: Behaviour | None, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        offset = behaviour.outputs_offset if behaviour is not None else 0.0
        given = list(inputs.values())
        made: dict[str, NDArray[Any]] = {}
        for index, (name, operand) in enumerate(self.operands.items()):
            source = given[index % len(given)] if given else np.zeros(1, operand.type.dtype)
            target = outputs.get(name)
            if target is None:
                made[name] = (source + offset if offset else source).astype(operand.type.dtype)
                continue
            if target.shape == source.shape and target.dtype == source.dtype:
                np.copyto(target, source)
            else:
                np.copyto(target, np.resize(source, target.shape), casting="unsafe")
            if offset:
                target += np.asarray(offset, target.dtype)
        return made

    def run_values(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._engine._path is not None and self._engine.act("run").answer:
            raise RuntimeError("answer() gives tensors of numbers, but this model has strings, sequences or maps; use another model")
        given = list(inputs.values())
        return {name: given[index % len(given)] for index, name in enumerate(self.operands)}


def _symbols_of(model: Model) -> _Symbols | None:
    """Return the names of open dimensions by input if it is a `fake_model`, else None."""
    if [operation.domain for operation in model.operations] != [FAKE_DOMAIN]:
        return None
    return {name: operand.symbols for name, operand in model.inputs.items()}


def _as_stored(operands: Mapping[str, Operand]) -> _Stored:
    return {name: (operand.type.value, operand.dimensions, operand.symbols) for name, operand in operands.items()}


def _shape_of(operand: Operand, extents: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of zeros. An open dimension has the extent of the input's dimension with the same name, else 1."""
    dimensions = operand.dimensions or ()
    symbols = operand.symbols or (None,) * len(dimensions)
    return tuple(extent or extents.get(symbol or "", 1) for extent, symbol in zip(dimensions, symbols, strict=True))


def lock_of(kind: int, byte: int) -> bytes:
    """Return a lock of one byte of a file as the kernel takes it (struct flock)."""
    return struct.pack("@hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)


def weights_of(model: Model) -> bytes:
    """Return all large constants of a model in one piece, which the fake stores as its data."""
    return b"".join(bytes(pool.view()) for pool in model.pools)
