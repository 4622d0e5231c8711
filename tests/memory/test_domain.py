"""Memory domains, row by row: what NNAPI's VTS asks of IDevice::allocate, IBuffer and executions, without a device.

Rows about scale, zero point and extra parameters have no counterpart: an ONNX operand has none of these; its
quantization is in the graph.
"""

from __future__ import annotations

import threading
import weakref
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aionn.errors import CallerError, ExecutionError, MemoryAllocationError
from aionn.hal import BufferDesc, BufferRole, DataLocation, ErrorStatus, Operand, OperandType, RequestArgument
from aionn.memory.device_buffer import DeviceBuffer
from aionn.memory.device_buffers import BufferUse, DeviceBuffers
from aionn.memory.domain import ModelInfo, combine_dimensions
from aionn.memory.region import reserve

TYPES = [OperandType.FLOAT32, OperandType.FLOAT16, OperandType.UINT8, OperandType.INT8]
DIMS = (1, 32, 32, 8)
MIXES = [("in", "in"), ("in", "out"), ("out", "out")]

every_type = pytest.mark.parametrize("operand_type", TYPES, ids=lambda t: t.value)


def conv(operand_type: OperandType, model_id: int = 1, dimensions: tuple[int, ...] | None = DIMS, count: int = 1) -> ModelInfo:
    """`count` independent convolutions, input i to output i."""
    operands = (Operand(operand_type, dimensions),) * count
    return ModelInfo(model_id, operands, operands)


def add(operand_type: OperandType, model_id: int = 1, dimensions: tuple[int, ...] = DIMS) -> ModelInfo:
    """a + b with a scalar third input."""
    operand = Operand(operand_type, dimensions)
    return ModelInfo(model_id, (operand, operand, Operand(OperandType.INT32, ())), (operand,))


def allocate(
    models: list[ModelInfo | None], inputs: list[BufferRole], outputs: list[BufferRole], dimensions: tuple[int, ...] = ()
) -> DeviceBuffer:
    return DeviceBuffers().allocate(BufferDesc(dimensions), models, inputs, outputs)


def refused(models: list[ModelInfo | None], inputs: list[BufferRole], outputs: list[BufferRole], dimensions: tuple[int, ...] = ()) -> None:
    buffers = DeviceBuffers()
    with pytest.raises(CallerError):
        buffers.allocate(BufferDesc(dimensions), models, inputs, outputs)
    assert len(buffers) == 0


def both_ways(models: list[ModelInfo | None], role: BufferRole, dimensions: tuple[int, ...] = ()) -> None:
    refused(models, [role], [], dimensions)
    refused(models, [], [role], dimensions)


def conflicting(first: ModelInfo, second: ModelInfo) -> None:
    for mix in MIXES:
        roles = [(way, BufferRole(index, 0)) for index, way in enumerate(mix)]
        refused([first, second], [r for way, r in roles if way == "in"], [r for way, r in roles if way == "out"])


# --- MemoryDomainAllocateTest ------------------------------------------------------------------------------------------


@every_type
def test_allocate_empty_role(operand_type: OperandType) -> None:
    refused([], [], [])
    refused([conv(operand_type)], [], [])


@every_type
def test_allocate_nullptr_or_invalid_prepared_model(operand_type: OperandType) -> None:
    both_ways([None], BufferRole(0, 0))
    both_ways([conv(operand_type), None], BufferRole(0, 0))


@every_type
@pytest.mark.parametrize("index", [1, -1, 2**31])
def test_allocate_invalid_model_index(operand_type: OperandType, index: int) -> None:
    both_ways([conv(operand_type)], BufferRole(index, 0))


@every_type
@pytest.mark.parametrize("index", [1, -1, 2**31])
def test_allocate_invalid_io_index(operand_type: OperandType, index: int) -> None:
    both_ways([conv(operand_type)], BufferRole(0, index))


