"""Tensors of types that NumPy lacks: arrays of ml_dtypes go in and come out on every path, and hold what the engine has made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import aionn
from aionn.engines.elements import PACKED_BITS, pack, unpack
from aionn.errors import CallerError, CompilationError
from aionn.hal import OperandType

pytestmark = [pytest.mark.anyio]

KINDS = [OperandType.BFLOAT16, OperandType.FLOAT8E4M3FN, OperandType.FLOAT8E5M2, OperandType.INT4, OperandType.UINT4]
NUMBERS = np.array([[0, 1, 2], [3, 1, 0], [6, 5, 4]], np.float32)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["onnxruntime", "openvino", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def casts(kind: OperandType) -> aionn.Model:
    """wide = few as float32; narrow = x in the type."""
    number = helper.np_dtype_to_tensor_dtype(kind.dtype)
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["few"], ["wide"], name="widen", to=TensorProto.FLOAT),
            helper.make_node("Cast", ["x"], ["narrow"], name="narrow", to=number),
        ],
        "casts",
        [helper.make_tensor_value_info("few", number, ["N", 3]), helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", 3])],
        [helper.make_tensor_value_info("wide", TensorProto.FLOAT, ["N", 3]), helper.make_tensor_value_info("narrow", number, ["M", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    return aionn.Model.from_onnx(model.SerializeToString())


def check(outputs: Any, few: NDArray[Any]) -> None:
    np.testing.assert_array_equal(outputs["wide"], NUMBERS)
    assert outputs["narrow"].dtype == few.dtype
    np.testing.assert_array_equal(outputs["narrow"].view(np.uint8), few.view(np.uint8))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
async def test_arrays_of_ml_dtypes_go_in_and_come_out_on_every_path(device: str, kind: OperandType, tmp_path: Path) -> None:
    few = NUMBERS.astype(kind.dtype)
    inputs = {"few": few, "x": NUMBERS}
    kinds = []
    for _ in range(2):
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(casts(kind), devices=(device,), cache_dir=tmp_path)
            kinds.append(compilation.outcomes[0].kind.value)
            check(await compilation.compute(inputs), few)
            with aionn.Memory.allocate(few.nbytes) as given, aionn.Memory.allocate(few.nbytes) as wanted:
                given.array(few.dtype, few.shape)[...] = few
                check(await compilation.compute({**inputs, "few": given}, outputs={"narrow": wanted}), few)
            async with compilation.burst() as burst:
                for _ in range(3):
                    check(await burst.compute(inputs), few)
                async with burst.frame(shapes={name: array.shape for name, array in inputs.items()}) as frame:
                    for name, array in inputs.items():
                        frame[name][...] = array
                    check(await burst.compute(frame), few)
                async for result in burst.map([inputs] * 8):
                    check(result.outputs, few)
    assert kinds == (["no_cache", "no_cache"] if device == "reference" else ["miss", "hit"])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
async def test_device_memory_holds_them(device: str, kind: OperandType) -> None:
    few = NUMBERS.astype(kind.dtype)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(casts(kind), devices=(device,))
        async with (
            await compilation.allocate(inputs=("few",), shape=(3, 3)) as given,
            await compilation.allocate(outputs=("narrow",), shape=(3, 3)) as wanted,
        ):
            await given.copy_from(few)
            outputs = await compilation.compute({"few": given, "x": NUMBERS}, outputs={"narrow": wanted})
            np.testing.assert_array_equal(outputs["wide"], NUMBERS)
            np.testing.assert_array_equal((await wanted.snapshot()).view(np.uint8), few.view(np.uint8))
            await given.reset(1)
            outputs = await compilation.compute({"few": given, "x": NUMBERS}, outputs={"narrow": wanted})
            np.testing.assert_array_equal(outputs["wide"], np.ones((3, 3)))
            with pytest.raises(CallerError, match=f"device memory of {kind.value} cannot be filled with"):
                await given.reset(1e6 if kind is not OperandType.BFLOAT16 else float(np.finfo(np.float64).max))


async def test_device_memory_of_float_types_rounds_as_those_of_numpy_do() -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(casts(OperandType.BFLOAT16), devices=("onnxruntime",))
        async with await compilation.allocate(inputs=("few",), shape=(3, 3)) as given:
            await given.reset(0.1)
            assert (await given.snapshot())[0, 0] == ml_dtypes.bfloat16(0.1)
        compilation = await runtime.compile(casts(OperandType.INT4), devices=("onnxruntime",))
        async with await compilation.allocate(inputs=("few",), shape=(3, 3)) as given:
            for wrong in (0.5, 8, -9, float("nan")):
                with pytest.raises(CallerError, match="nothing is cast in silence"):
                    await given.reset(wrong)
            await given.reset(-8)
            assert (await given.snapshot())[0, 0] == ml_dtypes.int4(-8)


async def test_another_dtype_is_refused_with_the_name_of_the_right_one() -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(casts(OperandType.BFLOAT16), devices=("onnxruntime",))
        with pytest.raises(CallerError, match=r"dtype float32 does not fit the model's bfloat16.*few\.astype\(ml_dtypes\.bfloat16\)"):
            await compilation.compute({"few": NUMBERS, "x": NUMBERS})
        bits = NUMBERS.astype(ml_dtypes.bfloat16).view(np.uint16)
        with pytest.raises(CallerError, match="dtype uint16 does not fit the model's bfloat16"):
            await compilation.compute({"few": bits, "x": NUMBERS})


async def test_a_type_that_an_engine_does_not_take_is_refused_in_one_sentence_when_the_model_is_compiled() -> None:
    async with aionn.Runtime() as runtime:
        for kind, engine in ((OperandType.FLOAT8E4M3FNUZ, "openvino"), (OperandType.FLOAT4E2M1, "onnxruntime")):
            with pytest.raises(CompilationError, match=engine) as caught:
                await runtime.compile(casts(kind), devices=(engine,))
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [OperandType.INT4, OperandType.UINT4, OperandType.INT2, OperandType.UINT2], ids=lambda kind: kind.value)
def test_bits_outside_of_an_element_do_not_reach_its_neighbours(kind: OperandType) -> None:
    """An array that is a view of bytes may hold bits that belong to no element."""
    bits = PACKED_BITS[kind]
    stray = np.array([[0xF1, 0xF2, 0xFF], [0x80, 0xF3, 0x7C]], np.uint8)
    packed = pack(stray.view(kind.dtype), bits)
    np.testing.assert_array_equal(packed, pack((stray & (2**bits - 1)).view(kind.dtype), bits))
    np.testing.assert_array_equal(unpack(packed, kind).view(np.uint8) & (2**bits - 1), stray & (2**bits - 1))


def beside_a_sequence(kind: OperandType, *, narrow: bool = False) -> aionn.Model:
    """rows = [x]; wide = few as float32; with `narrow`, again = few."""
    number = helper.np_dtype_to_tensor_dtype(kind.dtype)
    nodes = [helper.make_node("SequenceConstruct", ["x"], ["rows"]), helper.make_node("Cast", ["few"], ["wide"], to=TensorProto.FLOAT)]
    outputs = [helper.make_tensor_sequence_value_info("rows", TensorProto.FLOAT, None), helper.make_tensor_value_info("wide", 1, None)]
    if narrow:
        nodes.append(helper.make_node("Identity", ["few"], ["again"]))
        outputs.append(helper.make_tensor_value_info("again", number, None))
    inputs = [helper.make_tensor_value_info("few", number, None), helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])]
    graph = helper.make_graph(nodes, "beside", inputs, outputs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    return aionn.Model.from_onnx(made.SerializeToString())


@pytest.mark.parametrize("kind", [*KINDS, OperandType.INT2], ids=lambda kind: kind.value)
@pytest.mark.parametrize("shape", [(3, 3), (), (0,), (3,)], ids=str)
async def test_arrays_of_ml_dtypes_go_in_beside_a_sequence(kind: OperandType, shape: tuple[int, ...]) -> None:
    few = np.asarray(np.resize(np.array([1, 0, 1, 1], np.float32), shape).astype(kind.dtype))
    x = np.array([1, 2], np.float32)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(beside_a_sequence(kind), devices=("onnxruntime",))
        outputs = await compilation.compute({"few": few, "x": x})
        np.testing.assert_array_equal(outputs["rows"], [x])
        np.testing.assert_array_equal(outputs["wide"], few.astype(np.float32), strict=True)


async def test_an_output_that_onnxruntime_cannot_return_beside_a_sequence_is_refused_at_compile() -> None:
    async with aionn.Runtime() as runtime:
        with pytest.raises(CompilationError, match=r"output 'again' is of type tensor\(bfloat16\), which NumPy lacks") as caught:
            await runtime.compile(beside_a_sequence(OperandType.BFLOAT16, narrow=True), devices=("onnxruntime",))
        assert caught.value.reason is not None
