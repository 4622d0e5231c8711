"""Memory that an app brings: the rows of NNAPI's TestMemory and TestValidation that have a counterpart, through a real driver.

Constants and arguments from files, shared memory, blobs and images; over compute and over a burst; what is refused, and
that nothing stays mapped.
"""

# Tests open small files; no task waits for the loop meanwhile.
# ruff: noqa: ASYNC230

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import aionn
from aionn.testing.models import identity_model
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio

WIDTH = 64
BYTES = WIDTH * 4


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def runtime(anyio_backend: Any) -> AsyncIterator[aionn.Runtime]:
    async with aionn.Runtime() as runtime:
        # The driver is there before anything is counted.
        async with await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("onnxruntime",)):
            pass
        yield runtime


def two_additions(first_offset: int, second_offset: int, location: str = "weights") -> bytes:
    """y = x + a + b, with a and b in a file of that name, at these bytes."""
    constants = []
    for name, offset in (("a", first_offset), ("b", second_offset)):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[WIDTH], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(BYTES))):
            tensor.external_data.add(key=key, value=value)
        constants.append(tensor)
    nodes = [helper.make_node("Add", ["x", "a"], ["t"]), helper.make_node("Add", ["t", "b"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "additions", values[:1], values[1:], constants)
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


def numbers(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)


A, B, X = numbers(1), numbers(2), numbers(3)


async def added(runtime: aionn.Runtime, model: aionn.Model) -> None:
    async with await runtime.compile(model, devices=("onnxruntime",)) as compilation:
        outputs = await compilation.compute({"x": X})
        np.testing.assert_allclose(outputs["y"], X + A + B, rtol=1e-6)


# --- TestMemory: constants ---------------------------------------------------------------------------------------------


async def test_fd(runtime: aionn.Runtime, tmp_path: Path) -> None:
    with leak_check():
        with open(tmp_path / "matrices", "w+b") as file:
            file.write(bytes(20) + A.tobytes() + bytes(400 - 20 - BYTES) + B.tobytes())
            file.flush()
            memory = aionn.Memory.from_fd(file, 400 + BYTES, mmap.PROT_READ)
        model = aionn.Model.from_onnx(two_additions(20, 400), memories={"weights": memory})
        memory.close()
        assert [constant.location.offset for constant in model.constants] == [20, 400]
        await added(runtime, model)
        del model


async def test_a_hardware_buffer_blob_holds_constants(runtime: aionn.Runtime) -> None:
    with leak_check():
        blob = aionn.HardwareBuffer.allocate(1024)
        blob.planes["blob"][20 : 20 + BYTES] = A.view(np.uint8)
        blob.planes["blob"][512 : 512 + BYTES] = B.view(np.uint8)
        model = aionn.Model.from_onnx(two_additions(20, 512), memories={"weights": blob.memory})
        await added(runtime, model)
        image = aionn.HardwareBuffer.allocate(16, 16, "rgba_8888")
        with pytest.raises(aionn.CallerError, match="image"):
            aionn.Model.from_onnx(two_additions(0, 256), memories={"weights": image.memory})
        image.close()
        blob.close()
        del model, blob


async def test_a_weights_file_beside_the_model_is_mapped_where_it_lies(runtime: aionn.Runtime, tmp_path: Path) -> None:
    (tmp_path / "in_place.onnx").write_bytes(two_additions(20, 20 + BYTES))
    (tmp_path / "weights").write_bytes(bytes(20) + A.tobytes() + B.tobytes())
    in_place = aionn.Model.from_onnx(tmp_path / "in_place.onnx")
    assert [pool.description.kind.value for pool in in_place.pools] == ["mmap_fd"]
    assert not in_place.pools[0].description.writable
    await added(runtime, in_place)
    # An element that cannot be read whole is copied. The token names the file, which says where its weights lie.
    (tmp_path / "odd").write_bytes(bytes(3) + A.tobytes() + B.tobytes())
    (tmp_path / "copied.onnx").write_bytes(two_additions(3, 3 + BYTES, "odd"))
    copied = aionn.Model.from_onnx(tmp_path / "copied.onnx")
    assert [pool.description.kind.value for pool in copied.pools] == ["ashmem"]
    assert copied.token != in_place.token
    await added(runtime, copied)


@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize("cached", [False, True], ids=["no_cache", "cache"])
@pytest.mark.parametrize("given", [False, True], ids=["beside_the_model", "memory_of_the_app"])
async def test_weights_cut_off_on_disk_are_a_compilation_error(
    runtime: aionn.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, cached: bool, given: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    content = two_additions(4096, 4096 + BYTES)
    (tmp_path / "model.onnx").write_bytes(content)
    (tmp_path / "weights").write_bytes(bytes(4096) + A.tobytes() + B.tobytes())
    if given:
        with open(tmp_path / "weights", "rb") as file, aionn.Memory.from_fd(file, 4096 + 2 * BYTES, mmap.PROT_READ) as memory:
            model = aionn.Model.from_onnx(content, memories={"weights": memory})
    else:
        model = aionn.Model.from_onnx(tmp_path / "model.onnx")
    os.truncate(tmp_path / "weights", 100)
    cache: dict[str, Any] = {"cache_dir": tmp_path / "cache", "token": model.token} if cached else {}
    with pytest.raises(aionn.CompilationError, match="cut off") as told:
        compilation = await runtime.compile(model, devices=("onnxruntime",), mode=mode, **cache)
        await compilation.compute({"x": X})
    assert "100 bytes" in told.value.reason
    # The driver goes on, and the whole file compiles.
    (tmp_path / "weights").write_bytes(bytes(4096) + A.tobytes() + B.tobytes())
    await added(runtime, aionn.Model.from_onnx(tmp_path / "model.onnx"))


def test_memory_cut_off_on_disk_is_refused_when_a_model_is_read_from_it(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(A.tobytes() + B.tobytes())
    with open(tmp_path / "weights", "rb") as file, aionn.Memory.from_fd(file, 2 * BYTES, mmap.PROT_READ) as memory:
        os.truncate(tmp_path / "weights", 100)
        with pytest.raises(aionn.CallerError, match="cut off"):
            aionn.Model.from_onnx(two_additions(0, BYTES), memories={"weights": memory})


@pytest.mark.parametrize(("first", "second"), [(0, 1024), (2**63, 0), (-4, 0), (800, 0), (2**64 - 256, 0)])
def test_set_operand_value_from_memory_refuses_what_lies_beyond(first: int, second: int) -> None:
    with aionn.Memory.allocate(1024) as memory, pytest.raises(aionn.CallerError, match="bytes"):
        aionn.Model.from_onnx(two_additions(first, second), memories={"weights": memory})


def test_set_operand_value_from_memory_refuses_what_is_no_memory() -> None:
    blob = aionn.HardwareBuffer.allocate(1024)
    with blob, aionn.Memory.allocate(1024) as memory:
        nothings: list[Any] = [5, "weights", [memory], {"weights": None}, {"weights": 5}, {"weights": bytes(1024)}, {"weights": blob}]
        for wrong in nothings:
            with pytest.raises(aionn.CallerError, match="memories"):
                aionn.Model.from_onnx(two_additions(0, 512), memories=wrong)
        for other in ({}, {"other": memory}, None):
            with pytest.raises(aionn.CallerError, match="weights"):
                aionn.Model.from_onnx(two_additions(0, 512), memories=other)
    with pytest.raises(aionn.CallerError, match="closed"):
        aionn.Model.from_onnx(two_additions(0, 512), memories={"weights": memory})


async def test_an_output_may_not_overlap_a_constant(runtime: aionn.Runtime) -> None:
    with aionn.Memory.allocate(4096) as memory:
        memory.array(np.float32, WIDTH)[:], memory.array(np.float32, WIDTH, 512)[:] = A, B
        model = aionn.Model.from_onnx(two_additions(0, 512), memories={"weights": memory})
        async with await runtime.compile(model, devices=("onnxruntime",)) as compilation, compilation.burst() as burst:
            for target, wrong in ((memory[0:BYTES], True), (memory[600 : 600 + BYTES], True), (memory[1024 : 1024 + BYTES], False)):
                for compute in (compilation.compute, burst.compute):
                    if wrong:
                        with pytest.raises(aionn.CallerError, match="constant"):
                            await compute({"x": X}, outputs={"y": target})
                    else:
                        await compute({"x": X}, outputs={"y": target})
                        np.testing.assert_allclose(target.array(np.float32, WIDTH), X + A + B, rtol=1e-6)


# --- TestMemory, TestValidation: arguments -----------------------------------------------------------------------------


@pytest.fixture(params=["compute", "burst"])
async def compute(request: pytest.FixtureRequest, runtime: aionn.Runtime) -> AsyncIterator[Any]:
    """`compute` of y = x, float32 (64,): without and with a burst."""
    model = aionn.Model.from_onnx(identity_model({"x": (WIDTH,)}, outputs=["y"]))
    async with await runtime.compile(model, devices=("onnxruntime",)) as compilation, compilation.burst() as burst:
        chosen = compilation.compute if request.param == "compute" else burst.compute
        await chosen({"x": X})  # the frame it comes with is there before anything is counted
        yield chosen


async def test_a_shared_memory(compute: Any) -> None:
    with leak_check():
        memory = aionn.Memory.allocate(32 + 2 * BYTES + 60)
        given, wanted = memory[32 : 32 + BYTES], memory[32 + BYTES : 32 + 2 * BYTES]
        given.array(np.float32, WIDTH)[:] = X
        outputs = await compute({"x": given}, outputs={"y": wanted})
        np.testing.assert_array_equal(outputs["y"], X)
        np.testing.assert_array_equal(wanted.array(np.float32, WIDTH), X)
        assert set(memory.view()[32 + 2 * BYTES :]) == {0}
        del outputs
        for part in (given, wanted, memory):
            part.close()
        del given, wanted, memory, part


@pytest.mark.parametrize("kind", ["float32", "float16", "uint8", "int8"])
async def test_set_input_and_output_from_memory_of_every_type(runtime: aionn.Runtime, tmp_path: Path, kind: str) -> None:
    """Shared memory, a file, a blob and memory in the driver, each as input and as output; and what does not fit."""
    element = np.dtype(kind)
    size = WIDTH * element.itemsize
    x = (np.arange(WIDTH) - (WIDTH // 2 if kind != "uint8" else 0)).astype(element)
    (tmp_path / "frames").write_bytes(x.tobytes() + bytes(size))
    model = aionn.Model.from_onnx(identity_model({"x": (WIDTH,)}, element, outputs=["y"]))
    with open(tmp_path / "frames", "r+b") as file:
        mapped = aionn.Memory.from_fd(file, 2 * size)
    async with (
        await runtime.compile(model, devices=("onnxruntime",)) as compilation,
        compilation.burst() as burst,
        await compilation.allocate(inputs=("x",), outputs=("y",)) as state,
    ):
        with mapped, aionn.Memory.allocate(4 * size) as memory, aionn.HardwareBuffer.allocate(size) as blob:
            memory.array(element, WIDTH)[:] = x
            for compute in (compilation.compute, burst.compute):
                for target in (memory[size : 2 * size], mapped[size:], blob):
                    place = np.frombuffer(target.view(), element)
                    place[:] = 0
                    await compute({"x": memory[:size]}, outputs={"y": target})
                    np.testing.assert_array_equal(place, x)
                    np.testing.assert_array_equal((await compute({"x": target}))["y"], x)
                await state.reset()
                for _ in range(2):
                    assert await compute({"x": mapped[:size]}, outputs={"y": state}) == {}
                    assert await compute({"x": state}, outputs={"y": state}) == {}
                    np.testing.assert_array_equal((await compute({"x": state}))["y"], x)
                for wrong in (memory, memory[: size - element.itemsize], memory[: size + element.itemsize]):
                    with pytest.raises(aionn.CallerError, match="same size"):
                        await compute({"x": wrong})
                    with pytest.raises(aionn.CallerError, match="same size"):
                        await compute({"x": x}, outputs={"y": wrong})
                with pytest.raises(aionn.CallerError, match="overlap"):
                    await compute({"x": memory[:size]}, outputs={"y": memory[size // 2 : size // 2 + size]})
                if element.itemsize > 1:
                    with pytest.raises(aionn.CallerError, match="multiples of"):
                        await compute({"x": memory[1 : 1 + size]})
            np.testing.assert_array_equal(memory.array(element, WIDTH), x)
    assert (tmp_path / "frames").read_bytes() == x.tobytes() * 2


async def test_two_with_hardware_buffer_input(compute: Any) -> None:
    with aionn.HardwareBuffer.allocate(BYTES) as blob, aionn.HardwareBuffer.allocate(BYTES) as out:
        blob.planes["blob"][:] = X.view(np.uint8)
        np.testing.assert_array_equal((await compute({"x": blob}, outputs={"y": out}))["y"], X)


async def test_two_with_hardware_buffer_input_filled_after_it_was_set(runtime: aionn.Runtime) -> None:
    model = aionn.Model.from_onnx(identity_model({"x": (WIDTH,)}, outputs=["y"]))
    async with await runtime.compile(model, devices=("onnxruntime",)) as compilation, compilation.burst() as burst, burst.frame() as frame:
        with aionn.HardwareBuffer.allocate(BYTES) as blob:
            frame["x"] = blob
            for value in (X, A):
                blob.planes["blob"][:] = value.view(np.uint8)
                np.testing.assert_array_equal((await burst.compute(frame))["y"], value)


async def test_set_input_and_output_from_a_hardware_buffer_blob(compute: Any) -> None:
    """A blob is used as a whole, so its length must be the operand's."""
    for size in (BYTES - 4, BYTES + 4, 2 * BYTES, 1):
        with aionn.HardwareBuffer.allocate(size) as blob:
            with pytest.raises(aionn.CallerError, match="same size"):
                await compute({"x": blob})
            with pytest.raises(aionn.CallerError, match="same size"):
                await compute({"x": X}, outputs={"y": blob})


async def test_set_input_and_output_from_memory_of_another_shape(compute: Any) -> None:
    """The bytes are right, and the tensor that the app says lies there is not the operand's."""
    with aionn.Memory.allocate(BYTES) as memory:
        for shape in ((1, WIDTH), (WIDTH, 1), (8, 8), (WIDTH - 1,), (WIDTH + 1,), ()):
            with pytest.raises(aionn.CallerError, match="shape"):
                await compute({"x": memory.shaped(shape)})
            with pytest.raises(aionn.CallerError, match="shape"):
                await compute({"x": X}, outputs={"y": memory.shaped(shape)})
        not_shapes: list[Any] = [5, "12", (1.5,), (None,), (0,), (-1,), (2**70,)]
        for wrong in not_shapes:
            with pytest.raises(aionn.CallerError):
                memory.shaped(wrong)
        for wrong in not_shapes[1:4] + not_shapes[5:]:
            with pytest.raises(aionn.CallerError):
                memory.array(np.float32, wrong)


async def test_a_file_is_read_and_written_in_place(compute: Any, tmp_path: Path) -> None:
    (tmp_path / "frames").write_bytes(bytes(4096) + X.tobytes() + bytes(4096))
    with open(tmp_path / "frames", "r+b") as file:
        memory = aionn.Memory.from_fd(file, 4096, offset=4096)
    with memory:
        await compute({"x": memory[:BYTES]}, outputs={"y": memory[BYTES : 2 * BYTES]})
    assert (tmp_path / "frames").read_bytes()[4096 + BYTES : 4096 + 2 * BYTES] == X.tobytes()


async def test_a_file_that_is_cut_off_is_told_and_hurts_nobody(runtime: aionn.Runtime, compute: Any, tmp_path: Path) -> None:
    path = tmp_path / "frame"
    path.write_bytes(X.tobytes())
    with open(path, "r+b") as file, aionn.Memory.from_fd(file, BYTES) as memory:
        np.testing.assert_array_equal((await compute({"x": memory}))["y"], X)
        pids = [device.pid for device in runtime.devices]
        os.truncate(path, 0)
        with pytest.raises(aionn.ExecutionError, match=r"cut off|shorter than claimed"):
            await compute({"x": memory})
        np.testing.assert_array_equal((await compute({"x": X}))["y"], X)
        assert [device.pid for device in runtime.devices] == pids


async def test_set_input_from_memory_refuses_what_does_not_fit(compute: Any) -> None:
    with aionn.Memory.allocate(4 * BYTES) as memory:
        for wrong in (memory, memory[: BYTES - 4], memory[: BYTES + 4]):
            with pytest.raises(aionn.CallerError, match="same size"):
                await compute({"x": wrong})
            with pytest.raises(aionn.CallerError, match="same size"):
                await compute({"x": X}, outputs={"y": wrong})
        with pytest.raises(aionn.CallerError, match="multiples of 4"):
            await compute({"x": memory[2 : BYTES + 2]})
        with pytest.raises(aionn.CallerError, match="overlap"):
            await compute({"x": memory[:BYTES]}, outputs={"y": memory[BYTES // 2 : BYTES // 2 + BYTES]})
        with pytest.raises(aionn.CallerError, match="does not have"):
            await compute({"x": X}, outputs={"nothing": memory[:BYTES]})
        with pytest.raises(aionn.CallerError, match="ndarray"):
            await compute({"x": X}, outputs={"y": X})
    with pytest.raises(aionn.CallerError, match="closed"):
        await compute({"x": memory})


async def test_one_file_as_two_memories_is_still_one_file(compute: Any, tmp_path: Path) -> None:
    (tmp_path / "frame").write_bytes(X.tobytes() * 2)
    with open(tmp_path / "frame", "r+b") as file:
        first, second = aionn.Memory.from_fd(file, BYTES), aionn.Memory.from_fd(file, 2 * BYTES)
    with first, second:
        with pytest.raises(aionn.CallerError, match="overlap"):
            await compute({"x": first}, outputs={"y": second[4 : 4 + BYTES]})
        await compute({"x": first}, outputs={"y": second[BYTES:]})


async def test_memory_that_is_mapped_read_only_is_no_output(compute: Any, tmp_path: Path) -> None:
    (tmp_path / "frame").write_bytes(X.tobytes())
    with open(tmp_path / "frame", "rb") as file, aionn.Memory.from_fd(file, BYTES, mmap.PROT_READ) as memory:
        np.testing.assert_array_equal((await compute({"x": memory}))["y"], X)
        with pytest.raises(aionn.CallerError, match="reading only"):
            await compute({"x": X}, outputs={"y": memory})


async def test_memory_closed_while_in_flight_lives_until_the_answer(compute: Any) -> None:
    with leak_check():
        memory = aionn.Memory.allocate(BYTES)
        memory.array(np.float32, WIDTH)[:] = X
        found = []

        async def run() -> None:
            found.append((await compute({"x": memory}))["y"].copy())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.lowlevel.checkpoint()
            memory.close()
        np.testing.assert_array_equal(found[0], X)


async def test_free_memory_before_burst_and_burst_before_memory(runtime: aionn.Runtime) -> None:
    model = aionn.Model.from_onnx(identity_model({"x": (WIDTH,)}, outputs=["y"]))
    async with await runtime.compile(model, devices=("onnxruntime",)) as compilation:
        for memory_first in (True, False):
            memory = aionn.Memory.allocate(BYTES)
            async with compilation.burst() as burst:
                await burst.compute({"x": memory})
                if memory_first:
                    memory.close()
                    await burst.compute({"x": X})
            memory.close()


async def test_images_enter_as_the_operand_wants_them(runtime: aionn.Runtime) -> None:
    shapes = {"nhwc": (1, 16, 32, 3), "gray": (1, 1, 16, 32), "any": ("h", "w", 3), "whole": (24, 32)}
    model = aionn.Model.from_onnx(identity_model(shapes, np.uint8))
    rgb, gray, nv12 = (aionn.HardwareBuffer.allocate(32, 16, kind) for kind in ("rgb_888", "gray8", "nv12"))
    for buffer in (rgb, gray, nv12):
        content = np.frombuffer(buffer.view(), np.uint8)
        content[:] = np.random.default_rng(buffer.size_bytes).integers(0, 255, buffer.size_bytes)
    async with await runtime.compile(model, devices=("onnxruntime",)) as compilation, compilation.burst() as burst:
        for compute in (compilation.compute, burst.compute):
            found = await compute({"nhwc": rgb, "gray": gray, "any": rgb, "whole": nv12})
            np.testing.assert_array_equal(found["nhwc_out"][0], rgb.planes["rgb"])
            np.testing.assert_array_equal(found["gray_out"][0, 0], gray.planes["gray"][..., 0])
            np.testing.assert_array_equal(found["any_out"], rgb.planes["rgb"])
            np.testing.assert_array_equal(found["whole_out"][:16], nv12.planes["y"][..., 0])
        assert burst.statistics()["copied_bytes"] == 0
        with pytest.raises(aionn.CallerError, match="does not fit the operand"):
            await burst.compute({"nhwc": rgb, "gray": rgb, "any": rgb, "whole": nv12})
    for buffer in (rgb, gray, nv12):
        buffer.close()


async def test_a_frame_knows_what_stands_elsewhere(runtime: aionn.Runtime) -> None:
    model = aionn.Model.from_onnx(identity_model({"x": ("n",), "z": (WIDTH,)}))
    async with await runtime.compile(model, devices=("onnxruntime",)) as compilation, compilation.burst() as burst:
        with aionn.Memory.allocate(BYTES) as memory:
            memory.array(np.float32, WIDTH)[:] = X
            async with burst.frame(shapes={"x": (WIDTH,)}) as frame:
                frame["z"][:] = A
                frame["x"] = memory
                with pytest.raises(aionn.CallerError, match="stands for it"):
                    frame["x"]
                found = await burst.compute(frame)
                np.testing.assert_array_equal(found["x_out"], X)
                np.testing.assert_array_equal(found["z_out"], A)
                frame["x"] = B
                np.testing.assert_array_equal((await burst.compute(frame))["x_out"], B)
                frame["x"] = memory[: BYTES // 2]
                with pytest.raises(aionn.CallerError, match="in a frame for"):
                    await burst.compute(frame)
