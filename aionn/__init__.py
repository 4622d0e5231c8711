"""aionn: an asyncio-based runtime for neural networks.

    import aionn

    async def main() -> None:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx("model.onnx"))
            async with compilation.burst() as burst:
                outputs = await burst.compute({"input": x})

    aionn.run(main)

Models run in driver processes of their own; frames cross in shared memory. This is the face for apps; `aionn.hal` is the
one for driver authors, `aionn.testing` the one for tests.
"""

import logging as _logging
import sys as _sys

if _sys.platform != "linux":
    raise ImportError(f"aionn runs on Linux (memfd, eventfd, pidfd, futex); this is {_sys.platform!r}")

from aionn import trace
from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason
from aionn.errors import (
    AionnError,
    CallerError,
    CompilationError,
    DeadlineError,
    DeviceMemoryLostError,
    DeviceUnavailableError,
    DriverDiedError,
    DriverHungError,
    ExecutionError,
    MemoryAllocationError,
    OutputInsufficientSizeError,
    StageRejected,
)
from aionn.memory import HardwareBuffer, Memory, PlaneLayout
from aionn.runtime.arguments import Outputs
from aionn.runtime.burst import Burst
from aionn.runtime.compilation import Compilation
from aionn.runtime.device_memory import DeviceMemory
from aionn.runtime.devices import Device
from aionn.runtime.frame import Frame
from aionn.runtime.model import Model
from aionn.runtime.runtime import Runtime, run
from aionn.runtime.stream import StreamResult

# Silent unless the app asks to hear of it; a driver's own words reach the app over its control socket.
_logging.getLogger("aionn").addHandler(_logging.NullHandler())

__all__ = [
    "AionnError",
    "Burst",
    "CacheOutcome",
    "CacheOutcomeKind",
    "CallerError",
    "Compilation",
    "CompilationError",
    "DeadlineError",
    "Device",
    "DeviceMemory",
    "DeviceMemoryLostError",
    "DeviceUnavailableError",
    "DriverDiedError",
    "DriverHungError",
    "ExecutionError",
    "Frame",
    "HardwareBuffer",
    "Memory",
    "MemoryAllocationError",
    "MissReason",
    "Model",
    "OutputInsufficientSizeError",
    "Outputs",
    "PlaneLayout",
    "Runtime",
    "StageRejected",
    "StreamResult",
    "run",
    "trace",
]
