"""`aionn.Model.from_bytes`: a model of a format that only its own device reads, as bytes with a declared border."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.caching import CacheOutcomeKind, MissReason
from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.engines.openvino import OpenVINOEngine
from aionn.engines.reference import ReferenceEngine
from aionn.errors import CallerError, CompilationError
from aionn.hal import CompileOptions, Operand, OperandType, ValueKind, ValueType, model_bytes
from aionn.hal.types import Default
from aionn.remote.calls import EngineOptionsMessage, PrepareModel
from aionn.remote.control import CallMessage, encode
from aionn.remote.device import model_message, options_message
from aionn.testing import FakeDevice, identity_model


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: what bytes mean does not depend on it."""
    return "asyncio", {"use_uvloop": True}


X, Y = Operand(OperandType.FLOAT32, (1, 16)), Operand(OperandType.FLOAT32, (1, 16))
CONTENT = bytes(range(256)) * 5000


def opaque(content: Any = CONTENT, form: str = "toy", **more: Any) -> aionn.Model:
    border: dict[str, Any] = {"inputs": {"x": X}, "outputs": {"y": Y}}
    return aionn.Model.from_bytes(content, **{**border, "format": form, "name": "toy.bin", **more})


def frame(value: float = 1) -> np.ndarray[Any, Any]:
    return np.full((1, 16), value, np.float32)


def test_the_bytes_lie_in_sealed_memory_and_not_in_the_message() -> None:
    model = opaque()
    assert bytes(model_bytes(model, "toy")) == CONTENT
    assert model_bytes(model, "toy").readonly
    (pool,) = model.pools
    assert not pool.description.writable
    assert (model.format, model.graph, model.name, [operation.domain for operation in model.operations]) == ("toy", b"", "toy.bin", ["toy"])
    assert aionn.Model.from_onnx(identity_model()).format == "onnx"
    prepare = PrepareModel(model_message(model), options_message(aionn.hal.PrepareOptions(), EngineOptionsMessage()), None)
    assert len(encode(CallMessage(1, prepare))[0]) < 1000


def test_the_token_is_that_of_the_bytes_and_of_the_border_and_of_the_format() -> None:
    others = [
        opaque(CONTENT[:-1]),
        opaque(form="toys"),
        opaque(inputs={"z": X}),
        opaque(inputs={"x": Operand(OperandType.FLOAT32, (0, 16))}),
        opaque(inputs={"x": Operand(OperandType.FLOAT32, (0, 16), ("N", None))}),
        opaque(inputs={"x": Operand(OperandType.INT32, (1, 16))}),
        opaque(inputs={}, outputs={"x": X, "y": Y}),
        opaque(outputs={"y": Y, "z": Y}),
    ]
    tokens = {model.token for model in others}
    assert len(tokens) == len(others)
    assert opaque().token == opaque(name="other").token == opaque(bytearray(CONTENT)).token not in tokens


def test_the_token_is_that_of_types_and_of_defaults() -> None:
    """Equal tokens would give one of these models the other's stored compilation, which has another border."""
    few = Operand(OperandType.FLOAT32, None)
    borders = [
        few,
        ValueType(ValueKind.SEQUENCE, few),
        ValueType(ValueKind.OPTIONAL, few),
        ValueType(ValueKind.MAP, few, OperandType.INT64),
    ]
    borders += [Operand(OperandType.FLOAT32, None, default=Default((1,), bytes((0, 0, 0, last)))) for last in (0, 1)]
    assert len({opaque(inputs={"x": border}).token for border in borders}) == len(borders)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"content": b""}, "data: the model has no bytes"),
        ({"content": "text"}, "data: expected bytes in one piece, got str"),
        ({"form": ""}, "format='': give the name of the format"),
        ({"form": "\udcff"}, r"format='\\udcff': give Unicode without surrogates"),
        ({"inputs": {"\udcff": X}}, r"inputs\['\\udcff'\]: give a name of Unicode without surrogates"),
        ({"form": "onnx"}, "an ONNX model is read by Model.from_onnx"),
        ({"outputs": {}}, "outputs: the model has none"),
        ({"inputs": [X]}, "inputs: expected a dict of aionn.hal.Operand by name, got list"),
        ({"inputs": {"x": (1, 16)}}, r"inputs\['x'\]: expected an aionn.hal.Operand under a name, got tuple"),
    ],
)
def test_what_is_wrong_is_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CallerError, match=sentence):
        opaque(**wrong)


