"""aionn: an asyncio-based runtime for neural networks.

    import aionn

    async def main() -> None:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx("model.onnx"))
            async with compilation.burst() as burst:
                outputs = await burst.compute({"input": x})

    aionn.run(main)

Each device runs models in a driver process; frames cross in shared memory. This is the face for apps; `aionn.hal` is the
one for driver authors, `aionn.testing` the one for tests.

A name's home is imported when the name is first asked for: every driver process imports this package on its way to
`aionn.driver`, and needs none of the app's side.
"""

import logging as _logging
import sys as _sys
import typing as _typing

from aionn.lazy import imported_when_asked as _imported_when_asked

if _sys.platform != "linux":
    raise ImportError(f"aionn runs on Linux (memfd, eventfd, pidfd, futex); this is {_sys.platform!r}")

if _typing.TYPE_CHECKING:
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
    from aionn.runtime.compilation import Compilation
    from aionn.runtime.executing.arguments import Outputs
    from aionn.runtime.executing.device_memory import DeviceMemory
    from aionn.runtime.model import Model
    from aionn.runtime.processes.devices import Device
    from aionn.runtime.runtime import Runtime, run
    from aionn.runtime.staging.comparing import Comparison, Tolerance
    from aionn.runtime.staging.stage import Stage, StagePolicy
    from aionn.runtime.streaming.burst import Burst
    from aionn.runtime.streaming.frame import Frame
    from aionn.runtime.streaming.stream import StreamResult

# Silent unless the app asks to hear of it; a driver's own words reach the app over its control socket.
_logging.getLogger("aionn").addHandler(_logging.NullHandler())

__all__ = [
    "AionnError",
    "Burst",
    "CacheOutcome",
    "CacheOutcomeKind",
    "CallerError",
    "Comparison",
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
    "Stage",
    "StagePolicy",
    "StageRejected",
    "StreamResult",
    "Tolerance",
    "run",
    "trace",
]

_HOMES = {
    "AionnError": "aionn.errors",
    "Burst": "aionn.runtime.streaming.burst",
    "CacheOutcome": "aionn.caching.outcomes",
    "CacheOutcomeKind": "aionn.caching.outcomes",
    "CallerError": "aionn.errors",
    "Comparison": "aionn.runtime.staging.comparing",
    "Compilation": "aionn.runtime.compilation",
    "CompilationError": "aionn.errors",
    "DeadlineError": "aionn.errors",
    "Device": "aionn.runtime.processes.devices",
    "DeviceMemory": "aionn.runtime.executing.device_memory",
    "DeviceMemoryLostError": "aionn.errors",
    "DeviceUnavailableError": "aionn.errors",
    "DriverDiedError": "aionn.errors",
    "DriverHungError": "aionn.errors",
    "ExecutionError": "aionn.errors",
    "Frame": "aionn.runtime.streaming.frame",
    "HardwareBuffer": "aionn.memory",
    "Memory": "aionn.memory",
    "MemoryAllocationError": "aionn.errors",
    "MissReason": "aionn.caching.outcomes",
    "Model": "aionn.runtime.model",
    "OutputInsufficientSizeError": "aionn.errors",
    "Outputs": "aionn.runtime.executing.arguments",
    "PlaneLayout": "aionn.memory",
    "Runtime": "aionn.runtime.runtime",
    "Stage": "aionn.runtime.staging.stage",
    "StagePolicy": "aionn.runtime.staging.stage",
    "StageRejected": "aionn.errors",
    "StreamResult": "aionn.runtime.streaming.stream",
    "Tolerance": "aionn.runtime.staging.comparing",
    "run": "aionn.runtime.runtime",
}
"""Where each name is defined; `TYPE_CHECKING` says the same to a type checker."""

_FACES = {name: f"aionn.{name}" for name in ("caching", "errors", "fmq", "hal", "testing", "trace")}
"""Modules that are faces too."""

if not _typing.TYPE_CHECKING:  # a type checker would take any name for an attribute
    __getattr__ = _imported_when_asked(__name__, {**_HOMES, **_FACES})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FACES})
