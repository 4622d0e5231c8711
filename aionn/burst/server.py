"""The driver's end of a burst: listen, execute, answer (NNAPI's ExecutionBurstServer). The listener is an async task.

Packets that differ only in their identity are decoded, checked and bound to their memories once. `_bound` remembers such a packet until
one of its slots is freed. `_native` remembers it as long, takes it in one call and answers it in another. Every other packet is read
and answered in Python. Requests are answered in order. Nothing here outlives `serve`: its `finally` frees the queues, the cached
memories and the remembered requests, whichever side ended first.

Invariants
    A slot that the executor caches came from `callback.get_memories`. If that call fails, the request is answered with the failure
    and not executed.
    A malformed packet costs one answer of GENERAL_FAILURE and nothing else. A request never ends the listener, whatever the executor
    raises, because other bursts run in the same process.
    `_working` is held wherever a request's memories are looked up, fetched or used across an await. `free_memory` takes it, too. So a
    memory that was asked for before a slot was freed never ends up in the slot afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import anyio

from aionn import trace
from aionn.burst.packets import (
    DATUM_BYTES,
    PacketError,
    PoolReference,
    decode_request,
    encode_result_body,
    identity_datum,
    is_framed_request,
    read_identity,
    result_identity_datum,
    split_requests,
)
from aionn.burst.spin_policy import COMPANY_NS, DRIVER_WINDOW_NS, SOON, YIELD_NS, SpinPolicy
from aionn.errors import AionnError, CallerError, ExecutionError
from aionn.fmq import Listener, MessageQueue
from aionn.hal.interfaces import IBurstCallback, IPreparedModel
from aionn.hal.types import ErrorStatus, IMemory, MQDescriptor, MQFlavor, Request, Result
from aionn.memo import Memo

_REMEMBERED = 256
"""How many different requests a burst remembers. A stream of frames has a handful."""


class IBoundExecution(Protocol):
    """One request, checked and bound to its memories. It may run again and again."""

    def execute_now(self, measure_timing: bool) -> Result | None:
        """Run right here, on the loop, if the run is known to be short. Return None if the caller must await `execute` instead."""
        ...

    async def execute(self, measure_timing: bool, deadline_ns: int | None) -> Result:
        """Run in a thread, and return the result when the run is over."""
        ...


@runtime_checkable
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

    def bind(self, request: Request, pools: Sequence[PoolReference]) -> IBoundExecution:
        """Check a request against the model and the cached memories. A buffer that the device owns is checked at each run instead.

        Raises:
            AionnError: a `CallerError` becomes INVALID_ARGUMENT, an `ExecutionError` keeps its status.
        """
        ...

    def close(self) -> None:
        """Free every memory."""
        ...


@runtime_checkable
class IChecksRequests(Protocol):
    """An executor that finds a request's faults before any memory is fetched and mapped for it."""

    def check(self, request: Request, pools: Sequence[PoolReference]) -> None:
        """Raise `CallerError` for a fault that the memories behind the slots cannot mend."""
        ...


class _Bound(NamedTuple):
    """A request bound to its memories. It is remembered by `key`, its packet without identity, unless `key` is empty."""

    execution: IBoundExecution
    measure_timing: bool
    slots: frozenset[int]
    key: bytes


