"""An `IDevice` as a driver process offers it: control calls become HAL calls on the device.

Every call runs in a separate task. Each object that the client made (a prepared model, a burst or a buffer) is in its `ClientTables`.
`aclose` frees all of them when the client has gone.

A client may bring further clients (`Attach`). Each has its connection and its tables, so it can name only what is its own. It holds one
prepared model of the client that brought it, and may use the buffers of that client in its executions.

Invariants
    A prepared model is freed when the last client that holds it has released it, or has gone.
    A client that was brought ends at the latest with the one that brought it, unless it is a guest: a client of another app.
    A guest gets nothing of the client that brought it. Only the driver's owner, its first client, may ask about guests.
    A guest has quotas, which count what it and all clients with its number have made. The owner has none.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from aionn.burst.executors import result_of
from aionn.driver import sharing
from aionn.driver.prepared_model import EnginePreparedModel
from aionn.driver.received import Received, size_of, weights_of
from aionn.driver.sharing import ClientTables, Shared, SharedModel, Sharing, known
from aionn.driver.threads import calling_app
from aionn.errors import AionnError, CallerError, CompilationError, QuotaError
from aionn.hal.interfaces import IBuffer, IDevice, IPreparedModel, PrepareOptions
from aionn.hal.types import Dependency, FencedResult, IMemory, Performance, Result
from aionn.hal.values import as_messages
from aionn.memory.descriptors import check_description
from aionn.memory.region import Region
from aionn.memory.requests import check_request
from aionn.needs import Confinement
from aionn.remote.calls import (
    Adopt,
    Allocate,
    CloseBurst,
    ConfigureExecutionBurst,
    CopyFrom,
    CopyTo,
    Drain,
    EndGuest,
    Evict,
    Execute,
    ExecuteFenced,
    ExecuteValues,
    ExportAgain,
    Fd,
    FreeBuffer,
    FreeMemory,
    GetMemories,
    GetSupportedOperations,
    GuestFacts,
    Guests,
    HalCall,
    HasRequest,
    LentMemory,
    ListShared,
    LogLine,
    Prepared,
    PrepareModel,
    PrepareModelFromCache,
    Quarantine,
    ReleasePreparedModel,
    SharedModelFacts,
)
from aionn.remote.connection import ONLY_PEER, Connection, Descriptors, PeerLimits
from aionn.remote.control import ATTACHED, GUEST_BODY_BYTES, PROTOCOL, Attach, ControlError, Ready, Refused, failure_of
from aionn.remote.fences import Waits, check_fence, dependency_failed, execute_fenced_by, refusal, signal_outcome, since_launch
from aionn.tasks import Tasks

CLEAN_UP_S = 2.0
"""How long a driver may take to free what a client left. What is left then ends with the process."""

logger = logging.getLogger("aionn.driver")


class Closable(Protocol):
    """An object that the client made and may close."""

    async def aclose(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Brought:
    """The clients that one client has brought.

    Args:
        by: the clients among which that one is, or None for those of the driver's owner.
    """

    def __init__(self, by: Brought | None = None) -> None:
        self._clients: set[DeviceService] = set()
        self._is_owners = by is None
        self._changed: asyncio.Event = asyncio.Event() if by is None else by._changed

    def add(self, client: DeviceService) -> None:
        """Note a client that has come."""
        self._clients.add(client)

    def remove(self, client: DeviceService) -> None:
        """Note that a client has gone."""
        self._clients.discard(client)
        self._changed.set()

    def burst_closed(self) -> None:
        """Note that one of these clients, or the one that brought them, has closed a burst."""
        self._changed.set()

    async def aclose(self) -> None:
        """Free everything of all of them."""
        for client in list(self._clients):
            await client.aclose()

    async def guests_gone(self, *, streaming: bool = False) -> None:
        """Return when no guest is left, or with `streaming` no guest that has an open burst."""
        while any(client.guest and (not streaming or _bursts_of(client)) for client in self._clients):
            self._changed.clear()
            await self._changed.wait()

    def _facts(self) -> tuple[GuestFacts, ...]:
        facts: dict[int, tuple[int, int, int]] = {}
        for client in self._clients:
            if client.guest:
                models, bursts, buffers = facts.get(client.guest, (0, 0, 0))
                made = client.made
                facts[client.guest] = models + len(made.prepared), bursts + _bursts_of(client), buffers + len(made.buffers)
        return tuple(GuestFacts(guest, *numbers) for guest, numbers in facts.items())

    async def answer(self, body: HalCall[Any]) -> object:
        """Answer what a driver's owner asks about its guests.

        Raises:
            CallerError: another client asks that.
            ControlError: it is another call, which no driver answers.
        """
        if not isinstance(body, Guests | EndGuest | Drain):
            raise ControlError(f"the client called {type(body).__name__}, which only an app answers")
        if not self._is_owners:
            raise CallerError(f"{type(body).__name__} is a call of the driver's owner, and this client is not; leave it to the service")
        if isinstance(body, Guests):
            return self._facts()
        if isinstance(body, Drain):
            await self.guests_gone()
            return None
        for client in [each for each in self._clients if each.guest == body.guest]:
            client.end(None)
        return None


def _bursts_of(client: DeviceService) -> int:
    """Return how many bursts a client has, with those of the clients that it has brought."""
    return len(client.made.bursts) + sum(map(_bursts_of, client.brought._clients))


class DeviceService:
    """Serves one client over one socket.

    Args:
        device: the device that the client uses.
        sock: the service takes over the socket.
        tasks: where calls and burst listeners run.
        page_fds: the descriptors of this process's statistics page, and of what its owner writes to. They go to the client with the
            greeting. The caller keeps owning them.
        brought_by: the service of the client that has brought this one, if one has.
        guest: the number of another app, which the client belongs to, or 0.

    Attributes:
        guest: as above.
        made: what this client has made.
        brought: the clients that it has brought.
    """

    def __init__(
        self,
        device: IDevice,
        sock: socket.socket,
        tasks: Tasks,
        page_fds: tuple[int, ...] = (),
        confinement: Confinement = Confinement(),  # noqa: B008 -- frozen
        brought_by: DeviceService | None = None,
        guest: int = 0,
    ) -> None:
        self._confinement = confinement
        self._brought_by = brought_by
        self.brought: Brought = Brought(None if brought_by is None else brought_by.brought)
        self.guest = guest
        self._page = tuple(map(Fd, page_fds))
        self._device = device
        self._tasks = tasks
        self.made: ClientTables = ClientTables(None if brought_by is None else brought_by.made, guest)
        self._waits: dict[int, Waits] = {}  # by prepared model
        self._last_number = 0 if brought_by is None else ATTACHED
        self._cancellable: dict[int, asyncio.Task[Any] | None] = {}  # by call, while it may be stopped
        self.ended = asyncio.Event()
        limits = PeerLimits(sharing.QUOTAS.messages_per_second, GUEST_BODY_BYTES) if self.made.app else ONLY_PEER
        self._connection = Connection(sock, self._call, self.end, None, self._cancel_soon, self._attach, limits=limits)
        self.made.of_all.add(self.made)

    async def start(self) -> None:
        """Greet the client, which may call from now on."""
        cache_files = await self._device.get_number_of_cache_files_needed()
        device = self._device
        facts = device.name, device.version, device.type, cache_files, device.priority_matters
        optional = getattr(device, "optional", device)  # of its engine, or of a device that is written by hand
        said = getattr(optional, "performance", Performance()), getattr(optional, "providers", ()), getattr(optional, "runs_on", "")
        self._connection.greet(Ready(PROTOCOL, *facts, *said, self._confinement, self._page))

    def _attach(self, message: Attach, descriptors: Descriptors) -> None:
        """Serve one more client, unless the model that it is to have has been released meanwhile."""
        held = self.made.prepared.get(message.prepared)
        if (held is None and message.prepared) or descriptors.lost:
            descriptors.close()  # the client sees the end of its socket, and asks again or not
            return
        sock = descriptors.take_socket(message.socket)
        guest = 0 if self.made.app else message.guest  # an app cannot speak for another one
        service = DeviceService(self._device, sock, self._tasks, (), self._confinement, self, guest)
        if held is not None:
            service.made.prepared[ATTACHED] = held.hold()
        self.brought.add(service)
        self._tasks.start_soon(service._live, name="client")

    async def _live(self) -> None:
        """Serve a client that another one has brought, until one of the two has gone."""
        assert self._brought_by is not None
        try:
            try:
                self.made.check_quota(clients=0)
                await self.start()
                await self.ended.wait()
            except QuotaError as error:
                self._connection.greet(Refused(failure_of(error)))
            # However long a run takes that is under way: what is not freed now would stay as long as the driver.
            await self.aclose()
        except Exception:  # an error of one client must not end the others
            logger.exception("device %r could not serve one of its clients", self._device.name)
            self.end(None)
        finally:
            self._brought_by.brought.remove(self)

    def log(self, level: int, name: str, text: str) -> None:
        """Send a line of this process's log to the client."""
        self._connection.post(LogLine(level, name, text))

    def end(self, error: Exception | None) -> None:
        """End the connection, with the error if the client has broken the protocol."""
        if error is not None:
            logger.warning("device %r ends the connection of its client: %s", self._device.name, error)
        self._connection.end(error if isinstance(error, AionnError) else ControlError("the client has gone"))
        self.ended.set()

    async def aclose(self) -> None:
        """Free everything that the client made here, and what the clients made that it has brought."""
        self.end(None)
        await self.brought.aclose()
        for number in list(self._waits):
            self._end_waits(number)
        for task in list(self._cancellable.values()):
            if task is not None:
                task.cancel()
        await self.made.aclose()

    def _call(self, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        self.made.check_quota(requests_in_flight=_weight(body))
        self.made.in_flight += _weight(body)
        self._tasks.start_soon(self._serve, call_id, body, descriptors, name=type(body).__name__)

    def _cancel_soon(self, call_id: int) -> None:
        # The call may be in the same read. Its task begins before the loop comes to `_cancel`.
        asyncio.get_running_loop().call_soon(self._cancel, call_id)

    def _cancel(self, call_id: int) -> None:
        if (task := self._cancellable.get(call_id)) is not None:
            task.cancel()

    async def _serve(self, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        calling_app.set(self.made.app)  # this task answers one call
        try:
            # Only calls that may take minutes are stopped. The pools of an execution must stay the driver's until it is done with them.
            if isinstance(body, GetSupportedOperations | PrepareModel | PrepareModelFromCache | Adopt):
                with _cancelled_as_error(self._cancellable, call_id, "the preparation was cancelled by its caller"):
                    await self._reply(call_id, body, descriptors)
            elif isinstance(body, ExecuteValues):
                await self._execute_values(call_id, body, descriptors)
            else:
                await self._reply(call_id, body, descriptors)
        except Exception as error:  # every call is answered, whatever the device raises
            descriptors.close()
            self._connection.reply_failure(call_id, error)
        finally:
            self.made.in_flight -= _weight(body)
            descriptors.close()

    async def _reply(self, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        # Closed before the answer, so that a client with the answer can rely on nothing of the call being left.
        # Views keep alive what an engine uses in place.
        with Received(descriptors) as received:
            answer = await self._answer(call_id, body, received)
        if self.ended.is_set():
            await self.made.aclose()  # the client has gone meanwhile, and `aclose` did not see what this call has made
        self._connection.reply(call_id, answer)

    async def _answer(self, call_id: int, body: HalCall[Any], received: Received) -> object:
        device = self._device
        match body:
            case Execute():
                return await self._execute(body, received)
            case ExecuteFenced():
                return await self._execute_fenced(call_id, body, received)
            case GetSupportedOperations(model=message, options=asked):
                model = self.made.model_of(received, message)
                # A device that is written by hand need not know of options that no app gives.
                more = {"options": received.options(asked)} if asked.values else {}
                return tuple(await device.get_supported_operations(model, **more))
            case PrepareModel(model=message, options=options, cache=cache):
                model, asked_for = self.made.model_of(received, message), received.prepare_options(options, device.name)
                files = () if cache is None else (received.cache(cache),)
                return await self._keep(call_id, weights_of(model), asked_for, lambda: device.prepare_model(model, asked_for, *files))
            case PrepareModelFromCache(options=options, cache=files_message):
                asked_for, cached = received.prepare_options(options, device.name), received.cache(files_message)
                return await self._keep(call_id, size_of(cached), asked_for, lambda: device.prepare_model_from_cache(asked_for, cached))
            case Adopt(options=options, cache=files_message, model_digest=digest, signed=signed):
                if not hasattr(device, "adopt"):  # one that is written by hand
                    why = f"device {device.name!r} adopts no compilation of another machine"
                    raise CompilationError(why, reason=f"refused_by_device: {why}")
                asked_for, adopted = received.prepare_options(options, device.name), received.cache(files_message)
                return await self._keep(call_id, size_of(adopted), asked_for, lambda: device.adopt(asked_for, adopted, digest, signed))
            case ConfigureExecutionBurst():
                return await self._configure(body, received)
            case ExportAgain(prepared=number, cache=cache):
                tuning = getattr(self.made.model(number), "tuning", None)
                if tuning is None:
                    raise CallerError(f"device {device.name!r} offers no better artifact of this model")
                return str(await tuning.export_again(None if cache is None else received.cache(cache)))
            case FreeMemory(burst=number, slot=slot):
                await known(self.made.bursts, number, "burst").free_memory(slot)
            case HasRequest(burst=number, identity=identity):
                find = getattr(known(self.made.bursts, number, "burst"), "has_request", None)  # a device written by hand may lack it
                return find is None or bool(find(identity))
            case CloseBurst(burst=number):
                await _close(self.made.bursts, number)
                self.brought.burst_closed()
            case ReleasePreparedModel(prepared=number):
                self._end_waits(number)
                await _close(self.made.prepared, number)
            case Allocate(desc=desc, prepared_models=numbers, input_roles=inputs, output_roles=outputs):
                buffer = await device.allocate(desc, list(map(self.made.model, numbers)), inputs, outputs)
                return await self.made.keep_buffer(buffer)
            case CopyFrom(token=token, source=lent, dimensions=dimensions):
                buffer = self.made.buffer(token)
                await buffer.copy_from(received.source(lent, body.offset, body.length), dimensions)
            case CopyTo(token=token, target=lent):
                buffer = self.made.buffer(token)
                with received.part(lent, body.offset, body.length) as target:
                    await buffer.copy_to(target)
            case ListShared() | Evict() | Quarantine():
                return administered(self._device, self.made, body)
            case FreeBuffer(token=token):
                await _close(self.made.buffers, token)
            case _:
                return await self.brought.answer(body)
        return None

    async def _keep(self, call_id: int, length: int, options: PrepareOptions, prepare: Callable[[], Awaitable[IPreparedModel]]) -> Prepared:
        """Prepare a model with so many bytes of weights, and keep it for the client."""
        threads = options.threads * (options.instances or 1)
        self.made.check_quota(prepared_models=1, weights_bytes=length, engine_threads=threads)
        self.made.preparing[call_id] = size = length, threads
        try:
            prepared = await prepare()
        finally:
            del self.made.preparing[call_id]
        self._last_number += 1
        self.made.prepared[self._last_number] = SharedModel(prepared, size)
        operands = as_messages(prepared.inputs), as_messages(prepared.outputs)
        contents = getattr(prepared, "contents", b"")  # of a device that copies constants
        runs_on = getattr(prepared, "runs_on", "")
        tunes = getattr(getattr(prepared, "tuning", None), "possible", False)
        rows = getattr(getattr(prepared, "joining", None), "axes", None)
        shown, instances = getattr(prepared, "number", 0), getattr(prepared, "instances", 1)
        return Prepared(self._last_number, *operands, prepared.save_outcome, contents, runs_on, tunes, rows, shown, instances)

    async def _execute(self, body: Execute, received: Received) -> Result:
        prepared = self.made.model(body.prepared)
        try:
            pools = self._pools(prepared, body, received)
        except AionnError as error:
            return result_of(error)
        return await prepared.execute(body.request, pools, body.measure_timing, body.deadline_ns)

    async def _execute_values(self, call_id: int, body: ExecuteValues, descriptors: Descriptors) -> None:
        from aionn.driver.values import serve_values  # few models have such values

        executed, region = await serve_values(self.made.model(body.prepared), body, descriptors)
        descriptors.close()
        try:
            self._connection.reply(call_id, executed)
        finally:
            if region is not None:
                region.close()

    async def _execute_fenced(self, call_id: int, body: ExecuteFenced, received: Received) -> FencedResult:
        """Execute when the dependencies are done. The memories are checked and mapped before the wait.

        The wait can be cancelled, the run cannot. So the wait is here, and the device gets no dependencies. A caller that ends the wait
        has the fence: it signals it, or sends the execution again.
        """
        began_ns = time.monotonic_ns()
        fence = received.fence(body.fence)
        check_fence(fence)
        given, failed = None, None
        try:
            prepared = self.made.model(body.prepared)
            pools = self._pools(prepared, body, received)
            after = [Dependency(each.fd, each.is_event) for each in body.after]
            # Before the loop turns, so that a release of the model that came together with the call ends this wait, too.
            waits = self._waits.setdefault(body.prepared, Waits())
            # A run that has begun is not cancelled. A cancellation that has come together with the call is looked at first.
            with _cancelled_as_error(self._cancellable, call_id, "the execution was cancelled by its caller before it began"):
                await asyncio.sleep(0)
                failed = await waits.done(after, body.deadline_ns)
            self.made.model(body.prepared)  # it may have been released meanwhile
            if failed is not None:
                given = dependency_failed(failed)
        except AionnError as error:
            given = refusal(error)
        if given is not None:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                signal_outcome(fence, body.request, given)
            return FencedResult(given, failed)
        run = getattr(prepared, "execute_fenced", None) or partial(execute_fenced_by, prepared)  # a device may be older than fences
        found = await run(body.request, pools, (), fence, body.measure_timing, body.deadline_ns)
        return FencedResult(found.result, None, since_launch(found.result, time.monotonic_ns() - began_ns))

    def _end_waits(self, prepared: int) -> None:
        """End the executions that wait for their dependencies, because their prepared model is released."""
        waits = self._waits.pop(prepared, None)
        if waits is not None:
            waits.close()

    def _pools(self, prepared: IPreparedModel, body: Execute | ExecuteFenced, received: Received) -> list[IMemory | IBuffer]:
        """Return the pools of a request. Maps them only after everything that can be checked before is right.

        Raises:
            CallerError: the request, a token or a description is wrong (INVALID_ARGUMENT). Nothing was mapped.
            ExecutionError: a descriptor does not fit its description, or cannot be mapped (GENERAL_FAILURE).
            MemoryAllocationError: a memory has holes that cannot be filled now.
        """
        buffers = {pool: self.made.buffer(pool) for pool in body.pools if isinstance(pool, int)}
        sizes = []
        for pool in body.pools:
            if isinstance(pool, LentMemory):
                check_description(pool.description)
            sizes.append(pool.description.size_bytes if isinstance(pool, LentMemory) else 0)
        wrong = check_request(list(prepared.inputs.items()), list(prepared.outputs.items()), body.request, sizes)
        if wrong is not None:
            raise CallerError(wrong)
        self.made.check_quota(mapped_memories=len(sizes), mapped_bytes=sum(sizes))
        pools: list[IMemory | IBuffer] = []
        for pool in body.pools:
            pools.append(mapped := received.memory(pool) if isinstance(pool, LentMemory) else buffers[pool])
            if isinstance(mapped, Region):
                self.made.note_mapped(mapped)
        return pools

    async def _configure(self, body: ConfigureExecutionBurst, received: Received) -> int:
        prepared = self.made.model(body.prepared)
        self.made.check_quota(bursts=1)
        channels = received.queue(body.request_channel), received.queue(body.result_channel)
        number = self._last_number = self._last_number + 1
        callback = BurstCallback(self._connection, number, self.made)
        callback.brought.update(zip(body.brought, callback.mapped([*body.brought.values()], received.kept), strict=True))
        self.made.bursts[number] = await prepared.configure_execution_burst(callback, *channels, body.anticipate)
        return number


def administered(device: IDevice, made: ClientTables, body: ListShared | Evict | Quarantine) -> object:
    """Answer the owner of a driver that apps share. `made`: the tables of the client that asks."""
    shares: Sharing | None = getattr(device, "sharing", None)
    if made.app or shares is None:
        raise CallerError(f"an app asked its driver for {type(body).__name__}, which only the service of all apps may; use `aionn ps`")
    match body:
        case Evict(key=key):
            return shares.evict(key)
        case Quarantine(keys=keys):
            shares.quarantined = dict(keys)
            return None
    holders: dict[Shared, dict[int, tuple[int, EnginePreparedModel]]] = {shared: {} for shared in shares.all()}
    for tables in made.of_all:
        for model in tables.prepared.values():
            prepared = model.prepared
            if isinstance(prepared, EnginePreparedModel) and prepared.shared in holders:
                holders[prepared.shared][prepared.number] = tables.app, prepared  # several clients of an app may hold one
    now = asyncio.get_running_loop().time()
    return tuple(
        SharedModelFacts(
            f"{shared.key:016x}",
            shared.label,
            shared.size_bytes,
            tuple(sorted({app for app, _ in held.values() if app})),
            shared.executions + sum(prepared.executions for _, prepared in held.values()),
            0.0 if shared.holders else now - shared.idle_since,
        )
        for shared, held in holders.items()
    )


def _weight(body: HalCall[Any]) -> int:
    """Return for how many requests in flight a call counts: a large graph stays in memory while the call waits."""
    return 1 + (len(getattr(getattr(body, "model", None), "graph", b"")) >> 20)


@contextmanager
def _cancelled_as_error(cancellable: dict[int, asyncio.Task[Any] | None], call_id: int, why: str) -> Iterator[None]:
    """Let the client cancel the body of its call, which then raises `CallerError(why)`."""
    cancellable[call_id] = asyncio.current_task()
    try:
        yield
    except asyncio.CancelledError:
        raise CallerError(why) from None
    finally:
        del cancellable[call_id]


async def _close(table: dict[int, C], number: int) -> None:
    closable = table.pop(number, None)
    if closable is not None:
        await closable.aclose()


class BurstCallback:
    """Asks the app for the memories of slots. Satisfies `IBurstCallback`.

    Attributes:
        number: of the burst, as the client knows it. listeners: of all its bursts, by number.
        may_use: says of a token whether it is one of the client's. brought: memories that came with the opening, by slot.
    """

    def __init__(self, connection: Connection, number: int, made: ClientTables) -> None:
        self.number = number
        self.listeners = made.listeners
        self.may_use = made.may_use
        self.made = made
        self.brought: dict[int, Region] = {}
        self._connection = connection

    def mapped(self, memories: Sequence[LentMemory], attach: Callable[[LentMemory], Region]) -> list[Region]:
        """Map memories within the client's quota, all or none. `attach` checks the descriptor of each and maps it."""
        regions: list[Region] = []
        with ExitStack() as mapped:
            for lent in memories:
                self.made.check_quota(mapped_memories=1, mapped_bytes=lent.description.size_bytes)
                regions.append(region := mapped.enter_context(closing(attach(lent))))
                self.made.note_mapped(region)
                region.forget_descriptor()
            mapped.pop_all()
        return regions

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        memories, descriptors = await self._connection.call(GetMemories(self.number, tuple(slots)))
        with closing(descriptors):
            return self.mapped(memories, descriptors.attach)
