"""The fast path: executions as packets over two message queues. Both ends live here.

    packets      the wire format (sans-IO)
    controller   the app's end, with its requests in flight
    executors    what that end needs of a device
    server       the driver's end: an async task that owns the burst, lends it to lanes, and answers the rest
    spin_policy  when an end may look for its peer before it sleeps, and for how long

The app creates both queues, and the driver attaches. Memories are named by slot and fetched once through `IBurstCallback`.

A usual request passes none of these files. `fmq.Caller` sends it and settles its answer. A lane (`fmq.Lane`) takes and answers it. The
rest comes here: packets that come for the first time, deadlines that pass, freed memory, and the end.

What a device that is written by hand needs is here, too. All other names come from their modules.

A name is imported when it is first asked for, because the app's end needs neither the driver's end nor an event loop.
"""

import typing as _typing

from aionn.lazy import imported_when_asked as _imported_when_asked

if _typing.TYPE_CHECKING:
    from aionn.burst.executors import DefaultBurstExecutorWithCache, IBoundExecution, IBurstExecutorWithCache, ILanes
    from aionn.burst.server import ExecutionBurstServer

__all__ = ["DefaultBurstExecutorWithCache", "ExecutionBurstServer", "IBoundExecution", "IBurstExecutorWithCache", "ILanes"]

if not _typing.TYPE_CHECKING:
    _HOMES = dict.fromkeys(__all__, "aionn.burst.executors") | {"ExecutionBurstServer": "aionn.burst.server"}
    __getattr__ = _imported_when_asked(__name__, _HOMES)