class ExecutionBurstServer:
    """Serves one burst. Satisfies `IBurstContext`. `create` makes it, and `serve` runs it.

    Attributes:
        answered: how many requests have been answered so far.
    """

    def __init__(
        self, callback: IBurstCallback, requests: MessageQueue, results: MessageQueue, executor: IBurstExecutorWithCache, low_power: bool
    ) -> None:
        self._callback = callback
        self._requests = requests
        self._results = results
        self._executor = executor
        self._spin = SpinPolicy(DRIVER_WINDOW_NS, low_power=low_power)
        # Whole framed requests without their identity. Only what has been decoded and bound is in it.
        self._bound: Memo[bytes, _Bound] = Memo(_REMEMBERED)
        self._native = Listener(requests, results)
        self._bodies: Memo[Result, bytes] = Memo(_REMEMBERED)
        self._last_result: Result | None = None
        self._last_body = b""
        self._working = asyncio.Lock()
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._serving = False
        self._released = False
        self.answered = 0

    @classmethod
    def create(
        cls,
        callback: IBurstCallback,
        request_channel: MQDescriptor | MessageQueue,
        result_channel: MQDescriptor | MessageQueue,
        executor: IBurstExecutorWithCache | IPreparedModel,
        *,
        low_power: bool = False,
    ) -> ExecutionBurstServer:
        """Make a server over two queues of the client. Both channels are taken over, also when this fails.

        Args:
            callback: resolves unknown slots.
            request_channel: queue of 24-byte datums that the client writes.
            result_channel: queue of 24-byte datums that the client reads.
            executor: caches mappings by slot. A plain prepared model is wrapped, and gets its pools anew each time.
            low_power: never stay awake between requests.

        Raises:
            CallerError: a queue cannot be attached, has other elements, or cannot be awaited.
        """
        queues: list[MessageQueue] = []
        refused: AionnError | None = None
        for channel in (request_channel, result_channel):
            try:
                queues.append(channel if isinstance(channel, MessageQueue) else MessageQueue.attach(channel))
            except AionnError as error:
                refused = refused or error  # attach the other queue too, so that it can be closed
        for queue in queues:
            refused = refused or _why_unfit(queue)
        if refused is not None:
            for queue in queues:
                queue.close()
            raise refused
        with_cache = executor if isinstance(executor, IBurstExecutorWithCache) else DefaultBurstExecutorWithCache(executor)
        return cls(callback, queues[0], queues[1], with_cache, low_power)

    async def serve(self) -> None:
        """Answer requests until the client closes the queues, dies, or `aclose` is called."""
        self._serving = True
        try:
            with self._scope:
                await self._listen()
        except AionnError as error:
            # The queues are closed or broken. That ends this burst and nothing else.
            trace.count("burst.server_ended", reason=str(error))
        finally:
            self._release()

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        _company.forget(self)
        try:
            self._native.forget()
            self._bound.clear()
            self._requests.close()
            self._results.close()
            self._executor.close()
        finally:
            self._ended.set()

    async def aclose(self) -> None:
        """End the listener after the request that it is executing. Everything is freed when this returns."""
        if self._serving:
            async with self._working:
                self._scope.cancel()
            await self._ended.wait()
        else:
            self._release()

    async def free_memory(self, slot: int) -> None:
        """Forget the memory cached under `slot`. Waits only for the request that is being executed, because the lock is fair."""
        async with self._working:
            self._native.forget()  # the other packets are remembered again when they come again
            for key in [key for key, entry in self._bound.items() if slot in entry.slots]:
                del self._bound[key]
            self._executor.remove_cache_entry(slot)

    # ---- listening ----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        requests = self._requests
        yielded_ns = time.monotonic_ns()
        while True:
            looked_ns = 0
            if not trace.active:
                yielded_ns = await self._serve_known(yielded_ns)
                looked_ns = self._native.looked_ns
            available = requests.available_to_read()
            if not available:
                if await self._wait_for_request(looked_ns):
                    yielded_ns = time.monotonic_ns()
                continue
            datums = requests.read(available)
            if datums is None:
                continue  # a broken client has taken datums back
            for packet in split_requests(datums):
                await self._answer(packet)
                now_ns = time.monotonic_ns()
                if now_ns - yielded_ns > YIELD_NS or not _company.alone(self, now_ns):
                    await asyncio.sleep(0)
                    yielded_ns = time.monotonic_ns()

    async def _serve_known(self, yielded_ns: int) -> int:
        """Serve known requests while more of them come within the window, if this end may stay awake.

        The caller reads whatever else then lies in the queue. Returns the time when the loop last ran.
        """
        native, awake = self._native, self._spin
        window_ns = awake.window_ns if awake.brisk else 0
        alone = _company.alone(self, time.monotonic_ns())
        while (bound := native.next(window_ns if alone else 0)) is not None:
            try:
                result = bound.execution.execute_now(bound.measure_timing)
            except Exception as error:  # as in `_result_of`
                result = result_of(error)
            if result is None:
                await self._answer(bound.key + identity_datum(native.identity, native.deadline_ns))
                now_ns = time.monotonic_ns()
            elif now_ns := native.answer(self._last_body if result is self._last_result else self._body(result)):
                self.answered += 1
            else:
                await self._send(result, native.identity, native.began_ns)
                now_ns = time.monotonic_ns()
            alone = _company.alone(self, now_ns)
            if now_ns - yielded_ns > YIELD_NS or not alone:
                await asyncio.sleep(0)
                yielded_ns = time.monotonic_ns()
                if trace.active:
                    break
        if native.waits:
            awake.watched(native.waits, native.waited_ns / native.waits)
            native.waits = native.waited_ns = 0
        return yielded_ns

    async def _wait_for_request(self, looked_ns: int) -> bool:
        """Wait until the client has written a request, or may have. Return whether this task slept.

        Args:
            looked_ns: since when this end has looked for a request already, or 0.
        """
        requests, awake = self._requests, self._spin
        began_ns = looked_ns or time.monotonic_ns()
        if not looked_ns and _company.alone(self, began_ns):
            budget_ns = awake.budget_ns()
            # The queue knows where both ends run, and does not spin if both run on the same CPU.
            # A closed queue ends the spin as well. Only elements count as seen, or this task would hold the loop without end.
            if budget_ns and requests.spin_until_readable(budget_ns) and requests.available_to_read():
                awake.waited(time.monotonic_ns() - began_ns, slept=False)
                return False
        await requests.wait_readable(or_flag=SOON if awake.allowed else 0)
        woken_ns = time.monotonic_ns()
        awake.waited(woken_ns - began_ns, slept=True)
        if awake.allowed and requests.take_flag(SOON) and _company.alone(self, woken_ns):
            requests.spin_until_readable(awake.window_ns)
        return True

    async def _answer(self, packet: bytes) -> None:
        began_ns = time.monotonic_ns()
        framed = is_framed_request(packet)
        identity, deadline_ns = read_identity(packet) if framed else (None, None)
        async with self._working:
            # NNAPI's packets are not remembered. A packet without identity must not pass for the body of a framed one.
            result = await self._result_of(packet, packet[:-DATUM_BYTES] if framed else None, deadline_ns)
        if trace.active:
            _trace_execution(result, identity or 0, began_ns)
        await self._send(result, identity, began_ns)

    async def _result_of(self, packet: bytes, key: bytes | None, deadline_ns: int | None) -> Result:
        try:
            entry = None if key is None else self._bound.get(key)
            if entry is None:
                entry = await self._bind(packet, key)
            if key is not None:
                self._native.remember(key, entry)
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                return Result(
                    ErrorStatus.MISSED_DEADLINE_TRANSIENT, message="the deadline had passed before the driver began the execution"
                )
            now = entry.execution.execute_now(entry.measure_timing)
            return now or await entry.execution.execute(entry.measure_timing, deadline_ns)
        except Exception as error:  # every error of an executor fails this request and nothing else
            return result_of(error)

    async def _bind(self, packet: bytes, key: bytes | None) -> _Bound:
        """Return the request of a packet, and remember it under `key` if there is one.

        Raises:
            Exception: the request cannot be executed.
        """
        decoded = decode_request(packet)
        if isinstance(self._executor, IChecksRequests):
            self._executor.check(decoded.request, decoded.pools)
        slots = [pool.slot for pool in decoded.pools if not pool.token]
        await self._ensure_cache_entries(slots)
        entry = _Bound(self._executor.bind(decoded.request, decoded.pools), decoded.measure_timing, frozenset(slots), key or b"")
        if key is not None:
            self._bound[key] = entry
        return entry

    async def _ensure_cache_entries(self, slots: Sequence[int]) -> None:
        unknown = sorted({slot for slot in slots if not self._executor.is_cache_entry_present(slot)})
        if not unknown:
            return
        with trace.span("burst.get_memories", slots=len(unknown)):
            memories = await self._callback.get_memories(unknown)
        if len(memories) != len(unknown):
            for memory in memories:
                _close(memory)
            raise ExecutionError(
                f"the driver asked for {len(unknown)} memories of this burst, but the app sent {len(memories)}",
                status=ErrorStatus.GENERAL_FAILURE,
            )
        for slot, memory in zip(unknown, memories, strict=True):
            self._executor.add_cache_entry(memory, slot)

    # ---- answering ----------------------------------------------------------------------------------------------------

    def _body(self, result: Result) -> bytes:
        """Return a framed answer without its identity. The same `Result` comes again and again."""
        if result is self._last_result:
            return self._last_body
        body = self._bodies.get(result)
        if body is None:
            try:
                body = encode_result_body(result, framed=True)
            except PacketError as error:
                body = encode_result_body(Result(ErrorStatus.GENERAL_FAILURE, message=str(error)), framed=True)
            self._bodies[result] = body
        self._last_result, self._last_body = result, body
        return body

    async def _send(self, result: Result, identity: int | None, began_ns: int) -> None:
        capacity = self._results.capacity
        for answer in (result, *_shorter(result, capacity)):
            if identity is None:
                packet = encode_result_body(answer, framed=False)
            else:
                packet = self._body(answer) + result_identity_datum(identity, time.monotonic_ns() - began_ns)
            if len(packet) <= capacity * DATUM_BYTES:
                self.answered += 1
                if not self._results.write(packet):
                    await self._results.write_blocking(packet)
                return
        raise CallerError(f"the result queue has room for {capacity} datums, but not even an error fits; make it larger")


