"""An `IDevice` as the app sees it: every HAL call becomes a control call to the driver process.

Nothing here starts or ends a process. The owner of the connection gives the reason for its end to `Connection.end`, and every
caller gets that error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from aionn.errors import CallerError, CompilationError
from aionn.escapes import escaped
from aionn.hal.interfaces import CacheHandles, IBuffer, IBurstCallback, IPreparedModel, PrepareOptions
from aionn.hal.model import Model, label
from aionn.hal.options import NO_OPTIONS, CallOptions, EngineOptions
from aionn.hal.queues import MQDescriptor
from aionn.hal.types import KEYRING_NEEDED, BufferDesc, BufferRole, CacheFiles, Dependency, FencedResult, IMemory, Operand, Request, Result
from aionn.hal.values import ValuesResult, from_messages
from aionn.memory.region import Region
from aionn.remote.channel import Descriptors
from aionn.remote.connection import Connection
from aionn.remote.control import (
    Adopt,
    Allocate,
    Allocated,
    CallBody,
    CloseBurst,
    Configured,
    ConfigureExecutionBurst,
    ControlError,
    Done,
    Execute,
    Executed,
    ExportAgain,
    ExportedAgain,
    Flags,
    FreeBuffer,
    GetMemories,
    GetSupportedOperations,
    LogLine,
    Memories,
    Prepared,
    PrepareModel,
    PrepareModelFromCache,
    Ready,
    ReleasePreparedModel,
    ReplyBody,
)
from aionn.remote.fenced import Fenced, fenced_answer, send_fenced
from aionn.remote.handles import RemoteBuffer, RemoteBurstContext
from aionn.remote.messages import cache_fds, cache_message, model_message, options_message, pool_fds, queue_message
from aionn.remote.option_files import opened_files
from aionn.remote.parts import PoolMessage
from aionn.tasks import run_in_thread

MAX_LINE_CHARACTERS = 8192
"""A driver of this release cuts its lines to as many bytes."""

MAX_NAME_CHARACTERS = 256


class RemoteDevice:
    """The device at the other end of a connection. Satisfies `IDevice`.

    `name` is the name under which the app asked for the device. The greeting has the engine's name.
    `restarted` is set when the app ends this driver by a restart.
    """

    def __init__(self, connection: Connection, ready: Ready, name: str | None = None) -> None:
        self.connection = connection
        self.name = name or ready.name
        self.restarted = False
        self.version = escaped(ready.version)
        self.type = ready.type
        self.cache_files = ready.cache_files
        self.priority_matters = ready.priority_matters
        self.performance = ready.performance
        self.providers = tuple(map(escaped, ready.providers))
        self.runs_on = escaped(ready.runs_on)
        lacks = tuple(map(escaped, ready.sandbox.lacks))
        self.sandbox = replace(ready.sandbox, holds=tuple(map(escaped, ready.sandbox.holds)), lacks=lacks)
        self._bursts: dict[int, IBurstCallback] = {}
        self._models: dict[int, str] = {}
        self._buffers: set[int] = set()

    @property
    def models(self) -> list[str]:
        """The prepared models for log lines, by the first digits of the token, or by name."""
        return sorted({name for name in self._models.values() if name})

    @property
    def unused(self) -> bool:
        """Whether the driver holds no prepared model and no buffer, and owes no answer."""
        return not (self._models or self._buffers or self.connection.calls_in_flight)

    def remember(self, number: int, model: Model) -> None:
        """Note which model a prepared model was made of."""
        self._models[number] = label(model)[:12]

    def forget(self, number: int) -> None:
        """Forget a prepared model that is released."""
        self._models.pop(number, None)

    async def get_supported_operations(
        self, model: Model, deadline_ns: int | None = None, *, options: EngineOptions = NO_OPTIONS
    ) -> Sequence[bool]:
        """Ask as the HAL says. At `deadline_ns` the caller stops waiting and gets `DeadlineError`."""
        body = GetSupportedOperations(model_message(model), dict(options), dict(options.files))
        async with opened_files(options) as files:
            flags, _ = await self.connection.call(body, Flags, (*pool_fds(model), *files), deadline_ns=deadline_ns)
        if len(flags.supported) != len(model.operations):
            found, wanted = len(flags.supported), len(model.operations)
            raise CompilationError(
                f"device {self.name!r} judged {found} operations, but the model has {wanted}; the fault lies in its engine"
            )
        return flags.supported

    async def get_number_of_cache_files_needed(self) -> CacheFiles:
        return self.cache_files

    async def prepare_model(self, model: Model, options: PrepareOptions, cache: CacheHandles | None = None) -> RemotePreparedModel:
        if cache is None:
            return await self._compile(model, options, None)
        from aionn.caching.store.lending import close_handles, open_again  # only caching needs it

        opened = await run_in_thread(open_again, cache, undo=close_handles)
        try:
            if isinstance(opened, CacheHandles):
                return await self._compile(model, options, opened)
        finally:
            close_handles(opened)
        prepared = await self._compile(model, options, None)
        prepared.save_outcome = str(opened)
        return prepared

    async def _compile(self, model: Model, options: PrepareOptions, cache: CacheHandles | None) -> RemotePreparedModel:
        body = PrepareModel(model_message(model), options_message(options, self.name), None if cache is None else cache_message(cache))
        prepared = await self._prepare(body, pool_fds(model), options, cache_fds(cache))
        self.remember(prepared.number, model)
        return prepared

    async def prepare_model_from_cache(self, options: PrepareOptions, cache: CacheHandles) -> RemotePreparedModel:
        body = PrepareModelFromCache(options_message(options, self.name), cache_message(cache))
        try:
            return await self._prepare(body, (), options, cache_fds(cache))
        except CompilationError as error:  # most contents were not adopted, and need no keyring
            if cache.keyring or not error.reason.endswith(KEYRING_NEEDED):
                raise
        from aionn.caching.keyring import current_keyring

        return await self.prepare_model_from_cache(options, replace(cache, keyring=await current_keyring()))

    async def adopt(self, options: PrepareOptions, cache: CacheHandles, model_digest: bytes, signed: bytes) -> RemotePreparedModel:
        body = Adopt(options_message(options, self.name), cache_message(cache), model_digest, signed)
        return await self._prepare(body, (), options, cache_fds(cache))

    async def _prepare(self, body: CallBody, pools: Sequence[int], options: PrepareOptions, cache: Sequence[int]) -> RemotePreparedModel:
        """Send a preparation with its descriptors: pools of a model, files that options name, cache files."""
        async with opened_files(options.of(self.name)) as files:
            prepared, _ = await self.connection.call(
                body, Prepared, (*pools, *files, *cache), unwanted=self._free, deadline_ns=options.deadline_ns
            )
        self._models[prepared.prepared] = ""  # until its owner says which model it is
        return RemotePreparedModel(self, prepared)

    def post(self, body: CallBody) -> None:
        """Make a call without waiting for its answer."""
        self.connection.post(body)

    async def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[IPreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> RemoteBuffer:
        numbers = []
        for prepared in prepared_models:
            if not isinstance(prepared, RemotePreparedModel) or prepared.device is not self:
                raise CallerError(
                    f"a prepared model belongs to another driver process than the present one of device {self.name!r}; "
                    "allocate with models that this process has prepared"
                )
            numbers.append(prepared.number)
        body = Allocate(desc, tuple(numbers), tuple(input_roles), tuple(output_roles))
        allocated, _ = await self.connection.call(body, Allocated, unwanted=self._free)
        self._buffers.add(allocated.token)
        return RemoteBuffer(self, allocated.token)

    def _free(self, unwanted: ReplyBody) -> None:
        """Free what the driver has made for a caller that has gone."""
        if isinstance(unwanted, Prepared):
            self.post(ReleasePreparedModel(unwanted.prepared))
        elif isinstance(unwanted, Allocated):
            self.post(FreeBuffer(unwanted.token))

    def forget_buffer(self, token: int) -> None:
        """Forget a buffer that is freed."""
        self._buffers.discard(token)

    def watch_burst(self, number: int, callback: IBurstCallback) -> None:
        """Let `callback` answer the driver's questions about a burst from now on."""
        self._bursts[number] = callback

    def forget_burst(self, number: int) -> None:
        """Answer no more questions about a burst."""
        self._bursts.pop(number, None)

    def log(self, call_id: int, line: LogLine) -> None:
        """Put a line of the driver's log into the app's, under the logger of the device. The driver may say anything."""
        extra = {"aionn_device": self.name, "aionn_logger": escaped(line.logger, MAX_NAME_CHARACTERS)}
        text = escaped(line.text, MAX_LINE_CHARACTERS)
        logging.getLogger(f"aionn.driver.{self.name}").log(line.level, "device %r: %s", self.name, text, extra=extra)
        self.connection.reply(call_id, Done())

    async def answer(self, call_id: int, body: CallBody, descriptors: Descriptors) -> None:
        """Answer a call of the driver. The owner of the connection runs this for each call."""
        descriptors.close()
        try:
            if not isinstance(body, GetMemories):
                raise ControlError(f"the driver called {type(body).__name__}, which only a driver answers")
            callback = self._bursts.get(body.burst)
            if callback is None:
                raise CallerError(f"the driver asked for memories of burst {body.burst}, which is not open")
            memories = await callback.get_memories(body.slots)
            self.connection.reply(
                call_id, Memories(tuple(memory.description for memory in memories)), [memory.fileno() for memory in memories]
            )
        except Exception as error:  # any error here is the answer to the driver, and must not end the app's task
            self.connection.reply_failure(call_id, error)


