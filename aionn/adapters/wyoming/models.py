"""A model in a driver, with one burst for all satellites."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

import aionn
from aionn.engines.litert import FORMAT, border
from aionn.errors import CallerError, DriverDiedError, DriverHungError
from aionn.hal import Operand

DEPTH = 16
"""Requests in flight for each model. Further satellites wait, in order."""

TRIES = 3
"""A frame that ends so many drivers is refused."""

Array = NDArray[Any]


class SharedBurst:
    """A model with a burst that all satellites share.

    Attributes:
        inputs: `aionn.hal.Operand` by name, in the model's order.
    """

    def __init__(self, burst: aionn.Burst, inputs: Mapping[str, Operand]) -> None:
        self.inputs = inputs
        self._burst = burst

    async def compute(self, *arrays: Array) -> list[Array]:
        """Run the model with arrays for its inputs in their order. Returns its outputs in their order.

        The state of a stream is among the arrays, so a call that a driver's end interrupts is made again.
        """
        given = dict(zip(self.inputs, arrays, strict=True))
        for _ in range(TRIES - 1):
            try:
                return list((await self._burst.compute(given)).values())
            except (DriverDiedError, DriverHungError):
                continue
        return list((await self._burst.compute(given)).values())


class SoundModel(msgspec.Struct, frozen=True):
    """A model's file, read as far as its border.

    Attributes:
        path: of the file, whose name without its ending is the model's name.
        model: what is compiled.
    """

    path: Path
    model: aionn.Model

    @classmethod
    async def read(cls, path: Path, shape: tuple[int, ...] | None = None) -> SoundModel:
        """Read a .tflite or .onnx file.

        Args:
            shape: of the first input, where a .tflite file leaves it open and cannot be prepared so.

        Raises:
            CallerError: the file is missing or broken.
            CompilationError: its graph is broken.
        """
        if path.suffix != ".tflite":
            model = await aionn.Model.load(path)
            await model.read()
            return cls(path, model)
        try:
            content = await anyio.Path(path).read_bytes()
        except OSError as error:
            why = f"the model {str(path)!r} cannot be read ({error.strerror})"
            raise CallerError(f"{why}; give the path of a .tflite or .onnx file") from error
        try:
            inputs, outputs = border(content)
        except CallerError as error:
            raise CallerError(f"{str(path)!r}: {error}") from error
        if shape is not None:
            first = next(iter(inputs))
            inputs[first] = Operand(inputs[first].type, shape)
        return cls(path, aionn.Model.from_bytes(content, inputs=inputs, outputs=outputs, format=FORMAT, name=path.name))

    async def open(self, runtime: aionn.Runtime, stack: AsyncExitStack) -> SharedBurst:
        """Compile the model and open its burst, which `stack` closes. Satellites share runs where the model leaves the axis open."""
        inputs = self.model.inputs
        opaque = self.model.format == FORMAT
        compilation = await runtime.compile(
            self.model,
            devices=("litert",) if opaque else None,
            threads=1,
            name=self.path.stem,
            batch=None if opaque or all(all(one.dimensions or ()) for one in inputs.values()) else aionn.Batching(max_rows=DEPTH),
        )
        return SharedBurst(await stack.enter_async_context(compilation.burst(name=self.path.stem, depth=DEPTH)), inputs)


def samples_of(sound: bytes) -> NDArray[np.float32]:
    """Return 16-bit sound as numbers between -32768 and 32767."""
    return np.frombuffer(sound, "<i2").astype(np.float32)