@every_type
@pytest.mark.parametrize("frequency", [10.0, 0.0, -0.5, float("nan"), float("inf")])
def test_allocate_invalid_frequency(operand_type: OperandType, frequency: float) -> None:
    both_ways([conv(operand_type)], BufferRole(0, 0, frequency))


@every_type
def test_allocate_same_role_specified_twice(operand_type: OperandType) -> None:
    model = conv(operand_type)
    refused([model], [BufferRole(0, 0), BufferRole(0, 0)], [])
    refused([model], [], [BufferRole(0, 0), BufferRole(0, 0)])
    refused([model, model], [BufferRole(0, 0), BufferRole(1, 0)], [])
    refused([model, model], [], [BufferRole(0, 0), BufferRole(1, 0)])


@every_type
def test_allocate_conflict_operand_type(operand_type: OperandType) -> None:
    other = TYPES[(TYPES.index(operand_type) + 1) % len(TYPES)]
    conflicting(conv(operand_type, 1), conv(other, 2))


@every_type
def test_allocate_conflict_rank_between_roles(operand_type: OperandType) -> None:
    conflicting(add(operand_type, 1), add(operand_type, 2, DIMS[1:]))


@every_type
def test_allocate_conflict_dimensions_between_roles(operand_type: OperandType) -> None:
    conflicting(add(operand_type, 1), add(operand_type, 2, (4, *DIMS[1:])))


@every_type
def test_allocate_conflict_rank_between_role_and_desc(operand_type: OperandType) -> None:
    both_ways([conv(operand_type)], BufferRole(0, 0), DIMS[1:])


@every_type
def test_allocate_conflict_dimensions_between_role_and_desc(operand_type: OperandType) -> None:
    both_ways([conv(operand_type)], BufferRole(0, 0), (4, *DIMS[1:]))


@every_type
def test_allocate_conflict_rank_with_scalar_role(operand_type: OperandType) -> None:
    refused([add(operand_type)], [BufferRole(0, 2)], [], (1,))


@every_type
def test_allocate_an_input_and_an_output_role_of_one_model(operand_type: OperandType) -> None:
    buffer = allocate([conv(operand_type)], [BufferRole(0, 0)], [BufferRole(0, 0)])
    assert buffer.token > 0
    assert buffer.size_bytes == prod(DIMS) * operand_type.element_bytes
    assert not buffer.is_initialized


@every_type
def test_open_dimensions_are_filled_by_desc_and_roles(operand_type: OperandType) -> None:
    models: list[ModelInfo | None] = [
        conv(operand_type, 1, (0, 32, 0, 8)),
        conv(operand_type, 2, (1, 0, 0, 8)),
        conv(operand_type, 3, None),
    ]
    roles = [BufferRole(0, 0), BufferRole(1, 0), BufferRole(2, 0)]
    assert allocate(models, roles, []).dimensions == (1, 32, 0, 8)
    assert allocate(models, roles, []).size_bytes is None
    assert allocate(models, roles, [], (0, 0, 32, 0)).dimensions == DIMS


def test_memory_that_cannot_be_had_is_an_error_at_allocation() -> None:
    buffers = DeviceBuffers(reserve)
    with pytest.raises(MemoryAllocationError) as caught:
        buffers.allocate(BufferDesc(), [conv(OperandType.UINT8, dimensions=(2**46,))], [BufferRole(0, 0)], [])
    assert caught.value.needed_bytes == 2**46
    assert len(buffers) == 0


# --- MemoryDomainCopyTest ----------------------------------------------------------------------------------------------


def copy_from(buffer: DeviceBuffer, size: int, dimensions: tuple[int, ...] = ()) -> ErrorStatus:
    return status_of(lambda: buffer.copy_from(bytes(size), dimensions))


def copy_to(buffer: DeviceBuffer, size: int) -> ErrorStatus:
    return status_of(lambda: buffer.copy_to(bytearray(size)))


def status_of(call: object) -> ErrorStatus:
    try:
        assert callable(call)
        call()
    except CallerError:
        return ErrorStatus.INVALID_ARGUMENT
    except ExecutionError as error:
        return ErrorStatus(error.status)
    return ErrorStatus.NONE