def _shorter(result: Result, capacity: int) -> tuple[Result, Result]:
    """Return what to send instead of an answer that is larger than the queue: first the reason, then the bare status."""
    status = ErrorStatus.GENERAL_FAILURE if result.status is ErrorStatus.NONE else result.status
    return Result(status, message=f"the answer does not fit into {capacity} datums"), Result(status)


def _why_unfit(queue: MessageQueue) -> AionnError | None:
    if queue.quantum != DATUM_BYTES:
        return CallerError(f"a queue of the burst has elements of {queue.quantum} bytes, but a datum has {DATUM_BYTES}")
    if queue.flavor is not MQFlavor.SYNCHRONIZED or queue.reader_fd < 0:
        return CallerError("a queue of the burst cannot be awaited; a burst needs synchronized queues with eventfds")
    return None


def _trace_execution(result: Result, identity: int, began_ns: int) -> None:
    trace.span_at("burst.execute", began_ns, time.monotonic_ns(), identity=identity, status=result.status.name)


class _Company:
    """Knows which bursts of this process have been served lately.

    A burst with company does not look without sleeping, and lets the others run after every answer. An idle burst does not count as
    company.
    """

    __slots__ = ("_changed_ns", "_last")

    def __init__(self) -> None:
        self._last: ExecutionBurstServer | None = None
        self._changed_ns = 0

    def alone(self, server: ExecutionBurstServer, now_ns: int) -> bool:
        """Return whether only `server` has been served for `COMPANY_NS`. Asking counts as being served."""
        if server is not self._last:
            if self._last is not None:
                self._changed_ns = now_ns
            self._last = server
        return now_ns - self._changed_ns > COMPANY_NS

    def forget(self, server: ExecutionBurstServer) -> None:
        if self._last is server:
            self._last = None


