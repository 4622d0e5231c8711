"""A model of a format that is not ONNX: a .tflite file on LiteRT (TensorFlow Lite), with a small model that this file builds.

    python examples/litert_driver.py [--frames N] [--json]

The engine is `aionn.engines.litert`. `LiteRTPlainEngine` is an engine of this file: the same without XNNPACK. It prepares at once and runs
slower, so it serves while the other one compiles. `tests/engines/test_check_engine.py` holds both to the contract of drivers.

The program compiles the model twice over one cache (the second time is a HIT), answers frames in a burst, and swaps the stages. Each
answer is compared with NumPy.

Exit codes: 0 fine, 1 an answer is wrong or the runtime failed, 2 wrong usage (a package that is not installed).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aionn
from aionn.engines.litert import FORMAT, LiteRTEngine
from aionn.errors import DeviceUnavailableError
from aionn.hal import Operand, OperandType
from answers import print_answer

QUICK, BEST = "litert_driver:LiteRTPlainEngine", "litert"
Array = NDArray[Any]


class LiteRTPlainEngine(LiteRTEngine):
    """The same without XNNPACK: nothing is laid out anew, so it is ready sooner and runs slower."""

    name = "litert-plain"
    delegates = False


# --- a model, so that no binary lies in the repository -----------------------------------------------------------------

FEATURES, CLASSES = 64, 4
INPUTS = {"features": Operand(OperandType.FLOAT32, (1, FEATURES))}
OUTPUTS = {"scores": Operand(OperandType.FLOAT32, (1, CLASSES))}


def weights() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the matrix and the bias of the classifier."""
    random = np.random.default_rng(7)
    return np.float32(0.25) * random.normal(size=(CLASSES, FEATURES)).astype(np.float32), random.normal(size=CLASSES).astype(np.float32)


def expected(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what the model computes: the softmax of one dense layer."""
    matrix, bias = weights()
    logits = features @ matrix.T + bias
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores: NDArray[np.float32] = powers / powers.sum(axis=-1, keepdims=True)
    return scores


def build_model() -> bytes:
    """Return the classifier as the contents of a .tflite file, made with the schema that the package carries."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    matrix, bias = weights()
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.subgraphs, graph.name = 3, [graph], b"classifier"
    model.buffers = [_made(schema.BufferT, data=None)]

    def tensor(name: str, shape: Sequence[int], constant: Array | None = None) -> int:
        if constant is not None:
            model.buffers.append(_made(schema.BufferT, data=np.frombuffer(constant.tobytes(), np.uint8)))
        buffer = 0 if constant is None else len(model.buffers) - 1
        graph.tensors.append(_made(schema.TensorT, name=name.encode(), shape=list(shape), type=schema.TensorType.FLOAT32, buffer=buffer))
        return len(graph.tensors) - 1

    graph.tensors = []
    features = tensor("features", (1, FEATURES))
    constants = [tensor("matrix", matrix.shape, matrix), tensor("bias", bias.shape, bias)]
    logits, scores = tensor("logits", (1, CLASSES)), tensor("scores", (1, CLASSES))
    graph.inputs, graph.outputs = [features], [scores]
    operators, options = schema.BuiltinOperator, schema.BuiltinOptions
    model.operatorCodes = [
        _made(schema.OperatorCodeT, builtinCode=code, deprecatedBuiltinCode=code, version=1)
        for code in (operators.FULLY_CONNECTED, operators.SOFTMAX)
    ]
    dense, softmax = schema.FullyConnectedOptionsT(), _made(schema.SoftmaxOptionsT, beta=1.0)
    graph.operators = [
        _made(
            schema.OperatorT,
            opcodeIndex=0,
            inputs=[features, *constants],
            outputs=[logits],
            builtinOptionsType=options.FullyConnectedOptions,
            builtinOptions=dense,
        ),
        _made(
            schema.OperatorT,
            opcodeIndex=1,
            inputs=[logits],
            outputs=[scores],
            builtinOptionsType=options.SoftmaxOptions,
            builtinOptions=softmax,
        ),
    ]
    builder = flatbuffers.Builder(4096)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def _made(kind: Any, **fields: Any) -> Any:
    thing = kind()
    for name, content in fields.items():
        setattr(thing, name, content)
    return thing


def load_model() -> aionn.Model:
    """Return the classifier as aionn holds it: bytes, with the border that they have."""
    return aionn.Model.from_bytes(build_model(), inputs=INPUTS, outputs=OUTPUTS, format=FORMAT, name="classifier.tflite")


# --- the program ------------------------------------------------------------------------------------------------------


async def classify(cache_dir: Path, frames: int) -> dict[str, Any]:
    """Compile, compile again from the cache, answer frames in a burst, and swap to the better stage. Return what happened."""
    model = load_model()
    random = np.random.default_rng(1)
    asked = [random.normal(size=(1, FEATURES)).astype(np.float32) for _ in range(frames)]
    async with aionn.Runtime() as runtime:
        outcomes = []
        for _ in range(2):
            compilation = await runtime.compile(model, devices=(BEST,), cache_dir=cache_dir)
            outcomes += [outcome.kind.name for outcome in compilation.outcomes]
        worst = 0.0
        async with compilation.burst() as burst:
            for features in asked:
                answer = await burst.compute({"features": features})
                worst = max(worst, float(np.abs(answer["scores"] - expected(features)).max()))
        # Both stages of so small a model are equally fast, so the outputs alone decide.
        staged = await runtime.compile(model, mode="staged", stages=(QUICK, BEST), stage_policy=aionn.StagePolicy(min_gain=None))
        first = (await staged.compute({"features": asked[0]})).device
        await staged.wait_for_stage(BEST)
        last = await staged.compute({"features": asked[0]})
        worst = max(worst, float(np.abs(last["scores"] - expected(asked[0])).max()))
    return {"outcomes": outcomes, "frames": frames, "worst": worst, "stages": [first, last.device]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run a LiteRT model through aionn: cached, in a burst, staged.")
    parser.add_argument("--frames", type=int, default=200, help="frames to answer in the burst (default: 200)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    try:
        LiteRTEngine()
    except DeviceUnavailableError as error:
        print(f"litert_driver.py: {error}", file=sys.stderr)
        return 2
    # Driver processes import the plain engine from this folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = aionn.run(classify, Path(folder), asked.frames)
        except aionn.AionnError as error:
            print(f"litert_driver.py: {error}", file=sys.stderr)
            return 1
    text = "\n".join(f"{name}: {value}" for name, value in found.items())
    told = print_answer("litert_driver.py", json.dumps(found) if asked.json else text)
    return told if found["worst"] < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
