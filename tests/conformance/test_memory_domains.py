"""NNAPI's VTS rows of memory domains (MemoryDomainAllocateTest, CopyTest, ExecutionTest), each a test named after its row:
for four element types, in process and through a driver process, executions over compute, over a burst and fenced.

Rows about scale and zero point have no counterpart: an ONNX operand has neither. The engine is the reference; the device under
test is shared by all tests of a module, so what one leaves behind would fail the last.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import numpy as np
import onnx
import pytest
from onnx import helper

import aionn
from aionn.burst.controller import ExecutionBurstController
from aionn.burst.packets import DATUM_BYTES, PoolReference, encode_request_body
from aionn.driver.device import EngineDevice
from aionn.driver.memories import EngineBuffer
from aionn.errors import CallerError, ExecutionError
from aionn.fmq import MessageQueue
from aionn.hal.interfaces import IBuffer, IDevice, IPreparedModel, PrepareOptions
from aionn.hal.types import (
    NO_TIMING,
    UNKNOWN_TIME_US,
    BufferDesc,
    BufferRole,
    DataLocation,
    ErrorStatus,
    IMemory,
    Request,
    RequestArgument,
    Result,
)
from aionn.memory.region import Region
from aionn.remote.device import RemoteBuffer, RemoteDevice
from aionn.remote.fences import make_fence, outcome_of
from aionn.testing.models import identity_model
from tests.conformance.devices import HOLDERS
from tests.conformance.test_devices import channels

pytestmark = pytest.mark.anyio

TYPES = ["float32", "float16", "uint8", "int8"]
DIMS = (1, 32, 32, 8)
ELEMENTS = 32 * 32 * 8
MIXES = [("in", "in"), ("in", "out"), ("out", "out")]
INVALID, FAILED, FINE = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE, ErrorStatus.NONE
UNKNOWN_TOKEN = 2**31


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", params=["in_process", "in_a_driver"])
async def device(request: pytest.FixtureRequest, anyio_backend: Any) -> AsyncIterator[IDevice]:
    holder: Any = HOLDERS[request.param]
    async with holder("reference") as held:
        yield held
        if isinstance(held, EngineDevice):
            assert len(held.buffers) == 0


@pytest.fixture(params=TYPES)
def dtype(request: pytest.FixtureRequest) -> np.dtype[Any]:
    chosen: np.dtype[Any] = np.dtype(request.param)
    return chosen


def conv(dtype: np.dtype[Any], count: int = 1, dims: Sequence[int | str] = DIMS) -> aionn.Model:
    """`count` independent operations, input i to output i."""
    return aionn.Model.from_onnx(identity_model({f"x{i}": dims for i in range(count)}, dtype))


def add(dtype: np.dtype[Any], dims: Sequence[int] = DIMS) -> aionn.Model:
    """a + b, with a scalar third input."""
    element = helper.np_dtype_to_tensor_dtype(dtype)
    values = [helper.make_tensor_value_info(name, element, list(dims)) for name in ("a", "b", "sum")]
    scalar = helper.make_tensor_value_info("act", onnx.TensorProto.INT32, [])
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["sum"])], "add", [*values[:2], scalar], values[2:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return aionn.Model.from_onnx(made.SerializeToString())


@asynccontextmanager
async def prepared(device: IDevice, *models: aionn.Model) -> AsyncIterator[list[IPreparedModel]]:
    async with AsyncExitStack() as stack:
        made = []
        for model in models:
            made.append(await device.prepare_model(model, PrepareOptions()))
            stack.push_async_callback(made[-1].aclose)
        yield made


async def allocate(
    device: IDevice, models: Sequence[Any], inputs: Sequence[BufferRole], outputs: Sequence[BufferRole], dims: tuple[int, ...] = ()
) -> IBuffer:
    return await device.allocate(BufferDesc(dims), models, inputs, outputs)


async def refused(call: Awaitable[object]) -> None:
    with pytest.raises((CallerError, ExecutionError)) as caught:
        await call
    if isinstance(caught.value, ExecutionError):
        assert caught.value.status == FAILED


async def both_ways(device: IDevice, models: Sequence[Any], role: BufferRole, dims: tuple[int, ...] = ()) -> None:
    await refused(allocate(device, models, [role], [], dims))
    await refused(allocate(device, models, [], [role], dims))


async def conflicting(device: IDevice, first: aionn.Model, second: aionn.Model) -> None:
    async with prepared(device, first, second) as models:
        for mix in MIXES:
            roles = [(way, BufferRole(index, 0)) for index, way in enumerate(mix)]
            inputs, outputs = [r for way, r in roles if way == "in"], [r for way, r in roles if way == "out"]
            await refused(allocate(device, models, inputs, outputs))


async def status_of(call: Awaitable[object]) -> ErrorStatus:
    try:
        await call
    except CallerError:
        return INVALID
    except ExecutionError as error:
        return ErrorStatus(error.status)
    return FINE


# --- MemoryDomainAllocateTest ------------------------------------------------------------------------------------------


async def test_allocate_empty_role(device: IDevice, dtype: np.dtype[Any]) -> None:
    await refused(allocate(device, [], [], []))
    async with prepared(device, conv(dtype)) as models:
        await refused(allocate(device, models, [], []))


@pytest.mark.every_combination  # each device has a check of its own
@pytest.mark.parametrize("wrong", [None, object()], ids=["nullptr", "invalid"])
async def test_allocate_nullptr_and_invalid_prepared_model(device: IDevice, wrong: Any) -> None:
    await both_ways(device, [wrong], BufferRole(0, 0))
    async with prepared(device, conv(np.dtype("float32"))) as models:  # a good model does not take its place
        for index in (0, 1):
            await both_ways(device, [wrong, *models], BufferRole(index, 0))


async def test_allocate_invalid_model_index(device: IDevice, dtype: np.dtype[Any]) -> None:
    async with prepared(device, conv(dtype)) as models:
        await both_ways(device, models, BufferRole(1, 0))


async def test_allocate_invalid_io_index(device: IDevice, dtype: np.dtype[Any]) -> None:
    async with prepared(device, conv(dtype)) as models:
        await both_ways(device, models, BufferRole(0, 1))


async def test_allocate_invalid_frequency(device: IDevice, dtype: np.dtype[Any]) -> None:
    async with prepared(device, conv(dtype)) as models:
        for frequency in (10.0, 0.0, -0.5, float("nan"), float("inf")):
            await both_ways(device, models, BufferRole(0, 0, frequency))


async def test_allocate_same_role_specified_twice(device: IDevice, dtype: np.dtype[Any]) -> None:
    async with prepared(device, conv(dtype)) as [model]:
        twice, two_models = [BufferRole(0, 0), BufferRole(0, 0)], [BufferRole(0, 0), BufferRole(1, 0)]
        for models, roles in (([model], twice), ([model, model], two_models)):
            await refused(allocate(device, models, roles, []))
            await refused(allocate(device, models, [], roles))


async def test_allocate_conflict_operand_type(device: IDevice, dtype: np.dtype[Any]) -> None:
    other = TYPES[(TYPES.index(dtype.name) + 1) % len(TYPES)]
    await conflicting(device, conv(dtype), conv(np.dtype(other)))


async def test_allocate_conflict_rank_between_roles(device: IDevice, dtype: np.dtype[Any]) -> None:
    await conflicting(device, add(dtype), add(dtype, DIMS[1:]))


async def test_allocate_conflict_dimensions_between_roles(device: IDevice, dtype: np.dtype[Any]) -> None:
    await conflicting(device, add(dtype), add(dtype, (4, *DIMS[1:])))


async def test_allocate_conflict_rank_between_role_and_desc(device: IDevice, dtype: np.dtype[Any]) -> None:
    async with prepared(device, conv(dtype)) as models:
        await both_ways(device, models, BufferRole(0, 0), DIMS[1:])


async def test_allocate_conflict_dimensions_between_role_and_desc(device: IDevice, dtype: np.dtype[Any]) -> None:
    async with prepared(device, conv(dtype)) as models:
        await both_ways(device, models, BufferRole(0, 0), (4, *DIMS[1:]))


async def test_allocate_conflict_rank_with_scalar_role(device: IDevice, dtype: np.dtype[Any]) -> None:
    async with prepared(device, add(dtype)) as models:
        await refused(allocate(device, models, [BufferRole(0, 2)], [], (1,)))


async def test_tokens_are_positive_and_never_used_again(device: IDevice, dtype: np.dtype[Any]) -> None:
    async with prepared(device, conv(dtype)) as models:
        seen = set()
        for _ in range(20):
            buffer = await allocate(device, models, [BufferRole(0, 0)], [BufferRole(0, 0)])
            assert buffer.token > 0
            assert buffer.token not in seen
            seen.add(buffer.token)
            await buffer.aclose()


# --- MemoryDomainCopyTest ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def buffer_of(device: IDevice, model: aionn.Model, dims: tuple[int, ...] = ()) -> AsyncIterator[IBuffer]:
    async with prepared(device, model) as models:
        buffer = await allocate(device, models, [BufferRole(0, 0)], [BufferRole(0, 0)], dims)
        try:
            yield buffer
        finally:
            await buffer.aclose()


async def copied(copy: Callable[..., Awaitable[None]], size_bytes: int, *dims: tuple[int, ...]) -> ErrorStatus:
    memory = Region.allocate(size_bytes)
    try:
        return await status_of(copy(memory, *dims))
    finally:
        memory.close()


async def test_copy_from_invalid_memory_size(device: IDevice, dtype: np.dtype[Any]) -> None:
    size = ELEMENTS * dtype.itemsize
    async with buffer_of(device, conv(dtype)) as buffer:
        assert await copied(buffer.copy_from, size // 2, ()) is INVALID
        assert await copied(buffer.copy_from, size * 2, ()) is INVALID


async def test_copy_from_invalid_memory_size_dynamic_shape(device: IDevice, dtype: np.dtype[Any]) -> None:
    size = ELEMENTS * dtype.itemsize
    async with buffer_of(device, conv(dtype, dims=("n", *DIMS[1:]))) as buffer:
        assert await copied(buffer.copy_from, size // 2, DIMS) is INVALID
        assert await copied(buffer.copy_from, size * 2, DIMS) is INVALID
        assert await copied(buffer.copy_from, size, DIMS) is FINE
        assert await copied(buffer.copy_from, size, (2, *DIMS[1:])) is INVALID


async def test_copy_from_invalid_dimensions(device: IDevice, dtype: np.dtype[Any]) -> None:
    size = ELEMENTS * dtype.itemsize
    async with buffer_of(device, conv(dtype)) as buffer:
        for wrong in (DIMS[1:], (2, *DIMS[1:]), (0, *DIMS[1:])):
            assert await copied(buffer.copy_from, size, wrong) is INVALID
        assert await copied(buffer.copy_from, size, ()) is FINE
        assert await copied(buffer.copy_from, size, DIMS) is FINE


async def test_copy_from_invalid_dimensions_dynamic_shape(device: IDevice, dtype: np.dtype[Any]) -> None:
    size = ELEMENTS * dtype.itemsize
    async with buffer_of(device, conv(dtype, dims=("n", *DIMS[1:]))) as buffer:
        for wrong in (DIMS[1:], (2, 32, 32, 4), (1, 32, 32, 0), ()):
            assert await copied(buffer.copy_from, size, wrong) is INVALID
        assert await copied(buffer.copy_from, size, DIMS) is FINE


async def test_copy_to_uninitialized_memory(device: IDevice, dtype: np.dtype[Any]) -> None:
    async with buffer_of(device, conv(dtype)) as buffer:
        assert await copied(buffer.copy_to, ELEMENTS * dtype.itemsize) is FAILED
        assert await copied(buffer.copy_to, ELEMENTS * dtype.itemsize * 2) is INVALID  # the size is looked at first


@pytest.mark.parametrize("first", [1, "n"], ids=["", "dynamic_shape"])
async def test_copy_to_invalid_memory_size(device: IDevice, dtype: np.dtype[Any], first: int | str) -> None:
    size = ELEMENTS * dtype.itemsize
    async with buffer_of(device, conv(dtype, dims=(first, *DIMS[1:]))) as buffer:
        assert await copied(buffer.copy_from, size, DIMS) is FINE
        assert await copied(buffer.copy_to, size // 2) is INVALID
        assert await copied(buffer.copy_to, size * 2) is INVALID
        assert await copied(buffer.copy_to, size) is FINE


async def test_a_failed_copy_from_leaves_the_buffer_uninitialized(device: IDevice, dtype: np.dtype[Any]) -> None:
    size = ELEMENTS * dtype.itemsize
    async with buffer_of(device, conv(dtype)) as buffer:
        assert await copied(buffer.copy_from, size, ()) is FINE
        assert await copied(buffer.copy_from, size // 2, ()) is INVALID
        assert await copied(buffer.copy_to, size) is FAILED


# --- MemoryDomainExecutionTest -----------------------------------------------------------------------------------------


class Runs:
    """A prepared model, executed in one of three ways. Satisfies `IBurstCallback`."""

    def __init__(self, device: IDevice, model: IPreparedModel, way: str) -> None:
        self.device, self.model, self.way = device, model, way
        self.requests, self.results = MessageQueue.create(DATUM_BYTES, 1024), MessageQueue.create(DATUM_BYTES, 1024)
        self.controller = ExecutionBurstController(self.requests, self.results)
        self.memories: list[IMemory] = []

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        return [self.memories[slot] for slot in slots]

    async def execute(self, request: Request, pools: Sequence[Any]) -> ErrorStatus:
        """Execute, once untimed and once timed, and check what holds after every execution of the list; the status of both."""
        execute = {"compute": self._compute, "burst": self._burst, "fenced": self._fenced}[self.way]
        untimed = await execute(request, pools, False)
        timed = await execute(request, pools, True)
        assert untimed.status is timed.status
        assert untimed.timing == NO_TIMING
        if untimed.status is FINE:
            assert UNKNOWN_TIME_US not in (timed.timing.on_device_us, timed.timing.in_driver_us)
            assert timed.timing.on_device_us <= timed.timing.in_driver_us
            assert len(untimed.output_shapes) in (0, len(request.outputs))
        else:
            assert timed.timing == NO_TIMING
            assert untimed.output_shapes == timed.output_shapes == ()
            assert untimed.message
            assert timed.message
        return untimed.status

    async def _compute(self, request: Request, pools: Sequence[Any], measure_timing: bool) -> Result:
        try:
            return await self.model.execute(request, pools, measure_timing)
        except CallerError as error:  # a buffer that is not even this driver's is refused before it is sent
            return Result(INVALID, message=str(error))

    async def _fenced(self, request: Request, pools: Sequence[Any], measure_timing: bool) -> Result:
        """The fence says the outcome, also where the request is refused, and the times since the launch are known with the others."""
        fence = make_fence()
        try:
            found = await self.model.execute_fenced(request, pools, (), fence, measure_timing)
            assert (found.since_launch == NO_TIMING) is (found.result.timing == NO_TIMING)
            result = found.result
        except CallerError as error:  # as in `_compute`
            result = Result(INVALID, message=str(error))
        assert outcome_of(fence) is (result.status is FINE)
        os.close(fence)
        return result

    async def _burst(self, request: Request, pools: Sequence[Any], measure_timing: bool) -> Result:
        references = []
        for pool in pools:
            if isinstance(pool, IMemory):
                self.memories.append(pool)
                references.append(PoolReference(len(self.memories) - 1))
            else:
                references.append(PoolReference(-1, pool.token or UNKNOWN_TOKEN))
        body = encode_request_body(request, tuple(references), measure_timing, framed=True)
        result, _ = await self.controller.execute(body)
        return result


@asynccontextmanager
async def runs(device: IDevice, model: IPreparedModel, way: str) -> AsyncIterator[Runs]:
    made = Runs(device, model, way)
    context = await model.configure_execution_burst(made, *channels(device, made.requests, made.results))
    try:
        yield made
    finally:
        made.controller.end(CallerError("the test is over"))
        await context.aclose()


@pytest.fixture(params=["compute", "burst", "fenced"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


NOT_FENCED = pytest.mark.parametrize("way", ["compute", "burst"])
"""A fenced execution needs the full shape of its outputs."""


@pytest.fixture
def memory() -> Any:
    """Room for two tensors of any of the types: pool 0 of each request."""
    region = Region.allocate(8 * ELEMENTS * 4)
    yield region
    region.close()


def shared(dtype: np.dtype[Any], place: int = 0, dims: tuple[int, ...] = DIMS) -> RequestArgument:
    size = ELEMENTS * dtype.itemsize
    return RequestArgument(DataLocation(0, place * 2 * size, int(np.prod(dims)) * dtype.itemsize), dims)


def token(pool: int = 1, dims: tuple[int, ...] = ()) -> RequestArgument:
    return RequestArgument(DataLocation(pool, 0, 0), dims)


def stand_in(device: IDevice, number: int) -> IBuffer:
    """A buffer that the driver never gave out."""
    if isinstance(device, RemoteDevice):
        return RemoteBuffer(device, number)
    assert isinstance(device, EngineDevice)
    never = EngineBuffer.__new__(EngineBuffer)
    never._buffers, never.token = device.buffers, number
    return never


async def fill(buffer: IBuffer, dtype: np.dtype[Any]) -> None:
    assert await copied(buffer.copy_from, ELEMENTS * dtype.itemsize, DIMS) is FINE


async def test_execution_invalid_token(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    async with prepared(device, conv(dtype)) as [model], runs(device, model, way) as run:
        for number in (0, UNKNOWN_TOKEN):
            buffer = stand_in(device, number)
            assert await run.execute(Request((token(),), (shared(dtype),)), [memory, buffer]) is INVALID
            assert await run.execute(Request((shared(dtype),), (token(),)), [memory, buffer]) is INVALID


async def test_execution_invalid_prepared_model(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    async with prepared(device, conv(dtype), conv(dtype)) as [a, b], runs(device, b, way) as run:
        buffer = await allocate(device, [a], [BufferRole(0, 0)], [BufferRole(0, 0)])
        await fill(buffer, dtype)
        assert await run.execute(Request((token(),), (shared(dtype),)), [memory, buffer]) is INVALID
        assert await run.execute(Request((shared(dtype),), (token(),)), [memory, buffer]) is INVALID
        await buffer.aclose()


async def test_execution_invalid_io_index(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    async with prepared(device, conv(dtype, 2)) as [model], runs(device, model, way) as run:
        buffer = await allocate(device, [model], [BufferRole(0, 0)], [])
        await fill(buffer, dtype)
        as_input = Request((shared(dtype), token()), (shared(dtype, 1), shared(dtype, 2)))
        as_output = Request((shared(dtype), shared(dtype, 1)), (shared(dtype, 2), token()))
        assert await run.execute(as_input, [memory, buffer]) is INVALID
        assert await run.execute(as_output, [memory, buffer]) is INVALID
        await buffer.aclose()


async def test_execution_invalid_io_type(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    async with prepared(device, conv(dtype)) as [model], runs(device, model, way) as run:
        input_only = await allocate(device, [model], [BufferRole(0, 0)], [])
        output_only = await allocate(device, [model], [], [BufferRole(0, 0)])
        await fill(output_only, dtype)
        assert await run.execute(Request((shared(dtype),), (token(),)), [memory, input_only]) is INVALID
        assert await run.execute(Request((token(),), (shared(dtype),)), [memory, output_only]) is INVALID
        await input_only.aclose()
        await output_only.aclose()


async def test_execution_part_of_a_memory(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    """An offset of 1 or a length of 4, as input and as output: a buffer is used as a whole."""
    async with prepared(device, conv(dtype)) as [model], runs(device, model, way) as run:
        buffer = await allocate(device, [model], [BufferRole(0, 0)], [BufferRole(0, 0)])
        await fill(buffer, dtype)
        size = ELEMENTS * dtype.itemsize
        for offset, length in ((1, 0), (0, 4), (0, size), (0, size - 1), (2**32 - 1, 0), (0, 2**32 - 1)):
            part = RequestArgument(DataLocation(1, offset, length), DIMS)
            assert await run.execute(Request((part,), (shared(dtype),)), [memory, buffer]) is INVALID
            assert await run.execute(Request((shared(dtype),), (part,)), [memory, buffer]) is INVALID
        assert await copied(buffer.copy_to, size) is FINE  # a refused request does not touch it
        await buffer.aclose()


async def test_execution_uninitialized_memory(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    async with prepared(device, conv(dtype)) as [model], runs(device, model, way) as run:
        buffer = await allocate(device, [model], [BufferRole(0, 0)], [BufferRole(0, 0)])
        reading, writing = Request((token(),), (shared(dtype, 1),)), Request((shared(dtype),), (token(),))
        given: Any = np.frombuffer(memory.view(), dtype, 2 * ELEMENTS)[:ELEMENTS]
        given[:] = np.arange(ELEMENTS) % 100
        assert await run.execute(reading, [memory, buffer]) is FAILED
        assert await run.execute(writing, [memory, buffer]) is FINE
        assert await run.execute(reading, [memory, buffer]) is FINE
        np.testing.assert_array_equal(np.frombuffer(memory.view(), dtype, ELEMENTS, 2 * ELEMENTS * dtype.itemsize), given)
        await buffer.aclose()


async def test_execution_same_request_multiple_roles(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    async with prepared(device, conv(dtype, 2)) as [model], runs(device, model, way) as run:
        roles = [BufferRole(0, 0), BufferRole(0, 1)]
        buffer = await allocate(device, [model], roles, roles)
        await fill(buffer, dtype)
        assert await run.execute(Request((token(), shared(dtype)), (token(), shared(dtype, 1))), [memory, buffer]) is INVALID
        assert await run.execute(Request((shared(dtype), shared(dtype, 1)), (token(), token())), [memory, buffer]) is INVALID
        await fill(buffer, dtype)
        assert await run.execute(Request((token(), token()), (shared(dtype, 1), shared(dtype, 2))), [memory, buffer]) is FINE
        await buffer.aclose()


@NOT_FENCED
async def test_execution_invalid_dimensions(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    two = (2, *DIMS[1:])
    async with prepared(device, conv(dtype, dims=("n", *DIMS[1:]))) as [model], runs(device, model, way) as run:
        buffer = await allocate(device, [model], [BufferRole(0, 0)], [BufferRole(0, 0)], DIMS)
        await fill(buffer, dtype)
        assert await run.execute(Request((token(dims=two),), (shared(dtype, 1, two),)), [memory, buffer]) is INVALID
        assert await run.execute(Request((shared(dtype, 0, two),), (token(dims=two),)), [memory, buffer]) is INVALID
        assert await run.execute(Request((shared(dtype, 0, two),), (token(),)), [memory, buffer]) is FAILED
        # An execution that has begun and failed has written something or other.
        assert await copied(buffer.copy_to, ELEMENTS * dtype.itemsize) is FAILED
        await buffer.aclose()


@NOT_FENCED
async def test_a_flexible_buffer_follows_the_last_execution(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    async with prepared(device, conv(dtype, dims=("n", *DIMS[1:]))) as [model], runs(device, model, way) as run:
        buffer = await allocate(device, [model], [BufferRole(0, 0)], [BufferRole(0, 0)])
        for rows in (2, 1, 2):
            dims = (rows, *DIMS[1:])
            assert await run.execute(Request((shared(dtype, 0, dims),), (token(),)), [memory, buffer]) is FINE
            assert await copied(buffer.copy_to, rows * ELEMENTS * dtype.itemsize) is FINE
            assert await run.execute(Request((token(),), (shared(dtype, 1, dims),)), [memory, buffer]) is FINE
        await buffer.aclose()


async def test_a_freed_buffer_is_refused_and_its_token_stays_dead(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    async with prepared(device, conv(dtype)) as [model], runs(device, model, way) as run:
        buffer = await allocate(device, [model], [BufferRole(0, 0)], [BufferRole(0, 0)])
        await fill(buffer, dtype)
        request = Request((token(),), (shared(dtype),))
        assert await run.execute(request, [memory, buffer]) is FINE
        await buffer.aclose()
        other = await allocate(device, [model], [BufferRole(0, 0)], [BufferRole(0, 0)])
        await fill(other, dtype)
        assert await run.execute(request, [memory, buffer]) is INVALID
        await other.aclose()


async def test_many_executions_may_read_one_buffer_at_once(device: IDevice, dtype: np.dtype[Any], way: str, memory: Region) -> None:
    async with prepared(device, conv(dtype)) as [model], runs(device, model, way) as run:
        buffer = await allocate(device, [model], [BufferRole(0, 0)], [])
        await fill(buffer, dtype)
        found = []

        async def read() -> None:
            found.append(await run.execute(Request((token(),), (shared(dtype),)), [memory, buffer]))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(read)
        assert found == [FINE] * 8
        await buffer.aclose()
