"""Rows of NNAPI's TestValidation and TestMemory about memory in the driver, on the public face: each test is named after its row.

Rows of operands that ONNX does not have (scale, zero point, frequency, padding) have no counterpart. Nor has a part of a device
memory: the face has no slice of one, and `test_memory_domains` refuses offsets and lengths in a request by hand.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import permutations
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import helper

import aionn
from aionn.hal.types import ErrorStatus
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio

OPERANDS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "x": ("float32", (1, 2)),
    "same": ("float32", (1, 2)),
    "half": ("float16", (1, 2)),
    "byte": ("uint8", (1, 2)),
    "flat": ("float32", (2,)),
    "tall": ("float32", (3, 2)),
    "scalar": ("float32", ()),
    "open": ("float32", ("n", 2)),
}
GOOD = np.array([[3, 4]], np.float32)


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


def every_kind() -> aionn.Model:
    """Each input comes back as the output of its name and "_out"."""
    values = {}
    for name, (dtype, dims) in OPERANDS.items():
        element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        for operand in (name, f"{name}_out"):
            values[operand] = helper.make_tensor_value_info(operand, element, list(dims))
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in OPERANDS]
    graph = helper.make_graph(nodes, "kinds", [values[name] for name in OPERANDS], [values[f"{name}_out"] for name in OPERANDS])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return aionn.Model.from_onnx(made.SerializeToString())


def inputs(**other: Any) -> dict[str, Any]:
    arrays = {name: np.ones([2 if extent == "n" else int(extent) for extent in dims], dtype) for name, (dtype, dims) in OPERANDS.items()}
    return {**arrays, **other}


@pytest.fixture(scope="module")
async def compilation(anyio_backend: Any) -> AsyncIterator[aionn.Compilation]:
    """The driver that it began with serves it to the end, whatever is asked of it."""
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(every_kind(), devices=("onnxruntime",))
        pids = [device.pid for device in runtime.devices]
        yield compilation
        assert [device.pid for device in runtime.devices] == pids
        await compilation.compute(inputs())


@pytest.fixture(params=["compute", "burst"])
async def compute(request: pytest.FixtureRequest, compilation: aionn.Compilation) -> AsyncIterator[Any]:
    async with compilation.burst() as burst:
        yield compilation.compute if request.param == "compute" else burst.compute


async def refused(compilation: aionn.Compilation, **wrong: Any) -> None:
    with pytest.raises(aionn.CallerError):
        await (await compilation.allocate(**wrong)).aclose()


async def empty(memory: aionn.DeviceMemory) -> None:
    """It holds nothing that can be read."""
    with pytest.raises(aionn.ExecutionError, match="not initialized") as caught:
        await memory.snapshot()
    assert caught.value.status is ErrorStatus.GENERAL_FAILURE


# --- MemoryDesc --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["inputs", "outputs"])
async def test_memory_desc_add_input_role_and_add_output_role(compilation: aionn.Compilation, side: str) -> None:
    name, other = ("x", "x_out") if side == "inputs" else ("x_out", "x")
    not_names: list[Any] = [None, 5, name, (5,), (None,), ([],), (name.encode(),), name.encode(), object()]
    for wrong in not_names:
        await refused(compilation, **{side: wrong})
    for wrong in (("unknown",), (other,), (name, "unknown"), (name, name), ("",)):
        await refused(compilation, **{side: wrong})
    names: Any
    for names in ((name,), [name]):
        async with await compilation.allocate(**{side: names}) as memory:
            assert getattr(memory, side) == (name,)


@pytest.mark.parametrize("what", ["type", "rank", "dims"])
async def test_memory_desc_operand_metadata(compilation: aionn.Compilation, what: str) -> None:
    """Roles that disagree, as two inputs, as an input and an output, and as two outputs; each in both orders."""
    kinds = {"type": ("x", "half", "byte"), "rank": ("x", "flat", "scalar"), "dims": ("x", "tall")}[what]
    for first, second in permutations(kinds, 2):
        await refused(compilation, inputs=(first, second))
        await refused(compilation, inputs=(first,), outputs=(f"{second}_out",))
        await refused(compilation, outputs=(f"{first}_out", f"{second}_out"))
    for roles in (
        {"inputs": ("x", "same"), "outputs": ()},
        {"inputs": ("same",), "outputs": ("x_out",)},
        {"inputs": (), "outputs": ("x_out", "same_out")},
        {"inputs": ("open", "x"), "outputs": ("open_out",)},
    ):
        async with await compilation.allocate(**roles) as memory:
            assert memory.shape == (1, 2)


async def test_memory_desc_set_dimensions(compilation: aionn.Compilation) -> None:
    wrong: Any
    for wrong in ((2,), (1, 2, 1), (2, 2), (1, 3), (-1, 2), (1, -2), (2**70, 2), 5, "12", (1.0, 2), (None, 2), ("1", 2), (float("nan"), 2)):
        await refused(compilation, inputs=("x",), shape=wrong)
        await refused(compilation, outputs=("x_out",), shape=wrong)
    for wrong in ((3,), (3, 3), (-3, 2), (2**63, 2), (2**32, 2**32), (3.5, 2), (3, None)):
        await refused(compilation, inputs=("open",), shape=wrong)
    for shape in ((), None, (1, 2), (0, 2), (0, 0), [1, 2], (np.int64(1), np.int32(2)), np.array([1, 2])):
        async with await compilation.allocate(inputs=("x",), shape=shape) as memory:  # type: ignore[arg-type]
            assert memory.shape == (1, 2)
    for shape in ((), None, (0, 2), (0, 0)):
        async with await compilation.allocate(inputs=("open",), shape=shape) as memory:
            assert memory.shape is None
    async with await compilation.allocate(inputs=("open",), shape=(5, 0)) as memory:
        assert memory.shape == (5, 2)


async def test_memory_desc_set_scalar_dimensions(compilation: aionn.Compilation) -> None:
    """Before and after adding the role: here the two are one call."""
    for wrong in ((1,), (0,), (1, 1)):
        await refused(compilation, inputs=("scalar",), shape=wrong)
        await refused(compilation, outputs=("scalar_out",), shape=wrong)
    async with await compilation.allocate(inputs=("scalar",), outputs=("scalar_out",), shape=()) as memory:
        assert memory.shape == ()
        await memory.copy_from(np.array(7, np.float32))
        assert await memory.snapshot() == 7
        with pytest.raises(aionn.CallerError):
            await memory.copy_from(np.ones(1, np.float32))
        await empty(memory)
        with aionn.Memory.allocate(4) as shared, pytest.raises(aionn.CallerError):
            await memory.copy_from(shared, (1,))


async def test_memory_desc_finish(compilation: aionn.Compilation) -> None:
    nothing: dict[str, Any]
    for nothing in ({}, {"inputs": ()}, {"outputs": []}, {"shape": (1, 2)}):
        await refused(compilation, **nothing)


async def test_memory_desc_create_memory(compilation: aionn.Compilation) -> None:
    """One description makes any number of memories, each with contents of its own."""
    memories = [await compilation.allocate(inputs=("x",), outputs=("x_out",)) for _ in range(5)]
    for number, memory in enumerate(memories):
        await memory.reset(number)
    for number, memory in enumerate(memories):
        np.testing.assert_array_equal(await memory.snapshot(), np.full((1, 2), number, np.float32))
        await memory.aclose()
        await memory.aclose()
        with pytest.raises(aionn.CallerError, match="closed"):
            await memory.snapshot()


@pytest.mark.parametrize("rows", [2**40, 2**60])
async def test_memory_desc_create_memory_that_no_machine_has(compilation: aionn.Compilation, rows: int) -> None:
    with pytest.raises(aionn.MemoryAllocationError) as caught:
        await compilation.allocate(inputs=("open",), shape=(rows, 2))
    assert caught.value.needed_bytes == 8 * rows


async def test_invalid_compilation_memory_desc_add_role() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (4,)})), devices=("reference",))
        await compilation.aclose()
        both: list[dict[str, Any]] = [{"inputs": ("x",)}, {"outputs": ("x_out",)}]
        for roles in both:
            with pytest.raises(aionn.CallerError, match="closed"):
                await compilation.allocate(**roles)
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (4,)})), devices=("reference",))
    for roles in both:
        with pytest.raises(aionn.CallerError):
            await compilation.allocate(**roles)


async def test_memory_desc_memory_copying(compilation: aionn.Compilation) -> None:
    """In the order of the row. A memory that a copy could not fill cannot be the source of another copy."""
    good, small, large = (aionn.Memory.allocate(size) for size in (8, 4, 16))
    good.array(np.float32, 2)[:] = GOOD[0]
    one = await compilation.allocate(inputs=("x",))
    two = await compilation.allocate(inputs=("same",))
    flat, tall, half = [await compilation.allocate(inputs=(name,)) for name in ("flat", "tall", "half")]
    wrong: Any
    for wrong in (None, 5, b"12345678", object()):
        await one.copy_from(good)
        with pytest.raises(aionn.CallerError):
            await one.copy_from(wrong)
        await empty(one)
    for wrong in (5, b"12345678", object()):
        with pytest.raises(aionn.CallerError):
            await one.copy_to(wrong)

    # Shared memory -> device memory
    for wrong in (small, large):
        await one.copy_from(good)
        with pytest.raises(aionn.CallerError):
            await one.copy_from(wrong)
        await empty(one)
    # Device memory -> shared memory
    with pytest.raises(aionn.ExecutionError, match="not initialized"):
        await one.copy_to(good)
    await one.copy_from(good)
    for wrong in (small, large):
        with pytest.raises(aionn.CallerError):
            await one.copy_to(wrong)
        np.testing.assert_array_equal(await one.snapshot(), GOOD)  # a copy out of it changes nothing
    # Device memory -> device memory
    with pytest.raises(aionn.CallerError):
        await one.copy_from(small)
    await two.copy_from(good)
    with pytest.raises(aionn.ExecutionError, match="not initialized"):
        await two.copy_from(one)
    await empty(two)
    await one.copy_from(good)
    for other in (flat, tall, half):
        await other.reset(1)
        with pytest.raises(aionn.CallerError):
            await other.copy_from(one)
        await empty(other)
    await two.copy_from(one)
    np.testing.assert_array_equal(await two.snapshot(), GOOD)
    await two.copy_from(two)
    np.testing.assert_array_equal(await two.snapshot(), GOOD)
    for memory in (one, two, flat, tall, half):
        await memory.aclose()
    with pytest.raises(aionn.CallerError, match="closed"):
        await one.copy_from(good)
    for shared in (good, small, large):
        shared.close()


async def test_a_copy_that_the_driver_cannot_read_leaves_the_memory_empty(compilation: aionn.Compilation, tmp_path: Any) -> None:
    path = tmp_path / "frame"
    path.write_bytes(bytes(8))
    async with await compilation.allocate(inputs=("x",), outputs=("x_out",)) as memory:
        await memory.copy_from(GOOD)
        with path.open("r+b") as file, aionn.Memory.from_fd(file, 8) as mapped:
            path.write_bytes(b"")
            with pytest.raises((aionn.CallerError, aionn.ExecutionError), match=r"cut off|shorter than claimed"):
                await memory.copy_from(mapped)
        await empty(memory)


async def test_an_execution_fills_a_memory_whose_last_copy_was_refused(compilation: aionn.Compilation, compute: Any) -> None:
    memory = await compilation.allocate(inputs=("x",), outputs=("x_out",))
    for value in (1, 2, 3):  # a burst sends the second and third without encoding them again
        await memory.reset(9)
        with pytest.raises(aionn.CallerError):
            await memory.copy_from(np.ones(3, np.float32))
        with pytest.raises(aionn.ExecutionError, match="not initialized"):
            await compute(inputs(x=memory))
        with pytest.raises(aionn.ExecutionError, match="not initialized"):
            await compute(inputs(x=memory), outputs={"x_out": memory})
        await compute(inputs(x=np.full((1, 2), value, np.float32)), outputs={"x_out": memory})
        np.testing.assert_array_equal(await memory.snapshot(), np.full((1, 2), value, np.float32))
        np.testing.assert_array_equal((await compute(inputs(x=memory)))["x_out"], np.full((1, 2), value, np.float32))
    await memory.aclose()


# --- DeviceMemory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_device_memory_set_input_from_memory(way: str) -> None:
    with FakeDevice() as fake:
        async with leak_check(), aionn.Runtime() as runtime:
            model = aionn.Model.from_onnx(identity_model({"x": (1, 2), "z": (1, 2)}))
            compilation = await runtime.compile(model, devices=(fake.name,))
            async with compilation.burst() as burst:
                compute = compilation.compute if way == "compute" else burst.compute
                memory = await compilation.allocate(inputs=("x",), outputs=("z_out",))
                read = await compilation.allocate(inputs=("x",))
                for uninitialized in (memory, read):
                    with pytest.raises(aionn.ExecutionError, match="not initialized"):
                        await compute({"x": uninitialized, "z": GOOD})
                await memory.copy_from(GOOD)
                await read.copy_from(memory)
                found = (await compute({"x": read, "z": GOOD}))["x_out"]
                np.testing.assert_array_equal(found, GOOD)
                # No role for it.
                for arguments, outputs in (
                    ({"x": GOOD, "z": read}, {}),
                    ({"x": GOOD, "z": GOOD}, {"x_out": read}),
                    ({"x": GOOD, "z": GOOD}, {"x_out": memory}),
                ):
                    with pytest.raises(aionn.CallerError, match="was allocated for"):
                        await compute(arguments, outputs=outputs)
                np.testing.assert_array_equal(await read.snapshot(), GOOD)  # a refused request changes nothing
                # A failed execution with it as output.
                fake.fail()
                with pytest.raises(aionn.ExecutionError, match="failed on demand"):
                    await compute({"x": GOOD, "z": GOOD}, outputs={"z_out": memory})
                fake.behave()
                with pytest.raises(aionn.ExecutionError, match="not initialized") as caught:
                    await compute({"x": memory, "z": GOOD})
                assert caught.value.status is ErrorStatus.GENERAL_FAILURE
                del found, caught


async def test_device_memory_set_input_from_memory_emptied_between_set_and_compute(compilation: aionn.Compilation) -> None:
    async with compilation.burst() as burst, await compilation.allocate(inputs=("x",)) as memory:
        await memory.copy_from(GOOD)
        async with burst.frame(shapes={"open": (2, 2)}) as frame:
            for name, value in inputs(x=memory).items():
                frame[name] = value
            np.testing.assert_array_equal((await burst.compute(frame))["x_out"], GOOD)
            with pytest.raises(aionn.CallerError):
                await memory.copy_from(np.ones((2, 2), np.float32))
            with pytest.raises(aionn.ExecutionError, match="not initialized"):
                await burst.compute(frame)
            await memory.copy_from(2 * GOOD)
            np.testing.assert_array_equal((await burst.compute(frame))["x_out"], 2 * GOOD)


async def test_device_memory_set_output_from_memory(compilation: aionn.Compilation, compute: Any) -> None:
    async with await compilation.allocate(outputs=("x_out",)) as memory:
        await empty(memory)
        for arguments, outputs in ((inputs(x=memory), {}), (inputs(), {"same_out": memory})):
            with pytest.raises(aionn.CallerError, match="was allocated for"):
                await compute(arguments, outputs=outputs)
        await empty(memory)
        left = await compute(inputs(x=GOOD), outputs={"x_out": memory})
        assert "x_out" not in left
        np.testing.assert_array_equal(await memory.snapshot(), GOOD)
        not_outputs: list[Any] = [5, "x_out", [memory], {"x_out": 5}, {"x_out": None}, {5: memory}, {"unknown": memory}]
        for wrong in not_outputs:
            with pytest.raises(aionn.CallerError):
                await compute(inputs(), outputs=wrong)
        np.testing.assert_array_equal(await memory.snapshot(), GOOD)


async def test_device_memory_set_input_from_memory_dynamic_shape(compilation: aionn.Compilation, compute: Any) -> None:
    """A memory of one row stands for an input of any number of rows. The request cannot give it two."""
    async with await compilation.allocate(inputs=("open",), shape=(1, 2)) as memory:
        for rows in (2, 3):
            with pytest.raises(aionn.CallerError):
                await memory.copy_from(np.ones((rows, 2), np.float32))
            with aionn.Memory.allocate(8 * rows) as shared, pytest.raises(aionn.CallerError):
                await memory.copy_from(shared)
        await memory.copy_from(GOOD)
        np.testing.assert_array_equal((await compute(inputs(open=memory)))["open_out"], GOOD)
        async with compilation.burst() as burst, burst.frame(shapes={"open": (2, 2)}) as frame:
            for name, value in inputs(open=memory).items():
                frame[name] = value
            with pytest.raises(aionn.CallerError, match="in a frame for"):
                await burst.compute(frame)


async def test_device_memory_set_output_from_memory_dynamic_shape(compilation: aionn.Compilation, compute: Any) -> None:
    """As a driver reports an output that does not fit the memory: GENERAL_FAILURE, for the caller cannot give it more room."""
    async with await compilation.allocate(outputs=("open_out",), shape=(1, 2)) as memory:
        await compute(inputs(open=GOOD), outputs={"open_out": memory})
        np.testing.assert_array_equal(await memory.snapshot(), GOOD)
        with pytest.raises(aionn.ExecutionError) as caught:
            await compute(inputs(open=np.ones((2, 2), np.float32)), outputs={"open_out": memory})
        assert not isinstance(caught.value, aionn.OutputInsufficientSizeError)
        assert caught.value.status is ErrorStatus.GENERAL_FAILURE
        await empty(memory)
        await compute(inputs(open=2 * GOOD), outputs={"open_out": memory})
        np.testing.assert_array_equal(await memory.snapshot(), 2 * GOOD)


# --- TestMemory --------------------------------------------------------------------------------------------------------


WIDE = 52
"""A convolution over four axes of this extent needs 52^4 * 53^4 elements for its columns: more bytes than any process can address."""


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
async def test_memory_leak_test_conv_too_large(engine: str) -> None:
    axes = [WIDE] * 4
    shapes = {"x": [1, 1, *axes], "w": [1, 1, *axes], "y": [1, 1, *[WIDE + 1] * 4]}
    values = {name: helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()}
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[WIDE // 2] * 8)
    graph = helper.make_graph([node], "too_large", [values["x"], values["w"]], [values["y"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.ones((1, 1, *axes), np.float32)
    failures = []
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(model.SerializeToString()), devices=(engine,))
        pid = next(device.pid for device in runtime.devices if device.pid)
        async with compilation.burst() as burst:
            for compute in (compilation.compute, burst.compute) * 2:
                try:
                    await compute({"x": x, "w": x})
                except aionn.ExecutionError as error:
                    failures.append(error.status)
            held = psutil.Process(pid).memory_info().rss
            for _ in range(5):
                with pytest.raises(aionn.ExecutionError):
                    await burst.compute({"x": x, "w": x})
            assert psutil.Process(pid).memory_info().rss - held < 2 * x.nbytes
        assert pid == next(device.pid for device in runtime.devices if device.pid)
    expected = {"onnxruntime": ErrorStatus.GENERAL_FAILURE, "reference": ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT}[engine]
    assert failures == [expected] * 4
