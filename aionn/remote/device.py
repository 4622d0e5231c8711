"""An `IDevice` as the app sees it: every HAL call becomes a control call to the driver process.

Nothing here starts or ends a process. The owner of the connection gives the reason for its end to `Connection.end`, and every
caller gets that error.

A confined driver opens no path of the app's. So each call that brings options brings descriptors of these files, too. A file that was
replaced or changed since the compile has another digest, and the driver refuses it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from aionn.errors import CallerError, CompilationError
from aionn.escapes import escaped
from aionn.hal.interfaces import CacheHandles, IBuffer, IBurstCallback, IPreparedModel, PrepareOptions
from aionn.hal.model import PooledModel, known_contents, known_token, short_label
from aionn.hal.options import NO_OPTIONS, CallOptions, EngineOptions
from aionn.hal.queues import MQDescriptor
from aionn.hal.types import KEYRING_NEEDED, BufferDesc, BufferRole, CacheFiles, Dependency, FencedResult, IMemory, Operand, Request, Result
from aionn.hal.values import ValuesResult, as_messages, from_messages
from aionn.loopless import Answer, running_loop
from aionn.memory.memory import Memory
from aionn.memory.region import Region
from aionn.pages.layout import JoinedRuns
from aionn.pages.page import PageReader
from aionn.remote.calls import (
    Adopt,
    Allocate,
    CacheMessage,
    CloseBurst,
    ConfigureExecutionBurst,
    CopyFrom,
    CopyTo,
    DependencyMessage,
    EngineOptionsMessage,
    Execute,
    ExecuteFenced,
    ExportAgain,
    Fd,
    FreeBuffer,
    FreeMemory,
    GetMemories,
    GetSupportedOperations,
    HalCall,
    HasRequest,
    LentMemory,
    LogLine,
    ModelMessage,
    MQMessage,
    OptionsMessage,
    Prepared,
    PrepareModel,
    PrepareModelFromCache,
    ReleasePreparedModel,
)
from aionn.remote.connection import Connection, Descriptors, Settled
from aionn.remote.control import ControlError, Ready
from aionn.remote.fences import check_fence, signal_fence


async def open_files(options: EngineOptions) -> Sequence[int]:
    """Open the files of options, in the order of `options.files`. The caller closes them with `close_files`.

    Raises:
        CallerError: a file cannot be opened any more.
    """
    from aionn.tasks import run_in_thread  # a client without a loop prepares nothing, so it needs no threads

    return await run_in_thread(_open_all, {name: str(options[name]) for name in options.files}, undo=close_files)


def _open_all(paths: Mapping[str, str]) -> list[int]:
    fds: list[int] = []
    try:
        for name, path in paths.items():
            fds.append(open_option(name, path, "compile the model again"))
    except BaseException:
        close_files(fds)
        raise
    return fds


def close_files(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def open_option(option: str, path: str, way_out: str) -> int:
    """Open the file that an option names. Blocks, but never for a writer of a pipe.

    Args:
        way_out: ends the text of the error.

    Raises:
        CallerError: it cannot be opened, or is not a regular file.
    """
    try:
        # Opened without waiting: a pipe without a writer would hold the thread, and the interpreter's end with it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CallerError(f"option {option!r}: the file {path!r} cannot be read ({error.strerror}); {way_out}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CallerError(f"option {option!r}: {path!r} is not a regular file; give the path of a file")
    return fd


MAX_LINE_CHARACTERS = 8192
"""A driver of this release cuts its lines to as many bytes."""

MAX_NAME_CHARACTERS = 256


class RemoteDevice:
    """The device at the other end of a connection. Satisfies `IDevice`.

    `name` is the name under which the app asked for the device. The greeting has the engine's name.
    `restarted` is set when the app ends this driver by a restart.
    `pidfd` returns a new descriptor of the driver process, or -1. `page` is the driver's statistics page, which its process owns.
    """

    page: PageReader | None = None

    def __init__(self, connection: Connection, ready: Ready, name: str | None = None, pidfd: Callable[[], int] = lambda: -1) -> None:
        self.pidfd = pidfd
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

    def remember(self, number: int, model: PooledModel) -> None:
        """Note which model a prepared model was made of."""
        self._models[number] = short_label(model)

    def remove_model(self, number: int) -> None:
        """Forget a prepared model that is released."""
        self._models.pop(number, None)

    async def get_supported_operations(
        self, model: PooledModel, deadline_ns: int | None = None, *, options: EngineOptions = NO_OPTIONS
    ) -> Sequence[bool]:
        """Ask as the HAL says. At `deadline_ns` the caller stops waiting and gets `DeadlineError`."""
        files = await open_files(options) if options.files else ()
        try:
            body = GetSupportedOperations(model_message(model), engine_options_message(options, files))
            supported, _ = await self.connection.call(body, deadline_ns=deadline_ns)
        finally:
            close_files(files)
        if len(supported) != len(model.operations):
            found, wanted = len(supported), len(model.operations)
            raise CompilationError(
                f"device {self.name!r} judged {found} operations, but the model has {wanted}; the fault lies in its engine"
            )
        return supported

    async def get_number_of_cache_files_needed(self) -> CacheFiles:
        return self.cache_files

    async def prepare_model(self, model: PooledModel, options: PrepareOptions, cache: CacheHandles | None = None) -> RemotePreparedModel:
        if cache is None:
            return await self._compile(model, options, None)
        from aionn.caching.store.directory import close_handles, open_again  # only caching needs it
        from aionn.tasks import run_in_thread

        opened = await run_in_thread(open_again, cache, undo=close_handles)
        try:
            if isinstance(opened, CacheHandles):
                return await self._compile(model, options, opened)
        finally:
            close_handles(opened)
        prepared = await self._compile(model, options, None)
        prepared.save_outcome = str(opened)
        return prepared

    async def _compile(self, model: PooledModel, options: PrepareOptions, cache: CacheHandles | None) -> RemotePreparedModel:
        message, files = model_message(model), None if cache is None else cache_message(cache)
        prepared = await self._prepare(options, lambda asked: PrepareModel(message, asked, files))
        self.remember(prepared.number, model)
        return prepared

    async def prepare_model_from_cache(self, options: PrepareOptions, cache: CacheHandles) -> RemotePreparedModel:
        try:
            return await self._prepare(options, lambda asked: PrepareModelFromCache(asked, cache_message(cache)))
        except CompilationError as error:  # most contents were not adopted, and need no keyring
            if cache.keyring or not error.reason.endswith(KEYRING_NEEDED):
                raise
        from aionn.caching.keyring import current_keyring

        return await self.prepare_model_from_cache(options, replace(cache, keyring=await current_keyring()))

    async def adopt(self, options: PrepareOptions, cache: CacheHandles, model_digest: bytes, signed: bytes) -> RemotePreparedModel:
        return await self._prepare(options, lambda asked: Adopt(asked, cache_message(cache), model_digest, signed))

    async def _prepare(self, options: PrepareOptions, call: Callable[[OptionsMessage], HalCall[Prepared]]) -> RemotePreparedModel:
        """Make the call of a preparation, with the files that its options name."""
        own = options.of(self.name)
        files = await open_files(own) if own.files else ()
        try:
            body = call(options_message(options, engine_options_message(own, files) if own else EngineOptionsMessage()))
            prepared, _ = await self.connection.call(body, unwanted=self._release, deadline_ns=options.deadline_ns)
        finally:
            close_files(files)
        self._models[prepared.prepared] = ""  # until its owner says which model it is
        return RemotePreparedModel(self, prepared)

    def _release(self, unwanted: Prepared) -> None:
        self.connection.post(ReleasePreparedModel(unwanted.prepared))

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
        token, _ = await self.connection.call(body, unwanted=lambda token: self.connection.post(FreeBuffer(token)))
        self._buffers.add(token)
        return RemoteBuffer(self, token)

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
        self.connection.reply(call_id, None)

    async def answer(self, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> Exception | None:
        """Answer a call of the driver. The owner of the connection runs this for each call. Returns the error that was the answer."""
        descriptors.close()
        try:
            if not isinstance(body, GetMemories):
                raise ControlError(f"the driver called {type(body).__name__}, which only a driver answers")
            callback = self._bursts.get(body.burst)
            if callback is None:
                raise CallerError(f"the driver asked for memories of burst {body.burst}, which is not open")
            memories = await callback.get_memories(body.slots)
            self.connection.reply(call_id, tuple(map(lent, memories)))
        except Exception as error:  # any error here is the answer to the driver, and must not end the app's task
            self.connection.reply_failure(call_id, error)
            return error
        return None


Found = FencedResult | BaseException
"""The driver's answer, or the error that came in its place."""