class StepRole(msgspec.Struct, frozen=True):
    """One input or output of one prepared model."""

    prepared: RemotePreparedModel
    is_input: bool
    index: int


class RemotePreparedModel:
    """A prepared model in the driver process. Satisfies `IPreparedModel`."""

    def __init__(self, device: RemoteDevice, prepared: Prepared) -> None:
        self.device = device
        self.number = prepared.prepared
        self.inputs: Mapping[str, Operand] = MappingProxyType(from_messages(prepared.inputs))
        self.outputs: Mapping[str, Operand] = MappingProxyType(from_messages(prepared.outputs))
        self.save_outcome = prepared.outcome
        self.contents = prepared.contents
        self.runs_on = escaped(prepared.runs_on)
        self.tunes = prepared.tunes
        self._closed = False

    def remember(self, model: Model) -> None:
        """Note which model this is, for log lines: one that comes from a cache does not say so itself."""
        self.device.remember(self.number, model)

    async def execute(
        self,
        request: Request,
        pools: Sequence[IMemory | IBuffer],
        measure_timing: bool = False,
        deadline_ns: int | None = None,
        settled: Callable[[Result | None], None] | None = None,
    ) -> Result:
        """Execute as the HAL says.

        Args:
            settled: called once. It gets the result when the driver is done with the pools, or None if the driver has gone or
                nothing was sent.
        """

        def answered(reply: ReplyBody | None) -> None:
            if settled is not None:
                settled(reply.result if isinstance(reply, Executed) else None)

        try:
            messages, fds = self._pools(pools)
            body = Execute(self.number, request, messages, bool(measure_timing), deadline_ns)
        except BaseException:
            answered(None)
            raise
        executed, _ = await self.device.connection.call(body, Executed, fds, answered)
        return executed.result

    async def execute_values(
        self,
        inputs: Mapping[str, Any],
        measure_timing: bool = False,
        deadline_ns: int | None = None,
        settled: Callable[[Result | None], None] | None = None,
    ) -> ValuesResult:
        """Execute with values of the model's types. `settled` is as for `execute`.

        Raises:
            CallerError: a name or a value does not fit; nothing was sent.
        """
        from aionn.remote.value_calls import call_values  # few models have such values

        operands = self.inputs, self.outputs
        return await call_values(self.device.connection, self.number, operands, inputs, measure_timing, deadline_ns, settled)

    async def export_again(self, cache: CacheHandles | None) -> str:
        """Ask the engine for a better artifact ("offered" or ""), or store the one it has offered ("saved" or a reason)."""
        if cache is None:
            answer, _ = await self.device.connection.call(ExportAgain(self.number, None), ExportedAgain)
            return answer.outcome
        from aionn.caching.store.lending import close_handles, open_again

        opened = await run_in_thread(open_again, cache, undo=close_handles)
        try:
            if not isinstance(opened, CacheHandles):
                return str(opened)
            answer, _ = await self.device.connection.call(ExportAgain(self.number, cache_message(opened)), ExportedAgain, cache_fds(opened))
            return answer.outcome
        finally:
            close_handles(opened)

    def _pools(self, pools: Sequence[IMemory | IBuffer]) -> tuple[tuple[PoolMessage, ...], list[int]]:
        """Return the pools of a request as messages, and the descriptors that travel beside them."""
        messages, fds = [], []
        for pool in pools:
            if isinstance(pool, RemoteBuffer) and pool.device is self.device:
                messages.append(PoolMessage(None, pool.token))
            elif isinstance(pool, Region | IMemory):  # a check against the protocol alone takes long
                messages.append(PoolMessage(pool.description))
                fds.append(pool.fileno())
            else:
                raise CallerError(
                    f"a device memory belongs to another driver process than the present one of device {self.device.name!r}; "
                    "allocate it again"
                )
        return tuple(messages), fds

    def start_fenced(
        self, fenced: Fenced, options: CallOptions, settled: Callable[[FencedResult | BaseException], None]
    ) -> Callable[[], None]:
        """Send a fenced execution without waiting; see `fenced.send_fenced`."""
        messages, fds = self._pools(fenced.pools)
        is_event = tuple(dependency.is_event for dependency in fenced.after)
        body = Execute(self.number, fenced.request, messages, options.measure_timing, options.deadline_ns, True, is_event)
        return send_fenced(self.device.connection, body, (*fenced.fds, *fds), settled)

    async def execute_fenced(
        self,
        request: Request,
        pools: Sequence[IMemory | IBuffer],
        after: Sequence[Dependency],
        fence: int,
        measure_timing: bool = False,
        deadline_ns: int | None = None,
    ) -> FencedResult:
        """Execute as the HAL says. Where the driver does not answer, this side signals a failure."""
        start = partial(self.start_fenced, Fenced(request, pools, after, fence), CallOptions(bool(measure_timing), deadline_ns))
        return await fenced_answer(start, fence)

    async def configure_execution_burst(
        self, callback: IBurstCallback, request_channel: MQDescriptor, result_channel: MQDescriptor, anticipate: bool = False
    ) -> RemoteBurstContext:
        body = ConfigureExecutionBurst(self.number, queue_message(request_channel), queue_message(result_channel), anticipate)
        fds = (*request_channel.fds, *result_channel.fds)
        configured, _ = await self.device.connection.call(body, Configured, fds, unwanted=self._close_burst)
        self.device.watch_burst(configured.burst, callback)
        return RemoteBurstContext(self.device, configured.burst)

    def _close_burst(self, unwanted: ReplyBody) -> None:
        if isinstance(unwanted, Configured):
            self.device.post(CloseBurst(unwanted.burst))

    def step_roles(self, is_input: bool, index: int) -> list[StepRole]:
        """Return what an input or output is in the driver. A plan has more to say (`PlannedModel.step_roles`)."""
        return [StepRole(self, is_input, index)]

    async def aclose(self) -> None:
        if not self._closed and self.device.connection.ended_by is None:
            self._closed = True
            self.device.forget(self.number)
            await self.device.connection.call(ReleasePreparedModel(self.number), Done)

    def release(self) -> None:
        """Release the model without waiting, for when its last holder has been collected."""
        if not self._closed:
            self._closed = True
            self.device.forget(self.number)
            self.device.post(ReleasePreparedModel(self.number))
