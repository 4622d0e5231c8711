"""A driver's process: everything a device needs that no engine should write.

`registry` finds engines, `device` makes an `IDevice` of any of them, `execution` runs requests (one thread per prepared
model, tiny ones on the loop), `artifacts` stores what was compiled and gives it back verified, and `process` is what
`python -m aionn.driver NAME` does: bind its life to its parent's, greet, serve. Engines see arrays; clients see HAL
calls; nobody here knows the runtime.
"""

from aionn.driver.device import EngineDevice
from aionn.driver.registry import find_engine

__all__ = ["EngineDevice", "find_engine"]
