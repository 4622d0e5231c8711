"""Models whose nodes are named after the partial engines that run them, and what they compute."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

import aionn
from aionn.runtime.serving.planned_model import PlannedModel
from aionn.runtime.serving.serving import Serving
from tests.runtime.partial_engines import HERE

REF, ORT, LEFT, RIGHT = f"{HERE}:RefPart", f"{HERE}:OrtPart", f"{HERE}:LeftFake", f"{HERE}:RightFake"
UNTIMED = f"{HERE}:UntimedFake"

Outputs = Mapping[str, NDArray[Any]]


def made(nodes: Sequence[NodeProto], inputs: Mapping[str, Any], outputs: Mapping[str, Any], constants: Sequence[Any] = ()) -> bytes:
    """Return a model of float32 tensors; a shape may have names. An output of another type is (type, shape)."""
    graph = helper.make_graph(
        list(nodes),
        "planned",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [
            helper.make_tensor_value_info(name, *(shape if isinstance(shape, tuple) else (TensorProto.FLOAT, shape)))
            for name, shape in outputs.items()
        ],
        list(constants),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return bytes(model.SerializeToString())


def node(name: str, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> NodeProto:
    return helper.make_node(kind, list(inputs), list(outputs), name=name, **attributes)


def woven(shape: Sequence[int | str]) -> bytes:
    """Four steps, ref-ort-ref-ort. A main input is read by several, and the main output `mid` by a later one."""
    return made(
        [
            node("ref_mul", "Mul", ["x", "x"], ["a"]),
            node("ort_add", "Add", ["a", "x"], ["mid"]),
            node("ref_sub", "Sub", ["mid", "a"], ["b"]),
            node("ref_neg", "Neg", ["mid"], ["c"]),
            node("ort_sum", "Sum", ["b", "c", "y"], ["end"]),
        ],
        {"x": list(shape), "y": list(shape)},
        {"mid": list(shape), "end": list(shape)},
    )


def woven_outputs(x: NDArray[Any], y: NDArray[Any]) -> Outputs:
    a = x * x
    mid = a + x
    return {"mid": mid, "end": (mid - a) + -mid + y}


def filtering() -> bytes:
    """The boundary tensor `kept` has as many elements as the data says: those of `x` above 0. `end` has as many."""
    return made(
        [
            node("ref_zero", "Sub", ["x", "x"], ["zero"]),
            node("ref_above", "Greater", ["x", "zero"], ["above"]),
            node("ref_keep", "Compress", ["x", "above"], ["kept"], axis=0),
            node("ort_double", "Add", ["kept", "kept"], ["twice"]),
            node("ref_neg", "Neg", ["twice"], ["end"]),
        ],
        {"x": ["N"]},
        {"end": ["M"]},
    )


def chain(homes: Sequence[str], shape: Sequence[int | str] = (1, 16)) -> bytes:
    """Identity nodes, one per home ("left", "right"), from `input` to `output`."""
    names = ["input", *(f"t{number}" for number in range(1, len(homes))), "output"]
    nodes = [node(f"{home}_{number}", "Identity", [names[number]], [names[number + 1]]) for number, home in enumerate(homes)]
    return made(nodes, {"input": list(shape)}, {"output": list(shape)})


def numbers(shape: Sequence[int], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@asynccontextmanager
async def compiled(model: bytes, *devices: str, **options: Any) -> AsyncIterator[tuple[aionn.Runtime, aionn.Compilation]]:
    """Compile a model over these devices, and see that it was cut."""
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(model), devices=devices, **options)
        assert compilation.device == "+".join(devices) or set(compilation.device.split("+")) == set(devices)
        yield runtime, compilation


def serving_of(compilation: aionn.Compilation) -> Serving:
    """Return what the compilation serves from."""
    serving = compilation._parts.compiled.serving
    assert serving is not None
    return serving


def plan_of(compilation: aionn.Compilation) -> PlannedModel:
    """Return the plan that the compilation serves from."""
    prepared = serving_of(compilation).prepared
    assert isinstance(prepared, PlannedModel)
    return prepared
