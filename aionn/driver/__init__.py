"""A driver's process: everything a device needs that no engine should write.

`registry` finds engines, `device` makes an `IDevice` of any of them, `execution` runs requests (one thread per prepared
model, tiny ones on the loop), `threads` has the threads for that and for compiling, `artifacts` stores what was compiled and
gives it back verified, `blobs` is the blob cache that engines are handed, and `process` is what `python -m aionn.driver NAME` does: bind
its life to its parent's, greet, serve.
Engines see arrays; clients see HAL calls; nobody here knows the runtime.

The names here are imported when they are asked for: `__main__` has settings to make before NumPy is loaded, and Python
imports this package before it.
"""

import typing as _typing

from aionn.lazy import imported_when_asked as _imported_when_asked

if _typing.TYPE_CHECKING:
    from aionn.driver.device import EngineDevice
    from aionn.driver.registry import find_engine

__all__ = ["EngineDevice", "find_engine"]

if not _typing.TYPE_CHECKING:
    _HOMES = {"EngineDevice": "aionn.driver.device", "find_engine": "aionn.driver.registry"}
    __getattr__ = _imported_when_asked(__name__, _HOMES)
