"""The driver's end of a burst: listen, execute, answer (NNAPI's ExecutionBurstServer). The listener is an async task.

The task owns the burst. While only known packets come, it lends the burst to the lanes of its model (`ILanes`): threads that
take, run and answer them natively. It gets the burst back for every other packet, for `free_memory`, and for the end.

Packets that differ only in their identity are decoded, checked and bound to their memories once. `_native` remembers such a packet
until one of the burst's slots is freed. Every other packet is read and answered here. Requests are answered in order. Nothing here
outlives `serve` but a run that a lane has begun: its `finally` frees the queues, the cached memories and the remembered requests,
whichever side ended first.

Invariants
    A slot that the executor caches was in `callback.brought`, or came from `callback.get_memories`. If that call fails, the request is
    answered with the failure and not executed.
    A malformed packet costs one answer of GENERAL_FAILURE and nothing else. A request never ends the listener, whatever the executor
    raises, because other bursts run in the same process.
    `_working` is held while the burst is lent, and wherever a request's memories are looked up, fetched or used across an await.
    `free_memory` takes it, too. So a memory that was asked for before a slot was freed never ends up in the slot afterwards.
    A run that a lane has begun holds its memories. They stay mapped until it is over, also after the end of the burst.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

from aionn import trace
from aionn.burst.executors import (
    Bodies,
    Bound,
    DefaultBurstExecutorWithCache,
    IBurstExecutorWithCache,
    ILanes,
    close_memory,
    result_of,
)
from aionn.burst.packets import (
    DATUM_BYTES,
    FORFEITED,
    decode_request,
    decode_result,
    encode_result_body,
    is_framed_request,
    read_after,
    read_identity,
    result_identity_datum,
    split_requests,
)
from aionn.burst.spin_policy import DRIVER_WINDOW_NS, YIELD_NS, may_stay_awake
from aionn.errors import AionnError, CallerError, ExecutionError
from aionn.fmq import LONGEST_KNOWN, Listener, MessageQueue
from aionn.hal.interfaces import IBurstCallback, IPreparedModel
from aionn.hal.queues import MQDescriptor, MQFlavor
from aionn.hal.types import ErrorStatus, Result

logger = logging.getLogger("aionn.driver")

CLOSE_S = 2.0
"""How long the end of a burst waits for a run in flight."""


class ExecutionBurstServer:
    """Serves one burst. Satisfies `IBurstContext`. `create` makes it, and `serve` runs it."""

    def __init__(
        self,
        callback: IBurstCallback,
        queues: tuple[MessageQueue, MessageQueue],
        executor: IBurstExecutorWithCache,
        lanes: ILanes | None,
        window_ns: int,
        anticipate: bool = False,
    ) -> None:
        self._callback = callback
        self._requests, self._results = queues
        self._executor = executor
        self._lanes = lanes
        self._native = Listener(*queues, window_ns, queues[0].inode, anticipate)
        self._bodies = Bodies()
        listeners: dict[int, Listener] | None = getattr(callback, "listeners", None)
        if listeners is not None:
            self._native.beside(listeners, getattr(callback, "number", 0))
        self._working = asyncio.Lock()
        self._quiet = asyncio.Event()  # no lane runs a request of this burst
        self._wanted = 0  # how many tasks want `_working`: the burst is not lent meanwhile
        self._task: asyncio.Task[Any] | None = None  # of `serve`, until `aclose` cancels it
        self._ended = asyncio.Event()
        self._answered = 0  # by the listener
        self._taken: deque[bytes] = deque()  # packets that the listener has read and not answered
        self._needed = 0  # datums of the answer that waits for room, or 0

    @property
    def answered(self) -> int:
        """How many requests have been answered so far."""
        return self._answered + self._native.answered

    @classmethod
    def create(
        cls,
        callback: IBurstCallback,
        request_channel: MQDescriptor | MessageQueue,
        result_channel: MQDescriptor | MessageQueue,
        executor: IBurstExecutorWithCache | IPreparedModel,
        *,
        lanes: ILanes | None = None,
        low_power: bool = False,
        anticipate: bool = False,
    ) -> ExecutionBurstServer:
        """Make a server over two queues of the client. Both channels are taken over, also when this fails.

        Args:
            callback: resolves unknown slots. Its `listeners`, if it has them, are those of all bursts of the client, by `number`. Its
                `brought`, if it has that, are memories by slot, which the server owns when this returns.
            request_channel: queue of 24-byte datums that the client writes.
            result_channel: queue of 24-byte datums that the client reads.
            executor: caches mappings by slot. A plain prepared model is wrapped, and gets its pools anew each time.
            lanes: the threads that run what `executor` binds. None: the listener serves every packet itself.
            low_power: never stay awake between requests.
            anticipate: let lanes run the model shortly before a request is due. Without lanes it does nothing.

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
            queue.forget_descriptor()
            refused = refused or _why_unfit(queue)
        if refused is not None:
            for queue in queues:
                queue.close()
            raise refused
        caches = hasattr(executor, "add_cache_entry")  # a check against a protocol compares all its attributes each time
        with_cache = cast(IBurstExecutorWithCache, executor) if caches else DefaultBurstExecutorWithCache(cast(IPreparedModel, executor))
        window_ns = DRIVER_WINDOW_NS if may_stay_awake(low_power=low_power) else 0
        server = cls(callback, (queues[0], queues[1]), with_cache, lanes, window_ns, anticipate)
        for slot, memory in getattr(callback, "brought", {}).items():
            with_cache.add_cache_entry(memory, slot)
        return server

    async def serve(self) -> None:
        """Answer requests until the client closes the queues, dies, or `aclose` is called."""
        self._task = asyncio.current_task()
        try:
            await self._listen()
        except asyncio.CancelledError:
            if self._task is not None:
                raise
        except AionnError as error:
            # The queues are closed or broken. That ends this burst and nothing else.
            trace.count("burst.server_ended", reason=str(error))
        finally:
            self._release()

    def _release(self) -> None:
        if self._ended.is_set():
            return
        try:
            self._native.beside(None, 0)
            self._native.forget()
            self._requests.close()
            self._results.close()
            self._executor.close()
        finally:
            self._ended.set()

    async def aclose(self) -> None:
        """End the listener. A run in flight is waited for at most `CLOSE_S`. Everything else is freed when this returns."""
        if self._task is None:
            self._release()
            return
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S), self._owned():
                    pass
        finally:
            task, self._task = self._task, None
            if task is not None and not self._ended.is_set():
                task.cancel()
        await self._ended.wait()

    async def free_memory(self, slot: int) -> None:
        """Forget the memory cached under `slot`. Waits only for the requests that are being executed, because the lock is fair."""
        async with self._owned():
            self._native.forget()  # packets over other slots are remembered again when they come again
            self._executor.remove_cache_entry(slot)

    def has_request(self, identity: int) -> bool:
        """Return whether this end still has that request to answer. An app that has waited for long asks so over the control socket.

        Requests in hand are known from private memory, because a bug in an engine may damage the queues. A request that lies in the
        queue counts, too, and so does every request while an answer has room. Both ends look at their queues again, because the word
        that would have woken them may be damaged.

        Raises:
            QueueClosedError, QueueCorruptedError: the queues cannot be used any more.
        """
        if self._ended.is_set():
            return False
        self._requests.signal()
        self._results.signal()
        if self._needed:
            return self._results.available_to_write() >= self._needed
        queued = self._requests.peek(self._requests.available_to_read()) or b""
        # First the queue and then the lanes: a lane may take a request in between.
        packets = [*self._taken, *split_requests(queued)]
        return any(is_framed_request(one) and read_identity(one)[0] == identity for one in packets) or self._native.has(identity)

    @asynccontextmanager
    async def _owned(self) -> AsyncIterator[None]:
        """Take the burst back from the lanes, and keep it for the body."""
        self._wanted += 1
        try:
            if self._lanes is not None:
                self._lanes.recall(self._native)
            async with self._working:
                await self._idle()
                yield
        finally:
            self._wanted -= 1

    async def _idle(self) -> None:
        """Wait until no lane runs a request of this burst. It is not lent."""
        loop = asyncio.get_running_loop()
        while not self._native.when_idle(partial(loop.call_soon_threadsafe, self._quiet.set)):  # one callback serves all who wait
            self._quiet.clear()
            await self._quiet.wait()

    # ---- listening ----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        requests = self._requests
        yielded_ns = time.monotonic_ns()
        while True:
            lanes = self._lanes
            if lanes is not None:
                async with self._working:
                    if not self._wanted and not await self._lend(lanes):
                        lanes = None
                if self._native.blocked:
                    await self._catch_up()
            available = requests.available_to_read()
            if not available:
                if lanes is None:
                    await requests.wait_readable()
                else:
                    await self._catch_up()
                    requests.peek(1)  # raises the reason, if the queue has come to its end
                    await asyncio.sleep(0)
                continue
            if lanes is not None:
                await self._serve_first(requests.peek(available) or b"")
                continue
            await self._catch_up()
            self._taken.extend(split_requests(requests.read(available) or b""))  # a broken client may have taken datums back
            while self._taken:
                await self._answer()
                if time.monotonic_ns() - yielded_ns > YIELD_NS:
                    await asyncio.sleep(0)
                    yielded_ns = time.monotonic_ns()

    async def _serve_first(self, datums: bytes) -> None:
        """Bind the packets that lanes do not know yet, so that lanes take them. Or answer the first packet, if they cannot."""
        for number, packet in enumerate(split_requests(datums)):
            framed = is_framed_request(packet) and len(packet) <= LONGEST_KNOWN
            key = packet[:-DATUM_BYTES] if framed else None
            refusal: Result | None = None
            if key is not None and self._native.find(key) is None:
                try:
                    async with self._working:
                        await self._bind(packet, key)
                    continue
                except Exception as error:  # as in `_result_of`
                    refusal = result_of(error)
            elif key is not None and number:
                continue
            if number == 0:  # lanes have given a known packet back because it is late, for instance
                await self._catch_up()
                taken = self._requests.read(len(packet) // DATUM_BYTES)  # not as it was peeked: its caller may have left since
                if taken is None:
                    return  # a broken client has taken datums back
                if refusal is None:
                    self._taken.append(taken)
                    await self._answer()
                else:
                    await self._send(refusal, read_identity(packet)[0], time.monotonic_ns())
            return

    async def _catch_up(self) -> None:
        """Wait until every request that lanes have taken is answered. Before that, the listener answers none. The burst is not lent."""
        await self._idle()
        for body, identity, service_ns in self._native.held():
            result = decode_result(body + result_identity_datum(identity, service_ns)).result
            await self._write(result, identity, service_ns)

    async def _lend(self, lanes: ILanes) -> bool:
        """Lend the burst to the lanes until they give it back. Returns False if they cannot serve it."""
        loop = asyncio.get_running_loop()
        returned: asyncio.Future[None] = loop.create_future()
        try:
            if not lanes.lend(self._native, partial(loop.call_soon_threadsafe, _settle, returned)):
                return False
        except OSError as error:
            logger.warning("a burst is served without lanes, because the system refused to watch its queue: %s", error)
            self._lanes = None
            return False
        try:
            await returned
        finally:
            lanes.recall(self._native)
        return True

    async def _answer(self) -> None:
        """Answer the first packet that the listener has taken."""
        packet, began_ns = self._taken[0], time.monotonic_ns()
        framed = is_framed_request(packet)
        identity, deadline_ns = read_identity(packet) if framed else (None, None)
        after = read_after(packet) if framed else 0
        async with self._working:
            # NNAPI's packets are not remembered. A packet without identity must not pass for the body of a framed one.
            result = await self._result_of(packet, packet[:-DATUM_BYTES] if framed else None, deadline_ns, after)
        if trace.active:  # lanes record the same natively; `queue` names the burst as their records do
            of = {"queue": self._requests.inode, "identity": identity or 0, "status": result.status.name}
            trace.span_at("burst.execute", began_ns, time.monotonic_ns(), **of)
        await self._send(result, identity, began_ns)
        self._taken.popleft()

    async def _result_of(self, packet: bytes, key: bytes | None, deadline_ns: int | None, after: int) -> Result:
        try:
            entry: Bound | None = None if key is None else self._native.find(key)
            if entry is None:
                entry = await self._bind(packet, key)
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                return Result(
                    ErrorStatus.MISSED_DEADLINE_TRANSIENT, message="the deadline had passed before the driver began the execution"
                )
            if after and not self._native.may_run(after):
                return Result(ErrorStatus.GENERAL_FAILURE, message=FORFEITED)
            return await entry.execution.execute(entry.measure_timing, deadline_ns)
        except Exception as error:  # every error of an executor fails this request and nothing else
            return result_of(error)

    async def _bind(self, packet: bytes, key: bytes | None) -> Bound:
        """Return the request of a packet, and remember it under `key` if there is one.

        Raises:
            Exception: the request cannot be executed.
        """
        decoded = decode_request(packet)
        self._executor.check(decoded.request, decoded.pools)
        await self._ensure_cache_entries([pool.slot for pool in decoded.pools if not pool.token])
        entry = Bound(self._executor.bind(decoded.request, decoded.pools), decoded.measure_timing, self._bodies)
        if key is not None:
            kind = entry.execution.kind
            self._native.remember(key, entry, entry.execution.serial, kind and 2 * kind + entry.measure_timing)
        return entry

    async def _ensure_cache_entries(self, slots: Sequence[int]) -> None:
        unknown = sorted({slot for slot in slots if not self._executor.is_cache_entry_present(slot)})
        if not unknown:
            return
        with trace.span("burst.get_memories", slots=len(unknown)):
            memories = await self._callback.get_memories(unknown)
        if len(memories) != len(unknown):
            for memory in memories:
                close_memory(memory)
            raise ExecutionError(
                f"the driver asked for {len(unknown)} memories of this burst, but the app sent {len(memories)}",
                status=ErrorStatus.GENERAL_FAILURE,
            )
        for slot, memory in zip(unknown, memories, strict=True):
            self._executor.add_cache_entry(memory, slot)

    # ---- answering ----------------------------------------------------------------------------------------------------

    async def _send(self, result: Result, identity: int | None, began_ns: int) -> None:
        self._answered += 1
        await self._write(result, identity, time.monotonic_ns() - began_ns)
        if identity is not None:
            self._native.note(identity, result.status is ErrorStatus.NONE)

    async def _write(self, result: Result, identity: int | None, service_ns: int) -> None:
        capacity = self._results.capacity
        for answer in (result, *_shorter(result, capacity)):
            if identity is None:
                packet = encode_result_body(answer, framed=False)
            else:
                packet = self._bodies.of(answer) + result_identity_datum(identity, service_ns)
            if len(packet) <= capacity * DATUM_BYTES:
                if not self._results.write(packet):
                    self._needed = len(packet) // DATUM_BYTES
                    await self._results.write_blocking(packet)
                    self._needed = 0
                return
        raise CallerError(f"the result queue has room for {capacity} datums, but not even an error fits; make it larger")


def _settle(returned: asyncio.Future[None]) -> None:
    if not returned.done():
        returned.set_result(None)


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
