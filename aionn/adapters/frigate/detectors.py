"""`Detectors`: the models that clients of Frigate's protocol use, each with a burst that all of its clients share.

A model that a client sends is a file in a private folder for as long as it serves. The folder goes with this process, also after
SIGKILL: the next process that makes such a folder removes it. A model is known by its contents, so two clients that send the same
file share it, and two files of the same name do not take each other's place for clients that use them.

When a driver dies, each of its models is prepared in a new one and run once at that moment, and not when the next request comes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

import aionn
from aionn.adapters.frigate.decoding import SIZES
from aionn.adapters.frigate.messages import DTYPES
from aionn.caching.private_folder import make_folder, name_folder, remove_folder
from aionn.errors import AionnError, CallerError, DeadlineError
from aionn.events import DriverEnded
from aionn.tasks import run_in_thread

logger = logging.getLogger("aionn.frigate")

MOST_MODELS = 4
"""So many received models serve at once. Another one takes the place of the one that has been unused for longest."""

MOST_WAITING = 8
"""So many clients wait while a model of another one is prepared. They are fewer than the requests that may be in work."""

LOAD_S = 300.0
OPEN_S = 30.0
"""How long the first run of a model may take. Each later one has the 200 ms of Frigate's detector."""


class Detector:
    """A model that serves.

    Attributes:
        name: by which clients ask for it.
        device: which computes it.
        used_s: when it was last asked for a picture, or made.
    """

    def __init__(self, name: str, model: aionn.Model, compilation: aionn.Compilation, burst: aionn.Burst) -> None:
        self.name, self.device, self.used_s = name, compilation.device, time.monotonic()
        self._picture, *others = model.inputs
        if set(others) - {SIZES}:
            raise CallerError(f"the model has the inputs {', '.join(model.inputs)}; a detector has one, and perhaps {SIZES!r}")
        operand = model.inputs[self._picture]
        self._shape, self._dtype = operand.dimensions or (0, 0, 0, 0), operand.type.dtype
        if len(self._shape) != 4:
            raise CallerError(
                f"the model's input {self._picture!r} has {len(self._shape)} extents; a detector takes pictures, which have 4"
            )
        self._sizes = bool(others)
        self._compilation, self._burst = compilation, burst
        self._last: tuple[tuple[int, ...], Any] = (self._shape[0] or 1, *self._shape[1:]), self._dtype
        self._opening = False

    async def compute(self, tensor: NDArray[Any], width: int, height: int, timeout_s: float) -> Mapping[str, NDArray[Any]]:
        """Run the model once. If its driver dies meanwhile, run it once more in the next driver.

        Raises:
            CallerError: the tensor does not fit the model.
            AionnError: as `Burst.compute`.
        """
        self._check(tensor)
        self._last, self.used_s = (tensor.shape, tensor.dtype), time.monotonic()
        return await self._burst.compute(self._inputs(tensor, width, height), timeout_s=timeout_s, retry=1)

    async def open(self) -> None:
        """Run the model once on zeros, so that its driver is there and warm. Do nothing if the extents of its input are not known."""
        shape, dtype = self._last
        if self._opening or not all(shape):
            return
        self._opening = True
        try:
            await self._burst.compute(self._inputs(np.zeros(shape, dtype), *shape[:-3:-1]), timeout_s=OPEN_S, retry=1)
        finally:
            self._opening = False

    async def aclose(self) -> None:
        """Give the driver's memory back."""
        await self._compilation.aclose()

    def _check(self, tensor: NDArray[Any]) -> None:
        """Name the line of Frigate's configuration that is wrong for this model."""
        if tensor.dtype != self._dtype and self._dtype in DTYPES.values():
            wanted = "int" if self._dtype == np.uint8 else "float"
            raise CallerError(
                f"a picture of {tensor.dtype} came for the model {self.name!r}; set input_dtype: {wanted} in Frigate's configuration"
            )
        for layout, axis, other in (("nchw", 1, 3), ("nhwc", 3, 1)):
            if 0 < self._shape[axis] <= 4 < tensor.shape[axis] and tensor.shape[other] == self._shape[axis]:
                raise CallerError(
                    f"a picture of {tensor.shape} came for the model {self.name!r}; set input_tensor: {layout} in Frigate's configuration"
                )

    def _inputs(self, tensor: NDArray[Any], width: int, height: int) -> dict[str, NDArray[Any]]:
        return {self._picture: tensor, SIZES: np.array([[height, width]])} if self._sizes else {self._picture: tensor}


