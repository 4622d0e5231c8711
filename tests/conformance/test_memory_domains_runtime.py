"""Rows of NNAPI's runtime MemoryDomainTest and MemoryCopyTest that have a counterpart: through the public face, in driver processes.

Partitions and fallback pools have none: a model runs whole on one device, and memory that a device will not give is an error.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.testing import FakeDevice, identity_model
from tests.leaks import driver_pids, leak_check

pytestmark = pytest.mark.anyio


async def test_memory_copy_test() -> None:
    """ashmem -> device 1 -> device 2 -> ashmem: the value arrives."""
    async with leak_check(), aionn.Runtime() as runtime:
        model = aionn.Model.from_onnx(identity_model({"x": (1,)}))
        first = await runtime.compile(model, devices=("reference",))
        second = await runtime.compile(model, devices=("onnxruntime",))
        async with (
            aionn.Memory.allocate(4) as source,
            aionn.Memory.allocate(4) as target,
            await first.allocate(inputs=("x",)) as near,
            await second.allocate(inputs=("x",)) as far,
        ):
            source.array(np.float32, 1)[0] = 3.14
            await near.copy_from(source)
            await far.copy_from(near)
            await far.copy_to(target)
            assert target.array(np.float32, 1)[0] == np.float32(3.14)


async def test_single_partition_gives_memory_of_the_device_for_an_input_and_an_output() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (4,)})), devices=("onnxruntime",))
        async with await compilation.allocate(inputs=("x",), outputs=("x_out",)) as memory:
            await memory.copy_from(np.arange(4, dtype=np.float32))
            assert await compilation.compute({"x": memory}, outputs={"x_out": memory}) == {}
            np.testing.assert_array_equal(await memory.snapshot(), np.arange(4, dtype=np.float32))


@pytest.mark.parametrize("dimensions", [(1, 4, 6, 3), (0, 4, 6, 3), (4, 6, 3)], ids=str)
async def test_device_memory_is_copied_into_an_image_and_back(dimensions: tuple[int, ...]) -> None:
    shape = tuple(extent or 1 for extent in dimensions)
    picture = np.arange(72, dtype=np.uint8).reshape(shape)
    async with leak_check(), aionn.Runtime() as runtime:
        declared = tuple(extent or "N" for extent in dimensions)
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": declared}, np.uint8)), devices=("onnxruntime",))
        async with await compilation.allocate(inputs=("x",), outputs=("x_out",)) as memory:
            await compilation.compute({"x": picture}, outputs={"x_out": memory})
            with (
                aionn.HardwareBuffer.allocate(6, 4, "rgb_888") as image,
                aionn.HardwareBuffer.allocate(72) as blob,
                aionn.HardwareBuffer.allocate(6, 4, "rgba_8888") as other,
            ):
                for target in (image, blob):
                    found = await memory.copy_to(target)
                    assert found.shape == shape
                    np.testing.assert_array_equal(found, picture)
                    assert bytes(target.view()) == picture.tobytes()
                    target.view()[0] = 99
                    assert found.flat[0] == 99  # over the buffer's own bytes
                    await memory.copy_from(target)
                    assert (await memory.snapshot()).flat[0] == 99
                    target.view()[0] = 0
                    await memory.copy_from(target)
                for wrong in (other, aionn.HardwareBuffer.allocate(71)):
                    with wrong, pytest.raises(aionn.CallerError, match=r"does not fit|same size"):
                        await memory.copy_to(wrong)
                del found, wrong


async def test_a_use_after_a_cancelled_copy_waits_for_the_driver() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (4,)})), devices=("onnxruntime",))
        (device,) = (device for device in runtime.devices if device.pid is not None)
        (pid,) = driver_pids()

        async def cancelled(copy: Callable[[], Coroutine[Any, Any, object]]) -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(copy)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()

        async with await compilation.allocate(inputs=("x",), outputs=("x_out",)) as memory:
            await memory.reset(1)
            await compilation.compute({"x": memory}, outputs={"x_out": memory})
            connection = compilation._parts.kept.connection
            assert connection is not None
            assert connection.link is not None
            for copy in (lambda: memory.reset(2), memory.snapshot):
                os.kill(pid, signal.SIGSTOP)
                await cancelled(copy)
                assert device.statistics()["calls_in_flight"] == 1
                found: list[Any] = []

                async def use(found: list[Any] = found) -> None:
                    await compilation.compute({"x": memory}, outputs={"x_out": memory})
                    found.append(await memory.snapshot())

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(use)
                    await anyio.wait_all_tasks_blocked()
                    assert device.statistics()["calls_in_flight"] == 1
                    assert connection.link.in_flight == 0, "it did not wait for the copy"
                    os.kill(pid, signal.SIGCONT)
                np.testing.assert_array_equal(found[0], np.full(4, 2, np.float32))


async def test_a_device_that_fails_answers_with_an_error_and_never_with_a_fallback() -> None:
    with FakeDevice() as fake:
        async with leak_check(), aionn.Runtime() as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (4,)})), devices=(fake.name,))
            async with await compilation.allocate(outputs=("x_out",)) as memory:
                fake.fail("no memory domain today")
                with pytest.raises(aionn.ExecutionError, match="no memory domain today"):
                    await compilation.compute({"x": np.zeros(4, np.float32)}, outputs={"x_out": memory})
                fake.behave()
                with pytest.raises(aionn.ExecutionError, match="not initialized"):
                    await memory.snapshot()


async def test_dynamic_shape_of_a_memory_follows_what_was_written_last() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": ("N",)})), devices=("onnxruntime",))
        async with await compilation.allocate(outputs=("x_out",)) as memory:
            shapes = [memory.shape]
            for extent in (3, 5):
                await compilation.compute({"x": np.arange(extent, dtype=np.float32)}, outputs={"x_out": memory})
                shapes.append(memory.shape)
                np.testing.assert_array_equal(await memory.snapshot(), np.arange(extent, dtype=np.float32))
            assert shapes == [None, (3,), (5,)]


@pytest.mark.parametrize(
    ("kind", "values", "wrong"),
    [
        ("float32", [0, -2.5, 1e30, np.inf, np.nan, np.float64(0.1)], ["1", None, [1], 1e300]),
        ("float16", [0, -2.5, np.nan], [1e30, 70000]),
        ("uint8", [0, 255, 3.0, np.int64(7)], [256, -1, 2.5, np.nan, 1e30]),
        ("int8", [-128, 127], [128, -129, 0.1, np.inf]),
    ],
)
async def test_memory_is_filled_with_a_value_that_it_can_hold(kind: str, values: list[Any], wrong: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with leak_check(), aionn.Runtime() as runtime:
            model = aionn.Model.from_onnx(identity_model({"x": (4,)}, np.dtype(kind)))
            compilation = await runtime.compile(model, devices=("reference",))
            async with await compilation.allocate(inputs=("x",)) as memory:
                for value in values:
                    await memory.reset(value)
                    np.testing.assert_array_equal(await memory.snapshot(), np.full(4, value, kind))
                for value in wrong:
                    with pytest.raises(aionn.CallerError, match="nothing is cast in silence"):
                        await memory.reset(value)
                np.testing.assert_array_equal(await memory.snapshot(), np.full(4, values[-1], kind))
                for target in (np.zeros(4, kind), memory):
                    with pytest.raises(aionn.CallerError, match="copied into a Memory"):
                        await memory.copy_to(target)  # type: ignore[arg-type]
