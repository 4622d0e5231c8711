"""`KeptState`: the recurrent state of a stream, in device memory, and the app's copy of the last snapshot.

Invariants
    `kept` holds one array for each state, all from the same moment of the stream.
    `inputs` is empty while the state is not in a driver. `filled` is set while the device memories hold the stream's state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn import trace
from aionn.errors import CallerError
from aionn.hal.types import Operand
from aionn.runtime.executing.arguments import as_array, check_mapping
from aionn.runtime.executing.device_buffers import BufferPair, DeviceRoles, ModelRoles
from aionn.runtime.executing.device_memory import DeviceMemory, allocate, state_of
from aionn.runtime.preparing.kept_model import KeptModel

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