class Detectors:
    """The models in an open runtime.

    Args:
        options: of `Runtime.compile`, for each model.
        most_bytes: the largest model that a client may send.
        told: is called with a sentence when a received model serves.
    """

    def __init__(self, runtime: aionn.Runtime, options: Mapping[str, Any], most_bytes: int, told: Callable[[str], None]) -> None:
        self._runtime, self._options, self._most_bytes, self._told = runtime, options, most_bytes, told
        self._received: dict[bytes, tuple[Detector, str]] = {}
        self._receiving = anyio.Lock()
        self._arriving_bytes = 0
        self._folder, self._held = "", -1
        self.fixed: Detector | None = None

    def find(self, name: str) -> Detector | None:
        """Return the model that serves clients which ask for that name, or None."""
        if self.fixed is not None:
            return self.fixed
        return next((detector for detector, _ in reversed(self._received.values()) if detector.name == name), None)

    async def load(self, path: str) -> None:
        """Serve every client with the model at `path`.

        Raises:
            AionnError: it cannot be prepared, or does not run.
        """
        self.fixed = await self._prepared(await self._runtime.load(path), os.path.basename(path))

    async def receive(self, name: str, data: memoryview) -> Detector:
        """Serve a model that a client has sent.

        Raises:
            CallerError: the name or the size is refused, or the bytes are not a model that a detector can be.
            AionnError: the model cannot be prepared, or does not run.
            OSError: the file cannot be written.
        """
        if self.fixed is not None:
            raise CallerError("this server has the model of --model")
        if not 0 < len(name) <= 255 or not name.isprintable():
            raise CallerError(f"a model's name has from 1 to 255 printable characters, and this one has {len(name)}")
        if not 0 < data.nbytes <= self._most_bytes:
            raise CallerError(f"it has {data.nbytes} bytes; a model has from 1 to {self._most_bytes}, which --max-model sets")
        many = self._receiving.statistics().tasks_waiting >= MOST_WAITING
        if many or self._arriving_bytes + data.nbytes > 2 * self._most_bytes:
            raise CallerError("clients send too many models at this moment; it asks again")
        self._arriving_bytes += data.nbytes
        try:
            async with self._receiving:
                return await self._received_one(name, data)
        finally:
            self._arriving_bytes -= data.nbytes

    async def _received_one(self, name: str, data: memoryview) -> Detector:
        path, began_s = await run_in_thread(self._written, data), time.monotonic()
        kept = False
        try:
            model = await self._runtime.load(path)
            key = await model.digest() + name.encode()
            if key not in self._received:
                detector = await self._prepared(model, name)
                self._received[key], kept = (detector, path), True
                size, took_s = f"{data.nbytes / 1e6:.1f} MB", time.monotonic() - began_s
                self._told(f"model {name!r} ({size}) of a detector serves on {detector.device} after {took_s:.1f} s")
            detector = self._received[key][0]
        finally:
            if not kept:
                os.unlink(path)
        if len(self._received) > MOST_MODELS:
            oldest = min(self._received.keys() - {key}, key=lambda each: self._received[each][0].used_s)
            old, path = self._received.pop(oldest)
            os.unlink(path)
            await old.aclose()
        return detector

    def _written(self, data: memoryview) -> str:
        """Write a file into the private folder. Returns its path."""
        if not self._folder:
            folder = name_folder()
            if not folder:
                raise OSError("there is no folder for a temporary file; set TMPDIR")
            self._held = make_folder(folder)
            self._folder = folder
        path = os.path.join(self._folder, f"{token_hex(16)}.onnx")  # which no other model can name as the file of its external data
        try:
            with open(path, "xb") as file:
                file.write(data)
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            raise
        return path

    async def _prepared(self, model: aionn.Model, name: str) -> Detector:
        compilation = await self._runtime.compile(model, name=name, timeout_s=LOAD_S, **self._options)
        try:
            burst = await compilation.burst(name=name).__aenter__()
            detector = Detector(name, model, compilation, burst)
            await detector.open()
        except BaseException as error:
            await compilation.aclose()
            if isinstance(error, DeadlineError):
                await self._end_endless(compilation.device.split("+"))  # of a model that is cut, several
            raise
        return detector

    async def _end_endless(self, names: Sequence[str]) -> None:
        """End a run that may never end by itself, with its drivers. Their other models are opened again (`watch`)."""
        for device in self._runtime.devices:
            try:
                if device.name in names:
                    await device.restart()
            except AionnError as error:
                logger.warning("the first run of a received model goes on in its driver: %s", error)

    async def watch(self) -> None:
        """Open every model again when a driver has died. Returns when the runtime is closed."""
        async with anyio.create_task_group() as opening:
            async for event in self._runtime.events():
                if isinstance(event, DriverEnded) and event.cause != "closed":
                    for detector in filter(None, (self.fixed, *(received for received, _ in self._received.values()))):
                        opening.start_soon(_opened_again, detector)

    def end(self) -> None:
        """Remove the private folder."""
        if self._held >= 0:
            remove_folder(self._folder)
            os.close(self._held)
            self._held = -1


async def _opened_again(detector: Detector) -> None:
    try:
        await detector.open()
    except AionnError as error:
        logger.info("model %r is not open again (%s); its next request tries once more", detector.name, error)
