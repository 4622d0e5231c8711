"""Bytes that cross the process wall without being copied, and those that stay behind it.

    limits           how much memory may still be had, and by which limit
    descriptors      whether somebody else's descriptor may be mapped
    region           one piece of shared memory, mapped; beside `aionn.pages`, the only place that calls mmap
    memory           `Memory`: what an app holds and slices
    hardware_buffer  `HardwareBuffer`: images, their planes and strides, as tensors
    pool             slots of a burst
    requests         whether a request may touch the bytes it names; pure
    domain           for which uses a buffer may live in a driver, and its dimensions; pure
    device_buffer    one such buffer: its memory, its state and copies of it; pure
    buffer_use       the device buffers that one request holds; pure
    device_buffers   the registry of device buffers, and the requests that name them; pure

Design
    One mapping per memory, shared by all slices of it and released with the last user. Nothing has a name in
    /dev/shm: memory is a memfd, so the kernel frees it with its last descriptor and mapping.
    Allocation never lies: what cgroups, resource limits and the machine leave is asked first, then the pages are
    reserved. Too little is a `MemoryAllocationError` that names need and have; never SIGBUS or a killed process later.
    What another process sent is checked before it is mapped, and what it asks for before it is touched: sizes are
    sealed, sums cannot wrap, an output overlaps nothing.
    Errors have two phases. A request of the wrong shape is a `CallerError` (INVALID_ARGUMENT), raised before anything
    is mapped. What cannot be mapped after that is a `MappingError` (GENERAL_FAILURE).
"""

from aionn.memory.buffer_use import BufferUse
from aionn.memory.device_buffer import DeviceBuffer
from aionn.memory.device_buffers import BufferRequest, DeviceBuffers
from aionn.memory.domain import ModelInfo, Role, combine_dimensions
from aionn.memory.hardware_buffer import HardwareBuffer, PlaneLayout
from aionn.memory.memory import Memory
from aionn.memory.region import Access, MappingError, Region, attach_all, reserve
from aionn.memory.requests import check_request, input_shape, output_shape

__all__ = [
    "Access",
    "BufferRequest",
    "BufferUse",
    "DeviceBuffer",
    "DeviceBuffers",
    "HardwareBuffer",
    "MappingError",
    "Memory",
    "ModelInfo",
    "PlaneLayout",
    "Region",
    "Role",
    "attach_all",
    "check_request",
    "combine_dimensions",
    "input_shape",
    "output_shape",
    "reserve",
]
