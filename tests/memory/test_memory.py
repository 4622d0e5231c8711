"""`Memory` as an app holds it: wrapping, slicing, arrays, lifetimes, and the rows that NNAPI's tests have for it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aionn.errors import CallerError, ExecutionError
from aionn.hal import Constant, DataLocation, IMemory, MemoryDescription, MemoryKind, Model, Operand, OperandType
from aionn.memory.hardware_buffer import HardwareBuffer
from aionn.memory.memory import Memory
from aionn.memory.region import Access, Region
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio

PAGE = mmap.PAGESIZE
TYPES = [OperandType.FLOAT32, OperandType.FLOAT16, OperandType.UINT8, OperandType.INT8]
every_type = pytest.mark.parametrize("operand_type", TYPES, ids=lambda t: t.value)


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    path.write_bytes(bytes(2 * PAGE))
    return path


# --- rows of TestMemory -----------------------------------------------------------------------------------------------


@every_type
def test_memory_test_fd_two_matrices_at_offsets_20_and_200(operand_type: OperandType, pool: Path) -> None:
    one = np.arange(12).reshape(3, 4).astype(operand_type.dtype)
    two = one + np.ones((), operand_type.dtype)
    with open(pool, "r+b") as file:
        for offset, matrix in ((20, one), (200, two)):
            file.seek(offset)
            file.write(matrix.tobytes())
        file.flush()
        with leak_check(), Memory.from_fd(file, 300, mmap.PROT_READ) as memory:
            assert memory.description == MemoryDescription(MemoryKind.MMAP_FD, 300, writable=False)
            total = memory.array(operand_type.dtype, (3, 4), 20) + memory.array(operand_type.dtype, (3, 4), 200)
            assert (total == one + two).all()
            assert memory.view().readonly
            assert not memory.array(operand_type.dtype, (3, 4), 20).flags.writeable


@every_type
def test_memory_test_a_hardware_buffer_two_matrices_in_a_blob(operand_type: OperandType) -> None:
    one = np.arange(12).reshape(3, 4).astype(operand_type.dtype)
    with leak_check(), HardwareBuffer.allocate(300) as blob:
        assert blob.description == MemoryDescription(MemoryKind.HARDWARE_BUFFER_BLOB, 300)
        for offset in (20, 200):
            blob.memory.array(operand_type.dtype, (3, 4), offset)[:] = one
        assert (blob.memory.array(operand_type.dtype, (3, 4), 20) + blob.memory.array(operand_type.dtype, (3, 4), 200) == 2 * one).all()


def test_memory_leak_test_three_regions_with_gaps_leave_the_mappings_as_before(pool: Path) -> None:
    with leak_check():
        with open(pool, "r+b") as file:
            weights = Memory.allocate(20 + 48 + 30)
            source = Memory.from_fd(file, 48, mmap.PROT_READ)
            target = Memory.allocate(32 + 48 + 60)
        weights.array(np.float32, (3, 4), 20)[:] = 2
        target.array(np.float32, (3, 4), 32)[:] = weights.array(np.float32, (3, 4), 20) + source.array(np.float32, (3, 4))
        assert (target.array(np.float32, 12, 32) == 2).all()
        for memory in (weights, source, target):
            memory.close()


# --- from_fd ---------------------------------------------------------------------------------------------------------------


def test_the_app_may_close_its_own_descriptor_at_once(pool: Path) -> None:
    with leak_check():
        fd = os.open(pool, os.O_RDWR)
        memory = Memory.from_fd(fd, 2 * PAGE)
        os.close(fd)
        assert not os.get_inheritable(memory.fileno())
        memory.view()[PAGE] = 3
        assert memory.flush()
        memory.close()
        assert pool.read_bytes()[PAGE] == 3


def test_a_file_is_mapped_from_its_offset_on(pool: Path) -> None:
    pool.write_bytes(bytes(PAGE) + b"second page" + bytes(PAGE))
    with open(pool, "r+b") as file, Memory.from_fd(file, 11, offset=PAGE) as memory:
        assert bytes(memory.view()) == b"second page"
        assert memory.description.offset_bytes == PAGE


@pytest.mark.parametrize(
    ("size", "prot", "offset"),
    [
        (0, 3, 0),
        (-1, 3, 0),
        (2 * PAGE + 1, 3, 0),
        (PAGE + 1, 3, PAGE),
        (1, 3, 2 * PAGE),
        (PAGE, 3, 20),
        (PAGE, 3, 2**63),
        (PAGE, 3, 2**64 - PAGE),
        (PAGE, 0, 0),
        (PAGE, mmap.PROT_WRITE, 0),
        (PAGE, mmap.PROT_READ | mmap.PROT_EXEC, 0),
    ],
)
def test_from_fd_refuses_what_does_not_lie_in_the_file(pool: Path, size: int, prot: int, offset: int) -> None:
    with leak_check(), open(pool, "r+b") as file, pytest.raises(CallerError):
        Memory.from_fd(file, size, prot, offset)


def test_from_fd_refuses_descriptors_that_are_no_memory(pool: Path) -> None:
    with leak_check():
        read_end, write_end = os.pipe()
        unsealed = os.memfd_create("app", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(unsealed, 0, PAGE)
        read_only = os.open(pool, os.O_RDONLY)
        for fd in (read_end, write_end, unsealed, read_only, -1, 2**40):
            with pytest.raises(CallerError):
                Memory.from_fd(fd, 1)
        for fd in (read_end, write_end, unsealed, read_only):
            os.close(fd)


@pytest.mark.parametrize("size", ["16", 16.0, None], ids=repr)
def test_a_size_that_is_no_whole_number_is_told_in_one_sentence(pool: Path, size: Any) -> None:
    told = "expected a whole number of bytes"
    with leak_check(), open(pool, "r+b") as file:
        with pytest.raises(CallerError, match=told):
            Memory.allocate(size)
        with pytest.raises(CallerError, match=told):
            Memory.from_fd(file, size)
        with pytest.raises(CallerError, match=told):
            Memory.from_fd(file, 16, offset=size)


@pytest.mark.parametrize("fd", ["pool", None, 3.0], ids=repr)
def test_what_has_no_descriptor_is_told_in_one_sentence(fd: Any) -> None:
    with leak_check(), pytest.raises(CallerError, match=r"expected a descriptor, got .*; give its number, or an open file"):
        Memory.from_fd(fd, 16)


def test_a_file_that_was_cut_off_is_refused_where_touching_it_would_end_the_process(pool: Path) -> None:
    with open(pool, "r+b") as file, Memory.from_fd(file, 2 * PAGE) as memory, memory[PAGE:] as part:
        memory.array(np.uint8, 2 * PAGE)[:] = 7
        file.truncate(PAGE)
        for look in (memory.view, part.view, lambda: memory.array(np.uint8, 1)):
            with pytest.raises(ExecutionError, match="cut off"):
                look()
        file.truncate(2 * PAGE)
        assert part.array(np.uint8, PAGE).sum() == 0
        assert memory.array(np.uint8, PAGE)[0] == 7


def test_holes_of_a_file_are_filled_before_it_is_written_to(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(64 * PAGE)
        with Memory.from_fd(file, 64 * PAGE, mmap.PROT_READ):
            assert os.fstat(file.fileno()).st_blocks == 0
        with Memory.from_fd(file, 64 * PAGE):
            assert os.fstat(file.fileno()).st_blocks * 512 >= 64 * PAGE


# --- as the home of a model's constants ------------------------------------------------------------------------------------


def with_constant(pool: IMemory, operand: Operand, offset: int, length: int, index: int = 0) -> Model:
    constant = Constant("w", operand, DataLocation(index, offset, length))
    return Model(graph=b"", inputs={}, outputs={}, operations=(), constants=(constant,), pools=(pool,), token=bytes(32))


@every_type
@pytest.mark.parametrize("blob", [False, True], ids=["FromMemory", "FromAHardwareBufferBlob"])
def test_model_set_operand_value(operand_type: OperandType, blob: bool) -> None:
    operand = Operand(operand_type, (3, 4))
    size = 12 * operand_type.element_bytes
    with HardwareBuffer.allocate(2 * size) if blob else Memory.allocate(2 * size) as memory:
        assert with_constant(memory, operand, size, size).pools == (memory,)
        for offset, length in (
            (0, size - 1),
            (0, size + 1),
            (0, 2 * size),
            (2 * size, size),
            (size + 1, size),
            (2**64 - size, size),
            (-1, size),
        ):
            with pytest.raises(CallerError):
                with_constant(memory, operand, offset, length)
        for index in (1, 999, -1):
            with pytest.raises(CallerError, match="the model has 1 pools"):
                with_constant(memory, operand, 0, size, index)


def test_model_set_operand_value_from_a_hardware_buffer_with_an_image_is_refused() -> None:
    with HardwareBuffer.allocate(3, 1, "rgba_8888") as image, pytest.raises(CallerError, match=r"an image .* that only executions use"):
        with_constant(image, Operand(OperandType.UINT8, (12,)), 0, 12)


# --- arrays and slices ------------------------------------------------------------------------------------------------------


@every_type
def test_execution_set_input_from_memory_ranges_beyond_it_are_refused(operand_type: OperandType) -> None:
    with Memory.allocate(64) as memory:
        fits = 64 // operand_type.element_bytes
        assert memory.array(operand_type.dtype, fits).shape == (fits,)
        for shape, offset in (
            (fits + 1, 0),
            (fits, 1),
            (1, 64),
            (1, 65),
            (1, -1),
            (1, 2**64),
            ((-1,), 0),
            ((-1, -1), 0),
            ((2**40, 2**40), 0),
        ):
            with pytest.raises(CallerError):
                memory.array(operand_type.dtype, shape, offset)
        assert memory.array(np.uint8, np.prod((2, 3))).shape == (6,)
        assert memory.array(operand_type.dtype, (), 64 - operand_type.element_bytes).shape == ()
        with pytest.raises(CallerError, match="Python objects"):
            memory.array(object, 1)


@every_type
def test_memory_is_the_tensor_of_an_operand_of_its_size(operand_type: OperandType) -> None:
    size = 12 * operand_type.element_bytes
    with Memory.allocate(2 * size) as memory, memory[size:] as half:
        for dimensions in ((3, 4), (0, 4), (3, 0), (12,), (0,), (1, 3, 4)):
            place, shape = half.locate(Operand(operand_type, dimensions))
            assert Operand(operand_type, dimensions).accepts(shape)
            assert (place.offset_bytes, place.array(operand_type.dtype, shape).size) == (size, 12)
            place.close()
        assert half.locate(Operand(operand_type, None), (2, 6))[1] == (2, 6)
        for wrong in ((3, 5), (0, 5), (6, 4), (0, 24), ()):
            with pytest.raises(CallerError, match="same size"):
                half.locate(Operand(operand_type, wrong))
        for open_dimensions in (None, (0, 0)):
            with pytest.raises(CallerError, match="give shape="):
                half.locate(Operand(operand_type, open_dimensions))
        with pytest.raises(CallerError, match="open extent"):
            half.locate(Operand(operand_type, (3, 4)), (4, 3))


def test_slices_share_bytes_and_know_their_place() -> None:
    with Memory.allocate(100) as memory, memory[20:60] as middle, middle[10:-10] as inner:
        assert (middle.offset_bytes, middle.size_bytes, inner.offset_bytes, len(inner)) == (20, 40, 30, 20)
        inner.array(np.uint8, 20)[:] = 5
        assert memory.array(np.uint8, 100).sum() == 100
        assert bytes(memory.view()[30:50]) == bytes([5]) * 20
        assert inner.pool is middle.pool is memory.pool
        whole: IMemory = memory
        assert whole.fileno() == memory.pool.fileno()
        for ask in (lambda: inner.description, inner.fileno):
            with pytest.raises(CallerError, match="cannot be sent as a pool"):
                ask()
        with pytest.raises(CallerError):
            inner.array(np.uint8, 21)


@pytest.mark.parametrize(
    "index",
    [
        slice(0, 101),
        slice(100, None),
        slice(101, None),
        slice(5, 5),
        slice(7, 3),
        slice(-101, None),
        slice(None, None, 2),
        3,
        slice(1.5, 2),
        slice(None, "3"),
    ],
)
def test_a_slice_that_is_not_within_is_refused_and_not_clipped(index: Any) -> None:
    with Memory.allocate(100) as memory, pytest.raises(CallerError):
        memory[index]


def test_the_pool_goes_with_its_last_user() -> None:
    with leak_check():
        memory = Memory.allocate(100)
        region = memory.pool
        part, whole = memory[10:20], memory[:]
        assert whole.description == region.description
        memory.close()
        memory.close()
        assert not region.closed
        part.view()[0] = 1
        part.close()
        assert not region.closed
        del whole
        assert region.closed


def test_use_after_close_is_a_clear_error() -> None:
    with leak_check():
        memory = Memory.allocate(100)
        memory.close()
        assert memory.closed
        uses = (
            memory.view,
            memory.fileno,
            lambda: memory.array(np.uint8, 1),
            lambda: memory[:],
            lambda: memory.description,
            memory.flush,
            lambda: memory.locate(Operand(OperandType.UINT8, (100,))),
        )
        for use in uses:
            with pytest.raises(CallerError, match="has been closed"):
                use()


def test_an_element_type_that_numpy_does_not_know_is_refused() -> None:
    with Memory.allocate(100) as memory, pytest.raises(CallerError, match=r"dtype='float99'.*as in np\.float32"):
        memory.array("float99", 1)


def test_arrays_keep_the_bytes_after_close() -> None:
    memory = Memory.allocate(100)
    array = memory.array(np.uint8, 100)
    memory.close()
    array[:] = 1
    assert array.sum() == 100


async def test_memory_is_let_go_of_at_the_end_of_its_block() -> None:
    with leak_check():
        async with Memory.allocate(100) as memory, HardwareBuffer.allocate(4, 2, "nv12") as image:
            region = image.memory.pool
        assert memory.closed
        assert image.closed
        assert region.closed
        with pytest.raises(ZeroDivisionError):
            async with Memory.allocate(100) as memory:
                1 / 0  # noqa: B018
        assert memory.closed


def test_both_orders_of_freeing_memory_and_its_user_are_safe() -> None:
    """Burst.FreeMemoryBeforeBurst and FreeBurstBeforeMemory, as far as the memory goes: who caches it is told."""
    purged: list[str] = []
    first = Memory.allocate(100)
    first.pool.when_closed(lambda: purged.append("first"))
    first.close()
    assert purged == ["first"]
    second = Memory.allocate(100)
    forget = second.pool.when_closed(lambda: purged.append("second"))
    forget()
    second.close()
    assert purged == ["first"]


def test_a_thousand_cycles_of_allocate_slice_and_free_leave_nothing(pool: Path) -> None:
    with leak_check(), open(pool, "r+b") as file:
        for cycle in range(1000):
            memory = Memory.allocate(PAGE) if cycle % 2 else Memory.from_fd(file, PAGE, offset=PAGE)
            part = memory[8:24]
            peer = Region.attach(os.dup(memory.fileno()), memory.description, Access.READ)
            part.array(np.float32, 4)[:] = cycle
            assert (np.frombuffer(peer.view()[8:24], np.float32) == cycle).all()
            memory.close()
            peer.close()
            if cycle % 3:
                part.close()
        del part
