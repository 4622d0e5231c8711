"""OpenVINO: slower to compile than ONNX Runtime, quicker to run convolutions on a CPU. Extra: aionn[openvino].

Without a provider it runs on the CPU. "openvino:GPU" names another device of OpenVINO, "openvino:AUTO" leaves the choice to OpenVINO, and
"openvino:HETERO:GPU,CPU" divides a model. What a compiled model runs on is asked of it.

An artifact is OpenVINO's exported blob (model file) and the names of the inputs and outputs in their order (data file).
The names are needed because OpenVINO merges names of tensors that it finds to be the same. From a writable buffer (a
private mapping) the blob's weights are used in place, 3 times quicker than from bytes. OpenVINO copies a read-only buffer.
OpenVINO takes a graph only whole, so compiling costs a temporary copy of the constants. OpenVINO then keeps another copy.

What is set where the device has the property, and why. An app may set any property of the device in place of these (`options`), except
the numbers of threads and streams, which are arguments of `compile`.
    INFERENCE_PRECISION_HINT        f32, always: left alone it takes bf16 where the CPU has it, and text recognition drifts by 0.12.
    PERFORMANCE_HINT                LATENCY: a lane has one request at a time.
    NUM_STREAMS                     one per lane, where there are several. A stream runs one request.
    INFERENCE_NUM_THREADS           explicit: for all streams together. OpenVINO itself uses at most the usable CPUs.
    ENABLE_CPU_PINNING              off: each driver process would pin its threads to the same first cores.
    CPU_DENORMALS_OPTIMIZATION      on, as for ONNX Runtime.

What an executable keeps: OpenVINO's own copy of the weights, or the artifact's buffer. It also keeps the arrays of the last `run`
until the next one, because OpenVINO's tensors own what they lie over.

OpenVINO says which devices there are, and their versions. A compile sets the properties of its device.
"""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.engines.complaints import cancelled, openvino_failure
from aionn.engines.elements import PACKED_BITS, PackedRuns, as_bytes, deliver, run_apart
from aionn.engines.processor import Flushing, instruction_set, run_threads
from aionn.errors import CallerError, CompilationError, DeviceUnavailableError
from aionn.hal.engine import Artifact, CompileOptions, Executable, ExecutionReport
from aionn.hal.model import Operation, PooledModel
from aionn.hal.options import NO_OPTIONS, OptionValue
from aionn.hal.types import CacheFiles, DeviceType, OperandType
from aionn.hal.values import outside_frames

_CPU = "CPU"
_AUTO = "AUTO"
_OVER_OTHERS = (_AUTO, "HETERO", "MULTI", "BATCH")
"""Devices that use others, which may be named after a colon. All but AUTO need these names."""

_TYPES = {"CPU": DeviceType.CPU, "GPU": DeviceType.GPU, "NPU": DeviceType.ACCELERATOR}

_OF_COMPILE = {"INFERENCE_NUM_THREADS": "threads", "NUM_STREAMS": "instances"}
"""Properties that aionn sets from arguments of `compile`."""

_UNLISTED = {"CACHE_DIR", "CACHE_MODE", "DEVICE_PROPERTIES"}
"""Properties that OpenVINO takes for every device without listing them."""


