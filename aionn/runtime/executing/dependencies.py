"""What an execution that is started depends on, and what others that depend on it rely on: the shapes of its outputs in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import msgspec
import numpy as np

from aionn.errors import NO_DESCRIPTOR_LEFT, CallerError, ExecutionError, refuse_coroutine
from aionn.hal.types import Dependency, ErrorStatus, Result
from aionn.memory.hardware_buffer import HardwareBuffer
from aionn.memory.limits import allocation_error
from aionn.memory.memory import Memory
from aionn.remote.device import RemoteBuffer
from aionn.remote.fences import check_pollable
from aionn.runtime.executing.arguments import FrameLayout
from aionn.runtime.executing.device_memory import DeviceMemory
from aionn.runtime.executing.event import Event, awaited_fence_of, error_of
from aionn.runtime.executing.placement import Placement, state_of


class After:
    """One dependency: an event, or a descriptor of the app's that was duplicated."""

    __slots__ = ("_fd", "event", "sent")

    def __init__(self, event: Event | None, fd: int = -1) -> None:
        self.event = event
        self.sent = False
        self._fd = fd

    @property
    def failed(self) -> bool:
        return self.event is not None and error_of(self.event) is not None

    @property
    def done(self) -> bool:
        return self.event is not None and self.event.done()

    @property
    def dependency(self) -> Dependency:
        """Return what the driver waits for."""
        self.sent = True
        return Dependency(self._fd) if self.event is None else Dependency(awaited_fence_of(self.event), is_event=True)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def dependencies_of(after: Any) -> tuple[After, ...]:
    """Check and duplicate what an app passes as `after`. Each dependency must be closed.

    Raises:
        CallerError: something is not an event, or a descriptor that can be waited for.
        MemoryAllocationError: no file descriptor is left.
    """
    if type(after) is not tuple and (isinstance(after, Event | int | str | bytes) or not isinstance(after, Iterable)):
        refuse_coroutine(after, "what was passed for after")
        raise CallerError(f"after: expected a tuple of events and descriptors, got {type(after).__name__}; write after=(event,)")
    found: list[After] = []
    try:
        for value in after:
            found.append(_dependency(value))
    except BaseException:
        for one in found:
            one.close()
        raise
    return tuple(found)


def _dependency(value: Any) -> After:
    if isinstance(value, Event):
        return After(value)
    number = value if isinstance(value, int) and not isinstance(value, bool) else getattr(value, "fileno", None)
    if callable(number):
        try:
            number = number()
        except (OSError, ValueError) as error:
            raise CallerError(f"after: {type(value).__name__} has no open descriptor ({error}); give an open one") from None
    if not isinstance(number, int):
        refuse_coroutine(value, "a dependency in after")
        raise CallerError(f"after: expected an aionn.Event or a descriptor, got {type(value).__name__}")
    try:
        check_pollable(number)
        return After(None, os.dup(number))
    except OSError as error:
        if error.errno in NO_DESCRIPTOR_LEFT:
            raise allocation_error(0, error) from error
        raise CallerError(f"after: descriptor {number} is not open ({error.strerror}); give an open one") from error


def shape_of(value: Any) -> tuple[int, ...]:
    return (state_of(value).shape if isinstance(value, DeviceMemory) else getattr(value, "shape", None)) or ()


def kept(value: Any) -> Any:
    """Return an argument that the app may change or close from now on."""
    if isinstance(value, Memory):
        return value[:] if value.shape is None else value.shaped(value.shape)
    return value if isinstance(value, DeviceMemory | HardwareBuffer) else np.array(value)


def give_shapes(placement: Placement, layout: FrameLayout, outputs: Mapping[str, Any]) -> None:
    """Give every output in an app's memory its full shape, because executions that depend on this one read it in place."""
    for index, (name, dtype, shape, _, _) in enumerate(layout.outputs):
        place = placement.outputs.get(index)
        if place is None or place.shape or isinstance(place.pool, RemoteBuffer):
            continue
        known = getattr(outputs[name], "shape", None) or shape
        if known is None:
            raise CallerError(
                f"output {name!r}: an execution that is started needs the shape of an output in memory, and the model leaves it open; "
                "give memory.shaped(shape)"
            )
        needed = prod(known) * dtype.itemsize
        if needed != place.length:
            raise CallerError(
                f"output {name!r} of shape {known} takes {needed} bytes, but the memory has {place.length}; pass a slice of {needed}"
            )
        placement.outputs[index] = msgspec.structs.replace(place, shape=known)


def check_shapes(placement: Placement, result: Result, names: list[str]) -> None:
    """Raise if an output in an app's memory has come out in another shape than the app has given."""
    for index, place in placement.outputs.items():
        if place.shape and index < len(result.output_shapes) and result.output_shapes[index].dimensions != place.shape:
            found = result.output_shapes[index].dimensions
            raise ExecutionError(
                f"output {names[index]!r} came out in shape {found}, but its memory is for {place.shape}; give memory for that shape",
                status=ErrorStatus.GENERAL_FAILURE,
            )
