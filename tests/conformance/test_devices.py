"""One suite for every `IDevice`: what the HAL's acceptance lists ask of executions, on the compute path and over a burst."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

import aionn
from aionn.burst.controller import ExecutionBurstController
from aionn.burst.packets import DATUM_BYTES, PoolReference, encode_request_body
from aionn.driver import find_engine
from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError
from aionn.fmq import MessageQueue
from aionn.hal.interfaces import CacheHandles, IBurstContext, IDevice, IPreparedModel, PrepareOptions
from aionn.hal.types import (
    NO_TIMING,
    UNKNOWN_TIME_US,
    DataLocation,
    ErrorStatus,
    IMemory,
    Operand,
    OperandType,
    Priority,
    Request,
    RequestArgument,
    Result,
)
from aionn.memory.region import Region
from aionn.testing.models import identity_model
from tests.conformance.devices import ENGINES, HOLDERS
from tests.leaks import leak_check
from tests.scaled_model import scaled_model

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("both_ways")]

FACTOR = np.linspace(-2, 2, 64, dtype=np.float32)  # 256 bytes: a constant by reference
BYTES = FACTOR.nbytes
SENTINEL = 0xAB


@dataclass
class Memories:
    """Slot 0: the input, slot 1: the output. Satisfies `IBurstCallback`."""

    input: Region
    output: Region

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        return [(self.input, self.output)[slot] for slot in slots]

    def array(self, count: int) -> NDArray[np.float32]:
        return np.frombuffer(self.output.view(), np.float32, count).copy()


@dataclass
class Ways:
    """A prepared model and both ways to execute a request on it."""

    prepared: IPreparedModel
    memories: Memories
    burst: ExecutionBurstController

    async def execute(self, way: str, request: Request, *, measure_timing: bool = False, deadline_ns: int | None = None) -> Result:
        memories = self.memories
        if way == "compute":
            return await self.prepared.execute(request, [memories.input, memories.output], measure_timing, deadline_ns)
        body = encode_request_body(request, (PoolReference(0), PoolReference(1)), measure_timing, framed=True)
        result, _ = await self.burst.execute(body, None, deadline_ns)
        return result


def request(
    shape: tuple[int, ...] = (64,), in_bytes: int = BYTES, out_shape: tuple[int, ...] | None = None, out_bytes: int = BYTES
) -> Request:
    given = RequestArgument(DataLocation(0, 0, in_bytes), shape)
    wanted = RequestArgument(DataLocation(1, 0, out_bytes), shape if out_shape is None else out_shape)
    return Request((given,), (wanted,))


GOOD = request()


@asynccontextmanager
async def ways(device: IDevice, model: aionn.Model) -> AsyncIterator[Ways]:
    prepared = await device.prepare_model(model, PrepareOptions())
    memories = Memories(Region.allocate(4096), Region.allocate(4096))
    np.frombuffer(memories.input.view(), np.float32, 64)[:] = np.arange(64)
    memories.output.view()[:] = bytes([SENTINEL]) * 4096
    requests, results = MessageQueue.create(DATUM_BYTES, 1024), MessageQueue.create(DATUM_BYTES, 1024)
    burst = ExecutionBurstController(requests, results)
    context: IBurstContext | None = None
    try:
        context = await prepared.configure_execution_burst(memories, *channels(device, requests, results))
        yield Ways(prepared, memories, burst)
    finally:
        burst.end(CallerError("the test is over"))
        if context is not None:
            await context.aclose()
        await prepared.aclose()
        memories.input.close()
        memories.output.close()


def channels(device: IDevice, requests: MessageQueue, results: MessageQueue) -> tuple[Any, Any]:
    """The descriptors as that device takes them: in process it takes them over, so it gets duplicates, as a socket makes them."""
    found = []
    for queue in (requests, results):
        descriptor = queue.descriptor()
        if hasattr(device, "connection"):
            found.append(descriptor)
        else:
            found.append(replace(descriptor, fds=tuple(os.dup(fd) for fd in descriptor.fds)))
    return found[0], found[1]


@pytest.fixture(params=list(HOLDERS))
def holder(request: pytest.FixtureRequest) -> Any:
    return HOLDERS[request.param]


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    find_engine(ENGINES[request.param])  # what a library opens once per process, for good, is not a leak of a test's
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def scaled() -> aionn.Model:
    return aionn.Model.from_onnx(scaled_model(FACTOR))


@pytest.fixture(scope="module")
def dynamic() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": ("n",)}))


def is_refusal(result: Result, status: ErrorStatus) -> None:
    assert result.status is status
    assert result.output_shapes == ()
    assert result.timing == NO_TIMING
    assert result.message


async def test_a_fully_specified_request_gives_the_same_on_both_ways(holder: Any, engine: str, scaled: aionn.Model) -> None:
    async with leak_check(), holder(engine) as device, ways(device, scaled) as both:
        assert list(await device.get_supported_operations(scaled)) == [True]
        assert dict(both.prepared.inputs) == dict(scaled.inputs)
        assert dict(both.prepared.outputs) == {"y": Operand(OperandType.FLOAT32, (64,))}
        answers = []
        for way in ("compute", "burst", "compute", "burst"):
            for timed in (False, True):
                both.memories.output.view()[:BYTES] = bytes(BYTES)
                result = await both.execute(way, GOOD, measure_timing=timed)
                assert result.status is ErrorStatus.NONE
                assert len(result.output_shapes) in (0, 1)
                if timed:
                    assert result.timing.in_driver_us != UNKNOWN_TIME_US
                    assert result.timing.on_device_us == UNKNOWN_TIME_US or result.timing.on_device_us <= result.timing.in_driver_us
                else:
                    assert result.timing == NO_TIMING
                answers.append(both.memories.array(64))
        expected = np.arange(64, dtype=np.float32) * (1 if "fake" in engine else FACTOR)
        for answer in answers:
            np.testing.assert_array_equal(answer, answers[0])
        np.testing.assert_allclose(answers[0], expected, rtol=1e-6)
        assert set(both.memories.output.view()[BYTES:]) == {SENTINEL}  # nothing outside its argument was touched


BAD_REQUESTS = {
    "no input": Request((), GOOD.outputs),
    "no output": Request(GOOD.inputs, ()),
    "an input too many": Request(GOOD.inputs * 2, GOOD.outputs),
    "an output too many": Request(GOOD.inputs, GOOD.outputs * 2),
    "no such pool": Request((RequestArgument(DataLocation(2, 0, BYTES), (64,)),), GOOD.outputs),
    "past the pool's end": Request((RequestArgument(DataLocation(0, 4096, BYTES), (64,)),), GOOD.outputs),
    "an input too short": request(in_bytes=BYTES - 4),
    "an output too short": request(out_bytes=BYTES - 4),
    "another rank": request(shape=(8, 8)),
    "another extent": request(shape=(32,), in_bytes=128),
    "an input without a value that has a place": Request((RequestArgument(DataLocation(1, 0, 4), (), has_no_value=True),), GOOD.outputs),
    "overlapping": Request(GOOD.inputs, (RequestArgument(DataLocation(0, 4, BYTES), (64,)),)),
}


async def test_a_request_that_does_not_fit_is_an_invalid_argument_and_the_next_one_works(holder: Any, scaled: aionn.Model) -> None:
    async with leak_check(), holder(ENGINES["fake"]) as device, ways(device, scaled) as both:
        for bad in BAD_REQUESTS.values():
            for way in ("compute", "burst"):
                is_refusal(await both.execute(way, bad, measure_timing=True), ErrorStatus.INVALID_ARGUMENT)
        for way in ("compute", "burst"):
            assert (await both.execute(way, GOOD)).status is ErrorStatus.NONE


async def test_an_open_output_tells_its_shape_and_one_without_room_tells_what_it_needs(
    holder: Any, engine: str, dynamic: aionn.Model
) -> None:
    async with leak_check(), holder(engine) as device, ways(device, dynamic) as both:
        for way in ("compute", "burst"):
            for timed in (False, True):
                unspecified = await both.execute(way, request(out_shape=(), out_bytes=1024), measure_timing=timed)
                assert unspecified.status is ErrorStatus.NONE
                assert [(shape.dimensions, shape.is_sufficient) for shape in unspecified.output_shapes] == [((64,), True)]
                np.testing.assert_array_equal(both.memories.array(64), np.arange(64))
                insufficient = await both.execute(way, request(out_shape=(), out_bytes=BYTES - 1), measure_timing=timed)
                assert insufficient.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
                assert [(shape.dimensions, shape.is_sufficient) for shape in insufficient.output_shapes] == [((64,), False)]
                assert insufficient.timing == NO_TIMING


async def test_deadlines_are_kept_and_the_largest_one_does_not_overflow(holder: Any, scaled: aionn.Model) -> None:
    missed = (ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT)
    unlimited = 2**63 - 1
    async with leak_check(), holder(ENGINES["fake"]) as device, ways(device, scaled) as both:
        for way in ("compute", "burst"):
            assert (await both.execute(way, GOOD, deadline_ns=unlimited)).status is ErrorStatus.NONE
            try:
                past = await both.execute(way, GOOD, deadline_ns=1)
            except DeadlineError:
                continue  # the app's end of a burst does not wait for what is late already
            is_refusal(past, past.status)
            assert past.status in missed
        near = time.monotonic_ns() + 5_000_000
        with contextlib.suppress(DeadlineError):
            assert (await both.execute("compute", GOOD, deadline_ns=near)).status in (ErrorStatus.NONE, *missed)
        with pytest.raises(DeadlineError):
            await device.prepare_model(scaled, PrepareOptions(deadline_ns=1))
        with contextlib.suppress(DeadlineError):
            await (await device.prepare_model(scaled, PrepareOptions(deadline_ns=time.monotonic_ns() + 5_000_000))).aclose()
        for priority in (Priority.LOW, Priority.HIGH):
            await (await device.prepare_model(scaled, PrepareOptions(priority=priority, deadline_ns=unlimited))).aclose()


async def test_what_was_never_stored_or_has_been_released_is_refused(holder: Any, scaled: aionn.Model) -> None:
    async with leak_check(), holder(ENGINES["fake"]) as device:
        with pytest.raises((CompilationError, CallerError)):
            await device.prepare_model_from_cache(PrepareOptions(), CacheHandles((), (), bytes(32)))
        prepared = await device.prepare_model(scaled, PrepareOptions())
        await prepared.aclose()
        with Region.allocate(4096).view(), Region.allocate(4096).view():
            pools = [Region.allocate(4096), Region.allocate(4096)]
        try:
            result = await prepared.execute(GOOD, pools)
        except AionnError as error:
            assert "released" in str(error)
        else:
            is_refusal(result, ErrorStatus.INVALID_ARGUMENT)
        for pool in pools:
            pool.close()


async def test_a_burst_over_descriptors_that_are_no_queues_is_refused_and_leaves_none_open(holder: Any, scaled: aionn.Model) -> None:
    async with leak_check(), holder(ENGINES["fake"]) as device:
        prepared = await device.prepare_model(scaled, PrepareOptions())
        queues = [MessageQueue.create(DATUM_BYTES, 64), MessageQueue.create(8, 64)]
        async with leak_check():
            with pytest.raises(CallerError):
                await prepared.configure_execution_burst(Memories(*(None, None)), *channels(device, *queues))  # type: ignore[arg-type]
        for queue in queues:
            queue.close()
        await prepared.aclose()