class Chosen:
    """The device of OpenVINO that an engine uses.

    Attributes:
        name: of aionn's device, as in "openvino:GPU".
        device: as OpenVINO names it.
        providers: every name that may be chosen here.
        exports: whether compiled models can be stored.
        type: of the hardware.
        version: names and versions of the hardware and its driver.
    """

    def __init__(self, core: Any, engine: str, provider: str) -> None:
        """Find a device by its name, in any case. Without a name it is the CPU.

        Raises:
            DeviceUnavailableError: there is no such device here.
        """
        self._core = core
        self.device = provider.upper() or _CPU
        self.name = f"{engine}:{self.device}" if provider else engine
        available = list(core.available_devices)
        over_others = [name for name in _OVER_OTHERS if _properties(core, name)]
        self.providers = (*available, *(name for name in over_others if name == _AUTO))
        first, colon, others = self.device.partition(":")
        used = [other.partition("(")[0].lstrip("-") for other in others.split(",")] if colon else []
        known = over_others if colon or first == _AUTO else available
        missing = next((one for one in used if not _is_there(one, available)), None)
        if missing is not None or (first not in known and not _is_there(self.device, known)):
            there = ", ".join(f"{engine}:{one}" for one in self.providers)
            has = f"OpenVINO has no device {missing or self.device!r} here, it has {there}"
            way_out = "; a GPU or NPU is there once its driver is installed and this account may open it (aionn doctor says more)"
            raise DeviceUnavailableError(self.name, f"device {self.name!r} is not there, because {has}" + way_out * (first in _TYPES))
        self.exports = first not in _OVER_OTHERS or first == "HETERO"
        hardware = used or (available if first == _AUTO else [self.device])
        self.type = _TYPES.get(hardware[0].partition(".")[0], DeviceType.OTHER) if len(set(hardware)) == 1 else DeviceType.OTHER
        self.version = ";".join(filter(None, (_versions(core, one) for one in hardware)))
        self._known = _properties(core, first)
        for one in hardware:
            self._known |= _properties(core, one)

    def settings(self, options: CompileOptions) -> dict[str, Any]:
        """Return the properties of a compile: those that this device has of the usual ones, then those of the app.

        Raises:
            CallerError: the device has no such property, or another argument of `compile` sets it.
        """
        self.check(options.options)
        usual = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": run_threads(options) * options.instances,
            "ENABLE_CPU_PINNING": False,
            "CPU_DENORMALS_OPTIMIZATION": True,
        }
        if options.instances != 1:
            usual["NUM_STREAMS"] = options.instances
        return {**{name: value for name, value in usual.items() if name in self._known}, **options.options}

    def check(self, options: Mapping[str, OptionValue]) -> None:
        """Check the names of properties. OpenVINO checks their values when it compiles.

        Raises:
            CallerError: as for `settings`.
        """
        for name in options:
            if name in _OF_COMPILE:
                raise CallerError(f"option {name!r} of device {self.name!r}: give {_OF_COMPILE[name]}= to compile in its place")
            if name not in self._known | _UNLISTED:
                known = ", ".join(sorted(self._known - _OF_COMPILE.keys()))
                raise CallerError(f"device {self.name!r} has no option {name!r}; OpenVINO's properties for it are {known}")


def _is_there(name: str, available: list[str]) -> bool:
    """Return whether a device is there. "GPU" stands for the first of "GPU.0" and "GPU.1", and "GPU.0" for the only "GPU"."""
    return name in available or f"{name}.0" in available or (name.endswith(".0") and name[:-2] in available)


def _properties(core: Any, device: str) -> set[str]:
    """Return the properties that can be set. An absent device has none."""
    try:
        supported = core.get_property(device, "SUPPORTED_PROPERTIES")
    except Exception:  # OpenVINO raises RuntimeError or its subclasses for everything
        return set()
    return {name for name, access in supported.items() if access != "RO"}


def _versions(core: Any, device: str) -> str:
    """Return what names a device and its driver, as in "FULL_DEVICE_NAME=Intel Arc;GPU_DRIVER_VERSION=1.3"."""
    found = []
    try:
        for name in sorted(core.get_property(device, "SUPPORTED_PROPERTIES")):
            if name in ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE") or name.endswith("_VERSION"):
                found.append(f"{name}={core.get_property(device, name)}")
    except Exception as error:  # as above; a version that cannot be read must not be taken for another one
        found.append(f"unread={type(error).__name__}")
    return ";".join(found)


