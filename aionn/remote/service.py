"""An `IDevice` as a driver process offers it: control calls become HAL calls on the device.

Every call runs in a separate task. Each object that the client made (a prepared model, a burst or a buffer) is in one table here.
`aclose` frees all of them when the client has gone.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup

from aionn.burst.executors import result_of
from aionn.errors import AionnError, CallerError
from aionn.hal.interfaces import IBuffer, IBurstContext, IDevice, IPreparedModel
from aionn.hal.performance import Performance
from aionn.hal.queues import MQDescriptor
from aionn.hal.types import Dependency, IMemory, Result
from aionn.hal.values import as_messages
from aionn.memory.descriptors import check_description
from aionn.memory.requests import check_request
from aionn.remote.callback import RemoteBurstCallback
from aionn.remote.channel import Descriptors
from aionn.remote.connection import Connection
from aionn.remote.control import (
    PROTOCOL,
    Adopt,
    Allocate,
    Allocated,
    CallBody,
    CloseBurst,
    Configured,
    ConfigureExecutionBurst,
    ControlError,
    CopyFrom,
    CopyTo,
    Done,
    Execute,
    Executed,
    ExecuteValues,
    ExportAgain,
    ExportedAgain,
    Flags,
    FreeBuffer,
    FreeMemory,
    GetSupportedOperations,
    HasRequest,
    LogLine,
    Prepared,
    PrepareModel,
    PrepareModelFromCache,
    Ready,
    ReleasePreparedModel,
    ReplyBody,
    RequestFound,
)
from aionn.remote.fences import Waits, check_fence, dependency_failed, execute_fenced_by, refusal, settle, since_launch
from aionn.remote.parts import CacheMessage, ModelMessage, MQMessage, OptionsMessage
from aionn.remote.received import Handles, Received, from_files
from aionn.sandbox.report import Confinement

T = TypeVar("T")
logger = logging.getLogger("aionn.driver")


class Closable(Protocol):
    """An object that the client made and may close."""

    async def aclose(self) -> None: ...


C = TypeVar("C", bound=Closable)


class DeviceService:
    """Serves one client over one socket.

    Args:
        device: the device that the client uses.
        sock: the service takes over the socket.
        tasks: where calls and burst listeners run.
        page_fd: the descriptor of this process's statistics page, which goes to the client with the greeting. The caller keeps
            owning the descriptor.
    """

    def __init__(
        self,
        device: IDevice,
        sock: socket.socket,
        tasks: TaskGroup,
        page_fd: int | None = None,
        confinement: Confinement = Confinement(),  # noqa: B008 -- frozen
    ) -> None:
        self._confinement = confinement
        self._page_fds = () if page_fd is None else (page_fd,)
        self._device = device
        self._tasks = tasks
        self._prepared: dict[int, IPreparedModel] = {}
        self._bursts: dict[int, IBurstContext] = {}
        self._buffers: dict[int, IBuffer] = {}
        self._waits: dict[int, Waits] = {}  # by prepared model
        self._last_number = 0
        self._running: dict[int, anyio.CancelScope] = {}
        self.ended = anyio.Event()
        self._connection = Connection(sock, self._call, self._end, on_cancel=self._cancel)

    async def start(self) -> None:
        """Greet the client, which may call from now on."""
        cache_files = await self._device.get_number_of_cache_files_needed()
        device = self._device
        facts = device.name, device.version, device.type, cache_files, device.priority_matters
        optional = getattr(device, "optional", device)  # of its engine, or of a device that is written by hand
        said = getattr(optional, "performance", Performance()), getattr(optional, "providers", ()), getattr(optional, "runs_on", "")
        ready = Ready(PROTOCOL, *facts, *said, self._confinement)
        self._connection.greet(ready, self._page_fds)

    def log(self, level: int, name: str, text: str) -> None:
        """Send a line of this process's log to the client."""
        self._connection.post(LogLine(level, name, text))

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            logger.warning("device %r ends the connection of its client: %s", self._device.name, error)
        self._connection.end(error if isinstance(error, AionnError) else ControlError("the client has gone"))
        self.ended.set()

    async def aclose(self) -> None:
        """Free everything that the client made here."""
        self._end(None)
        for number in list(self._waits):
            self._end_waits(number)
        for burst in list(self._bursts.values()):
            await burst.aclose()
        for buffer in list(self._buffers.values()):
            await buffer.aclose()
        for prepared in list(self._prepared.values()):
            await prepared.aclose()
        for table in (self._bursts, self._buffers, self._prepared):
            table.clear()

    def _call(self, call_id: int, body: CallBody, descriptors: Descriptors) -> None:
        # The scope is known before its task has begun, because the cancellation may be in the same read.
        scope = self._running[call_id] = anyio.CancelScope()
        self._tasks.start_soon(self._serve, call_id, scope, body, descriptors, name=type(body).__name__)

    def _cancel(self, call_id: int) -> None:
        scope = self._running.get(call_id)
        if scope is not None:
            scope.cancel()

    async def _serve(self, call_id: int, scope: anyio.CancelScope, body: CallBody, descriptors: Descriptors) -> None:
        try:
            # Only calls that may take minutes are stopped. The pools of an execution must stay the driver's until it is done with them.
            if isinstance(body, GetSupportedOperations | PrepareModel | PrepareModelFromCache | Adopt):
                with scope:
                    await self._answer(call_id, body, descriptors)
                if scope.cancelled_caught:
                    self._connection.reply_failure(call_id, CallerError("the preparation was cancelled by its caller"))
            else:
                await self._answer(call_id, body, descriptors)
        except Exception as error:  # every call is answered, whatever the device raises
            descriptors.close()
            self._connection.reply_failure(call_id, error)
        finally:
            self._running.pop(call_id, None)
            descriptors.close()

    async def _answer(self, call_id: int, body: CallBody, descriptors: Descriptors) -> None:
        reply: ReplyBody
        match body:
            case Execute(fenced=True):
                reply = await self._execute_fenced(call_id, body, descriptors)
            case Execute():
                reply = await self._execute(body, descriptors)
            case ExecuteValues():
                await self._execute_values(call_id, body, descriptors)
                return
            case GetSupportedOperations(model=message, options=asked, files=files):
                with Received() as received:
                    model = received.model(message, descriptors)
                    # A device that is written by hand need not know of options that no app gives.
                    more = {"options": received.options(asked, files, descriptors)} if asked else {}
                    reply = Flags(tuple(await self._device.get_supported_operations(model, **more)))
            case PrepareModel(model=message, options=options, cache=cache):
                reply = await self._prepare(message, options, cache, descriptors)
            case PrepareModelFromCache() | Adopt():
                with Received() as received:
                    prepare = received.prepare_options(body.options, self._device.name, descriptors)
                    with Handles(body.cache, descriptors) as handles:
                        reply = self._keep(await from_files(self._device, prepare, body, handles))
            case ConfigureExecutionBurst():
                reply = await self._configure(body, descriptors)
            case ExportAgain(prepared=number, cache=cache):
                prepared = _known(self._prepared, number, "prepared model")
                reply = ExportedAgain(await self._export_again(prepared, cache, descriptors))
            case FreeMemory(burst=number, slot=slot):
                await _known(self._bursts, number, "burst").free_memory(slot)
                reply = Done()
            case HasRequest(burst=number, identity=identity):
                find = getattr(_known(self._bursts, number, "burst"), "has_request", None)  # a device written by hand may lack it
                reply = RequestFound(find is None or find(identity))
            case CloseBurst(burst=number):
                reply = await self._close(self._bursts, number)
            case ReleasePreparedModel(prepared=number):
                self._end_waits(number)
                reply = await self._close(self._prepared, number)
            case Allocate(desc=desc, prepared_models=numbers, input_roles=inputs, output_roles=outputs):
                models = [_known(self._prepared, number, "prepared model") for number in numbers]
                buffer = await self._device.allocate(desc, models, inputs, outputs)
                self._buffers[buffer.token] = buffer
                reply = Allocated(buffer.token)
            case CopyFrom(token=token, source=description, dimensions=dimensions):
                buffer = _known(self._buffers, token, "device buffer")
                with Received() as received:
                    await buffer.copy_from(received.source(descriptors, description, body.offset, body.length), dimensions)
                reply = Done()
            case CopyTo(token=token, target=description):
                buffer = _known(self._buffers, token, "device buffer")
                with Received() as received, received.part(descriptors, description, body.offset, body.length) as target:
                    await buffer.copy_to(target)
                reply = Done()
            case FreeBuffer(token=token):
                reply = await self._close(self._buffers, token)
            case _:
                raise ControlError(f"the client called {type(body).__name__}, which only an app answers")
        descriptors.close()  # before the answer, so that a client with the answer can rely on nothing of the call being left
        self._connection.reply(call_id, reply)

    async def _prepare(
        self, message: ModelMessage, options: OptionsMessage, cache: CacheMessage | None, descriptors: Descriptors
    ) -> Prepared:
        received = Received()
        try:
            model = received.model(message, descriptors)
            asked = received.prepare_options(options, self._device.name, descriptors)
            if cache is None:
                prepared = await self._device.prepare_model(model, asked)
            else:
                with Handles(cache, descriptors) as handles:
                    prepared = await self._device.prepare_model(model, asked, handles)
        finally:
            # Views keep alive what the engine uses in place, so the descriptors are not needed any more.
            received.close()
        return self._keep(prepared)

    def _keep(self, prepared: IPreparedModel) -> Prepared:
        self._last_number += 1
        self._prepared[self._last_number] = prepared
        operands = as_messages(prepared.inputs), as_messages(prepared.outputs)
        contents = getattr(prepared, "contents", b"")  # of a device that copies constants
        runs_on = getattr(prepared, "runs_on", "")
        tunes = getattr(getattr(prepared, "tuning", None), "possible", False)
        return Prepared(self._last_number, *operands, prepared.save_outcome, contents, runs_on, tunes)

    async def _execute(self, body: Execute, descriptors: Descriptors) -> Executed:
        prepared = _known(self._prepared, body.prepared, "prepared model")
        with Received() as received:
            try:
                pools = self._pools(prepared, body, received, descriptors)
            except AionnError as error:
                return Executed(result_of(error))
            return Executed(await prepared.execute(body.request, pools, body.measure_timing, body.deadline_ns))

    async def _execute_values(self, call_id: int, body: ExecuteValues, descriptors: Descriptors) -> None:
        from aionn.remote.value_calls import serve_values  # few models have such values

        executed, region = await serve_values(_known(self._prepared, body.prepared, "prepared model"), body, descriptors)
        descriptors.close()
        try:
            self._connection.reply(call_id, executed, () if region is None else (region.fileno(),))
        finally:
            if region is not None:
                region.close()

    async def _execute_fenced(self, call_id: int, body: Execute, descriptors: Descriptors) -> Executed:
        """Execute when the dependencies are done. The memories are checked and mapped before the wait.

        The wait can be cancelled, the run cannot. So the wait is here, and the device gets no dependencies.
        """
        began_ns = time.monotonic_ns()
        fence, *waited = fds = descriptors.take_many(1 + len(body.after))
        given: list[Result] = []
        with closing(Descriptors(fds)), Received() as received:
            failed = None
            check_fence(fence)
            try:
                prepared = _known(self._prepared, body.prepared, "prepared model")
                pools = self._pools(prepared, body, received, descriptors)
                after = [Dependency(fd, is_event) for fd, is_event in zip(waited, body.after, strict=True)]
                failed = await self._wait(call_id, body, after)
                _known(self._prepared, body.prepared, "prepared model")
            except AionnError as error:
                given.append(refusal(error))
            if failed is not None:
                given.append(dependency_failed(failed))
            if given:
                settle(fence, body.request, given[0])
                return Executed(given[0], failed)
            run = getattr(prepared, "execute_fenced", None) or partial(execute_fenced_by, prepared)  # a device may be older than fences
            found = await run(body.request, pools, (), fence, body.measure_timing, body.deadline_ns)
            return Executed(found.result, None, since_launch(found.result, time.monotonic_ns() - began_ns))

    async def _wait(self, call_id: int, body: Execute, after: Sequence[Dependency]) -> int | None:
        """Wait for the dependencies of an execution. From its return on the call cannot be cancelled."""
        scope = self._running[call_id]
        failed = None
        with scope:
            failed = await self._waits.setdefault(body.prepared, Waits()).done(after, body.deadline_ns)
        del self._running[call_id]
        if scope.cancel_called:
            raise CallerError("the execution was cancelled by its caller before it began")
        return failed

    def _end_waits(self, prepared: int) -> None:
        """End the executions that wait for their dependencies, because their prepared model is released."""
        waits = self._waits.pop(prepared, None)
        if waits is not None:
            waits.close()

    def _pools(self, prepared: IPreparedModel, body: Execute, received: Received, descriptors: Descriptors) -> list[IMemory | IBuffer]:
        """Return the pools of a request. Maps them only after everything that can be checked before is right.

        Raises:
            CallerError: the request, a token or a description is wrong (INVALID_ARGUMENT). Nothing was mapped.
            ExecutionError: a descriptor does not fit its description, or cannot be mapped (GENERAL_FAILURE).
            MemoryAllocationError: a memory has holes that cannot be filled now.
        """
        buffers = [_known(self._buffers, pool.token, "device buffer") if pool.memory is None else None for pool in body.pools]
        for pool in body.pools:
            if pool.memory is not None:
                check_description(pool.memory)
        sizes = [0 if pool.memory is None else pool.memory.size_bytes for pool in body.pools]
        wrong = check_request(list(prepared.inputs.items()), list(prepared.outputs.items()), body.request, sizes)
        if wrong is not None:
            raise CallerError(wrong)
        pools: list[IMemory | IBuffer] = []
        for pool, buffer in zip(body.pools, buffers, strict=True):
            if buffer is not None:
                pools.append(buffer)
            elif pool.memory is not None:
                pools.append(received.memory(descriptors.take(), pool.memory))
        return pools

    async def _configure(self, body: ConfigureExecutionBurst, descriptors: Descriptors) -> Configured:
        prepared = _known(self._prepared, body.prepared, "prepared model")
        requests = _descriptor(body.request_channel, descriptors)
        try:
            results = _descriptor(body.result_channel, descriptors)
        except BaseException:
            Descriptors(requests.fds).close()
            raise
        self._last_number += 1
        number = self._last_number
        callback = RemoteBurstCallback(self._connection, number)
        self._bursts[number] = await prepared.configure_execution_burst(callback, requests, results, body.anticipate)
        return Configured(number)

    async def _export_again(self, prepared: IPreparedModel, cache: CacheMessage | None, descriptors: Descriptors) -> str:
        tuning = getattr(prepared, "tuning", None)
        if tuning is None:
            raise CallerError(f"device {self._device.name!r} offers no better artifact of this model")
        if cache is None:
            return str(await tuning.export_again(None))
        with Handles(cache, descriptors) as handles:
            return str(await tuning.export_again(handles))

    async def _close(self, table: dict[int, C], number: int) -> Done:
        closable = table.pop(number, None)
        if closable is not None:
            await closable.aclose()
        return Done()


def _descriptor(message: MQMessage, descriptors: Descriptors) -> MQDescriptor:
    return MQDescriptor(message.grantors, message.quantum, message.flavor, descriptors.take_many(message.fds))


def _known(table: Mapping[int, T], number: int, what: str) -> T:
    try:
        return table[number]
    except KeyError:
        raise CallerError(f"{what} {number} does not exist in this driver process, or has been released; use one that is open") from None