class Fenced(NamedTuple):
    """A fenced execution as it is sent; see `IPreparedModel.execute_fenced`."""

    request: Request
    pools: Sequence[IMemory | IBuffer]
    after: Sequence[Dependency]
    fence: int

    @property
    def fds(self) -> list[int]:
        """The descriptors that the driver signals and waits for."""
        return [self.fence, *(dependency.fd for dependency in self.after)]


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
        self.rows = None if prepared.rows is None else replace(prepared.rows, reason=escaped(prepared.rows.reason))
        self._shown = prepared.shown
        self.instances = prepared.instances
        self._closed = False

    def joined_runs(self) -> JoinedRuns | None:
        """Return what the driver has joined for this model, or None if its page does not show that."""
        page = self.device.page
        return page.joined_runs(self._shown) if page is not None and self._shown else None

    @property
    def was_joining(self) -> bool:
        """Whether a joined run of the model is in progress, or was when its driver ended."""
        page = self.device.page
        return page is not None and self._shown in page.joining_models()

    def remember(self, model: PooledModel) -> None:
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

        def answered(found: Result | BaseException) -> None:
            if settled is not None:
                settled(None if isinstance(found, BaseException) else found)

        try:
            body = Execute(self.number, request, self._pools(pools), bool(measure_timing), deadline_ns)
        except BaseException as error:
            answered(error)
            raise
        result, _ = await self.device.connection.call(body, answered)
        return result

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
        from aionn.remote.values import call_values  # few models have such values

        operands = self.inputs, self.outputs
        return await call_values(self.device.connection, self.number, operands, inputs, measure_timing, deadline_ns, settled)

    async def export_again(self, cache: CacheHandles | None) -> str:
        """Ask the engine for a better artifact ("offered" or ""), or store the one it has offered ("saved" or a reason)."""
        if cache is None:
            outcome, _ = await self.device.connection.call(ExportAgain(self.number, None))
            return outcome
        from aionn.caching.store.directory import close_handles, open_again
        from aionn.tasks import run_in_thread

        opened = await run_in_thread(open_again, cache, undo=close_handles)
        try:
            if not isinstance(opened, CacheHandles):
                return str(opened)
            outcome, _ = await self.device.connection.call(ExportAgain(self.number, cache_message(opened)))
            return outcome
        finally:
            close_handles(opened)

    def _pools(self, pools: Sequence[IMemory | IBuffer]) -> tuple[LentMemory | int, ...]:
        """Return the pools of a request as messages."""
        messages: list[LentMemory | int] = []
        for pool in pools:
            if isinstance(pool, RemoteBuffer) and pool.device is self.device:
                messages.append(pool.token)
            elif isinstance(pool, Region | IMemory):  # a check against the protocol alone takes long
                messages.append(LentMemory(pool.description, Fd(pool.fileno())))
            else:
                raise CallerError(
                    f"a device memory belongs to another driver process than the present one of device {self.device.name!r}; "
                    "allocate it again"
                )
        return tuple(messages)

    def start_fenced(self, fenced: Fenced, options: CallOptions, settled: Settled[FencedResult]) -> Callable[[], None]:
        """Send a fenced execution, and return without waiting. Returns what asks the driver to end its wait for dependencies.

        `settled` is called once, in the loop. It must not raise.

        Raises:
            AionnError: nothing was sent, and `settled` is not called.
        """
        after = tuple(DependencyMessage(Fd(dependency.fd), dependency.is_event) for dependency in fenced.after)
        pools, how = self._pools(fenced.pools), (options.measure_timing, options.deadline_ns)
        body = ExecuteFenced(self.number, fenced.request, pools, *how, Fd(fenced.fence), after)
        sent = False

        def answered(found: FencedResult | BaseException) -> None:
            if sent:
                settled(found)

        stop = self.device.connection.begin(body, answered)
        sent = True
        return stop

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
        check_fence(fence)
        answer: Answer[Found] = Answer(running_loop())
        found: Found = CallerError("the execution was cancelled by its caller")
        stop: Callable[[], None] | None = None
        try:
            options = CallOptions(bool(measure_timing), deadline_ns)
            stop = self.start_fenced(Fenced(request, pools, after, fence), options, answer.set)
            found = await answer.wait()
        finally:
            if isinstance(found, BaseException):
                signal_fence(fence, succeeded=False)
                if stop is not None:
                    stop()
        if isinstance(found, BaseException):
            raise found
        return found

    async def configure_execution_burst(
        self, callback: IBurstCallback, request_channel: MQDescriptor, result_channel: MQDescriptor, anticipate: bool = False
    ) -> RemoteBurstContext:
        brought = {slot: lent(memory) for slot, memory in getattr(callback, "brought", {}).items()}
        body = ConfigureExecutionBurst(self.number, queue_message(request_channel), queue_message(result_channel), anticipate, brought)
        burst, _ = await self.device.connection.call(body, unwanted=lambda burst: self.device.connection.post(CloseBurst(burst)))
        self.device.watch_burst(burst, callback)
        return RemoteBurstContext(self.device, burst, tuple(brought))

    def step_roles(self, is_input: bool, index: int) -> list[StepRole]:
        """Return what an input or output is in the driver. A plan has more to say (`PlannedModel.step_roles`)."""
        return [StepRole(self, is_input, index)]

    async def aclose(self) -> None:
        if not self._closed and self.device.connection.ended_by is None:
            self._closed = True
            self.device.remove_model(self.number)
            await self.device.connection.call(ReleasePreparedModel(self.number))

    def release(self) -> None:
        """Release the model without waiting, for when its last holder has been collected."""
        if not self._closed:
            self._closed = True
            self.device.remove_model(self.number)
            self.device.connection.post(ReleasePreparedModel(self.number))