def computes_with(compiled: Any) -> str:
    """Return the devices that a compiled model runs on, with its precision if that is not float32, as in "CPU (bf16)"."""
    try:
        devices = ", ".join(compiled.get_property("EXECUTION_DEVICES"))
    except Exception:  # some devices do not say it
        return ""
    try:
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    except Exception:
        return devices
    return devices if precision in ("f32", "dynamic") else f"{devices} ({precision})"


def flushes_denormals(compiled: Any) -> bool:
    """Return whether a compiled model takes denormals for zero. Other devices than the CPU do not say it."""
    try:
        return bool(compiled.get_property("CPU_DENORMALS_OPTIMIZATION"))
    except Exception:
        return True


_CONVERTER = "openvino.tools.ovc"
_ARTIFACT_FORMAT = 1


class _Names(msgspec.Struct, frozen=True):
    """The artifact's data file."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class OpenVINOEngine:
    """`hal.Engine` over one device of OpenVINO, which is the CPU if none is named.

    Raises:
        DeviceUnavailableError: the package is not installed, or has no such device on this machine.
    """

    name = "openvino"
    cache_files = CacheFiles(model=1, data=1)
    options: Mapping[str, type | tuple[type, ...]] = {"*": (str, int, float, bool)}

    def __init__(self, provider: str = "") -> None:
        try:
            openvino = _openvino()
        except ImportError as error:
            why = f"device {self.name!r} needs the package openvino, which cannot be imported ({error}); pip install 'aionn[openvino]'"
            raise DeviceUnavailableError(self.name, why) from error
        self._ov = openvino
        self._core = openvino.Core()
        self.version = f"{openvino.get_version()};{instruction_set()};f32,latency,denormals=0;artifact={_ARTIFACT_FORMAT}"
        chosen = Chosen(self._core, self.name, provider)
        self.providers = chosen.providers
        if provider:
            self.name = chosen.name
            self.version += f";{chosen.version}"
        if not chosen.exports:
            self.cache_files = CacheFiles()
        self.device_type, self.runs_on = chosen.type, chosen.device
        self._chosen = chosen

    @classmethod
    def for_provider(cls, provider: str) -> OpenVINOEngine:
        """Make the engine over a device of OpenVINO, as in "GPU"."""
        return cls(provider)

    def supported_operations(self, model: PooledModel, options: Mapping[str, OptionValue] = NO_OPTIONS) -> Sequence[bool]:
        """Return False for each operator that OpenVINO's ONNX reader names as one it cannot convert."""
        self._chosen.check(options)
        if model.format != "onnx":
            return (False,)
        try:
            self._core.read_model(self._whole(model))
        except CompilationError:
            raise
        except Exception as error:  # OpenVINO raises RuntimeError or its subclasses for everything
            refused = _refused_operators(str(error))
            return tuple(operation.op_type not in refused for operation in model.operations)
        return (True,) * len(model.operations)

    def compile(self, model: PooledModel, options: CompileOptions) -> OpenVINOExecutable:
        """Compile for the shapes that the model leaves open, or for its one static shape. Cannot be interrupted once begun."""
        _check_wanted(options)
        _check_tensors(model)
        settings = self._chosen.settings(options)
        try:
            graph = self._core.read_model(self._whole(model))
            _check_wanted(options)
            with Flushing():  # OpenVINO leaves denormals flushed in the thread that compiles; this puts them back
                compiled = self._core.compile_model(graph, self._chosen.device, settings)
        except CompilationError:
            raise
        except Exception as error:
            raise _compilation_error(str(error), model.operations) from error
        names = _Names(tuple(model.inputs), tuple(model.outputs))
        _check_ports(compiled, names)
        return OpenVINOExecutable(self._ov, compiled, names, None)

    def export(self, executable: Executable) -> Artifact | None:
        if not isinstance(executable, OpenVINOExecutable):
            raise CallerError(f"export got a {type(executable).__name__}; device {self.name!r} exports only what it has compiled itself")
        return executable.artifact()

    def load(self, artifact: Artifact, options: CompileOptions) -> OpenVINOExecutable:
        """Import a blob; its kernels are generated again.

        Raises:
            CompilationError: the bytes are not an artifact of this OpenVINO on this CPU.
        """
        _check_wanted(options)
        if (len(artifact.model), len(artifact.data)) != (1, 1):
            found = f"{len(artifact.model)} model and {len(artifact.data)} data files"
            raise CompilationError(f"an artifact of {found} was given, but one of openvino has one of each; compile the model")
        settings = self._chosen.settings(options)
        blob = np.frombuffer(artifact.model[0], np.uint8)
        try:
            names = msgspec.json.decode(bytes(artifact.data[0]), type=_Names)
            stream = self._ov.Tensor(blob, shared_memory=True) if blob.flags.writeable else blob.tobytes()
            with Flushing():
                compiled = self._core.import_model(stream, self._chosen.device, settings)
        except Exception as error:
            raise CompilationError(f"openvino cannot load the artifact ({error}); compile the model", reason=str(error)) from error
        _check_ports(compiled, names)
        return OpenVINOExecutable(self._ov, compiled, names, artifact)

    @staticmethod
    def _whole(model: PooledModel) -> bytes:
        from aionn.graph.constants import embed_constants

        whole: bytes = embed_constants(model).SerializeToString()
        return whole


