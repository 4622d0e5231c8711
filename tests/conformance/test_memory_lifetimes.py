"""What happens to memory when a process dies, leaves, or lies: cycles, kills, streams with their state in the driver, hostile
clients. The short forms run always; `pytest -m soak tests/conformance/test_memory_lifetimes.py` runs the full numbers.
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import onnxruntime
import psutil
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import aionn
from aionn.errors import AionnError, CallerError
from aionn.hal.types import DataLocation, ErrorStatus, MemoryDescription, MemoryKind, Request, RequestArgument
from aionn.memory.region import Region
from aionn.remote.calls import CopyFrom, Execute, Fd, LentMemory
from aionn.remote.device import RemotePreparedModel
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model
from tests.leaks import Inventory, driver_pids, ended, leak_check

pytestmark = pytest.mark.anyio

WIDTH, HIDDEN = 8, 16


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """As `leak_check`, for what is let go of when it is collected: that takes the loop one more turn."""
    async with leak_check():
        yield
        gc.collect()
        await anyio.wait_all_tasks_blocked()


FAKE = FakeDevice.name


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


def recurrent() -> bytes:
    """A GRU, one step: y and the next state from x and the state."""
    generator = np.random.default_rng(5)
    weights = {
        "w": generator.standard_normal((1, 3 * HIDDEN, WIDTH)).astype(np.float32) * 0.4,
        "r": generator.standard_normal((1, 3 * HIDDEN, HIDDEN)).astype(np.float32) * 0.4,
    }
    node = helper.make_node("GRU", ["x", "w", "r", "", "", "state"], ["y", "stateN"], hidden_size=HIDDEN)
    shapes = {"x": [1, 1, WIDTH], "state": [1, 1, HIDDEN], "y": [1, 1, 1, HIDDEN], "stateN": [1, 1, HIDDEN]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "gru", [values["x"], values["state"]], [values["y"], values["stateN"]], constants)
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


def given(stream: int, steps: int) -> NDArray[np.float32]:
    return np.random.default_rng(stream).standard_normal((steps, 1, 1, WIDTH)).astype(np.float32)


def directly(model: bytes, stream: int, steps: int) -> NDArray[np.float32]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    state, found = np.zeros((1, 1, HIDDEN), np.float32), []
    for x in given(stream, steps):
        y, state = session.run(["y", "stateN"], {"x": x, "state": state})
        found.append(y.reshape(-1))
    return np.array(found)


# --- recurrent streams -------------------------------------------------------------------------------------------------


async def streams_equal(count: int, steps: int) -> None:
    model = recurrent()
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(model), devices=("onnxruntime",))

        async def stream(number: int) -> None:
            found = np.empty((steps, HIDDEN), np.float32)
            async with compilation.burst() as burst, await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state:
                await state.reset()
                for step, x in enumerate(given(number, steps)):
                    outputs = await burst.compute({"x": x, "state": state}, outputs={"stateN": state})
                    assert list(outputs) == ["y"]
                    found[step] = outputs["y"].reshape(-1)
                    del outputs
                assert burst.statistics()["copied_bytes"] == steps * WIDTH * 4  # of the state, nothing
            np.testing.assert_allclose(found, directly(model, number, steps), rtol=1e-5, atol=1e-6)

        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(stream, number)


async def test_streams_with_their_state_in_the_driver_equal_onnx_runtime() -> None:
    async with nothing_left():
        await streams_equal(16, 100)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_16_streams_of_10000_steps_equal_onnx_runtime() -> None:
    async with nothing_left():
        await streams_equal(16, 10_000)


# --- device memory: state, refusals, ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_a_failed_execution_leaves_a_state_as_it_was_and_empties_what_it_only_writes(way: str) -> None:
    with FakeDevice() as fake:
        async with nothing_left(), aionn.Runtime() as runtime:
            model = aionn.Model.from_onnx(identity_model({"state": (4,)}, outputs=["stateN"]))
            compilation = await runtime.compile(model, devices=(fake.name,))
            async with compilation.burst() as burst:
                compute = compilation.compute if way == "compute" else burst.compute
                state = await compilation.allocate(inputs=("state",), outputs=("stateN",))
                other = await compilation.allocate(inputs=("state",), outputs=("stateN",))
                with pytest.raises(aionn.ExecutionError, match="not initialized"):
                    await compute({"state": state})
                await state.copy_from(np.arange(4, dtype=np.float32))
                await other.copy_from(state)
                fake.tell(outputs_offset=1.0)
                await compute({"state": state}, outputs={"stateN": state})
                fake.fail()
                for target in (state, other):
                    with pytest.raises(aionn.ExecutionError, match="failed on demand"):
                        await compute({"state": state}, outputs={"stateN": target})
                np.testing.assert_array_equal(await state.snapshot(), [1, 2, 3, 4])
                with pytest.raises(aionn.ExecutionError, match="not initialized"):
                    await other.snapshot()


@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_a_caller_that_leaves_does_not_leave_half_a_turn(way: str) -> None:
    with FakeDevice() as fake:
        async with nothing_left(), aionn.Runtime() as runtime:
            model = aionn.Model.from_onnx(identity_model({"state": (4,)}, outputs=["stateN"]))
            compilation = await runtime.compile(model, devices=(fake.name,))
            async with compilation.burst() as burst, await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state:
                compute = compilation.compute if way == "compute" else burst.compute
                await state.reset(7)
                fake.tell(outputs_offset=1.0)
                fake.hang()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lambda: compute({"state": state}, outputs={"stateN": state}))
                    await fake.heard("run")
                    with pytest.raises(CallerError, match="in flight"):
                        await compute({"state": state}, outputs={"stateN": state})
                    with pytest.raises(CallerError, match="in flight"):
                        await state.reset()
                    tasks.cancel_scope.cancel()
                found: list[NDArray[Any]] = []

                async def look() -> None:
                    found.append(await state.snapshot())

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(look)  # it waits for the driver: the caller has left, the execution has not
                    await anyio.wait_all_tasks_blocked()
                    assert found == []
                    fake.tell(hang=())
                np.testing.assert_array_equal(found[0], [8, 8, 8, 8])


async def test_a_state_dies_with_its_driver_and_says_so() -> None:
    settings = {"AIONN_TEST_WORD": "dies"}  # of a service, no other test has the driver that is killed here
    async with nothing_left(), aionn.Runtime(driver_env=settings) as runtime:
        model = aionn.Model.from_onnx(identity_model({"state": (4,)}, outputs=["stateN"]))
        compilation = await runtime.compile(model, devices=(FAKE,))
        async with compilation.burst() as burst:
            state = await compilation.allocate(inputs=("state",), outputs=("stateN",))
            await state.reset(3)
            kept = await state.snapshot()
            pid = next(device.pid for device in runtime.devices if device.pid)
            os.kill(pid, signal.SIGKILL)
            for _ in range(2):
                for compute in (burst.compute, compilation.compute):
                    with pytest.raises(aionn.DeviceMemoryLostError):
                        await compute({"state": state}, outputs={"stateN": state})
                for use in (state.snapshot, state.reset):
                    with pytest.raises(aionn.DeviceMemoryLostError):
                        await use()
            again = await compilation.allocate(inputs=("state",), outputs=("stateN",))
            await again.copy_from(kept)
            await burst.compute({"state": again}, outputs={"stateN": again})
            np.testing.assert_array_equal(await again.snapshot(), [3, 3, 3, 3])
            await state.aclose()
            with pytest.raises(CallerError, match="closed"):
                await state.snapshot()


# --- cycles and kills ----------------------------------------------------------------------------------------------------


async def cycles(count: int) -> None:
    async with aionn.Runtime() as runtime:
        model = aionn.Model.from_onnx(identity_model({"x": (256,)}, outputs=["y"]))
        compilation = await runtime.compile(model, devices=(FAKE,))
        x = np.arange(256, dtype=np.float32)
        async with compilation.burst() as burst:

            async def one(number: int) -> None:
                state = await compilation.allocate(inputs=("x",), outputs=("y",))
                with aionn.Memory.allocate(2048) as memory:
                    await state.copy_from(x)
                    await burst.compute({"x": state}, outputs={"y": state})
                    outputs = await (burst.compute if number % 2 else compilation.compute)({"x": state}, outputs={"y": memory[1024:]})
                    assert outputs["y"][255] == 255
                    del outputs
                if number % 3:
                    await state.aclose()  # or it is collected

            async def quiet() -> None:
                """What has been collected, or closed, is freed in the driver, too, before these are answered."""
                gc.collect()
                for _ in range(3):
                    await anyio.wait_all_tasks_blocked()
                    await compilation.compute({"x": x})
                    await burst.compute({"x": x})

            for number in range(10):
                await one(number)
            await quiet()
            driver = psutil.Process(driver_pids()[0])
            ours, theirs = Inventory.take().sizes(), (driver.num_fds(), mappings(driver.pid))
            rss = driver.memory_info().rss
            for number in range(count):
                await one(number)
            await quiet()
            assert Inventory.take().sizes() == ours
            assert (driver.num_fds(), mappings(driver.pid)) == theirs
            assert driver.memory_info().rss - rss < 16 * 2**20


def mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").count("memfd:aionn")


async def test_allocate_use_free_leaves_nothing_on_either_side() -> None:
    async with nothing_left():
        await cycles(200)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_1000_cycles_leave_nothing_on_either_side() -> None:
    async with nothing_left():
        await cycles(1000)


async def driver_kills(count: int) -> None:
    moments = random.Random(11)
    async with aionn.Runtime() as runtime:
        model = aionn.Model.from_onnx(identity_model({"x": (256,)}, outputs=["y"]))
        compilation = await runtime.compile(model, devices=(FAKE,))
        sizes = set()
        for _ in range(count):
            busy = anyio.Event()

            async def use(busy: anyio.Event = busy) -> None:
                try:
                    async with compilation.burst() as burst:
                        while True:
                            state = await compilation.allocate(inputs=("x",), outputs=("y",))
                            async with state:
                                with aionn.Memory.allocate(1024) as memory:
                                    await state.copy_from(memory)
                                    await burst.compute({"x": state}, outputs={"y": state})
                                    await compilation.compute({"x": memory}, outputs={"y": state})
                                    busy.set()
                except aionn.DriverDiedError:
                    busy.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(use)
                await busy.wait()
                await anyio.sleep(moments.uniform(0, 0.01))  # the random moment itself
                for pid in driver_pids():
                    os.kill(pid, signal.SIGKILL)
                    assert await ended(pid, 10)
                # Told, or between two calls and on its way to a new driver.
                tasks.cancel_scope.cancel()
            gc.collect()
            sizes.add(Inventory.take().sizes()[1])
        assert max(sizes) <= 8, sizes  # what one compilation and one burst hold, however many drivers they have had


async def test_drivers_killed_at_random_leave_nothing() -> None:
    async with nothing_left():
        await driver_kills(8)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_100_drivers_killed_at_random_leave_nothing() -> None:
    async with nothing_left():
        await driver_kills(100)


APP = """
import sys, numpy as np, aionn
from aionn.testing.models import identity_model
from aionn.remote.device import (RemotePreparedModel)
async def main():
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (4096,)}, outputs=["y"])), devices=(sys.argv[1],))
        async with compilation.burst() as burst:
            while True:
                state = await compilation.allocate(inputs=("x",), outputs=("y",))
                with aionn.Memory.allocate(16384) as memory:
                    await state.copy_from(memory)
                    await burst.compute({"x": state}, outputs={"y": state})
                    print(runtime.devices and [d.pid for d in runtime.devices if d.pid][0], flush=True)
