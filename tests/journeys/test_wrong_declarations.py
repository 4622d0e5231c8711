"""Models whose files declare wrong shapes for outputs: apps get what the engine itself gives, in its true shape, on every way.

Real files do that (detectors, formula readers, exported attentions), and the engines run them. Each case asserts that what is declared
is not true, on real drivers; what comes out is held against the same engine used directly.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

import aionn
from aionn.graph.shapes import resolve_shapes
from tests.engines.onnx_graphs import model_of, value
from tests.leaks import driver_pids, leak_check

pytestmark = pytest.mark.anyio

Arrays = dict[str, NDArray[Any]]
Case = tuple[ModelProto, list[Arrays]]
ENGINES = ["onnxruntime", "openvino"]


@pytest.fixture(params=[pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Nothing here depends on the loop."""
    return request.param


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def rows(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(100 * seed + count).standard_normal((count, 4)).astype(np.float32)


def sliced(declared: list[int | str]) -> Case:
    """y = the first k rows of x."""
    nodes = [helper.make_node("Slice", ["x", "zero", "k"], ["y"])]
    inputs = [value("x", ["N", 4]), value("k", [1], TensorProto.INT64)]
    frames: list[Arrays] = [{"x": rows(8, seed), "k": np.array([k])} for seed, k in enumerate((8, 2, 5, 1, 8))]
    return model_of(nodes, inputs, [value("y", declared)], {"zero": np.array([0])}), frames


def too_large() -> Case:
    """The case of scrfd: the rest of the array was the frame's before."""
    return sliced([8, 4])


def too_small() -> Case:
    """The last frames need more than any first guess."""
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)]
    frames: list[Arrays] = [{"x": rows(count, seed)} for seed, count in enumerate((2, 1, 3, 900, 2, 901))]
    return model_of(nodes, [value("x", ["N", 4])], [value("y", [4, 4])]), frames


def wrong_rank() -> Case:
    nodes = [helper.make_node("Unsqueeze", ["x", "axis"], ["y"])]
    frames: list[Arrays] = [{"x": rows(3, seed)} for seed in range(3)]
    return model_of(nodes, [value("x", ["N", 4])], [value("y", [3, 4])], {"axis": np.array([0])}), frames


def one_symbol_for_two_extents() -> Case:
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=0), helper.make_node("Transpose", ["x"], ["z"], perm=[1, 0])]
    frames: list[Arrays] = [{"x": rows(count)} for count in (3, 1, 700, 3)]
    return model_of(nodes, [value("x", ["N", "M"])], [value("y", ["N", "M"]), value("z", ["N", "M"])]), frames


def batch_fixed_in_the_output_only() -> Case:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    frames: list[Arrays] = [{"x": rows(count)} for count in (1, 3, 2, 800, 1)]
    return model_of(nodes, [value("x", ["N", 4])], [value("y", [1, 4])]), frames


def nothing_found() -> Case:
    """As detectors have it: a fixed number of boxes is declared, and none or a few come out."""
    nodes = [helper.make_node("NonZero", ["x"], ["y"])]
    frames: list[Arrays] = [{"x": np.eye(4, dtype=np.float32)[:count].repeat(2, 0)} for count in (4, 1, 2)]
    frames.insert(1, {"x": np.zeros((8, 4), np.float32)})
    return model_of(nodes, [value("x", ["N", 4])], [value("y", [2, 8], TensorProto.INT64)]), frames


def an_input_that_is_an_output() -> Case:
    """A smaller array would be broadcast over the larger one."""
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    frames: list[Arrays] = [{"x": rows(count)} for count in (8, 1, 3)]
    return model_of(nodes, [value("x", ["N", 4])], [value("y", ["N", 4]), value("x", [8, 4])]), frames


CASES: list[Callable[[], Case]] = [
    too_large,
    too_small,
    wrong_rank,
    one_symbol_for_two_extents,
    batch_fixed_in_the_output_only,
    nothing_found,
    an_input_that_is_an_output,
]