INVALID, FAILED, NONE = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE, ErrorStatus.NONE


def in_and_out(operand_type: OperandType, *, dynamic: bool = False) -> tuple[DeviceBuffer, int]:
    """A buffer for input 0 and output 0, and its size."""
    model = conv(operand_type, dimensions=(0, *DIMS[1:]) if dynamic else DIMS)
    return allocate([model], [BufferRole(0, 0)], [BufferRole(0, 0)]), prod(DIMS) * operand_type.element_bytes


@every_type
def test_copy_from_invalid_memory_size(operand_type: OperandType) -> None:
    buffer, size = in_and_out(operand_type)
    assert copy_from(buffer, size // 2) is INVALID
    assert copy_from(buffer, size * 2) is INVALID


@every_type
def test_copy_from_invalid_memory_size_dynamic_shape(operand_type: OperandType) -> None:
    buffer, size = in_and_out(operand_type, dynamic=True)
    assert copy_from(buffer, size // 2, DIMS) is INVALID
    assert copy_from(buffer, size * 2, DIMS) is INVALID
    assert copy_from(buffer, size, DIMS) is NONE
    assert copy_from(buffer, size, (2, *DIMS[1:])) is INVALID


@every_type
def test_copy_from_invalid_dimensions(operand_type: OperandType) -> None:
    buffer, size = in_and_out(operand_type)
    for wrong in (DIMS[:-1], (2, *DIMS[1:]), (0, *DIMS[1:])):
        assert copy_from(buffer, size, wrong) is INVALID
    assert copy_from(buffer, size) is NONE
    assert copy_from(buffer, size, DIMS) is NONE


@every_type
def test_copy_from_invalid_dimensions_dynamic_shape(operand_type: OperandType) -> None:
    buffer, size = in_and_out(operand_type, dynamic=True)
    for wrong in (DIMS[:-1], (2, 32, 32, 4), (1, 32, 32, 0), ()):
        assert copy_from(buffer, size, wrong) is INVALID
    assert copy_from(buffer, size, DIMS) is NONE


@every_type
def test_copy_to_uninitialized_memory(operand_type: OperandType) -> None:
    buffer, size = in_and_out(operand_type)
    assert copy_to(buffer, size) is FAILED
    assert copy_to(buffer, size // 2) is INVALID  # the size is tested first


@every_type
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic_shape"])
def test_copy_to_invalid_memory_size(operand_type: OperandType, dynamic: bool) -> None:
    buffer, size = in_and_out(operand_type, dynamic=dynamic)
    assert copy_from(buffer, size, DIMS) is NONE
    assert [copy_to(buffer, size // 2), copy_to(buffer, size * 2), copy_to(buffer, size)] == [INVALID, INVALID, NONE]


@every_type
def test_what_is_copied_in_comes_out(operand_type: OperandType) -> None:
    buffer, size = in_and_out(operand_type)
    sent, got = np.random.default_rng(3).integers(0, 256, size, np.uint8), np.zeros(size, np.uint8)
    buffer.copy_from(sent)
    buffer.copy_to(got)
    assert (sent == got).all()
    with pytest.raises(CallerError, match="read-only"):
        buffer.copy_to(bytes(size))
    assert buffer.is_initialized


@every_type
def test_a_failed_copy_uninitializes(operand_type: OperandType) -> None:
    buffer, size = in_and_out(operand_type)
    buffer.copy_from(bytes(size))
    assert copy_from(buffer, size + 1) is INVALID
    assert not buffer.is_initialized
    assert copy_to(buffer, size) is FAILED


def test_a_source_that_cannot_be_opened_uninitializes_unless_the_buffer_is_in_use() -> None:
    def cut_off() -> bytes:
        raise ExecutionError("cut off", status=ErrorStatus.GENERAL_FAILURE)

    buffer = allocate([conv(OperandType.UINT8)], [BufferRole(0, 0)], [])
    buffer.copy_from(bytes(prod(DIMS)))
    buffer.begin_reading()
    with pytest.raises(ExecutionError, match="read"):
        buffer.fill_from(cut_off, ())
    buffer.end_reading()
    assert buffer.is_initialized
    with pytest.raises(ExecutionError, match="cut off"):
        buffer.fill_from(cut_off, ())
    assert not buffer.is_initialized


def test_a_scalar_is_copied_without_dimensions() -> None:
    buffer = allocate([add(OperandType.FLOAT32)], [BufferRole(0, 2)], [])
    assert copy_from(buffer, 4, (1,)) is INVALID
    assert copy_from(buffer, 4) is NONE


# --- MemoryDomainExecutionTest -----------------------------------------------------------------------------------------

HERE = RequestArgument(DataLocation(0, 0, 0), ())


def here(*dimensions: int) -> RequestArgument:
    return RequestArgument(DataLocation(0, 0, 0), dimensions)


def elsewhere() -> RequestArgument:
    return RequestArgument(DataLocation(1, 0, 64), (16,))


class Device:
    """One registry and a helper that runs a request to its end, the outputs filled with a number."""

    def __init__(self) -> None:
        self.buffers = DeviceBuffers()

    def allocate(self, models: list[ModelInfo | None], inputs: list[int], outputs: list[int], dims: tuple[int, ...] = ()) -> DeviceBuffer:
        return self.buffers.allocate(BufferDesc(dims), models, [BufferRole(0, i) for i in inputs], [BufferRole(0, i) for i in outputs])

    def run(
        self,
        model: ModelInfo,
        inputs: list[RequestArgument],
        outputs: list[RequestArgument],
        tokens: list[int | None],
        *,
        fails: bool = False,
        result: NDArray[np.generic] | None = None,
    ) -> ErrorStatus:
        def request() -> None:
            with self.buffers.use(model.id, inputs, outputs, tokens) as use:
                if fails:
                    raise ExecutionError("the engine failed", status=FAILED)
                for array in use.outputs.values():
                    if array is not None:
                        array[...] = 7
                use.succeed({} if result is None else dict.fromkeys(use.outputs, result))

        return status_of(request)


@every_type
@pytest.mark.parametrize("token", [0, 100])
def test_execution_invalid_token(operand_type: OperandType, token: int) -> None:
    device, model = Device(), conv(operand_type)
    device.allocate([model], [0], [0])
    assert device.run(model, [HERE], [elsewhere()], [token, None]) is INVALID
    assert device.run(model, [elsewhere()], [HERE], [token, None]) is INVALID


@every_type
def test_execution_invalid_prepared_model(operand_type: OperandType) -> None:
    device, model, twin = Device(), conv(operand_type, 1), conv(operand_type, 2)
    buffer = device.allocate([model], [0], [0])
    buffer.copy_from(bytes(buffer.size_bytes or 0))
    assert device.run(twin, [HERE], [elsewhere()], [buffer.token, None]) is INVALID
    assert device.run(twin, [elsewhere()], [HERE], [buffer.token, None]) is INVALID
    assert buffer.is_initialized


@every_type
def test_execution_invalid_io_index(operand_type: OperandType) -> None:
    device, model = Device(), conv(operand_type, count=2)
    buffer = device.allocate([model], [0], [])
    buffer.copy_from(bytes(buffer.size_bytes or 0))
    other = elsewhere()
    assert device.run(model, [other, HERE], [other, other], [buffer.token, None]) is INVALID
    assert device.run(model, [other, other], [other, HERE], [buffer.token, None]) is INVALID


@every_type
def test_execution_invalid_io_type(operand_type: OperandType) -> None:
    device, model = Device(), conv(operand_type)
    only_in, only_out = device.allocate([model], [0], []), device.allocate([model], [], [0])
    only_out.copy_from(bytes(only_out.size_bytes or 0))
    assert device.run(model, [elsewhere()], [HERE], [only_in.token, None]) is INVALID
    assert device.run(model, [HERE], [elsewhere()], [only_out.token, None]) is INVALID


@every_type
def test_execution_uninitialized_memory(operand_type: OperandType) -> None:
    device, model = Device(), conv(operand_type)
    tokens: list[int | None] = [device.allocate([model], [0], [0]).token, None]
    assert device.run(model, [HERE], [elsewhere()], tokens) is FAILED
    assert device.run(model, [elsewhere()], [HERE], tokens) is NONE
    assert device.run(model, [HERE], [elsewhere()], tokens) is NONE


@every_type
def test_execution_same_request_multiple_roles(operand_type: OperandType) -> None:
    device, model = Device(), conv(operand_type, count=2)
    buffer = device.allocate([model], [0, 1], [0, 1])
    buffer.copy_from(bytes(buffer.size_bytes or 0))
    other = elsewhere()
    assert device.run(model, [HERE, other], [other, HERE], [buffer.token, None]) is INVALID
    assert device.run(model, [other, other], [HERE, HERE], [buffer.token, None]) is INVALID
    buffer.copy_from(bytes(buffer.size_bytes or 0))
    assert device.run(model, [HERE, HERE], [other, other], [buffer.token, None]) is NONE


@every_type
def test_execution_invalid_dimensions(operand_type: OperandType) -> None:
    device, model = Device(), conv(operand_type, dimensions=(0, *DIMS[1:]))
    buffer = device.allocate([model], [0], [0], DIMS)
    buffer.copy_from(bytes(buffer.size_bytes or 0))
    tokens: list[int | None] = [buffer.token, None]
    assert device.run(model, [here(2, *DIMS[1:])], [elsewhere()], tokens) is INVALID
    assert device.run(model, [elsewhere()], [here(2, *DIMS[1:])], tokens) is INVALID
    flexible = device.allocate([model], [], [0])
    too_big = np.zeros((2, 32, 32, 4), operand_type.dtype)
    assert device.run(model, [elsewhere()], [HERE], [flexible.token, None], result=too_big) is FAILED
    assert not flexible.is_initialized


@every_type
def test_device_memory_a_failed_execution_uninitializes_its_outputs(operand_type: OperandType) -> None:
    device, model = Device(), conv(operand_type)
    buffer = device.allocate([model], [0], [0])
    buffer.copy_from(bytes(buffer.size_bytes or 0))
    assert device.run(model, [elsewhere()], [HERE], [buffer.token, None], fails=True) is FAILED
    assert not buffer.is_initialized
    assert device.run(model, [HERE], [elsewhere()], [buffer.token, None]) is FAILED


@every_type
def test_device_memory_a_failed_execution_leaves_its_inputs(operand_type: OperandType) -> None:
    device, model = Device(), conv(operand_type)
    buffer = device.allocate([model], [0], [0])
    buffer.copy_from(bytes(buffer.size_bytes or 0))
    assert device.run(model, [HERE], [elsewhere()], [buffer.token, None], fails=True) is FAILED
    assert device.run(model, [HERE], [elsewhere()], [buffer.token, None]) is NONE


def test_an_omitted_argument_is_no_use_of_the_token_in_pool_0() -> None:
    device, model = Device(), conv(OperandType.FLOAT32)
    omitted = RequestArgument(DataLocation(0, 0, 0), (), has_no_value=True)
    buffer = device.allocate([model], [0], [0])
    assert device.run(model, [omitted], [omitted], [buffer.token]) is NONE
    assert not buffer.is_initialized


def test_flexible_dimensions_follow_the_last_success_from_the_initial_ones() -> None:
    device, model = Device(), conv(OperandType.FLOAT32, dimensions=(0, 4))
    buffer = device.allocate([model], [0], [0])
    for rows in (3, 5, 2):
        result = np.full((rows, 4), rows, np.float32)
        assert device.run(model, [elsewhere()], [HERE], [buffer.token, None], result=result) is NONE
        assert buffer.dimensions == (rows, 4)
        with device.buffers.use(1, [here(rows, 4)], [elsewhere()], [buffer.token, None]) as use:
            assert (use.inputs[0] == result).all()
            assert not use.inputs[0].flags.writeable
        assert device.run(model, [here(rows + 1, 4)], [elsewhere()], [buffer.token, None]) is INVALID
    assert device.run(model, [elsewhere()], [here(6, 0)], [buffer.token, None]) is NONE  # the request fills it in
    assert buffer.dimensions == (6, 4)
    assert device.run(model, [elsewhere()], [here(6, 4)], [buffer.token, None], fails=True) is FAILED
    assert buffer.dimensions == (0, 4)


def test_a_result_that_is_missing_or_of_another_type_is_a_failure() -> None:
    device, model = Device(), conv(OperandType.FLOAT32, dimensions=(0, 4))
    buffer = device.allocate([model], [0], [0])
    for result in (None, np.zeros((2, 4), np.float64), np.zeros((0, 4), np.float32), np.zeros((2, 5), np.float32)):
        assert device.run(model, [elsewhere()], [HERE], [buffer.token, None], result=result) is FAILED


# --- readers and writers -------------------------------------------------------------------------------------------------


def test_many_read_at_once_and_a_writer_is_refused_without_a_trace() -> None:
    device, model = Device(), conv(OperandType.UINT8)
    buffer = device.allocate([model], [0], [0])
    size = buffer.size_bytes or 0
    buffer.copy_from(bytes([5]) * size)
    tokens: list[int | None] = [buffer.token, None]
    with device.buffers.use(1, [HERE], [], tokens) as first, device.buffers.use(1, [HERE], [], tokens):
        assert copy_to(buffer, size) is NONE
        assert device.run(model, [elsewhere()], [HERE], tokens) is FAILED
        assert copy_from(buffer, size) is FAILED
        assert (first.inputs[0] == 5).all()
    assert buffer.is_initialized
    assert copy_from(buffer, size) is NONE


def test_while_one_writes_nobody_else_may_use_it() -> None:
    device, model = Device(), conv(OperandType.UINT8)
    buffer = device.allocate([model], [0], [0])
    size = buffer.size_bytes or 0
    buffer.copy_from(bytes(size))
    tokens: list[int | None] = [buffer.token, None]
    with device.buffers.use(1, [], [HERE], tokens) as use:
        for refusal in (copy_to(buffer, size), copy_from(buffer, size)):
            assert refusal is FAILED
        assert device.run(model, [HERE], [elsewhere()], tokens) is FAILED
        assert device.run(model, [elsewhere()], [HERE], tokens) is FAILED
        use.succeed()
        assert copy_to(buffer, size) is NONE  # it has succeeded: from here on others may
    assert buffer.is_initialized


def test_a_request_that_is_refused_holds_nothing() -> None:
    device, model = Device(), conv(OperandType.UINT8, count=2)
    one, two = device.allocate([model], [0, 1], [0, 1]), device.allocate([model], [0, 1], [0, 1])
    one.copy_from(bytes(one.size_bytes or 0))
    in_two = RequestArgument(DataLocation(1, 0, 0), ())
    with device.buffers.use(1, [], [HERE], [two.token]):
        assert device.run(model, [HERE], [in_two], [one.token, two.token]) is FAILED
        assert copy_from(one, one.size_bytes or 0) is NONE  # no reader was left behind
    assert device.run(model, [HERE], [in_two], [one.token, two.token]) is NONE


def test_a_undone_request_leaves_all_as_it_was() -> None:
    device, model = Device(), conv(OperandType.UINT8, dimensions=(0,))
    buffer = device.allocate([model], [0], [0])
    buffer.copy_from(b"abc", (3,))
    device.buffers.use(1, [], [here(5)], [buffer.token]).undo()
    assert buffer.dimensions == (3,)
    out = bytearray(3)
    buffer.copy_to(out)
    assert out == b"abc"


def test_memory_that_a_request_needs_and_cannot_have_leaves_all_as_it_was() -> None:
    def reserve_little(size: int) -> bytearray:
        if size > 100:
            raise MemoryAllocationError("no more", needed_bytes=size, available_bytes=100)
        return bytearray(size)

    buffers = DeviceBuffers(reserve_little)
    buffer = buffers.allocate(BufferDesc(), [conv(OperandType.UINT8, dimensions=(0,))], [BufferRole(0, 0)], [BufferRole(0, 0)])
    buffer.copy_from(b"abc", (3,))
    with pytest.raises(MemoryAllocationError):
        buffers.use(1, [], [here(101)], [buffer.token])
    assert (buffer.is_initialized, buffer.dimensions) == (True, (3,))
    with pytest.raises(MemoryAllocationError):
        buffer.copy_from(bytes(101), (101,))
    assert not buffer.is_initialized


def test_writers_in_many_threads_never_overlap() -> None:
    device, model = Device(), conv(OperandType.UINT8, dimensions=(4096,))
    buffer = device.allocate([model], [0], [0])
    torn: list[int] = []
    served = [0, 0]
    start = threading.Barrier(4)

    def write(number: int) -> None:
        start.wait()
        for _ in range(300):
            if status_of(lambda: buffer.copy_from(bytes([number]) * 4096)) is NONE:
                served[0] += 1

    def read() -> None:
        out = bytearray(4096)
        start.wait()
        for _ in range(300):
            if status_of(lambda: buffer.copy_to(out)) is NONE:
                served[1] += 1
                torn.extend({*out} if len({*out}) > 1 else ())

    threads = [threading.Thread(target=write, args=(n,)) for n in (1, 2)] + [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert served[0] > 0
    assert copy_from(buffer, 4096) is NONE
    assert copy_to(buffer, 4096) is NONE


# --- tokens -----------------------------------------------------------------------------------------------------------------


def test_tokens_are_never_used_twice_and_a_stale_one_names_nothing() -> None:
    device, model = Device(), conv(OperandType.UINT8)
    seen: set[int] = set()
    for _ in range(100):
        buffer = device.allocate([model], [0], [0])
        assert buffer.token not in seen
        seen.add(buffer.token)
        device.buffers.release(buffer.token)
        device.buffers.release(buffer.token)
    assert len(device.buffers) == 0
    newer = device.allocate([model], [0], [0])
    newer.copy_from(bytes(newer.size_bytes or 0))
    assert all(device.run(model, [HERE], [elsewhere()], [token, None]) is INVALID for token in seen)


def test_a_freed_buffer_lives_until_the_execution_that_holds_it_ends() -> None:
    device, model = Device(), conv(OperandType.UINT8)
    buffer = device.allocate([model], [0], [0])
    buffer.copy_from(bytes([9]) * (buffer.size_bytes or 0))
    use: BufferUse
    with device.buffers.use(1, [HERE], [], [buffer.token]) as use:
        device.buffers.release(buffer.token)
        assert (use.inputs[0] == 9).all()
    device.buffers.clear()
    assert len(device.buffers) == 0


# --- a request that comes again ---------------------------------------------------------------------------------------------


def test_the_same_request_gets_the_same_arrays_and_what_lies_in_them_now() -> None:
    device, model = Device(), conv(OperandType.UINT8, dimensions=(4,))
    one, two = device.allocate([model], [0], [0]), device.allocate([model], [0], [0])
    one.copy_from(b"aaaa")
    there, back = (device.buffers.request(1, [HERE], [RequestArgument(DataLocation(1, 0, 0), ())], t) for t in ([1, 2], [2, 1]))
    seen = []
    for turn in range(6):
        with (back if turn % 2 else there).use() as use:
            output = use.outputs[0]
            assert output is not None
            assert (use.inputs[0] == ord("a") + turn).all()
            assert not use.inputs[0].flags.writeable
            np.add(use.inputs[0], 1, out=output)
            use.succeed()
            seen.append((id(use.inputs[0]), id(output)))
            kept = (use.inputs[0], output)  # or other arrays could get their numbers
    assert len(set(seen)) == 2
    assert np.shares_memory(kept[0], kept[1]) is False
    assert two.is_initialized


def test_a_request_that_comes_again_is_refused_as_a_new_one_would_be() -> None:
    device, model = Device(), conv(OperandType.UINT8, dimensions=(0,))
    one, two = device.allocate([model], [0], [0]), device.allocate([model], [0], [0])
    request = device.buffers.request(1, [here(3)], [RequestArgument(DataLocation(1, 0, 0), (3,))], [one.token, two.token])
    assert status_of(request.use) is FAILED  # nothing is in it
    one.copy_from(b"abc", (3,))
    for _ in range(2):
        with request.use() as use:
            use.succeed()
    one.copy_from(b"abcde", (5,))
    assert status_of(request.use) is INVALID  # it has another shape by now
    one.copy_from(b"xyz", (3,))
    with request.use() as use:
        assert bytes(use.inputs[0]) == b"xyz"
        assert status_of(request.use) is FAILED  # another request writes the other
    assert not two.is_initialized  # it did not succeed
    device.buffers.release(two.token)
    assert status_of(request.use) is INVALID
    device.buffers.release(one.token)
    assert status_of(request.use) is INVALID


def test_the_memory_of_a_freed_buffer_goes_while_requests_still_name_it() -> None:
    class Reserved(bytearray):
        """Memory that can be watched."""

    reserved: list[weakref.ref[Reserved]] = []

    def reserve_watched(size: int) -> Reserved:
        memory = Reserved(size)
        reserved.append(weakref.ref(memory))
        return memory

    buffers = DeviceBuffers(reserve_watched)
    model = conv(OperandType.UINT8, dimensions=(0,))
    one, two = (buffers.allocate(BufferDesc(), [model], [BufferRole(0, 0)], [BufferRole(0, 0)]) for _ in range(2))
    one.copy_from(b"abc", (3,))
    request = buffers.request(1, [HERE], [RequestArgument(DataLocation(1, 0, 0), (3,))], [one.token, two.token])
    with request.use() as use:
        use.succeed()
    one.copy_from(b"abcde", (5,))  # in new memory; an array over the old one has been shown
    assert [memory() is not None for memory in reserved] == [False, True, True]
    for buffer in (one, two):
        buffers.release(buffer.token)
    del one, two, buffer, use
    assert [memory() for memory in reserved] == [None, None, None]


# --- combining dimensions -----------------------------------------------------------------------------------------------------

shapes = st.none() | st.lists(st.integers(0, 3), max_size=3).map(tuple)
ALL_SHAPES = [shape for rank in range(4) for shape in product(range(1, 4), repeat=rank)]


def allowed(dimensions: tuple[int, ...] | None) -> set[tuple[int, ...]]:
    """Every concrete shape, of extents 1 to 3, that a description allows."""
    return {shape for shape in ALL_SHAPES if Operand(OperandType.UINT8, dimensions).accepts(shape)}


@given(shapes, shapes)
def test_combined_dimensions_allow_exactly_the_shapes_that_both_allow(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> None:
    both = allowed(a) & allowed(b)
    try:
        combined = combine_dimensions(a, b)
    except CallerError:
        assert not both
    else:
        assert allowed(combined) == both
        assert combined == combine_dimensions(b, a)


@given(shapes, shapes, shapes)
def test_the_order_of_combining_does_not_matter(a: tuple[int, ...] | None, b: tuple[int, ...] | None, c: tuple[int, ...] | None) -> None:
    def all_three(*order: tuple[int, ...] | None) -> object:
        try:
            return combine_dimensions(combine_dimensions(order[0], order[1]), order[2])
        except CallerError:
            return "refused"

    assert all_three(a, b, c) == all_three(c, a, b) == all_three(b, c, a)
