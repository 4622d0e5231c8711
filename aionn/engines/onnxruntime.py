"""ONNX Runtime: the default engine.

No whole model is ever put together: the session gets the skeleton's bytes and, by name, arrays over the model's pools. ORT copies
these (`add_external_initializers`), and they go when the session is made. Large tables that only Gather reads (embeddings) are used
where they lie (`add_initializer`). For other constants that gives silently wrong answers, because ORT's transpose optimizer changes
some of them under their old name.

An artifact is ORT's optimised graph (model file) and the weights in the layout that this CPU wants (data file). Loading it is 1.7
to 22 times quicker than compiling. ORT can write it only while it compiles. Loading optimises nothing, so all large weights are used
where they lie. The memory of those that ORT lays out once more (MatMul, LSTM) is given back when the session is made.

What is set, and why (measured on 2 cores, ONNX Runtime 1.31)
    session.set_denormal_as_zero    PP-OCRv6's detector makes denormals: 26 instead of 100 ms; outputs differ by 3e-7.
                                    ORT sets it for its pool and for one thread per process; `Flushing` for the one that runs.
    intra_op.allow_spinning         on only for SUSTAINED_SPEED: spinning saves up to 0.9 ms when cores are free and doubles
                                    the latency when one is taken.
    intra_op_num_threads            explicit: ORT's own choice counts the machine's cores, not this process's. A session's pool has
                                    one thread less, because the thread that calls `run` works, too. Lanes share the pool.
    never: prepacked weights in the artifact (one model loads, then dies of SIGSEGV), .ort files (slower or SIGSEGV).

What an app may set (`options`), beside the options of a provider
    graph_optimization_level        "disabled", "basic", "extended" or "all" (usual).
    allow_spinning                  whether threads wait awake, in place of the rule above.
    denormals_as_zero               False for results that keep denormals.
    custom_ops                      a library of operators. Operators of other domains than ONNX Runtime's are then its.
    cpu_fallback                    for a provider: False refuses models of which ONNX Runtime would run a part on its CPU provider.

With a provider ("onnxruntime:cuda") a session has that provider, and ONNX Runtime's CPU for nodes that the provider does not take.
`runs_on` counts the nodes of each. Only the CPU provider writes artifacts, because others may compile nodes for this one process.

What an executable keeps: the pools of tables, or the artifact's buffers. Of arrays given to `run` it keeps weak references only.

An `OnnxRuntimeExecutable` is a session with the bindings of its arrays.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.engines.complaints import cancelled, compilation_error, onnxruntime_failure, without_status
from aionn.engines.elements import PACKED_BITS, PackedRuns, pack, packed_bytes, run_apart
from aionn.engines.onnxruntime_artifact import (
    ARTIFACT_FORMAT,
    WEIGHTS_FILE,
    InPlace,
    WrittenArtifact,
    outside_folder,
    with_weights_outside,
    without_notes,
)
from aionn.engines.onnxruntime_providers import CPU, Provider, nodes_on, short_names
from aionn.engines.processor import Flushing, instruction_set, run_threads, usable_cpus
from aionn.errors import CallerError, CompilationError, DeviceUnavailableError
from aionn.graph.arrays import arrays_over, constant_arrays
from aionn.hal.engine import Artifact, CompileOptions, Executable, ExecutionReport
from aionn.hal.model import Operation, PooledModel
from aionn.hal.options import NO_OPTIONS, OptionValue
from aionn.hal.types import CacheFiles, DeviceType, ExecutionPreference, OperandType

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

    `runs_on` names the providers that run the model's nodes. `best_instances` is how many runs at once serve many callers best.

    Several threads may enter a session at once if each has its own bindings. So the lanes of a model share one session.
    """

    runs_on = ""
    best_instances = 1

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
                # ORT fails where a given array does not have the output's true shape.
                return run_apart(self, inputs, outputs, timing, failure)
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

    def _bind(self, key: tuple[object, ...], inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> _Binding:
        binding = self._session.io_binding()
        gone = partial(_unbind, weakref.ref(self), key)
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


def _unbind(executable: weakref.ref[OnnxRuntimeExecutable], key: tuple[object, ...], _: object) -> None:
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


TINY_WORK = 500_000_000
"""Weights times input elements up to which one thread is used. Hardly a weight meets an input element more than once, so the product
bounds the multiplications from above. In so short a run, waking a second thread that does not spin costs more than it saves: silero
(2.6e8) takes 0.08 ms on one thread, 0.14 on two. The next larger model at hand has 1.6e9."""

MOST_OWN_INSTANCES = 4
"""A tiny model has so many instances at most, if the app has not chosen. A loop in Python sends no more than a few lanes can run. Measured
with 64 Silero streams at 31 frames/s (2 vCPUs, 2026-11): with one lane a tenth of the requests waits 0.8 ms for it, with two 0.2 ms."""

_OLDEST = frozenset({"GlobalAveragePool", "GlobalMaxPool", "Identity", "Not", "Shape", "Softplus", "Transpose"})
"""Usual operators that ONNX has had since its first version. ORT has kernels from then on for operators that ONNX never had."""

_NEWEST = 2**31 - 1
"""The highest version of an operator set that the `onnx` package takes. A model may name any of 64 bits."""

TABLE_BYTES = 1 << 20
"""From this size on a table is worth the search in the graph (a millisecond) for the nodes that read it."""

OUTSIDE_BYTES = 64 << 10
"""In an artifact, weights from this size on are used where they lie. The others are parts of the graph. Handing one over costs 20 us,
as much as ORT's copies of so many bytes. In models at hand a fifth of the weights are larger, and have 19 of 20 bytes."""

_Kernels = Mapping[tuple[str, str], Sequence[tuple[int, int]]]

_FATAL_ONLY = 4  # every error is raised as well, and a driver's stderr is for messages that have no other way


class OnnxRuntimeEngine:
    """`hal.Engine` over one provider of the `onnxruntime` package, which is the CPU if none is named.

    Raises:
        DeviceUnavailableError: the package is not installed, or cannot be loaded here; or the provider does not work.
    """

    name = "onnxruntime"
    cache_files = CacheFiles(model=1, data=1)
    device_type = DeviceType.CPU
    options: Mapping[str, type | tuple[type, ...]] = {
        "graph_optimization_level": str,
        "allow_spinning": bool,
        "denormals_as_zero": bool,
        "custom_ops": Path,
    }

    def __init__(self, provider: str = "") -> None:
        # ORT's import writes a device id and a database into the user's cache, and may upload events. A driver must leave nothing
        # behind, and the app of a camera or microphone must report to no third party. An app that wants it sets the variable to 0.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            import onnxruntime
            from onnxruntime.capi import onnxruntime_pybind11_state as native
        except ImportError as error:
            why = (
                f"device {self.name!r} needs the package onnxruntime, which cannot be imported ({error}); pip install 'aionn[onnxruntime]'"
            )
            raise DeviceUnavailableError(self.name, why) from error
        self._ort = onnxruntime
        self._native = native
        onnxruntime.set_default_logger_severity(_FATAL_ONLY)
        self.version = f"{onnxruntime.__version__};{instruction_set()};all,denormals=0;artifact={ARTIFACT_FORMAT}"
        self._kernels: Mapping[str, _Kernels] | None = None
        self.providers = tuple(short_names(onnxruntime.get_available_providers()))
        self.runs_on = CPU
        if provider:
            self._take(Provider(onnxruntime, self.name, provider))

    @classmethod
    def for_provider(cls, provider: str) -> OnnxRuntimeEngine:
        """Make the engine over a provider by its short name, as in "cuda" for CUDAExecutionProvider."""
        return cls(provider)

    def _take(self, provider: Provider) -> None:
        self.name, self.runs_on, self.device_type = provider.device, provider.name, provider.type
        self.version += f";{provider.version}" if provider.version else ""
        if self.runs_on != CPU:
            self.cache_files = CacheFiles()
            self.options = {**self.options, "cpu_fallback": bool, "*": (str, int, float, bool)}

    def supported_operations(self, model: PooledModel, options: Mapping[str, OptionValue] = NO_OPTIONS) -> Sequence[bool]:
        """Return per node whether ORT has a kernel for its operator and version. `compile` may still refuse its element type.

        A library of operators names them only when a session is made. So it is taken to have what ORT does not know.
        """
        from aionn.graph.support import supported_operations

        custom = "custom_ops" in options
        providers = {self.runs_on} if options.get("cpu_fallback") is False else {self.runs_on, CPU}
        if self.runs_on not in self._kernel_versions():  # it compiles whole graphs, and says what it takes when a session is made
            providers.add(CPU)
        return supported_operations(model, lambda *operator: self._has_kernel(providers, custom, *operator))

    def compile(self, model: PooledModel, options: CompileOptions) -> OnnxRuntimeExecutable:
        """Optimise fully (0 to 130 ms more than without). If the model may be exported, let ORT write the artifact."""
        from aionn.graph.support import gather_tables

        weights = sum(prod(constant.operand.dimensions or ()) for constant in model.constants)
        work = _most_work([operand.dimensions for operand in model.inputs.values()], weights)
        arrays = constant_arrays(model)
        tables: Sequence[str] = ()
        if self.runs_on == CPU and any(array.nbytes >= TABLE_BYTES for array in arrays.values()):
            tables = gather_tables(model, TABLE_BYTES)
        if tables and not options.may_export:  # ORT copies what it gets to optimise or to write, and a table may be most of a model
            with suppress(CompilationError):  # either ORT reads a table while it optimises, or the next attempt fails as well
                return self._compiled(model, with_weights_outside(model.graph, tables), arrays, tables, options, work)
        return self._compiled(model, model.graph, arrays, tables, options, work)

    def _compiled(
        self, model: PooledModel, graph: bytes, arrays: Mapping[str, Any], tables: Sequence[str], options: CompileOptions, work: int
    ) -> OnnxRuntimeExecutable:
        """Make a session that optimises a graph. It gets copies of all constants, except the tables if they are outside of `graph`."""
        settings = self._settings(options, _threads(options, work))
        settings.graph_optimization_level = self._level(options.options.get("graph_optimization_level", "all"))
        copied = [name for name in arrays if graph is model.graph or name not in tables]
        outside_folder(settings)
        if copied:
            settings.add_external_initializers(copied, [self._ort.OrtValue.ortvalue_from_numpy(arrays[name]) for name in copied])
        in_place = InPlace(self._ort, self._native, {name: arrays[name] for name in tables})
        in_place.give(settings)
        written = WrittenArtifact(work) if options.may_export else None
        if written is not None:
            settings.optimized_model_filepath = written.graph_path
            settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", written.weights_file)
            settings.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", str(OUTSIDE_BYTES))
        session = self._session(graph, settings, options, model.operations)
        return self._executable(session, in_place.kept(), None if written is None else written.artifact, options, work)

    def export(self, executable: Executable) -> Artifact | None:
        """Return the optimised graph and its weights, once, and free ORT's files. Later, and without `may_export`, return None."""
        if not isinstance(executable, OnnxRuntimeExecutable):
            raise CallerError(f"export got a {type(executable).__name__}; device {self.name!r} exports only what it has compiled itself")
        return executable.artifact()

    def load(self, artifact: Artifact, options: CompileOptions) -> OnnxRuntimeExecutable:
        """Make a session of an artifact, which is already optimised. Its weights are used in place or laid out once more.

        With `options.give_back`, the memory of weights that were laid out is given back, and the artifact cannot be exported again.

        Raises:
            CompilationError: the bytes are not an artifact of this engine.
        """
        if (len(artifact.model), len(artifact.data)) != (1, 1):
            found = f"{len(artifact.model)} model and {len(artifact.data)} data files"
            raise CompilationError(f"an artifact of {found} was given, but one of onnxruntime has one of each; compile the model")
        weights = memoryview(artifact.data[0]).cast("B")
        try:
            graph, notes = without_notes(memoryview(artifact.model[0]).cast("B"))
            arrays = arrays_over([weights], notes.weights)
        except (ValueError, IndexError, msgspec.MsgspecError) as error:
            raise CompilationError(f"the artifact is not of this release's onnxruntime engine ({error}); compile the model") from error
        settings = self._settings(options, _threads(options, notes.work))
        settings.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        again = None if options.give_back else lambda: artifact
        if not notes.by_name:
            settings.add_external_initializers_from_files_in_memory([WEIGHTS_FILE], [weights], [len(weights)])  # copied, twice
            return self._executable(self._session(graph, settings, options, ()), weights, again, options, notes.work)
        outside_folder(settings)
        in_place = InPlace(self._ort, self._native, arrays)
        in_place.give(settings)
        watches = in_place.watch(weights, notes.weights, options.give_back) if options.give_back and not weights.readonly else ()
        del arrays
        session = self._session(graph, settings, options, ())
        return self._executable(session, (in_place.kept(), watches), again, options, notes.work)

    def _executable(
        self, session: Any, alive: object, artifact: Callable[[], Artifact] | None, options: CompileOptions, work: int
    ) -> OnnxRuntimeExecutable:
        made = OnnxRuntimeExecutable(session, alive, artifact, flush=_flush(options))
        if refusal := values_refusal(session):
            raise CompilationError(f"onnxruntime cannot run the model: {refusal}; cast it inside the model", reason=refusal)
        made.runs_on = CPU if self.runs_on == CPU else nodes_on(session, self.runs_on)
        if self.runs_on == CPU and 0 <= work <= TINY_WORK and options.preference is not ExecutionPreference.LOW_POWER:
            made.best_instances = min(usable_cpus(), MOST_OWN_INSTANCES)
        return made

    def _level(self, name: OptionValue) -> Any:
        levels = self._ort.GraphOptimizationLevel
        known = {"disabled": levels.ORT_DISABLE_ALL, "basic": levels.ORT_ENABLE_BASIC, "extended": levels.ORT_ENABLE_EXTENDED}
        known["all"] = levels.ORT_ENABLE_ALL
        if name not in known:
            raise CallerError(f"option 'graph_optimization_level' of device {self.name!r} is {name!r}; it is one of {sorted(known)}")
        return known[str(name)]

    def _settings(self, options: CompileOptions, threads: int) -> Any:
        settings = self._ort.SessionOptions()
        settings.log_severity_level = _FATAL_ONLY
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
        asked = options.options
        spinning = asked.get("allow_spinning", options.preference is ExecutionPreference.SUSTAINED_SPEED) and threads > 1
        settings.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
        settings.add_session_config_entry("session.set_denormal_as_zero", "1" if _flush(options) else "0")
        if self.runs_on != CPU:
            settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            settings.add_session_config_entry("session.disable_cpu_ep_fallback", "0" if asked.get("cpu_fallback", True) else "1")
        if "custom_ops" in asked:
            try:
                settings.register_custom_ops_library(asked["custom_ops"])
            except Exception as error:  # ORT's exceptions have no common base but this
                why = without_status(str(error)).replace(f"{asked['custom_ops']}: ", "").rpartition("error: ")[2]
                raise CallerError(
                    f"option 'custom_ops' of device {self.name!r}: ONNX Runtime cannot use the library ({why}); give one that exports "
                    "RegisterCustomOps"
                ) from error
        return settings

    def _provider(self, options: CompileOptions) -> Any:
        """Return what a session takes as its provider: the name, with the options that are not this engine's."""
        if self.runs_on == CPU:
            return CPU
        return self.runs_on, {name: str(value) for name, value in options.options.items() if name not in self.options}

    def _session(self, graph: bytes, settings: Any, options: CompileOptions, operations: Sequence[Operation]) -> Any:
        options.cancelled.when_set(lambda: settings.set_load_cancellation_flag(True))
        try:
            # Flushing restores what ORT changes in this thread when it makes the first session of the process.
            with Flushing(_flush(options)):
                return self._ort.InferenceSession(graph, settings, providers=[self._provider(options)], enable_fallback=0)
        except self._native.ModelLoadCanceled as error:
            raise cancelled() from error
        except Exception as error:  # ORT's exceptions have no common base but this
            if "fallback to CPU EP has been explicitly disabled" in str(error):
                raise CompilationError(
                    f"some operations of the model do not run on {self.runs_on}, and the option cpu_fallback=False forbids the CPU; "
                    "leave the option out, or use another device"
                ) from error
            raise compilation_error(str(error), operations) from error

    def _has_kernel(self, providers: Set[str], custom: bool, domain: str, operator: str, opset: int) -> bool:
        kernels = self._kernel_versions()
        if custom and domain and not any((domain, operator) in known for known in kernels.values()):
            return True
        found = [versions for provider in providers if provider in kernels for versions in kernels[provider].get((domain, operator), ())]
        if not domain:
            # A later kernel than the first begins with a version of the operator, so ONNX has the operator in `opset` too.
            if any((first > 1 or operator in _OLDEST) and first <= opset <= last for first, last in found):
                return True
            # ORT takes Constant nodes for initializers.
            if operator == "Constant" and opset > 0:
                return True
            import onnx  # its import takes 60 ms, and most models do without

            try:
                schema: Any = onnx.defs.get_schema(operator, min(max(opset, 0), _NEWEST), domain)
            except onnx.defs.SchemaError:
                return False
            # ORT inlines operators that ONNX defines through others.
            if schema.has_function or schema.has_context_dependent_function:
                return True
            opset = schema.since_version
        return any(first <= opset <= last for first, last in found)

    def _kernel_versions(self) -> Mapping[str, _Kernels]:
        """Return by provider which versions of each operator have a kernel. Several threads may ask, so only a whole table is kept."""
        kernels = self._kernels
        if kernels is None:
            found: dict[str, dict[tuple[str, str], list[tuple[int, int]]]] = {}
            for kernel in self._native.get_all_opkernel_def():
                versions = found.setdefault(kernel.provider, {}).setdefault((kernel.domain, kernel.op_name), [])
                versions.append(kernel.version_range)
            self._kernels = kernels = found
        return kernels


def _flush(options: CompileOptions) -> bool:
    """Return whether denormals are taken for zero."""
    return bool(options.options.get("denormals_as_zero", True))


def _most_work(input_shapes: Sequence[tuple[int, ...] | None], weights: int) -> int:
    """Return weights times input elements, cut above `TINY_WORK`. An open batch counts as 1. Any other open axis gives -1 (unknown)."""
    elements = 0
    for shape in input_shapes:
        if shape is None or 0 in shape[1:]:
            return -1
        elements += prod(extent or 1 for extent in shape)
    return min(weights * elements, TINY_WORK + 1)


def _threads(options: CompileOptions, work: int) -> int:
    """Return the app's number of threads, else 1 for a tiny model, else what `run_threads` says."""
    chosen = options.threads and not options.at_most
    return 1 if not chosen and 0 <= work <= TINY_WORK else run_threads(options)