def directly(engine: str, model: ModelProto) -> Callable[[Arrays], Arrays]:
    """The engine, used as its own documentation says."""
    content = model.SerializeToString()
    names = [output.name for output in model.graph.output]
    if engine == "onnxruntime":
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4
        session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])
        return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))
    import openvino

    compiled = openvino.Core().compile_model(openvino.Core().read_model(content), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda inputs: dict(zip(names, map(np.array, compiled(inputs).values()), strict=True))


def lied(model: aionn.Model, inputs: Arrays, outputs: Arrays) -> bool:
    """Whether an output has another shape than the model declares for these inputs."""
    declared = resolve_shapes(model.outputs, model.inputs, {name: inputs[name].shape for name in model.inputs})
    return any(declared[name] not in (None, array.shape) for name, array in outputs.items())


def check(found: Any, expected: Arrays) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.fixture(params=CASES, ids=lambda case: case.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param()
    return found


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def test_a_wrong_output_declaration_is_found_out_and_the_true_output_comes(engine: str, case: Case) -> None:
    proto, frames = case
    model, direct = aionn.Model.from_onnx(proto.SerializeToString()), directly(engine, proto)
    expected = [direct(inputs) for inputs in frames]
    assert any(lied(model, inputs, outputs) for inputs, outputs in zip(frames, expected, strict=True))
    async with leak_check(), aionn.Runtime() as runtime:
        alone = await runtime.compile(model, devices=(engine,))
        for inputs, outputs in zip(frames, expected, strict=True):
            check(await alone.compute(inputs), outputs)
        streamed = await runtime.compile(model, devices=(engine,))
        async with streamed.burst() as burst:
            for _ in range(3):
                for inputs, outputs in zip(frames, expected, strict=True):
                    check(await burst.compute(inputs), outputs)
                    check(await burst.compute(inputs), outputs)  # the usual frame
            kept = [result.outputs async for result in burst.map(frames)]
            for found, outputs in zip(kept, expected, strict=True):
                check(found, outputs)  # none was overwritten by the next
            del kept, found
            async with burst.frame({name: array.shape for name, array in frames[0].items()}) as frame:
                for name, array in frames[0].items():
                    frame[name][...] = array
                check(await burst.compute(frame), expected[0])
            assert burst.statistics()["connections"] == 1


async def test_a_frame_of_the_apps_own_gets_an_output_larger_than_declared(engine: str) -> None:
    """The first execution of all: nothing is known yet."""
    proto, frames = batch_fixed_in_the_output_only()
    model, inputs = aionn.Model.from_onnx(proto.SerializeToString()), frames[3]
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        async with compilation.burst() as burst, burst.frame({"x": inputs["x"].shape}) as frame:
            frame["x"][...] = inputs["x"]
            check(await burst.compute(frame), directly(engine, proto)(inputs))


@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_an_apps_own_memory_gets_an_output_of_another_shape_than_declared(engine: str, way: str) -> None:
    proto, frames = sliced([4, 4])
    model, direct = aionn.Model.from_onnx(proto.SerializeToString()), directly(engine, proto)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        async with compilation.burst() as burst, aionn.Memory.allocate(64) as declared, aionn.Memory.allocate(4096) as large:
            compute = burst.compute if way == "burst" else compilation.compute
            for inputs in frames[1], frames[3]:  # less than declared
                check(await compute(inputs, outputs={"y": declared}), direct(inputs))
            with pytest.raises(aionn.OutputInsufficientSizeError) as told:
                await compute(frames[2], outputs={"y": declared})
            assert told.value.shapes == {"y": (5, 4)}
            del told
            for inputs in frames:
                found = await compute(inputs, outputs={"y": large})
                check(found, direct(inputs))
                np.testing.assert_array_equal(large.array(np.float32, found["y"].shape), direct(inputs)["y"])
            del found


@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_device_memory_takes_an_output_of_another_shape_than_declared(engine: str, way: str) -> None:
    proto, frames = too_large()
    model, direct = aionn.Model.from_onnx(proto.SerializeToString()), directly(engine, proto)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        async with compilation.burst() as burst, await compilation.allocate(outputs=("y",)) as memory:
            assert memory.shape == (8, 4)
            compute = burst.compute if way == "burst" else compilation.compute
            for inputs in (*frames, *frames):
                expected = direct(inputs)["y"]
                assert await compute(inputs, outputs={"y": memory}) == {}
                assert memory.shape == expected.shape
                np.testing.assert_array_equal(await memory.snapshot(), expected)


@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_outputs_come_as_declared_from_a_driver_that_has_not_seen_the_declaration_fail(engine: str, way: str) -> None:
    """The model that is swapped in has only been tried on inputs for which the declaration is true."""
    proto, frames = batch_fixed_in_the_output_only()
    other = model_of([helper.make_node("Abs", ["x"], ["y"])], proto.graph.input, proto.graph.output)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(proto.SerializeToString()), devices=(engine,))
        async with compilation.burst() as burst, aionn.Memory.allocate(4096) as memory:
            compute = burst.compute if way == "burst" else compilation.compute
            for inputs in frames[1:4]:
                check(await compute(inputs), {"y": np.maximum(inputs["x"], 0)})
            await runtime.swap(compilation, aionn.Model.from_onnx(other.SerializeToString()))
            check(await compute(frames[0]), {"y": np.abs(frames[0]["x"])})
            check(await compute(frames[0], outputs={"y": memory}), {"y": np.abs(frames[0]["x"])})
            for inputs in (*frames, *frames):
                check(await compute(inputs), {"y": np.abs(inputs["x"])})
                if inputs["x"].nbytes <= 4096:
                    check(await compute(inputs, outputs={"y": memory}), {"y": np.abs(inputs["x"])})


def counting(declared: int) -> ModelProto:
    """y, and a state that grows by 1; both with a batch that only the outputs fix."""
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Add", ["state", "one"], ["stateN"])]
    inputs = [value("x", ["N", 4]), value("state", ["N", 2])]
    return model_of(nodes, inputs, [value("y", [declared, 4]), value("stateN", [declared, 2])], {"one": np.ones(1, np.float32)})


async def test_a_state_of_a_batch_that_the_output_denies_lives_in_the_driver_once_that_is_known(engine: str) -> None:
    model = aionn.Model.from_onnx(counting(1).SerializeToString())
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        with pytest.raises(aionn.CallerError, match="contradict"):
            await compilation.allocate(inputs=("state",), outputs=("stateN",), shape=(3, 2))
        await compilation.compute({"x": rows(3), "state": np.zeros((3, 2), np.float32)})
        async with (
            compilation.burst() as burst,
            await compilation.allocate(inputs=("state",), outputs=("stateN",), shape=(3, 2)) as state,
        ):
            await state.reset(5)
            for _ in range(10):
                outputs = await burst.compute({"x": rows(3), "state": state}, outputs={"stateN": state})
                np.testing.assert_array_equal(outputs["y"], np.maximum(rows(3), 0))
            kept = await state.snapshot()
            np.testing.assert_array_equal(kept, np.full((3, 2), 15, np.float32))
            del outputs
            (pid,) = driver_pids()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aionn.DeviceMemoryLostError):
                await state.snapshot()
        # What is known of the model outlives the driver, so the state can go on in the next one.
        async with await compilation.allocate(inputs=("state",), outputs=("stateN",), shape=(3, 2)) as state:
            await state.copy_from(kept)
            found = await compilation.compute({"x": rows(3), "state": state}, outputs={"stateN": state})
            np.testing.assert_array_equal(found["y"], np.maximum(rows(3), 0))
            np.testing.assert_array_equal(await state.snapshot(), kept + 1)


async def test_a_step_of_a_recurrent_stream_whose_output_outgrows_its_declaration_is_computed_once(engine: str) -> None:
    """The state advances by one for each step, also for the one that is computed again with more room."""
    nodes = [helper.make_node("Slice", ["x", "zero", "k"], ["y"]), helper.make_node("Add", ["state", "one"], ["stateN"])]
    inputs = [value("x", [600, 4]), value("k", [1], TensorProto.INT64), value("state", [2])]
    constants = {"zero": np.array([0]), "one": np.ones(1, np.float32)}
    proto = model_of(nodes, inputs, [value("y", [2, 4]), value("stateN", [2])], constants)
    x = rows(600)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(proto.SerializeToString()), devices=(engine,))
        async with compilation.burst() as burst, await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state:
            await state.reset()
            for step, k in enumerate((2, 2, 1, 600, 2, 600), 1):
                outputs = await burst.compute({"x": x, "k": np.array([k]), "state": state}, outputs={"stateN": state})
                np.testing.assert_array_equal(outputs["y"], x[:k])
                np.testing.assert_array_equal(await state.snapshot(), np.full(2, step, np.float32))
            del outputs