def test_bytes_of_another_format_are_not_handed_out() -> None:
    with pytest.raises(CompilationError, match="the model has the format 'toy', but this device reads 'tflite'"):
        model_bytes(opaque(), "tflite")
    with pytest.raises(CompilationError, match="the model has the format 'onnx', but this device reads 'toy'"):
        model_bytes(aionn.Model.from_onnx(identity_model()), "toy")


@pytest.mark.parametrize("make", [OnnxRuntimeEngine, OpenVINOEngine, ReferenceEngine])
def test_an_engine_for_onnx_refuses_other_formats(make: Any) -> None:
    engine = make()
    assert list(engine.supported_operations(opaque())) == [False]
    with pytest.raises(CompilationError, match=r"the model has the format 'toy'|no reference implementation of 'Opaque' in domain 'toy'"):
        engine.compile(opaque(), CompileOptions())


@pytest.mark.anyio
async def test_devices_for_onnx_refuse_it_in_one_sentence_each() -> None:
    async with aionn.Runtime() as runtime:
        with pytest.raises(CompilationError, match="device 'onnxruntime' cannot run a model of the format 'toy'") as one:
            await runtime.compile(opaque(), devices=("onnxruntime",))
        assert one.value.node == "toy.bin"
        with pytest.raises(CompilationError, match=r"no device can run every node of the model: .*'toy'.*; .*'toy'.*; .*'toy'"):
            await runtime.compile(opaque())
        with pytest.raises(CompilationError, match="device 'openvino' cannot run a model of the format 'toy'"):
            await runtime.compile(opaque(), mode="staged", stages=("onnxruntime", "openvino"))
        for content in (CONTENT, b"hello" * 10):  # as a graph, the latter is an empty one
            with pytest.raises(CompilationError, match=r"no device can run every node of the model: .*'toy'.*; .*'toy'"):
                await runtime.compile(opaque(content), devices=("onnxruntime", "reference"))


@pytest.mark.anyio
async def test_it_is_cached_and_never_stale(fake: FakeDevice, tmp_path: Path) -> None:
    async def outcome_of(model: aionn.Model, **more: Any) -> aionn.CacheOutcome:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, **more)
            np.testing.assert_array_equal((await compilation.compute({"x": frame(3)}))["y"], frame(3))
            return compilation.outcomes[0]

    kinds = [(await outcome_of(opaque())).kind for _ in range(2)]
    assert kinds == [CacheOutcomeKind.MISS, CacheOutcomeKind.HIT]
    assert (await outcome_of(opaque(CONTENT[:-1] + b"!"))).kind is CacheOutcomeKind.MISS
    token = bytes(range(32))
    assert (await outcome_of(opaque(), token=token)).kind is CacheOutcomeKind.MISS
    changed = await outcome_of(opaque(CONTENT[:-1] + b"!"), token=token)
    assert (changed.kind, changed.reason) == (CacheOutcomeKind.MISS, MissReason.OTHER_MODEL)


@pytest.mark.anyio
async def test_it_runs_in_bursts_and_is_swapped(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(opaque(), devices=(fake.name,))
        async with compilation.burst() as burst:
            for value in range(3):
                np.testing.assert_array_equal((await burst.compute({"x": frame(value)}))["y"], frame(value))
            await runtime.swap(compilation, opaque(CONTENT[::-1]))
            np.testing.assert_array_equal((await burst.compute({"x": frame(9)}))["y"], frame(9))


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["jit", "staged"])
async def test_it_is_compiled_later_and_in_stages(mode: Any, quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    names = (quick.name, best.name)
    async with aionn.Runtime() as runtime:
        which: dict[str, Any] = {"devices": names[:1]}
        if mode == "staged":
            which = {"stages": names, "stage_policy": aionn.StagePolicy(min_gain=None)}
        compilation = await runtime.compile(opaque(), mode=mode, cache_dir=tmp_path, **which)
        answer = await compilation.compute({"x": frame(2)})
        np.testing.assert_array_equal(answer["y"], frame(2))
        assert answer.device == quick.name
        if mode == "staged":
            await compilation.wait_for_stage(best.name)
            answer = await compilation.compute({"x": frame(5)})
            assert answer.device == best.name
            np.testing.assert_array_equal(answer["y"], frame(5))
