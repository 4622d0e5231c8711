"""The fast path: executions as packets over two message queues. Both ends live here.

    packets      the wire format (sans-IO)
    controller   the app's end, with its requests in flight
    executors    what that end needs of a device
    server       the driver's end: an async task that owns the burst, lends it to lanes, and answers the rest
    spin_policy  when an end may look for its peer before it sleeps, and for how long

The app creates both queues, and the driver attaches. Memories are named by slot and fetched once through `IBurstCallback`.

A usual request passes none of these files. `fmq.Caller` sends it and settles its answer. A lane (`fmq.Lane`) takes and answers it. The
rest comes here: packets that come for the first time, deadlines that pass, freed memory, and the end.

`controller` is imported when its name is first asked for, because drivers do without.
"""

import typing as _typing

from aionn.burst.executors import DefaultBurstExecutorWithCache, IBoundExecution, IBurstExecutorWithCache, ILanes, result_of
from aionn.burst.packets import (
    DATUM_BYTES,
    PacketError,
    PoolReference,
    RequestPacket,
    ResultPacket,
    decode_request,
    decode_result,
    encode_request,
    encode_request_body,
    encode_result,
    enough_datums,
)
from aionn.burst.server import CLOSE_S, ExecutionBurstServer
from aionn.lazy import imported_when_asked as _imported_when_asked

if _typing.TYPE_CHECKING:
    from aionn.burst.controller import ExecutionBurstController

__all__ = [
    "CLOSE_S",
    "DATUM_BYTES",
    "DefaultBurstExecutorWithCache",
    "ExecutionBurstController",
    "ExecutionBurstServer",
    "IBoundExecution",
    "IBurstExecutorWithCache",
    "ILanes",
    "PacketError",
    "PoolReference",
    "RequestPacket",
    "ResultPacket",
    "decode_request",
    "decode_result",
    "encode_request",
    "encode_request_body",
    "encode_result",
    "enough_datums",
    "result_of",
]

if not _typing.TYPE_CHECKING:
    __getattr__ = _imported_when_asked(__name__, {"ExecutionBurstController": "aionn.burst.controller"})