class RemoteBurstContext:
    """A burst's listener in the driver process. Satisfies `IBurstContext`.

    `number` names it there. `brought`: the slots of memories that it has from the beginning.
    """

    def __init__(self, device: RemoteDevice, number: int, brought: tuple[int, ...] = ()) -> None:
        self._device = device
        self.number = number
        self.brought = brought
        self._closed = False

    async def free_memory(self, slot: int) -> None:
        await self._device.connection.call(FreeMemory(self.number, slot))

    def forget_memory(self, slot: int) -> None:
        """Forget the memory cached under `slot`, without waiting."""
        self._device.connection.post(FreeMemory(self.number, slot))

    def ask(self, identity: int, answered: Callable[[bool], None]) -> None:
        """Ask whether the driver still has a request to answer, without waiting. Never calls `answered` if the connection ends first."""
        if self._device.connection.ended_by is None:

            def confirm(known: bool | BaseException) -> None:
                if self._device.connection.ended_by is None:
                    answered(known is True)

            self._device.connection.begin(HasRequest(self.number, identity), confirm)

    async def aclose(self) -> None:
        """End the burst. Returns when the driver has freed all it held for the burst, or has gone."""
        try:
            if not self._closed and self._device.connection.ended_by is None:
                self._closed = True
                await self._device.connection.call(CloseBurst(self.number))
        finally:
            self._device.forget_burst(self.number)

    def release(self) -> None:
        """End the burst without waiting."""
        if not self._closed:
            self._closed = True
            self._device.connection.post(CloseBurst(self.number))
        self._device.forget_burst(self.number)


