"""What the burst tests share: a raw client of a real `ExecutionBurstServer`, and a raw driver of a real controller.

The server runs in this process over the real driver code and an engine that is told what to do; the queues, slots and
packets are real. A raw end writes whatever it likes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from aionn.burst import ExecutionBurstServer
from aionn.burst.controller import ExecutionBurstController
from aionn.burst.packets import (
    DATUM_BYTES,
    PoolReference,
    RequestPacket,
    ResultPacket,
    decode_result,
    read_identity,
    split_requests,
    split_results,
)
from aionn.driver.device import EngineDevice
from aionn.driver.prepared_model import EnginePreparedModel
from aionn.errors import CallerError
from aionn.fmq import MessageQueue
from aionn.hal import Artifact, CacheFiles, CompileOptions, Executable, ExecutionReport, Model
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.types import (
    NO_TIMING,
    DataLocation,
    ErrorStatus,
    ExecutionPreference,
    IMemory,
    MemoryDescription,
    MemoryKind,
    Request,
    RequestArgument,
    Result,
)
from aionn.memory.region import Region
from aionn.runtime.model import Model as OnnxModel
from aionn.testing.models import identity_model
from tests.burst.whole_packets import encode_request, encode_result
from tests.fmq.queues import duplicated

ELEMENTS = 16
ARGUMENT_BYTES = 4 * ELEMENTS


class ScriptedEngine:
    """Returns its inputs plus 1. Before that it calls `act`, and `see` with its first input, if they are set. Satisfies `hal.Engine`."""

    name = "scripted"
    version = "1"
    cache_files = CacheFiles(0, 0)

    def __init__(self) -> None:
        self.act: Callable[[], None] | None = None
        self.see: Callable[[NDArray[Any]], object] | None = None
        self.runs = 0

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return [True] * len(model.operations)

    def compile(self, model: Model, options: CompileOptions) -> ScriptedExecutable:
        return ScriptedExecutable(self, list(model.outputs))

    def export(self, executable: Executable) -> Artifact | None:
        return None

    def load(self, artifact: Artifact, options: CompileOptions) -> ScriptedExecutable:
        raise AssertionError("this engine stores nothing")


class ScriptedExecutable:
    def __init__(self, engine: ScriptedEngine, names: list[str]) -> None:
        self._engine = engine
        self._names = names

    def lanes(self, count: int) -> Sequence[ScriptedExecutable]:
        return [self] * count

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        self._engine.runs += 1
        if self._engine.act is not None:
            self._engine.act()
        if self._engine.see is not None:
            self._engine.see(next(iter(inputs.values())))
        made = {}
        for name, source in zip(self._names, inputs.values(), strict=True):
            if name in outputs:
                outputs[name][...] = source + 1
            else:
                made[name] = source + 1
        return ExecutionReport(made, 1000 if timing else None)


class Gate:
    """Holds an engine's runs, in its thread, until it is opened; tells the loop that one has come."""

    def __init__(self) -> None:
        self._opened = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)

    def __call__(self) -> None:
        self._entered.release()
        if not self._opened.acquire(timeout=30):
            raise TimeoutError("the test never opened the gate")

    async def entered(self) -> None:
        assert await anyio.to_thread.run_sync(lambda: self._entered.acquire(timeout=30))

    def open(self, runs: int = 1) -> None:
        self._opened.release(runs)


@dataclass
class Slots:
    """The client's memories by slot. Satisfies `IBurstCallback`."""

    regions: dict[int, Region] = field(default_factory=dict)
    asked: list[list[int]] = field(default_factory=list)
    before_answer: Callable[[], Any] | None = None
    answer: Callable[[Sequence[int]], Sequence[IMemory]] | None = None

    def add(self, slot: int, size_bytes: int = 4096) -> NDArray[np.float32]:
        """New memory under `slot`, as float32."""
        self.regions[slot] = Region.allocate(size_bytes)
        array: NDArray[np.float32] = np.frombuffer(self.regions[slot].view(), np.float32)
        return array

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        self.asked.append(list(slots))
        if self.answer is not None:
            return self.answer(slots)
        if any(slot not in self.regions for slot in slots):
            raise CallerError(f"slots {list(slots)}: one is not in use")
        found = [attached(self.regions[slot]) for slot in slots]
        if self.before_answer is not None:
            await self.before_answer()
        return found

    def close(self) -> None:
        for region in self.regions.values():
            region.close()


def attached(region: Region) -> Region:
    """The same memory as a peer has it."""
    return Region.attach(os.dup(region.fileno()), MemoryDescription(MemoryKind.ASHMEM, region.size_bytes))


class RawClient:
    """A client's end of a burst, without a controller."""

    def __init__(
        self, requests: MessageQueue, results: MessageQueue, slots: Slots, server: ExecutionBurstServer, engine: ScriptedEngine
    ) -> None:
        self.requests = requests
        self.results = results
        self.slots = slots
        self.server = server
        self.engine = engine
        self.raw_results: list[bytes] = []

    async def send(self, packet: bytes | RequestPacket) -> None:
        data = packet if isinstance(packet, bytes) else encode_request(packet)
        with anyio.fail_after(20):
            await self.requests.write_blocking(data)

    async def receive(self) -> ResultPacket:
        """The next answer."""
        while not self.raw_results:
            with anyio.fail_after(20):
                await self.results.wait_readable()
            datums = self.results.read(self.results.available_to_read())
            assert datums is not None
            self.raw_results.extend(split_results(datums))
        return decode_result(self.raw_results.pop(0))

    async def answer_to(self, packet: bytes | RequestPacket) -> ResultPacket:
        await self.send(packet)
        return await self.receive()


