"""A driver for a format that is not ONNX: LiteRT (TensorFlow Lite) as an aionn engine, with a small model that this file builds.

    python examples/litert_driver.py [--frames N] [--json]

`LiteRTEngine` is all that a driver author writes: what it can run, how to compile, export, load and run. aionn adds the driver process,
the cache, bursts and stages. `LiteRTPlainEngine` is the same engine without XNNPACK: it prepares at once and runs slower, so it serves
while the other one compiles. `tests/engines/test_check_engine.py` holds both to the contract with `aionn.testing.check_engine`.

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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aionn
from aionn.errors import CompilationError, DeviceUnavailableError
from aionn.hal import Artifact, CacheFiles, CompileOptions, Executable, ExecutionReport, Model, Operand, OperandType, model_bytes
from answers import print_answer

FORMAT = "tflite"
QUICK, BEST = "litert_driver:LiteRTPlainEngine", "litert_driver:LiteRTEngine"
Array = NDArray[Any]


class LiteRTEngine:
    """`aionn.hal.Engine` over the package `ai-edge-litert`. It reads .tflite files, whose tensors have the declared names."""

    name = "litert"
    cache_files = CacheFiles(model=1)
    plain = False

    def __init__(self) -> None:
        try:
            from ai_edge_litert import interpreter
        except ImportError as error:
            why = f"device {self.name!r} needs the package ai-edge-litert, which cannot be imported ({error}); pip install ai-edge-litert"
            raise DeviceUnavailableError(self.name, why) from error
        from importlib.metadata import version

        self._litert = interpreter
        self.version = f"{version('ai-edge-litert')};{'plain' if self.plain else 'xnnpack'}"

    def supported_operations(self, model: Model) -> Sequence[bool]:
        """Return whether the model is a .tflite file. LiteRT itself says more only when it compiles."""
        return [model.format == FORMAT] * len(model.operations)

    def compile(self, model: Model, options: CompileOptions) -> LiteRTExecutable:
        """Make an interpreter of a copy of the bytes, which stays with it: the executable's weights."""
        executable = self._executable(bytes(model_bytes(model, FORMAT)), options)
        for what, declared, found in (
            ("input", model.inputs, executable.inputs),
            ("output", model.outputs, executable.outputs),
        ):
            for name, operand in declared.items():
                if name not in found or found[name][1] != operand.type.dtype:
                    had = {key: str(kind) for key, (_, kind) in found.items()}
                    raise CompilationError(f"the model declares {what} {name!r} of {operand.type.value}, but its file has {had}")
        return executable

    def export(self, executable: Executable) -> Artifact | None:
        """Return the model's bytes. LiteRT has nothing else to store."""
        assert isinstance(executable, LiteRTExecutable)
        return Artifact((executable.content,), ())

    def load(self, artifact: Artifact, options: CompileOptions) -> LiteRTExecutable:
        """Make an interpreter of stored bytes."""
        if (len(artifact.model), len(artifact.data)) != (1, 0):
            raise CompilationError(
                f"an artifact of litert is one model file, got {len(artifact.model)} and {len(artifact.data)} data files"
            )
        return self._executable(bytes(artifact.model[0]), options)

    def _executable(self, content: bytes, options: CompileOptions) -> LiteRTExecutable:
        if options.cancelled.is_set():
            raise CompilationError("the compilation was cancelled because its caller stopped waiting", reason="cancelled")
        if content[4:8] != b"TFL3":  # LiteRT trusts what it parses
            raise CompilationError("these bytes are not a .tflite file; its fifth to eighth bytes are 'TFL3'")
        kinds = self._litert.OpResolverType
        resolver = kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES if self.plain else kinds.AUTO

        def interpreter() -> Any:
            return self._litert.Interpreter(model_content=content, num_threads=options.threads or 1, experimental_op_resolver_type=resolver)

        try:
            return LiteRTExecutable(content, interpreter)
        except (ValueError, RuntimeError) as error:
            raise CompilationError(f"litert cannot prepare the model: {error}", reason=str(error)) from error


class LiteRTPlainEngine(LiteRTEngine):
    """The same without XNNPACK: nothing is laid out anew, so it is ready sooner and runs slower."""

    name = "litert-plain"
    plain = True


class LiteRTExecutable:
    """One interpreter. It keeps no array of a run: inputs are copied into its tensors, and outputs out of them.

    Attributes:
        content: the model's bytes, which all lanes read.
        inputs: index and dtype of each tensor by name. outputs: the same.
    """

    def __init__(self, content: bytes, interpreter: Any) -> None:
        self.content = content
        self._make = interpreter
        self._interpreter = interpreter()
        self._interpreter.allocate_tensors()
        self.inputs = self._tensors(self._interpreter.get_input_details())
        self.outputs = self._tensors(self._interpreter.get_output_details())
        self._shapes: dict[str, tuple[int, ...]] = {}

    @staticmethod
    def _tensors(details: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, np.dtype[Any]]]:
        return {detail["name"]: (detail["index"], np.dtype(detail["dtype"])) for detail in details}

    def lanes(self, count: int) -> Sequence[LiteRTExecutable]:
        """Return interpreters over the same bytes."""
        return [self, *(self.share() for _ in range(count - 1))]

    def share(self) -> LiteRTExecutable:
        """Return one more interpreter over the same bytes."""
        return LiteRTExecutable(self.content, self._make)

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], timing: bool) -> ExecutionReport:
        """Copy the inputs in, run, and copy the outputs out. LiteRT releases the GIL while it computes."""
        shapes = {name: array.shape for name, array in inputs.items()}
        if shapes != self._shapes:
            for name, shape in shapes.items():
                self._interpreter.resize_tensor_input(self.inputs[name][0], shape)
            self._interpreter.allocate_tensors()
            self._shapes = shapes
        for name, array in inputs.items():
            self._interpreter.set_tensor(self.inputs[name][0], array)
        began_ns = time.monotonic_ns()
        self._interpreter.invoke()
        took_ns = time.monotonic_ns() - began_ns
        made: dict[str, Array] = {}
        for name, (index, _) in self.outputs.items():
            result = self._interpreter.get_tensor(index)
            given = outputs.get(name)
            if given is not None and given.shape == result.shape:
                np.copyto(given, result)
            else:
                made[name] = result
        return ExecutionReport(made, took_ns if timing else None)


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
    # Driver processes import the engine from this folder.
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
