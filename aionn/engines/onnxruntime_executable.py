"""A session of ONNX Runtime as an `Executable`, with the bindings of its arrays."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.engines.complaints import onnxruntime_failure
from aionn.engines.elements import PACKED_BITS, PackedRuns, deliver, pack, packed_bytes
from aionn.engines.processor import Flushing
from aionn.hal.engine import Artifact, ExecutionReport
from aionn.hal.types import OperandType

_ALL_IN_PLACE = ExecutionReport()
"""What most runs report. To make another one takes longer than to look up the bindings."""

_KINDS = {
    "tensor(bfloat16)": (16, OperandType.BFLOAT16),
    "tensor(float8e4m3fn)": (17, OperandType.FLOAT8E4M3FN),
    "tensor(float8e4m3fnuz)": (18, OperandType.FLOAT8E4M3FNUZ),
    "tensor(float8e5m2)": (19, OperandType.FLOAT8E5M2),
    "tensor(float8e5m2fnuz)": (20, OperandType.FLOAT8E5M2FNUZ),
    "tensor(uint4)": (21, OperandType.UINT4),
    "tensor(int4)": (22, OperandType.INT4),
    "tensor(float4e2m1)": (23, OperandType.FLOAT4E2M1),
    "tensor(float8e8m0)": (24, OperandType.FLOAT8E8M0),
    "tensor(uint2)": (25, OperandType.UINT2),
    "tensor(int2)": (26, OperandType.INT2),
}
"""By ORT's name of a type that NumPy lacks: ONNX's number, by which such an array is bound, and the type."""

_Kinds = Mapping[str, tuple[int, OperandType]]


class OnnxRuntimeExecutable:
    """A session and its bindings. Arrays that come again are not bound again: 6 us a call instead of 19 (one input, one output).

    `runs_on` names the providers that run the model's nodes.

    Several threads may enter a session at once if each has its own bindings. So the lanes of a model share one session.
    """

    runs_on = ""

    def __init__(
        self, session: Any, alive: object, artifact: Callable[[], Artifact] | None, *, packs: bool = True, flush: bool = True
    ) -> None:
        """
        Args:
            packs: whether tensors of packed types come as arrays of ml_dtypes. Otherwise they are packed already.
            flush: whether runs take denormals for zero.
        """
        self._session = session
        self._alive = alive  # ORT reads these for as long as the session lives
        self._artifact = artifact
        self._flush = flush
        self._flushing = Flushing(flush)
        self._outputs = [output.name for output in session.get_outputs()]
        given = {given.name for given in session.get_inputs()}
        ports = (*session.get_inputs(), *session.get_outputs())
        self._kinds = {port.name: _KINDS[port.type] for port in ports if port.type in _KINDS}
        packed = {name: kind for name, (_, kind) in self._kinds.items() if kind in PACKED_BITS} if packs else {}
        self._packed = PackedRuns(OnnxRuntimeExecutable(session, alive, None, packs=False, flush=flush), packed) if packed else None
        self._passed = tuple(name for name in self._outputs if name in given)
        self._bindings: dict[tuple[object, ...], _Binding] = {}

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        """Run with inputs and given outputs in place, wherever they lie. An input may be read-only.

        An array is recognised by identity, so give a new array object for another place.
        """
        key = (*inputs, *map(id, inputs.values()), *outputs, *map(id, outputs.values()))
        bound = self._bindings.get(key)
        if bound is None or not bound.is_of(inputs, outputs):
            if self._packed is not None:
                return self._packed.run(inputs, outputs, timing)
            bound = self._bind(key, inputs, outputs)
        try:
            with self._flushing:
                started_ns = time.monotonic_ns() if timing else 0
                self._session.run_with_iobinding(bound.binding)
                took_ns = time.monotonic_ns() - started_ns if timing else None
        except BaseException as error:
            self._bindings.pop(key, None)  # its state is unknown after an error
            if isinstance(error, MemoryError) or not isinstance(error, Exception):
                raise
            failure = onnxruntime_failure(error)
            if outputs:
                return self._run_apart(inputs, outputs, timing, failure)
            raise failure from error
        if not (timing or bound.made or self._passed):
            return _ALL_IN_PLACE
        made = bound.take_made() if bound.made else {}
        for name in self._passed:  # ORT returns the input itself, and does not write to the array that is bound for the output
            if name in made or outputs[name].shape != inputs[name].shape:
                made[name] = inputs[name].copy()
            else:
                outputs[name][...] = inputs[name]
        return ExecutionReport(made, took_ns)

    def run_values(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run with values that no binding takes: strings, sequences, maps, optionals.

        ONNX Runtime binds dense tensors of numbers only. A run with an absent optional crashes it if its outputs are bound (1.32). So these
        runs bind nothing. An input of a type that NumPy lacks goes in as a value of ONNX Runtime.
        """
        kinds = self._kinds
        given = {name: _value_of(array, *kinds[name]) if name in kinds else array for name, array in inputs.items()}
        try:
            with self._flushing:
                return dict(zip(self._outputs, self._session.run(self._outputs, given), strict=True))
        except MemoryError:
            raise
        except Exception as error:
            raise onnxruntime_failure(error) from error

    def _run_apart(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool, failure: Exception
    ) -> ExecutionReport:
        """Run again with outputs that ORT itself allocates. ORT fails where a given array does not have the output's true shape.

        Raises:
            Exception: `failure`, if this run fails as well.
        """
        try:
            report = self.run(inputs, {}, timing)
        except Exception:
            raise failure from None
        made = dict(report.outputs)
        deliver(made, outputs)
        return ExecutionReport(made, report.on_device_ns)

    def _bind(self, key: tuple[object, ...], inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> _Binding:
        binding = self._session.io_binding()
        gone = partial(_forget, weakref.ref(self), key)
        bound = self._bindings[key] = _Binding(binding, self._outputs, inputs, outputs, self._kinds, gone)
        return bound

    def lanes(self, count: int) -> list[OnnxRuntimeExecutable]:
        """Return `count` executables over one session, of which this is the first."""
        return [self, *(self.share() for _ in range(count - 1))]

    def share(self) -> OnnxRuntimeExecutable:
        """Return one more executable over the same session."""
        return OnnxRuntimeExecutable(self._session, self._alive, None, flush=self._flush)

    def artifact(self) -> Artifact | None:
        """Return what to store, the first time only. Keeping it would cost the weights' size as long as the model lives."""
        artifact, self._artifact = self._artifact, None
        return artifact() if artifact else None


class _Binding:
    """A set of arrays bound to a session by their addresses.

    Invariants
        A binding keeps no array alive, and is forgotten with the first of its arrays (`gone`). It is used only while the very arrays
        it was made for are all alive. So an address never belongs to memory that is gone, or to another array that got the same `id`.
        Between runs, an output that ORT itself allocates has no memory. ORT would take the memory of the last run for the caller's.
    """

    __slots__ = ("_arrays", "_kinds", "_names", "binding", "made")

    def __init__(
        self,
        binding: Any,
        names: Sequence[str],
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        kinds: _Kinds,
        gone: Callable[[object], None],
    ) -> None:
        self.binding = binding
        self._kinds = kinds
        self._names = names
        self.made = [name for name in names if name not in outputs]
        self._arrays = [weakref.ref(array, gone) for array in (*inputs.values(), *outputs.values())]
        for name in names:  # bind all, so that an output's place in the binding is its index
            binding.bind_output(name)
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, kinds[name][0] if name in kinds else array.dtype, array.shape, _address(array))
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, kinds[name][0] if name in kinds else array.dtype, array.shape, _address(array))

    def is_of(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> bool:
        """Return whether the binding was made for these very arrays. Their names are the same."""
        known = iter(self._arrays)
        for array in inputs.values():
            if next(known)() is not array:
                return False
        for array in outputs.values():  # noqa: SIM110 -- a generator costs more than the loop
            if next(known)() is not array:
                return False
        return True

    def take_made(self) -> dict[str, NDArray[Any]]:
        """Return the outputs that ORT has allocated, by name."""
        values = zip(self._names, self.binding.get_outputs(), strict=True)
        kinds = self._kinds
        found = {name: _copied(value, kinds[name][1]) if name in kinds else value.numpy() for name, value in values if name in self.made}
        for name in self.made:
            self.binding.bind_output(name)
        return found


def _forget(executable: weakref.ref[OnnxRuntimeExecutable], key: tuple[object, ...], _: object) -> None:
    """Forget a binding, because one of its arrays is gone. This may happen in any thread."""
    owner = executable()
    if owner is not None:
        owner._bindings.pop(key, None)


def values_refusal(session: Any) -> str:
    """Return why ONNX Runtime cannot give or take the values of a session, as the end of a sentence. Empty if it can.

    Python gets the outputs of a run with values all at once, as NumPy's arrays.
    """
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if all(port.type.startswith("tensor(") and port.type != "tensor(string)" for port in (*inputs, *outputs)):
        return ""
    for side, ports in (("input", inputs), ("output", outputs)):
        for port in ports:
            if (side == "output" or port.type not in _KINDS) and any(kind in port.type for kind in _KINDS):
                return f"{side} {port.name!r} is of type {port.type}, which NumPy lacks, beside strings, sequences, maps or optionals"
    return ""


def _value_of(array: NDArray[Any], number: int, kind: OperandType) -> Any:
    """Return an array of a type that NumPy lacks as ONNX Runtime's own value."""
    from onnxruntime import OrtValue  # imported by the engine already

    bits = PACKED_BITS.get(kind)
    elements = pack(array, bits) if bits else np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.itemsize}")
    return OrtValue.ortvalue_from_numpy_with_onnx_type(elements, number)


def _copied(value: Any, kind: OperandType) -> NDArray[Any]:
    """Return a copy of a tensor whose type ORT cannot give to NumPy. One of a packed type stays packed, in an array of its shape."""
    shape = tuple(value.shape())
    bits = PACKED_BITS.get(kind)
    array: NDArray[Any] = np.zeros(shape, kind.dtype if bits is None else np.uint8)
    size = array.nbytes if bits is None else packed_bytes(array.size, bits)
    if size:
        ctypes.memmove(_address(array), value.data_ptr(), size)
    return array


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
