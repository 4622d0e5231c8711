"""Initializers that are inputs, too: an app may leave them out, and may give them. All paths and engines agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

import aionn
from aionn.errors import CallerError, CompilationError

pytestmark = [pytest.mark.anyio]

X = np.arange(3, dtype=np.float32)
SCALE, SHIFT = np.array([2, 3, 4], np.float32), np.array([1], np.float32)
OTHER = {"scale": np.array([5, 5, 5], np.float32), "shift": np.array([-1], np.float32)}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["onnxruntime", "openvino", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def scaled(ir_version: int = 8, *, scale: NDArray[np.float32] = SCALE, fixed: bool = False) -> ModelProto:
    """y = x * scale + shift, where scale and shift are initializers and (not `fixed`) inputs before and behind x."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, scale.shape)
    both = [helper.make_tensor_value_info("scale", TensorProto.FLOAT, scale.shape), helper.make_tensor_value_info("shift", 1, [1])]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "scale"], ["h"]), helper.make_node("Add", ["h", "shift"], ["y"])],
        "scaled",
        [x] if fixed else [both[0], x, both[1]],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, scale.shape)],
        [numpy_helper.from_array(scale, "scale"), numpy_helper.from_array(SHIFT, "shift")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=ir_version)


GIVEN: list[dict[str, NDArray[np.float32]]] = [{}, {"scale": OTHER["scale"]}, {"shift": OTHER["shift"]}, OTHER, {}]


async def check(compute: Any) -> None:
    """Every choice of given inputs gives what ONNX Runtime itself gives."""
    session = onnxruntime.InferenceSession(scaled().SerializeToString(), providers=["CPUExecutionProvider"])
    for given in GIVEN:
        wanted = session.run(None, {"x": X, **given})[0]
        np.testing.assert_array_equal((await compute({"x": X, **given}))["y"], wanted)


async def test_an_input_with_a_default_may_be_left_out_or_given_on_every_path(device: str, tmp_path: Path) -> None:
    (tmp_path / "scaled.onnx").write_bytes(scaled().SerializeToString())
    kinds = []
    for _ in range(2):
        async with aionn.Runtime() as runtime:
            model = await aionn.Model.load(tmp_path / "scaled.onnx")
            compilation = await runtime.compile(model, devices=(device,), cache_dir=tmp_path / "cache")
            kinds.append(compilation.outcomes[0].kind.value)
            assert list(compilation.model.inputs) == ["x", "scale", "shift"]
            assert [operand.default is None for operand in compilation.model.inputs.values()] == [True, False, False]
            await check(compilation.compute)
            await check(compilation.start)
            async with compilation.burst() as burst:
                for _ in range(2):
                    await check(burst.compute)
                results = [result.outputs["y"].copy() async for result in burst.map([{"x": X, **given} for given in GIVEN])]
                np.testing.assert_array_equal(results[0], X * SCALE + SHIFT)
                np.testing.assert_array_equal(results[3], X * OTHER["scale"] + OTHER["shift"])
                async with burst.frame() as frame:
                    frame["x"] = X
                    np.testing.assert_array_equal((await burst.compute(frame))["y"], X * SCALE + SHIFT)
                    frame["shift"] = OTHER["shift"]
                    np.testing.assert_array_equal((await burst.compute(frame))["y"], X * SCALE + OTHER["shift"])
                async with burst.frame() as frame:  # the same memory
                    frame["x"] = X
                    np.testing.assert_array_equal((await burst.compute(frame))["y"], X * SCALE + SHIFT)
    assert kinds == (["no_cache", "no_cache"] if device == "reference" else ["miss", "hit"])


async def test_memory_may_stand_for_an_input_beside_defaults_that_are_left_out() -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(scaled().SerializeToString()), devices=("onnxruntime",))
        async with await compilation.allocate(inputs=("shift",)) as state, compilation.burst() as burst:
            await state.copy_from(OTHER["shift"])
            with aionn.Memory.allocate(X.nbytes) as memory:
                memory.array(np.float32, 3)[:] = X
                for compute in (compilation.compute, burst.compute, burst.compute):
                    np.testing.assert_array_equal((await compute({"x": X, "shift": state}))["y"], X * SCALE + OTHER["shift"])
                    np.testing.assert_array_equal((await compilation.start({"x": X, "shift": state}))["y"], X * SCALE + OTHER["shift"])
                    np.testing.assert_array_equal((await compute({"x": memory}))["y"], X * SCALE + SHIFT)