_company = _Company()


def result_of(error: BaseException) -> Result:
    """Return the answer that stands for an error of this side."""
    if isinstance(error, ExecutionError):
        return Result(ErrorStatus(error.status), message=str(error))
    if isinstance(error, AionnError):
        status = ErrorStatus.INVALID_ARGUMENT if isinstance(error, CallerError) else ErrorStatus.GENERAL_FAILURE
        return Result(status, message=str(error))
    return Result(ErrorStatus.GENERAL_FAILURE, message=f"{type(error).__name__}: {error}")


def _close(memory: IMemory | None) -> None:
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
        _close(self._memories.pop(slot, None))

    def bind(self, request: Request, pools: Sequence[PoolReference]) -> IBoundExecution:
        if any(pool.token for pool in pools):
            raise CallerError("this device cannot use device memories in a burst; give arrays or aionn.Memory")
        return _DefaultBoundExecution(self._prepared, request, [self._memories[pool.slot] for pool in pools])

    def close(self) -> None:
        for slot in list(self._memories):
            self.remove_cache_entry(slot)


class _DefaultBoundExecution:
    def __init__(self, prepared: IPreparedModel, request: Request, pools: Sequence[IMemory]) -> None:
        self._prepared = prepared
        self._request = request
        self._pools = pools

    def execute_now(self, measure_timing: bool) -> Result | None:
        return None

    async def execute(self, measure_timing: bool, deadline_ns: int | None) -> Result:
        return await self._prepared.execute(self._request, self._pools, measure_timing, deadline_ns)


__all__ = [
    "DefaultBurstExecutorWithCache",
    "ExecutionBurstServer",
    "IBoundExecution",
    "IBurstExecutorWithCache",
    "result_of",
]