aionn.run(main)
"""


def app_kills(count: int) -> None:
    moments = random.Random(12)
    before = Path("/proc/meminfo").read_text(encoding="ascii")
    for _ in range(count):
        with subprocess.Popen([sys.executable, "-c", APP, FAKE], stdout=subprocess.PIPE, text=True) as app:
            assert app.stdout is not None
            lines = [app.stdout.readline() for _ in range(moments.randint(1, 20))]
            driver = int(lines[-1])
            app.kill()
        try:
            psutil.Process(driver).wait(10)  # it ends with its app, and the memory of both with them
        except psutil.NoSuchProcess:
            continue
    assert abs(shared_kib() - shared_kib(before)) < 64 * 1024


def shared_kib(text: str | None = None) -> int:
    lines = (text or Path("/proc/meminfo").read_text(encoding="ascii")).splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


def test_apps_killed_at_random_leave_nothing() -> None:
    with leak_check():
        app_kills(4)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_100_apps_killed_at_random_leave_nothing() -> None:
    with leak_check():
        app_kills(100)


# --- a hostile client ----------------------------------------------------------------------------------------------------


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def half_a_socket() -> int:
    one, other = socket.socketpair()
    other.close()
    return one.detach()


def memfd(size: int, *, sealed: bool) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, 1033, 2 | 4)
    return fd


ASHMEM, MMAP_FD = MemoryKind.ASHMEM, MemoryKind.MMAP_FD
PAGE = os.sysconf("SC_PAGE_SIZE")
LIES: dict[str, tuple[Callable[[], int], MemoryDescription]] = {
    "a pipe": (pipe, MemoryDescription(ASHMEM, 1024)),
    "a socket": (half_a_socket, MemoryDescription(ASHMEM, 1024)),
    "a directory": (lambda: os.open("/", os.O_RDONLY), MemoryDescription(MMAP_FD, 1024)),
    "a device": (lambda: os.open("/dev/zero", os.O_RDWR), MemoryDescription(MMAP_FD, 1024)),
    "a memfd that is shorter": (lambda: memfd(512, sealed=True), MemoryDescription(ASHMEM, 1024)),
    "an empty memfd": (lambda: memfd(0, sealed=True), MemoryDescription(ASHMEM, 1024)),
    "an unsealed memfd": (lambda: memfd(4096, sealed=False), MemoryDescription(ASHMEM, 1024)),
    "an unsealed memfd called a file": (lambda: memfd(4096, sealed=False), MemoryDescription(MMAP_FD, 1024)),
    "an offset near 2^64": (lambda: memfd(4096, sealed=True), MemoryDescription(MMAP_FD, 1024, True, 2**64 - PAGE)),
    "an offset that is no page": (lambda: memfd(4096, sealed=True), MemoryDescription(MMAP_FD, 1024, True, 20)),
    "an offset where there is none": (lambda: memfd(8192, sealed=True), MemoryDescription(ASHMEM, 1024, True, PAGE)),
    "a size near 2^64": (lambda: memfd(4096, sealed=True), MemoryDescription(ASHMEM, 2**64 - 1)),
    "no size": (lambda: memfd(4096, sealed=True), MemoryDescription(ASHMEM, 0)),
}


async def test_lies_about_memory_are_refused_one_by_one_and_hurt_nobody() -> None:
    async with nothing_left(), aionn.Runtime() as runtime:
        model = aionn.Model.from_onnx(identity_model({"x": (64,)}, outputs=["y"]))
        compilation = await runtime.compile(model, devices=(FAKE,))
        state = await compilation.allocate(inputs=("x",), outputs=("y",))
        await state.reset(5)
        pid = next(device.pid for device in runtime.devices if device.pid)
        assert pid is not None
        driver = psutil.Process(pid)
        filled = await compilation.allocate(inputs=("x",))
        prepared, token = state._state.buffers.prepared[0], filled._state.buffers.front.token
        assert isinstance(prepared, RemotePreparedModel)
        connection, number = prepared.device.connection, prepared.number
        x, y = RequestArgument(DataLocation(0, 0, 256), (64,)), RequestArgument(DataLocation(0, 512, 256), (64,))

        async def execute(description: MemoryDescription, fd: int, request: Request) -> ErrorStatus:
            result, _ = await connection.call(Execute(number, request, (LentMemory(description, Fd(fd)),), False, None))
            return result.status

        good = Region.allocate(1024)
        assert await execute(good.description, good.fileno(), Request((x,), (y,))) is ErrorStatus.NONE
        before = driver.num_fds(), mappings(pid)
        for name, (make, description) in LIES.items():
            fd = make()
            phase = ErrorStatus.GENERAL_FAILURE if name.startswith(("a ", "an empty", "an unsealed")) else ErrorStatus.INVALID_ARGUMENT
            if name == "a size near 2^64":
                phase = ErrorStatus.INVALID_ARGUMENT
            assert await execute(description, fd, Request((x,), (y,))) is phase, name
            await filled.reset(4)
            with pytest.raises(AionnError):
                await connection.call(CopyFrom(token, LentMemory(description, Fd(fd)), (64,)))
            with pytest.raises(aionn.ExecutionError, match="not initialized"):
                await filled.snapshot()
            os.close(fd)
        for begin, length in ((2**64 - 128, 256), (2**63, 256), (1024, 256), (900, 256), (256, 256 - 4), (100, 256)):
            wrong = RequestArgument(DataLocation(0, begin, length), (64,))
            assert await execute(good.description, good.fileno(), Request((x,), (wrong,))) is ErrorStatus.INVALID_ARGUMENT
        # The shape of a request is judged before its memory is looked at.
        fd = pipe()
        assert await execute(good.description, fd, Request((x,), (x,))) is ErrorStatus.INVALID_ARGUMENT
        os.close(fd)
        good.close()
        assert (driver.num_fds(), mappings(pid)) == before
        # The driver and its other client's memory are as they were.
        assert pid == next(device.pid for device in runtime.devices if device.pid)
        np.testing.assert_array_equal(await state.snapshot(), np.full(64, 5, np.float32))
        await compilation.compute({"x": state}, outputs={"y": state})