class RemoteBuffer:
    """A buffer in the driver process. Satisfies `IBuffer`."""

    def __init__(self, device: RemoteDevice, token: int) -> None:
        self.device = device
        self.token = token
        self._closed = False

    async def copy_from(self, source: IMemory, dimensions: tuple[int, ...], settled: Settled[None] | None = None) -> None:
        """Fill the whole buffer. `settled` is as for `Connection.call`."""
        pool, offset = _place_of(source)
        body = CopyFrom(self.token, lent(pool), dimensions, offset, source.size_bytes)
        await self.device.connection.call(body, settled)

    async def copy_to(self, target: IMemory, settled: Settled[None] | None = None) -> None:
        """Copy the whole buffer out. `settled` is as for `Connection.call`."""
        pool, offset = _place_of(target)
        body = CopyTo(self.token, lent(pool), offset, target.size_bytes)
        await self.device.connection.call(body, settled)

    async def aclose(self) -> None:
        if not self._closed and self.device.connection.ended_by is None:
            self._closed = True
            self.device.forget_buffer(self.token)
            await self.device.connection.call(FreeBuffer(self.token))

    def release(self) -> None:
        """Free the buffer without waiting."""
        if not self._closed:
            self._closed = True
            self.device.forget_buffer(self.token)
            self.device.connection.post(FreeBuffer(self.token))


def _place_of(memory: IMemory) -> tuple[IMemory, int]:
    """Return the whole pool of a memory, which may be a slice of it, and where the memory begins in its pool."""
    return (memory.pool, memory.offset_bytes) if isinstance(memory, Memory) else (memory, 0)


# --- what the app sends, as messages -------------------------------------------------------------------------------------


def lent(memory: IMemory) -> LentMemory:
    return LentMemory(memory.description, Fd(memory.fileno()))


def model_message(model: PooledModel) -> ModelMessage:
    return ModelMessage(
        model.graph,
        as_messages(model.inputs),
        as_messages(model.outputs),
        model.operations,
        model.constants,
        tuple(map(lent, model.pools)),
        known_token(model),
        known_contents(model),
    )


def engine_options_message(options: EngineOptions, opened: Sequence[int]) -> EngineOptionsMessage:
    """Return the options of one engine. `opened` are the files that they name."""
    files = {name: (digest, Fd(fd)) for (name, digest), fd in zip(options.files.items(), opened, strict=True)}
    return EngineOptionsMessage(dict(options), files)


def options_message(options: PrepareOptions, engine: EngineOptionsMessage) -> OptionsMessage:
    return OptionsMessage(
        options.preference,
        options.priority,
        options.deadline_ns,
        options.threads,
        options.open_outputs,
        options.at_most,
        options.instances,
        engine,
        options.batching,
    )


def cache_message(cache: CacheHandles) -> CacheMessage:
    return CacheMessage(tuple(map(Fd, cache.model)), tuple(map(Fd, cache.data)), cache.token, cache.keyring)


def queue_message(descriptor: MQDescriptor) -> MQMessage:
    return MQMessage(descriptor.grantors, descriptor.quantum, descriptor.flavor, tuple(map(Fd, descriptor.fds)))
