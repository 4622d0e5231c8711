"""What a burst's listener needs of a device: something that binds requests, and threads that run them (NNAPI: IBurstExecutorWithCache)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from aionn import trace
from aionn.burst.packets import PacketError, PoolReference, encode_result_body
from aionn.errors import AionnError, CallerError, ExecutionError, text_of
from aionn.fmq import Listener
from aionn.hal.interfaces import IPreparedModel
from aionn.hal.types import ErrorStatus, IMemory, Request, Result


class ILanes(Protocol):
    """The threads of one prepared model; see `fmq.Lanes`."""

    def lend(self, listener: Listener, returned: Callable[[], object], /) -> bool:
        """Serve the known packets of a burst from now on. Returns False, and does nothing, if it cannot be served.

        `returned` is called once, from any thread, when the burst has been given back or recalled. Runs may still be in flight.
        """
        ...

    def recall(self, listener: Listener, /) -> None:
        """Take no more requests of a burst. Does nothing if it is not lent."""
        ...


class IBoundExecution(Protocol):
    """One request, checked and bound to its memories. It may run again and again.

    Attributes:
        serial: whether it must not overlap with other requests of its burst, because it uses memory of the device.
        kind: requests of one kind may be joined into one run. 0: it joins with no other request.
    """

    serial: bool
    kind: int

    def run(self, lane: Any, measure_timing: bool) -> Result:
        """Run in the thread of a lane. Raises nothing: every failure is a result."""
        ...

    def warm_up(self, lane: Any) -> bool:
        """Run in the thread of a lane, without any effect but warm caches. Returns False if that cannot be. May raise anything."""
        ...

    async def execute(self, measure_timing: bool, deadline_ns: int | None) -> Result:
        """Run in a thread, and return the result when the run is over."""
        ...


class IBurstExecutorWithCache(Protocol):
    """Executes a burst's requests and caches its memories by slot (NNAPI: IBurstExecutorWithCache). Never called concurrently."""

    def is_cache_entry_present(self, slot: int) -> bool:
        """Return whether a memory is cached under `slot`."""
        ...

    def add_cache_entry(self, memory: IMemory, slot: int) -> None:
        """Cache a memory under `slot`, and own it from now on."""
        ...

    def remove_cache_entry(self, slot: int) -> None:
        """Free the memory under `slot`. An unknown slot is ignored."""
        ...

    def check(self, request: Request, pools: Sequence[PoolReference]) -> None:
        """Raise `CallerError` for a fault that is seen before any memory is fetched and mapped for the request."""
        ...

    def bind(self, request: Request, pools: Sequence[PoolReference]) -> IBoundExecution:
        """Check a request against the model and the cached memories. A buffer that the device owns is checked at each run instead.

        Raises:
            AionnError: a `CallerError` becomes INVALID_ARGUMENT, an `ExecutionError` keeps its status.
        """
        ...

    def close(self) -> None:
        """Free every memory."""
        ...


def result_of(error: BaseException) -> Result:
    """Return the answer that stands for an error of this side."""
    if isinstance(error, ExecutionError):
        return Result(ErrorStatus(error.status), message=text_of(error))
    if isinstance(error, AionnError):
        status = ErrorStatus.INVALID_ARGUMENT if isinstance(error, CallerError) else ErrorStatus.GENERAL_FAILURE
        return Result(status, message=text_of(error))
    return Result(ErrorStatus.GENERAL_FAILURE, message=f"{type(error).__name__}: {text_of(error)}")


class Bodies:
    """Framed answers without their identity. Lanes and the listener use it at the same time."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[Result | None, bytes] = (None, b"")

    def of(self, result: Result) -> bytes:
        """Return the encoded answer. The same `Result` mostly comes again, or one that is equal where shapes are open."""
        known, body = self._last
        if known is result or known == result:  # to compare takes a hundredth of the time to encode
            return body
        try:
            body = encode_result_body(result, framed=True)
        except PacketError as error:
            body = encode_result_body(Result(ErrorStatus.GENERAL_FAILURE, message=text_of(error)), framed=True)
        self._last = result, body
        return body


_NO_MEMORY = encode_result_body(Result(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT), framed=True)
"""The answer of a driver that has no memory for another one."""


class Bound(NamedTuple):
    """A request bound to its memories. The native listener remembers it. A lane calls it."""

    execution: IBoundExecution
    measure_timing: bool
    bodies: Bodies

    def __call__(self, lane: Any) -> bytes:
        """Run, and return the answer without its identity. Raises nothing."""
        try:
            result = self.execution.run(lane, self.measure_timing)
        except BaseException as error:
            result = result_of(error)
        try:
            return self.bodies.of(result)
        except MemoryError:
            return _NO_MEMORY

    def warm_up(self, lane: Any) -> bool:
        """Run before a request is due, and drop the result. Raises nothing."""
        try:
            return self.execution.warm_up(lane)
        except BaseException as error:
            trace.count("burst.warm_up_failed", reason=str(error))
            return False


def close_memory(memory: IMemory | None) -> None:
    """Close a memory that can be closed."""
    close = getattr(memory, "close", None)
    if close is not None:
        close()


class DefaultBurstExecutorWithCache:
    """Makes a burst executor of any prepared model. It keeps the memories and passes them at each execution, which is slower."""

    def __init__(self, prepared: IPreparedModel) -> None:
        self._prepared = prepared
        self._memories: dict[int, IMemory] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        return slot in self._memories

    def add_cache_entry(self, memory: IMemory, slot: int) -> None:
        self._memories[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        close_memory(self._memories.pop(slot, None))

    def check(self, request: Request, pools: Sequence[PoolReference]) -> None:
        if any(pool.token for pool in pools):
            raise CallerError("this device cannot use device memories in a burst; give arrays or aionn.Memory")

    def bind(self, request: Request, pools: Sequence[PoolReference]) -> IBoundExecution:
        return _DefaultBoundExecution(self._prepared, request, [self._memories[pool.slot] for pool in pools])

    def close(self) -> None:
        for slot in list(self._memories):
            self.remove_cache_entry(slot)


class _DefaultBoundExecution:
    serial = True
    kind = 0

    def __init__(self, prepared: IPreparedModel, request: Request, pools: Sequence[IMemory]) -> None:
        self._prepared = prepared
        self._request = request
        self._pools = pools

    def run(self, lane: Any, measure_timing: bool) -> Result:
        return Result(ErrorStatus.GENERAL_FAILURE, message="a prepared model of another kind has no lanes")

    def warm_up(self, lane: Any) -> bool:
        return False

    async def execute(self, measure_timing: bool, deadline_ns: int | None) -> Result:
        return await self._prepared.execute(self._request, self._pools, measure_timing, deadline_ns)