class OpenVINOExecutable:
    """One infer request. Arrays that come again are not set again: 15 us a call instead of 31 (one input, one output)."""

    def __init__(self, openvino: Any, compiled: Any, names: _Names, artifact: Artifact | None, *, packs: bool = True) -> None:
        """`packs`: whether tensors of packed types come as arrays of ml_dtypes. Otherwise they are packed already."""
        self._tensors = Tensors(openvino, compiled.inputs, compiled.outputs, names.inputs, names.outputs)
        if packs and self._tensors.packed:
            inner = OpenVINOExecutable(openvino, compiled, names, None, packs=False)
            self._tensors.packed_runs = PackedRuns(inner, self._tensors.packed)
        self._compiled = compiled
        self._artifact = artifact  # OpenVINO reads its buffer for as long as the compiled model lives
        self._input_index = {name: index for index, name in enumerate(names.inputs)}
        self._output_index = {name: index for index, name in enumerate(names.outputs)}
        self._names = names
        # An output that is an input: OpenVINO takes the memory set for it for the input's, and reads what is there.
        self._passed = {
            name: source
            for name, output in zip(names.outputs, compiled.outputs, strict=True)
            for source, port in zip(names.inputs, compiled.inputs, strict=True)
            if output.names & port.names
        }
        self._open = {name for name, output in zip(names.outputs, compiled.outputs, strict=True) if output.partial_shape.is_dynamic}
        self._flushing = Flushing(flushes_denormals(compiled))
        self._begin(frozenset())

    def _begin(self, given: frozenset[str]) -> None:
        """Begin a new request. A request writes to the last tensor set for an output, and never returns to its own tensor."""
        self._request = self._compiled.create_infer_request()
        self._given = given
        self._set_inputs: dict[str, NDArray[Any]] = {}
        self._set_outputs: dict[str, NDArray[Any]] = {}
        self._copies: dict[str, NDArray[Any]] = {}
        # By output of open shape: the tensor over its array, and the shape it must still have after a run.
        self._bound: dict[str, tuple[Any, Any]] = {}

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        """Run with inputs and given outputs in place. An input in memory that is mapped read-only is copied each time.

        An array is recognised by identity, so give a new array object for another place.
        """
        if self._tensors.packed_runs is not None:
            return self._tensors.packed_runs.run(inputs, outputs, timing)
        given = frozenset(outputs)
        if given != self._given:
            self._begin(given)
        request = self._request
        for name, array in inputs.items():
            if self._set_inputs.get(name) is not array:
                place = _writable(array)
                if place is None:
                    self._copies[name] = place = array.copy()
                else:
                    self._copies.pop(name, None)
                request.set_input_tensor(self._input_index[name], self._tensors.tensor_of(name, place))
                self._set_inputs[name] = array
            elif name in self._copies:
                np.copyto(self._copies[name], array)
        try:
            for name, array in outputs.items():
                if self._set_outputs.get(name) is not array and name not in self._passed:
                    target = self._tensors.tensor_of(name, array)
                    request.set_output_tensor(self._output_index[name], target)
                    self._set_outputs[name] = array
                    if name in self._open:
                        self._bound[name] = target, self._tensors.ov.Shape(array.shape)
            with self._flushing:
                started_ns = time.monotonic_ns()
                request.infer()
                took_ns = time.monotonic_ns() - started_ns
        except MemoryError:
            raise
        except Exception as error:
            failure = openvino_failure(error)
            if not outputs:
                raise failure from error
            self._begin(frozenset())  # OpenVINO refuses an array that the output does not fit into
            return run_apart(self, inputs, outputs, timing, failure)
        made = {
            # A copy: the request writes its own tensor again next time.
            name: self._tensors.copy_of(name, request.get_output_tensor(index))
            for name, index in self._output_index.items()
            if name not in outputs
        }
        for name, (target, shape) in self._bound.items():
            if target.shape != shape:  # OpenVINO has used a part of the array, and left in the rest what was there before
                made[name] = self._tensors.copy_of(name, target)
        if self._passed:
            passed = {name: inputs[source] for name, source in self._passed.items() if name in outputs}
            deliver(passed, {name: outputs[name] for name in passed})
            made.update((name, array.copy()) for name, array in passed.items())
        return ExecutionReport(made, took_ns if timing else None)

    @property
    def runs_on(self) -> str:
        """The devices that run the model now, as OpenVINO says."""
        return computes_with(self._compiled)

    def lanes(self, count: int) -> list[OpenVINOExecutable]:
        """Return `count` executables with one infer request each over one compiled model, of which this is the first."""
        return [self, *(self.share() for _ in range(count - 1))]

    def share(self) -> OpenVINOExecutable:
        """Return one more infer request over the same compiled model. Requests beyond the number of streams wait for each other."""
        return OpenVINOExecutable(self._tensors.ov, self._compiled, self._names, self._artifact)

    def artifact(self) -> Artifact:
        """Return what to store: the artifact it was loaded from, or a new one."""
        if self._artifact is not None:
            return self._artifact
        blob = io.BytesIO()
        self._compiled.export_model(blob)
        return Artifact((blob.getbuffer(),), (msgspec.json.encode(self._names),))


