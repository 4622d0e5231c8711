"""Calls with values over a socket: what a hostile app sends is answered, and what a hostile driver answers is an error."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from onnx import TensorProto, helper

from aionn.driver import find_engine
from aionn.driver import values as driver_values
from aionn.errors import AionnError, CallerError, ExecutionError
from aionn.hal import ErrorStatus, MemoryDescription, MemoryKind, PrepareOptions, Result
from aionn.memory.region import Region
from aionn.remote.calls import ExecutedValues, ExecuteValues, Fd, LentMemory, Values
from tests.leaks import Inventory
from tests.remote.pair import remote_device
from tests.runtime.values_models import passing

pytestmark = pytest.mark.anyio

FLOATS = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [None]))
GIVEN = {"x": [np.arange(3, dtype=np.float32), np.zeros(0, np.float32)]}
MEMORY = MemoryDescription(MemoryKind.ASHMEM, 4096)


async def test_whatever_an_app_sends_is_answered_and_the_next_call_works() -> None:
    async with remote_device(find_engine("onnxruntime")) as device:
        prepared = await device.prepare_model(passing(FLOATS), PrepareOptions())
        tree = msgspec.msgpack.encode([[[[3], 0]]])
        before = len(os.listdir("/proc/self/fd"))
        wrong: list[tuple[bytes, bytes, MemoryDescription | None]] = [
            (b"", b"", None),
            (tree, b"short", None),
            (b"\x91" * 100_000, b"", None),
            (tree, b"", MemoryDescription(MemoryKind.ASHMEM, 0)),
            (tree, b"", MEMORY),  # a file of another size
        ]
        for nodes, data, memory in wrong:
            file = os.memfd_create("hostile")
            try:
                inputs = Values(nodes, data, None if memory is None else LentMemory(memory, Fd(file)))
                executed, _ = await device.connection.call(ExecuteValues(prepared.number, inputs, False, None))
                assert executed.result.status in (ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE)
                assert executed.result.message
            finally:
                os.close(file)
        with pytest.raises(CallerError, match="prepared model 999 does not exist"):
            await device.connection.call(ExecuteValues(999, Values(tree), False, None))
        result, outputs, _ = await prepared.execute_values(GIVEN, True)
        assert result.status is ErrorStatus.NONE
        assert result.timing.in_driver_us < 10**7
        assert [array.tolist() for array in outputs["y"]] == [[0, 1, 2], []]
        assert len(os.listdir("/proc/self/fd")) == before


async def test_a_memory_that_the_app_can_still_change_or_shrink_is_refused() -> None:
    async with remote_device(find_engine("onnxruntime")) as device:
        prepared = await device.prepare_model(passing(FLOATS), PrepareOptions())
        file = os.memfd_create("unsealed")
        os.ftruncate(file, 4096)
        inputs = Values(msgspec.msgpack.encode([[[[3], 0]]]), b"", LentMemory(MEMORY, Fd(file)))
        executed, _ = await device.connection.call(ExecuteValues(prepared.number, inputs, False, None))
        os.close(file)
        assert executed.result.status is not ErrorStatus.NONE


@pytest.mark.parametrize(
    "answer",
    [
        ExecutedValues(Result(ErrorStatus.NONE)),
        ExecutedValues(Result(ErrorStatus.NONE), Values(msgspec.msgpack.encode([[[[3], 0]]]))),
        ExecutedValues(Result(ErrorStatus.NONE), Values(msgspec.msgpack.encode([{"a": 1}]))),
    ],
)
async def test_an_answer_that_does_not_fit_the_model_is_an_execution_error(answer: ExecutedValues, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lie(*_: Any) -> tuple[ExecutedValues, Region | None]:
        return answer, None

    async with remote_device(find_engine("onnxruntime")) as device:
        prepared = await device.prepare_model(passing(FLOATS), PrepareOptions())
        monkeypatch.setattr(driver_values, "serve_values", lie)
        with pytest.raises(ExecutionError, match="the driver's answer contradicts the model"):
            await prepared.execute_values(GIVEN)


async def test_values_in_a_file_are_refused_because_a_driver_could_cut_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "file", os.O_RDONLY)

    async def lie(*_: Any) -> tuple[ExecutedValues, Any]:
        sent = SimpleNamespace(fileno=lambda: fd, close=lambda: os.close(fd))
        tree = msgspec.msgpack.encode([[[[3], 0]]])
        memory = LentMemory(MemoryDescription(MemoryKind.MMAP_FD, 4096, writable=False), Fd(fd))
        return ExecutedValues(Result(ErrorStatus.NONE), Values(tree, b"", memory)), sent

    async with remote_device(find_engine("onnxruntime")) as device:
        prepared = await device.prepare_model(passing(FLOATS), PrepareOptions())
        monkeypatch.setattr(driver_values, "serve_values", lie)
        with pytest.raises(ExecutionError, match="the data of values lies in memory of kind mmap_fd; send it in ashmem"):
            await prepared.execute_values(GIVEN)


def _memfd(flags: int = 0, *, size_bytes: int = 4096, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("evil", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _holes() -> int:
    return _memfd()


def _unsealed() -> int:
    fd = _memfd(seals=0)
    os.posix_fallocate(fd, 0, 4096)
    return fd


def _short() -> int:
    return _memfd(size_bytes=4095)


def _huge_pages() -> int:
    return _memfd(os.MFD_HUGETLB | os.MFD_HUGE_2MB, size_bytes=2 << 20)


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def _folder() -> int:
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _path_only() -> int:
    fd = _memfd()
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _device() -> int:
    return os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)


@pytest.mark.parametrize(
    ("evil", "words"),
    [
        (_huge_pages, "its pages have 2097152 bytes"),
        (_holes, "4096 bytes were never reserved"),
        (_unsealed, "its size is not sealed"),
        (_short, "the file is shorter than claimed|never reserved"),
        (_pipe, "the descriptor is not a memfd"),
        (_folder, "the descriptor is not a memfd"),
        (_path_only, "the descriptor is not a memfd"),
        (_device, "the descriptor is not a memfd"),
    ],
)
async def test_an_answer_in_memory_that_could_end_or_block_the_app_is_refused_before_it_is_mapped(
    evil: Callable[[], int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = evil()

    async def lie(*_: Any) -> tuple[ExecutedValues, Any]:
        sent = SimpleNamespace(fileno=lambda: fd, close=lambda: None)
        tree = msgspec.msgpack.encode([[[[3], 0]]])
        memory = LentMemory(MemoryDescription(MemoryKind.ASHMEM, 4096, writable=False), Fd(fd))
        return ExecutedValues(Result(ErrorStatus.NONE), Values(tree, b"", memory)), sent

    try:
        async with remote_device(find_engine("onnxruntime")) as device:
            prepared = await device.prepare_model(passing(FLOATS), PrepareOptions())
            monkeypatch.setattr(driver_values, "serve_values", lie)
            before = Inventory.take()
            with pytest.raises(ExecutionError, match=f"the driver's answer contradicts the model: .*({words})"):
                await prepared.execute_values(GIVEN)
            assert Inventory.take().since(before) == []
    finally:
        os.close(fd)


async def test_every_call_is_settled_once_also_one_that_is_refused_here() -> None:
    settled: list[object] = []
    async with remote_device(find_engine("onnxruntime")) as device:
        prepared = await device.prepare_model(passing(FLOATS), PrepareOptions())
        with pytest.raises(CallerError, match="input 'x': expected a list"):
            await prepared.execute_values({"x": 1}, settled=settled.append)
        assert settled == [None]
        await prepared.execute_values(GIVEN, settled=settled.append)
        assert [type(each) for each in settled] == [type(None), Result]
        await prepared.aclose()
        with pytest.raises(AionnError):
            await prepared.execute_values(GIVEN, settled=settled.append)
        assert len(settled) == 3