def request(slot_offset: int = 0, inputs: int = 1) -> Request:
    """Inputs at the pool's beginning, outputs behind them."""
    places = [slot_offset + index * ARGUMENT_BYTES for index in range(2 * inputs)]
    arguments = [RequestArgument(DataLocation(0, place, ARGUMENT_BYTES), (1, ELEMENTS)) for place in places]
    return Request(tuple(arguments[:inputs]), tuple(arguments[inputs:]))


def packet(slot: int = 0, *, identity: int | None = None, measure_timing: bool = True, deadline_ns: int | None = None) -> RequestPacket:
    """A good request over one slot."""
    return RequestPacket(request(), (PoolReference(slot),), measure_timing, identity, deadline_ns)


def nothing_computed(answer: ResultPacket) -> bool:
    """What VTS expects of each refused request: a status, no shapes, no times."""
    result = answer.result
    return result.status is not ErrorStatus.NONE and result.output_shapes == () and result.timing == NO_TIMING


class RawModel:
    """A prepared model of a scripted engine in this process, and the raw clients' ends of its bursts."""

    def __init__(self, engine: ScriptedEngine, prepared: EnginePreparedModel, queues: ExitStack) -> None:
        self.engine = engine
        self.prepared = prepared
        self._queues = queues

    async def burst(self, *, capacity: int = 1024, result_capacity: int | None = None, slots: Slots | None = None) -> RawClient:
        """A burst of its own, with memory under slot 0 unless `slots` are given."""
        requests = MessageQueue.create(DATUM_BYTES, capacity)
        self._queues.callback(requests.close)
        results = MessageQueue.create(DATUM_BYTES, result_capacity or capacity)
        self._queues.callback(results.close)
        if slots is None:
            slots = Slots()
            self._queues.callback(slots.close)
            slots.add(0)
        channels = duplicated(requests.descriptor()), duplicated(results.descriptor())
        server = await self.prepared.configure_execution_burst(slots, *channels)
        return RawClient(requests, results, slots, server, self.engine)


@asynccontextmanager
async def raw_model(model: bytes | None = None, *, lanes: int = 1, low_power: bool = True) -> AsyncIterator[RawModel]:
    """A model with so many lanes over a scripted engine, whose bursts a test opens."""
    engine = ScriptedEngine()
    with ExitStack() as queues:
        async with anyio.create_task_group() as tasks:
            device = EngineDevice(engine, tasks)
            preference = ExecutionPreference.LOW_POWER if low_power else ExecutionPreference.FAST_SINGLE_ANSWER
            prepared = await device.prepare_model(
                OnnxModel.from_onnx(model or identity_model()), PrepareOptions(preference, instances=lanes)
            )
            yield RawModel(engine, prepared, queues)
            engine.act = engine.see = None
            await prepared.aclose()
            device.close()
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def raw_client(
    model: bytes | None = None, *, capacity: int = 1024, result_capacity: int | None = None, low_power: bool = True
) -> AsyncIterator[RawClient]:
    """A server over a scripted engine, and the raw client's end of its burst, with memory under slot 0."""
    async with raw_model(model, low_power=low_power) as raw:
        yield await raw.burst(capacity=capacity, result_capacity=result_capacity)


class RawDriver:
    """A driver's end of a burst, without a server: reads requests, answers what it is told."""

    def __init__(self, requests: MessageQueue, results: MessageQueue) -> None:
        self.requests = requests
        self.results = results
        self.read: list[bytes] = []

    def take(self) -> list[int]:
        """Read what lies in the queue; the identities of all requests that have come and are not answered."""
        datums = self.requests.read(self.requests.available_to_read())
        self.read.extend(split_requests(datums or b""))
        return [read_identity(one)[0] for one in self.read]

    async def wait_for(self, count: int) -> list[int]:
        """Wait until so many requests are unanswered."""
        while len(identities := self.take()) < count:
            with anyio.fail_after(20):
                await self.requests.wait_readable()
        return identities

    def answer(self, identity: int | None = None, result: Result | None = None) -> None:
        """Answer that request, or the oldest."""
        identities = self.take()
        identity = identities[0] if identity is None else identity
        if identity in identities:
            del self.read[identities.index(identity)]
        self.say(encode_result(ResultPacket(result or Result(ErrorStatus.NONE), identity, 7)))

    def say(self, datums: bytes) -> None:
        assert self.results.write(datums)

    def close(self) -> None:
        self.requests.close()
        self.results.close()


@asynccontextmanager
async def raw_driver(**options: Any) -> AsyncIterator[tuple[ExecutionBurstController, RawDriver]]:
    """A controller, and the raw driver's end of its burst."""
    capacity = options.pop("capacity", 1024)
    requests, results = MessageQueue.create(DATUM_BYTES, capacity), MessageQueue.create(DATUM_BYTES, capacity)
    driver = RawDriver(MessageQueue.attach(duplicated(requests.descriptor())), MessageQueue.attach(duplicated(results.descriptor())))
    controller = ExecutionBurstController(requests, results, **options)
    try:
        yield controller, driver
    finally:
        controller.end(CallerError("the test is over"))
        driver.close()


async def begin_to_free(server: ExecutionBurstServer, tasks: TaskGroup) -> anyio.Event:
    """Begin to free the memory of slot 0 in a task, and return once it waits. The event is set at its end."""
    freed = anyio.Event()

    async def free() -> None:
        await server.free_memory(0)
        freed.set()

    tasks.start_soon(free)
    await anyio.wait_all_tasks_blocked()
    assert not freed.is_set()
    return freed