async def test_what_is_wrong_with_the_names_is_said_without_those_that_may_be_left_out() -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(scaled().SerializeToString()), devices=("onnxruntime",))
        with pytest.raises(CallerError, match=r"inputs without \['x'\]; the model's inputs are \['x', 'scale', 'shift'\]"):
            await compilation.compute({})
        with pytest.raises(CallerError, match=r"inputs with \['shfit'\], which the model does not have"):
            await compilation.compute({"x": X, "shfit": SHIFT})
        with pytest.raises(CallerError, match=r"input 'shift': shape \(2,\) does not fit the model's \(1,\)"):
            await compilation.compute({"x": X, "shift": np.zeros(2, np.float32)})


FIXED = {
    "before IR version 4": lambda: scaled(3),
    "no input": lambda: scaled(fixed=True),
    "weights that an exporter lists": lambda: scaled(scale=np.ones(20_000, np.float32)),
}


@pytest.mark.parametrize("what", FIXED)
def test_other_initializers_stay_constants(what: str) -> None:
    assert list(aionn.Model.from_onnx(FIXED[what]().SerializeToString()).inputs) == ["x"]


@pytest.mark.parametrize("raw", [False, True])
def test_a_default_has_its_type_and_shape_whatever_the_input_leaves_open(raw: bool) -> None:
    number = helper.np_dtype_to_tensor_dtype(np.dtype(ml_dtypes.int4))
    values = np.array([1, -2, 3], ml_dtypes.int4)
    tensor = numpy_helper.from_array(values, "few") if raw else helper.make_tensor("few", number, [3], [1, -2, 3])
    graph = helper.make_graph(
        [helper.make_node("Cast", ["few"], ["y"], to=TensorProto.FLOAT)],
        "few",
        [helper.make_tensor_value_info("few", number, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N"])],
        [tensor],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    operand = aionn.Model.from_onnx(model.SerializeToString()).inputs["few"]
    assert operand.dimensions == (0,)
    assert operand.default is not None
    assert operand.default.shape == (3,)
    assert operand.default.content == values.view(np.uint8).tobytes()


def texts_of(shape: tuple[int, ...]) -> NDArray[np.object_]:
    texts = np.empty(shape, object)
    texts[...] = np.array(["é", "ends with a zero\0"], object)[: texts.size].reshape(shape)
    return texts


def joining(default: TensorProto) -> ModelProto:
    """y = x and text joined, where text is an initializer and an input."""
    kinds = [helper.make_tensor_value_info(name, TensorProto.STRING, list(default.dims)) for name in ("x", "text", "y")]
    join = helper.make_node("StringConcat", ["x", "text"], ["y"])
    graph = helper.make_graph([join], "joining", kinds[:2], kinds[2:], [default])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize("shape", [(), (0,), (2,)])
async def test_texts_may_be_a_default(shape: tuple[int, ...], tmp_path: Path) -> None:
    texts = texts_of(shape)
    default = TensorProto(name="text", data_type=TensorProto.STRING, dims=shape, string_data=[str(text).encode() for text in texts.flat])
    (tmp_path / "joining.onnx").write_bytes(joining(default).SerializeToString())
    x, other = np.full(shape, "x", object), np.full(shape, "other", object)
    async with aionn.Runtime() as runtime:
        for kind in ("miss", "hit"):
            model = await runtime.load(tmp_path / "joining.onnx")
            compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=tmp_path / "cache")
            assert [outcome.kind.value for outcome in compilation.outcomes] == [kind]
            for given, wanted in (({}, texts), ({"text": other}, other), ({}, texts)):
                made = (await compilation.compute({"x": x, **given}))["y"]
                assert (made.shape, made.tolist()) == (shape, np.asarray(x + wanted, object).tolist())
            await compilation.aclose()


@pytest.mark.parametrize(("texts", "why"), [([b"\xff"], "utf-8"), ([b"a", b"b"], "do not fill")])
def test_texts_that_are_broken_are_refused_by_the_initializers_name(texts: list[bytes], why: str) -> None:
    default = TensorProto(name="text", data_type=TensorProto.STRING, dims=[1], string_data=texts)
    with pytest.raises(CompilationError, match=f"initializer 'text' cannot be read: .*{why}"):
        aionn.Model.from_onnx(joining(default).SerializeToString())
