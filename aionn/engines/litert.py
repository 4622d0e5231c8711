"""LiteRT (TensorFlow Lite) on the CPU, for .tflite files. It reads no ONNX. Extra: aionn[litert].

A .tflite file is a model of opaque bytes. `border` reads its inputs and outputs, which an app declares:

    inputs, outputs = border(content)
    model = aionn.Model.from_bytes(content, inputs=inputs, outputs=outputs, format="tflite", name="words.tflite")

LiteRT computes with XNNPACK where it can. An artifact is the file's bytes (model file) and the shapes of the inputs as JSON (data file),
because some files can only be prepared with the shapes that the app declares.

What an executable keeps: the file's bytes, one interpreter, and no array of a run. Inputs are copied into the interpreter's tensors, and
outputs out of them.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.engines.complaints import cancelled
from aionn.engines.elements import deliver
from aionn.errors import CallerError, CompilationError, DeviceUnavailableError
from aionn.hal.engine import Artifact, CompileOptions, Executable, ExecutionReport
from aionn.hal.model import PooledModel, model_bytes
from aionn.hal.types import CacheFiles, Operand, OperandType

FORMAT = "tflite"

_MARK = b"TFL3"
"""The fifth to eighth bytes of a .tflite file. LiteRT trusts what it parses."""

Array = NDArray[Any]
Shapes = dict[str, tuple[int, ...]]


def border(content: bytes) -> tuple[dict[str, Operand], dict[str, Operand]]:
    """Return the inputs and the outputs of a .tflite file by name, in the file's order. An open dimension is 0.

    Tables of the file are read in Python. Nothing of the file is run.

    Raises:
        CallerError: these bytes are not a .tflite file, or it has tensors of a type that aionn lacks.
        DeviceUnavailableError: the package ai-edge-litert is not installed.
    """
    schema = _package("litert", "schema_py_generated")
    if content[4:8] != _MARK:
        raise CallerError("these bytes are not a .tflite file, whose fifth to eighth bytes are 'TFL3'; give the contents of one")
    kinds = {number: name.lower() for name, number in vars(schema.TensorType).items() if not name.startswith("_")}

    def operands(indices: Iterable[int]) -> dict[str, Operand]:
        tensors = [graph.Tensors(index) for index in indices]
        return {one.Name().decode(): Operand(OperandType(kinds[one.Type()]), _dimensions(one)) for one in tensors}

    try:
        graph = schema.Model.GetRootAs(content).Subgraphs(0)
        return operands(graph.InputsAsNumpy()), operands(graph.OutputsAsNumpy())
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, struct.error) as error:
        raise CallerError(f"the inputs and outputs of this .tflite file cannot be read ({error}); give a whole file") from error


def _dimensions(tensor: Any) -> tuple[int, ...]:
    extents = tensor.ShapeSignatureAsNumpy() if tensor.ShapeSignatureLength() else tensor.ShapeAsNumpy()
    return tuple(max(0, int(extent)) for extent in (extents if tensor.ShapeLength() else ()))


def _package(device: str, module: str) -> Any:
    try:
        return import_module(f"ai_edge_litert.{module}")
    except ImportError as error:
        why = f"device {device!r} needs the package ai-edge-litert, which cannot be imported ({error}); pip install 'aionn[litert]'"
        raise DeviceUnavailableError(device, why) from error


class LiteRTEngine:
    """`hal.Engine` over LiteRT's interpreter.

    Attributes:
        delegates: whether XNNPACK computes what it can. Without it a model is prepared sooner and runs slower.

    Raises:
        DeviceUnavailableError: the package is not installed.
    """

    name = "litert"
    cache_files = CacheFiles(model=1, data=1)
    delegates = True

    def __init__(self) -> None:
        self._litert = _package(self.name, "interpreter")
        self.version = f"{version('ai-edge-litert')};{'xnnpack' if self.delegates else 'plain'}"

    def supported_operations(self, model: PooledModel) -> Sequence[bool]:
        """Return whether the model is a .tflite file. LiteRT itself says more only when it compiles."""
        return [model.format == FORMAT] * len(model.operations)

    def compile(self, model: PooledModel, options: CompileOptions) -> LiteRTExecutable:
        """Make an interpreter of a copy of the bytes, which stays with it: the executable's weights."""
        shapes = {name: operand.dimensions for name, operand in model.inputs.items() if operand.dimensions and all(operand.dimensions)}
        executable = self._executable(bytes(model_bytes(model, FORMAT)), shapes, options)
        for what, declared, found in (("input", model.inputs, executable.inputs), ("output", model.outputs, executable.outputs)):
            for name, operand in declared.items():
                if name not in found or found[name][1] != operand.type.dtype:
                    had = {key: str(kind) for key, (_, kind) in found.items()}
                    raise CompilationError(f"the model declares {what} {name!r} of {operand.type.value}, but its file has {had}")
        return executable

    def export(self, executable: Executable) -> Artifact | None:
        """Return the model's bytes and the shapes of its inputs. LiteRT has nothing else to store."""
        assert isinstance(executable, LiteRTExecutable)
        return Artifact((executable.content,), (msgspec.json.encode(executable.declared),))

    def load(self, artifact: Artifact, options: CompileOptions) -> LiteRTExecutable:
        """Make an interpreter of stored bytes."""
        if (len(artifact.model), len(artifact.data)) != (1, 1):
            found = f"{len(artifact.model)} model files and {len(artifact.data)} data files"
            raise CompilationError(f"an artifact of litert is one model file and one data file, found {found}")
        return self._executable(bytes(artifact.model[0]), msgspec.json.decode(artifact.data[0], type=Shapes), options)

    def _executable(self, content: bytes, shapes: Shapes, options: CompileOptions) -> LiteRTExecutable:
        if options.cancelled.is_set():
            raise cancelled()
        if content[4:8] != _MARK:
            raise CompilationError("these bytes are not a .tflite file, whose fifth to eighth bytes are 'TFL3'")
        kinds = self._litert.OpResolverType
        resolver = kinds.AUTO if self.delegates else kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES

        def interpreter() -> Any:
            return self._litert.Interpreter(model_content=content, num_threads=options.threads or 1, experimental_op_resolver_type=resolver)

        try:
            return LiteRTExecutable(content, shapes, interpreter)
        except (ValueError, RuntimeError) as error:
            raise CompilationError(f"litert cannot prepare the model: {error}", reason=str(error)) from error


