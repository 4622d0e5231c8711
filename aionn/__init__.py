"""aionn: an asyncio-based runtime for neural networks.

    import aionn

    async def main() -> None:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(await runtime.load("model.onnx"))
            async with compilation.burst() as burst:
                outputs = await burst.compute({"input": x})

    aionn.run(main)

Each device runs models in a driver process, and frames cross in shared memory. This is the face for apps. The face for driver
authors is `aionn.hal`, the one for tests is `aionn.testing`.

The module that defines a name is imported when the name is first asked for. The reason: every driver process imports this
package on its way to `aionn.driver`, and needs nothing of the app's side.
"""

import logging as _logging
import sys as _sys
import typing as _typing

from aionn.lazy import imported_when_asked as _imported_when_asked

if _sys.platform != "linux":
    raise ImportError(f"aionn was imported on {_sys.platform!r}, but it runs on Linux only (it needs memfd, eventfd, pidfd and futex)")

# Each name with the module that defines it: here for a type checker, which reads `as` as "exported".
if _typing.TYPE_CHECKING:
    from aionn import caching as caching
    from aionn import errors as errors
    from aionn import events as events
    from aionn import fmq as fmq
    from aionn import hal as hal
    from aionn import trace as trace
    from aionn.caching.outcomes import CacheOutcome as CacheOutcome
    from aionn.caching.outcomes import CacheOutcomeKind as CacheOutcomeKind
    from aionn.caching.outcomes import MissReason as MissReason
    from aionn.errors import AionnError as AionnError
    from aionn.errors import CallerError as CallerError
    from aionn.errors import CompilationError as CompilationError
    from aionn.errors import DeadlineError as DeadlineError
    from aionn.errors import DeviceBusyError as DeviceBusyError
    from aionn.errors import DeviceMemoryLostError as DeviceMemoryLostError
    from aionn.errors import DeviceUnavailableError as DeviceUnavailableError
    from aionn.errors import DriverDiedError as DriverDiedError
    from aionn.errors import DriverHungError as DriverHungError
    from aionn.errors import ExecutionError as ExecutionError
    from aionn.errors import MemoryAllocationError as MemoryAllocationError
    from aionn.errors import ModelQuarantinedError as ModelQuarantinedError
    from aionn.errors import OutputInsufficientSizeError as OutputInsufficientSizeError
    from aionn.errors import QuotaError as QuotaError
    from aionn.errors import ServiceDiedError as ServiceDiedError
    from aionn.errors import StageRejected as StageRejected
    from aionn.hal.batching import Batching as Batching
    from aionn.memory.hardware_buffer import HardwareBuffer as HardwareBuffer
    from aionn.memory.hardware_buffer import PlaneLayout as PlaneLayout
    from aionn.memory.memory import Memory as Memory
    from aionn.needs import Confinement as Confinement
    from aionn.runtime.compilation import Compilation as Compilation
    from aionn.runtime.executing.arguments import Outputs as Outputs
    from aionn.runtime.executing.device_memory import DeviceMemory as DeviceMemory
    from aionn.runtime.executing.event import Event as Event
    from aionn.runtime.health import Health as Health
    from aionn.runtime.health import HealthPolicy as HealthPolicy
    from aionn.runtime.loop import run as run
    from aionn.runtime.model import Model as Model
    from aionn.runtime.processes.devices import Device as Device
    from aionn.runtime.runtime import Runtime as Runtime
    from aionn.runtime.staging.comparing import Comparison as Comparison
    from aionn.runtime.staging.comparing import Tolerance as Tolerance
    from aionn.runtime.staging.stage import Stage as Stage
    from aionn.runtime.staging.stage import StagePolicy as StagePolicy
    from aionn.runtime.streaming.blocking import BlockingBurst as BlockingBurst
    from aionn.runtime.streaming.burst import Burst as Burst
    from aionn.runtime.streaming.frame import Frame as Frame
    from aionn.runtime.streaming.item import Item as Item
    from aionn.runtime.streaming.recovering import RecurrentStream as RecurrentStream
    from aionn.runtime.streaming.stream import StreamResult as StreamResult

    __all__: list[str]

# And here for Python, which imports it when the name is first asked for. tests/test_public_api.py compares the two.
else:
    _NAMES = {
        "aionn.caching.outcomes": "CacheOutcome CacheOutcomeKind MissReason",
        "aionn.errors": "AionnError CallerError CompilationError DeadlineError DeviceBusyError DeviceMemoryLostError "
        "DeviceUnavailableError DriverDiedError DriverHungError ExecutionError MemoryAllocationError ModelQuarantinedError "
        "OutputInsufficientSizeError QuotaError ServiceDiedError StageRejected",
        "aionn.hal.batching": "Batching",
        "aionn.memory.hardware_buffer": "HardwareBuffer PlaneLayout",
        "aionn.memory.memory": "Memory",
        "aionn.runtime.compilation": "Compilation",
        "aionn.runtime.executing.event": "Event",
        "aionn.runtime.executing.arguments": "Outputs",
        "aionn.runtime.executing.device_memory": "DeviceMemory",
        "aionn.runtime.health": "Health HealthPolicy",
        "aionn.runtime.loop": "run",
        "aionn.runtime.model": "Model",
        "aionn.runtime.processes.devices": "Device",
        "aionn.runtime.runtime": "Runtime",
        "aionn.runtime.staging.comparing": "Comparison Tolerance",
        "aionn.runtime.staging.stage": "Stage StagePolicy",
        "aionn.runtime.streaming.blocking": "BlockingBurst",
        "aionn.runtime.streaming.burst": "Burst",
        "aionn.runtime.streaming.frame": "Frame",
        "aionn.runtime.streaming.item": "Item",
        "aionn.runtime.streaming.recovering": "RecurrentStream",
        "aionn.runtime.streaming.stream": "StreamResult",
        "aionn.needs": "Confinement",
    }
    _HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
    _FACES = {
        name: f"aionn.{name}" for name in ("blocking", "caching", "errors", "events", "fmq", "hal", "testing", "trace")
    }  # modules that are faces too
    __all__ = sorted((*_HOMES, "trace"))
    __getattr__ = _imported_when_asked(__name__, _HOMES | _FACES)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_FACES})


# Silent unless the app asks for messages. A driver's own messages reach the app over its control socket.
_logging.getLogger("aionn").addHandler(_logging.NullHandler())