def _openvino() -> Any:
    """Import the package without its converter of other formats.

    The converter costs 30 ms at each start, and brings a module that reports to its maker. The package works without the converter,
    and a later import finds it.
    """
    if "openvino" not in sys.modules and _CONVERTER not in sys.modules:
        sys.modules[_CONVERTER] = None  # type: ignore[assignment]  # makes Python refuse this import
        try:
            import openvino

            return openvino
        except ImportError:
            sys.modules.pop("openvino", None)  # the converter is needed here, or another module is missing; the import below shows which
        finally:
            del sys.modules[_CONVERTER]
    import openvino

    return openvino


def _writable(array: NDArray[Any]) -> NDArray[Any] | None:
    """Return the array as OpenVINO accepts it, or None if its memory is read-only.

    OpenVINO writes to no input, but refuses a read-only array. So a read-only array over writable memory gets a writable alias.
    """
    if array.flags.writeable:
        return array
    alias = array.view()
    try:
        alias.flags.writeable = True  # NumPy refuses if the owner of the memory forbids writing
    except ValueError:
        return None
    return alias


def _check_wanted(options: CompileOptions) -> None:
    if options.cancelled.is_set():
        raise cancelled()


def _check_tensors(model: PooledModel) -> None:
    if strange := outside_frames(model):
        why = f"{strange}, but it runs tensors of numbers only"
        raise CompilationError(f"openvino cannot prepare the model: {why}; use another device", reason=why)