class LiteRTExecutable:
    """One interpreter.

    Attributes:
        content: the model's bytes, which all lanes read.
        declared: shapes of inputs by name, with which the model is prepared. An input with an open dimension is not among them.
        inputs: index and dtype of each tensor by name. outputs: the same.
    """

    def __init__(self, content: bytes, declared: Shapes, interpreter: Any) -> None:
        self.content = content
        self.declared = declared
        self._make = interpreter
        self._interpreter = interpreter()
        self.inputs = _tensors(self._interpreter.get_input_details())
        self.outputs = _tensors(self._interpreter.get_output_details())
        self._shapes: Shapes = {}
        if declared.keys() == self.inputs.keys():
            self._prepare(declared)

    def share(self) -> LiteRTExecutable:
        """Return one more interpreter over the same bytes."""
        return LiteRTExecutable(self.content, self.declared, self._make)

    def lanes(self, count: int) -> Sequence[LiteRTExecutable]:
        """Return interpreters over the same bytes."""
        return [self, *(self.share() for _ in range(count - 1))]

    def _prepare(self, shapes: Shapes) -> None:
        self._shapes = {}  # a shape that does not fit leaves the interpreter unprepared
        for name, shape in shapes.items():
            self._interpreter.resize_tensor_input(self.inputs[name][0], shape)
        self._interpreter.allocate_tensors()
        self._shapes = shapes

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], timing: bool) -> ExecutionReport:
        """Copy the inputs in, run, and copy the outputs out. LiteRT releases the GIL while it computes."""
        shapes = {name: array.shape for name, array in inputs.items()}
        if shapes != self._shapes:
            self._prepare(shapes)
        for name, array in inputs.items():
            self._interpreter.set_tensor(self.inputs[name][0], array)
        began_ns = time.monotonic_ns()
        self._interpreter.invoke()
        took_ns = time.monotonic_ns() - began_ns
        made = {name: self._interpreter.get_tensor(index) for name, (index, _) in self.outputs.items()}
        deliver(made, outputs)
        return ExecutionReport(made, took_ns if timing else None)


def _tensors(details: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, np.dtype[Any]]]:
    return {detail["name"]: (detail["index"], np.dtype(detail["dtype"])) for detail in details}
