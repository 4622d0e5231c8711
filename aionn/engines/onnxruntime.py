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
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from aionn.engines.complaints import compilation_error, without_status
from aionn.engines.onnxruntime_artifact import (
    ARTIFACT_FORMAT,
    WEIGHTS_FILE,
    InPlace,
    WrittenArtifact,
    outside_folder,
    with_weights_outside,
    without_notes,
)
from aionn.engines.onnxruntime_executable import OnnxRuntimeExecutable, values_refusal
from aionn.engines.onnxruntime_providers import CPU, Provider, nodes_on, short_names
from aionn.engines.processor import Flushing, instruction_set, run_threads
from aionn.errors import CallerError, CompilationError, DeviceUnavailableError
from aionn.graph.arrays import arrays_over, constant_arrays
from aionn.hal.engine import Artifact, CompileOptions, Executable
from aionn.hal.model import Model, Operation
from aionn.hal.options import NO_OPTIONS, OptionValue
from aionn.hal.types import CacheFiles, DeviceType, ExecutionPreference

TINY_WORK = 500_000_000
"""Weights times input elements up to which one thread is used. Hardly a weight meets an input element more than once, so the product
bounds the multiplications from above. In so short a run, waking a second thread that does not spin costs more than it saves: silero
(2.6e8) takes 0.08 ms on one thread, 0.14 on two. The next larger model at hand has 1.6e9."""

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

_CANCELLED = "the compilation was cancelled because its caller stopped waiting"
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
            why = f"device {self.name!r} needs the package onnxruntime, which cannot be imported ({error}); pip install aionn[onnxruntime]"
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

    def supported_operations(self, model: Model, options: Mapping[str, OptionValue] = NO_OPTIONS) -> Sequence[bool]:
        """Return per node whether ORT has a kernel for its operator and version. `compile` may still refuse its element type.

        A library of operators names them only when a session is made. So it is taken to have what ORT does not know.
        """
        from aionn.graph.support import supported_operations

        custom = "custom_ops" in options
        providers = {self.runs_on} if options.get("cpu_fallback") is False else {self.runs_on, CPU}
        if self.runs_on not in self._kernel_versions():  # it compiles whole graphs, and says what it takes when a session is made
            providers.add(CPU)
        return supported_operations(model, lambda *operator: self._has_kernel(providers, custom, *operator))

    def compile(self, model: Model, options: CompileOptions) -> OnnxRuntimeExecutable:
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
        self, model: Model, graph: bytes, arrays: Mapping[str, Any], tables: Sequence[str], options: CompileOptions, work: int
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
        return self._executable(session, in_place.kept(), None if written is None else written.artifact, options)

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
            return self._executable(self._session(graph, settings, options, ()), weights, again, options)
        outside_folder(settings)
        in_place = InPlace(self._ort, self._native, arrays)
        in_place.give(settings)
        watches = in_place.watch(weights, notes.weights, options.give_back) if options.give_back and not weights.readonly else ()
        del arrays
        session = self._session(graph, settings, options, ())
        return self._executable(session, (in_place.kept(), watches), again, options)

    def _executable(
        self, session: Any, alive: object, artifact: Callable[[], Artifact] | None, options: CompileOptions
    ) -> OnnxRuntimeExecutable:
        made = OnnxRuntimeExecutable(session, alive, artifact, flush=_flush(options))
        if refusal := values_refusal(session):
            raise CompilationError(f"onnxruntime cannot run the model: {refusal}; cast it inside the model", reason=refusal)
        made.runs_on = CPU if self.runs_on == CPU else nodes_on(session, self.runs_on)
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
            raise CompilationError(_CANCELLED, reason="cancelled") from error
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