def _check_ports(compiled: Any, names: _Names) -> None:
    """Check that each input and output has the expected name at its place, because runs address them by place."""
    for side, ports, wanted in (("input", compiled.inputs, names.inputs), ("output", compiled.outputs, names.outputs)):
        if len(ports) != len(wanted) or any(name not in port.names for port, name in zip(ports, wanted, strict=True)):
            found = [sorted(port.names) for port in ports]
            raise CompilationError(
                f"OpenVINO made the {side}s {found}, but the model has {list(wanted)}; use another device for this model"
            )


_NO_RULE = re.compile(r"No conversion rule found for operations: ([^\n]+)")
_FAILED = re.compile(r"Conversion is failed for: ([^\n]+)")
_NODE = re.compile(r"<Node\([^)]*\): ([^>]+)>")


def _refused_operators(message: str) -> set[str]:
    """Return the operator names in a list such as "Foo-17, com.example.Bar"."""
    listed = [entry for pattern in (_NO_RULE, _FAILED) for found in pattern.findall(message) for entry in found.split(",")]
    return {re.sub(r"-\d+$", "", entry.strip()).rpartition(".")[2] for entry in listed}


def _compilation_error(message: str, operations: Sequence[Operation]) -> CompilationError:
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith(("Exception from", "Check '"))]
    reason = " ".join(line for line in lines if not line.startswith("To facilitate"))
    named = _NODE.search(message)
    refused = _refused_operators(message)
    node = named.group(1) if named else next((operation.name for operation in operations if operation.op_type in refused), None)
    at = "" if node is None else f" at node {node!r}"
    return CompilationError(f"openvino cannot prepare the model{at}: {reason}", node=node, reason=reason)


_KINDS = {
    "bf16": OperandType.BFLOAT16,
    "f8e4m3": OperandType.FLOAT8E4M3FN,
    "f8e5m2": OperandType.FLOAT8E5M2,
    "f8e8m0": OperandType.FLOAT8E8M0,
    "f4e2m1": OperandType.FLOAT4E2M1,
    "i4": OperandType.INT4,
    "u4": OperandType.UINT4,
}
"""By OpenVINO's name of a type that NumPy lacks."""


class Tensors:
    """The tensors of one executable.

    Attributes:
        ov: the package.
        packed: the packed types by the names of inputs and outputs.
        packed_runs: runs the executable where some type is packed.
    """

    def __init__(self, openvino: Any, inputs: Sequence[Any], outputs: Sequence[Any], given: Sequence[str], made: Sequence[str]) -> None:
        """`inputs`, `outputs`: ports of the compiled model. `given`, `made`: their names."""
        self.ov = openvino
        types = {name: port.get_element_type() for name, port in zip((*given, *made), (*inputs, *outputs), strict=True)}
        self._kinds = {
            name: (_KINDS[element.get_type_name()], element) for name, element in types.items() if element.get_type_name() in _KINDS
        }
        self.packed = {name: kind for name, (kind, _) in self._kinds.items() if kind in PACKED_BITS}
        self.packed_runs: PackedRuns | None = None

    def tensor_of(self, name: str, array: NDArray[Any]) -> Any:
        """Return a tensor over an array."""
        if name not in self._kinds:
            return self.ov.Tensor(array, shared_memory=True)
        return self.ov.Tensor(as_bytes(array), self.ov.Shape(array.shape), self._kinds[name][1])

    def copy_of(self, name: str, tensor: Any) -> NDArray[Any]:
        """Return a tensor's elements. One of a packed type stays packed, in an array of its shape."""
        if name not in self._kinds:
            return np.array(tensor.data)
        kind, content = self._kinds[name][0], as_bytes(tensor.data)
        array: NDArray[Any] = np.zeros(tuple(tensor.shape), np.uint8 if kind in PACKED_BITS else kind.dtype)
        as_bytes(array)[: content.size] = content
        return array
