"""The public face: names, signatures and attributes that apps and driver authors rely on.

A name that appears or goes is a decision: it is written down here, or the test fails.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.resources
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import aionn
from aionn import errors, hal

EMPTY = inspect.Parameter.empty

FACE = {
    "AionnError",
    "Batching",
    "BlockingBurst",
    "Burst",
    "CacheOutcome",
    "CacheOutcomeKind",
    "CallerError",
    "Comparison",
    "Compilation",
    "CompilationError",
    "Confinement",
    "DeadlineError",
    "Device",
    "DeviceBusyError",
    "DeviceMemory",
    "DeviceMemoryLostError",
    "DeviceUnavailableError",
    "DriverDiedError",
    "DriverHungError",
    "Event",
    "ExecutionError",
    "Frame",
    "HardwareBuffer",
    "Health",
    "HealthPolicy",
    "Item",
    "Memory",
    "MemoryAllocationError",
    "MissReason",
    "Model",
    "ModelQuarantinedError",
    "OutputInsufficientSizeError",
    "QuotaError",
    "Outputs",
    "PlaneLayout",
    "RecurrentStream",
    "Runtime",
    "ServiceDiedError",
    "Stage",
    "StagePolicy",
    "StageRejected",
    "StreamResult",
    "Tolerance",
    "run",
    "trace",
}

HAL_FACE = {
    "CACHE_TOKEN_BYTES",
    "CONSTANT_COPY_BYTES",
    "MAX_CACHE_FILES",
    "NO_TIMING",
    "UNKNOWN_TIME_US",
    "Artifact",
    "BufferDesc",
    "BufferRole",
    "CacheFiles",
    "CacheHandles",
    "CancelFlag",
    "CompileOptions",
    "Constant",
    "DataLocation",
    "Dependency",
    "Default",
    "DeviceType",
    "Engine",
    "EngineOptions",
    "ErrorStatus",
    "Executable",
    "ExecutionPreference",
    "ExecutionReport",
    "FencedResult",
    "GrantorDescriptor",
    "IBlobCache",
    "IBuffer",
    "IBurstCallback",
    "IBurstContext",
    "IDevice",
    "IMemory",
    "IPreparedModel",
    "MQDescriptor",
    "MQFlavor",
    "MemoryDescription",
    "MemoryKind",
    "Model",
    "Needs",
    "Operand",
    "OperandType",
    "Operation",
    "OptionValue",
    "OutputShape",
    "Performance",
    "PerformanceInfo",
    "PrepareOptions",
    "Priority",
    "Request",
    "RequestArgument",
    "Result",
    "Timing",
    "model_bytes",
    "ValueKind",
    "ValueType",
    "ValuesResult",
}

ERROR_TREE: dict[str, Any] = {
    "AionnError": Exception,
    "CallerError": ValueError,
    "CompilationError": "AionnError",
    "ExecutionError": "AionnError",
    "OutputInsufficientSizeError": "ExecutionError",
    "DriverDiedError": "AionnError",
    "DriverHungError": "AionnError",
    "DeadlineError": TimeoutError,
    "DeviceBusyError": "AionnError",
    "DeviceUnavailableError": "AionnError",
    "MemoryAllocationError": "AionnError",
    "ModelQuarantinedError": "CompilationError",
    "QuotaError": "ExecutionError",
    "StageRejected": "AionnError",
}


def parameters_of(function: Any) -> dict[str, Any]:
    """Per parameter its default; what is keyword-only is marked by a star before its name. `self` is left out."""
    return {
        ("*" if parameter.kind is parameter.KEYWORD_ONLY else "") + name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in {"self", "cls"}
    }


def test_the_face_is_what_is_written_here() -> None:
    assert set(aionn.__all__) == FACE
    assert [name for name in FACE if not hasattr(aionn, name)] == []
    public = {name for name, value in vars(aionn).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public - FACE == set()
    assert set(dir(aionn)) >= FACE
    assert all(inspect.ismodule(getattr(aionn, name)) for name in ("caching", "errors", "events", "fmq", "hal", "testing", "trace"))
    with pytest.raises(AttributeError, match="module 'aionn' has no attribute 'Runtimes'"):
        aionn.Runtimes  # type: ignore[attr-defined]  # noqa: B018


def test_a_type_checker_finds_every_name_where_it_is_imported_from() -> None:
    """The face names the home of each name twice: in a table for Python, and in imports for a type checker."""
    tree = ast.parse(Path(aionn.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # to a type checker, a name without it is not exported
    }
    faces = vars(aionn)["_FACES"].keys()
    assert imported == {**vars(aionn)["_HOMES"], **dict.fromkeys(faces - {"blocking", "testing"}, "aionn")}  # which an app imports itself
    assert sorted(imported.keys() - faces | {"trace"}) == aionn.__all__


def test_asking_for_an_error_imports_nothing_of_the_apps_side() -> None:
    """An engine raises `aionn.CompilationError` in a driver process, which has no use for the runtime."""
    code = "import aionn, sys; aionn.CompilationError; print([m for m in sys.modules if m.startswith(('aionn.runtime', 'numpy', 'anyio'))])"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_driver_process_imports_nothing_of_the_apps_side() -> None:
    """Each driver pays for what it imports, in time to start and in memory."""
    code = (
        "import aionn.driver, sys\n"
        "print([m for m in sys.modules if m.startswith(('numpy', 'anyio', 'asyncio'))])\n"  # __main__ has settings to make before
        "import aionn.driver.process\n"
        "print([m for m in sys.modules if m.startswith(('aionn.runtime', 'aionn.caching.store', 'aionn.graph', 'onnx'))])"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["[]", "[]"]


def test_the_face_of_the_hal_is_what_is_written_here() -> None:
    assert set(hal.__all__) == HAL_FACE


def test_a_runtime_compiles_with_these_options() -> None:
    assert list(parameters_of(aionn.Runtime.__init__).values()).count(EMPTY) == 0  # `aionn.Runtime()` needs nothing
    assert inspect.iscoroutinefunction(aionn.Runtime.compile)
    options = parameters_of(aionn.Runtime.compile)
    assert options == {
        "model": EMPTY,
        "*devices": None,
        "*preference": "fast_single_answer",
        "*priority": "medium",
        "*threads": None,
        "*instances": None,
        "*name": None,
        "*on_event": None,
        "*required": True,
        "*cache_dir": None,
        "*cache_required": False,
        "*token": None,
        "*mode": "eager",
        "*stages": None,
        "*stage_policy": None,
        "*options": None,
        "*batch": None,
        "*idle_s": None,
        "*timeout_s": None,
    }


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (aionn.Model, "digest format from_bytes from_onnx load name read"),
        (aionn.Device, "activity cache_files health pid providers restart runs_on sandbox statistics type version"),
    ],
)
def test_an_object_of_the_face_shows_these_members_of_its_class(kind: type, names: str) -> None:
    assert [name for name in dir(kind) if not name.startswith("_")] == names.split()


def test_a_compilation_computes_and_opens_bursts() -> None:
    assert inspect.iscoroutinefunction(aionn.Compilation.compute)
    assert parameters_of(aionn.Compilation.compute) == {
        "inputs": EMPTY,
        "*outputs": None,
        "*measure_timing": False,
        "*timeout_s": None,
        "*retry": 0,
    }
    assert parameters_of(aionn.Compilation.burst) == {"*depth": 8, "*anticipate": False, "*name": None, "*warm": False}
    assert {"compute", "burst", "aclose"} <= set(dir(aionn.Compilation))
    assert not inspect.iscoroutinefunction(aionn.Compilation.start)
    assert parameters_of(aionn.Compilation.start) == {
        "inputs": EMPTY,
        "*after": (),
        "*outputs": None,
        "*measure_timing": False,
        "*timeout_s": None,
    }
    assert {"done", "cancelled", "cancel", "result", "exception", "status", "fence", "__await__"} <= set(dir(aionn.Event))
    assert "outcomes:" in (aionn.Compilation.__doc__ or "")  # an attribute of each; the journeys read it


def test_a_burst_computes_frames() -> None:
    assert inspect.iscoroutinefunction(aionn.Burst.compute)
    assert parameters_of(aionn.Burst.compute) == parameters_of(aionn.Compilation.compute)
    assert parameters_of(aionn.Burst.frame) == {"shapes": None}
    assert parameters_of(aionn.Burst.lease) == {"shapes": None}
    assert parameters_of(aionn.Burst.map) == {"frames": EMPTY, "*policy": "block", "*depth": 2, "*deadline_s": None}
    assert {"compute", "frame", "lease", "map", "statistics"} <= set(dir(aionn.Burst))
    assert not inspect.iscoroutinefunction(aionn.BlockingBurst.compute)
    assert parameters_of(aionn.BlockingBurst.compute) == parameters_of(aionn.Burst.compute)
    assert parameters_of(aionn.Compilation.blocking) == {"*anticipate": False, "*name": None}
    assert {"compute", "close", "statistics"} <= set(dir(aionn.BlockingBurst))
    assert parameters_of(aionn.Item) == {"inputs": EMPTY, "tag": None, "captured_ns": 0}


def test_a_recurrent_stream_computes_frames_without_their_states() -> None:
    assert parameters_of(aionn.Compilation.recurrent) == {"states": EMPTY, "*snapshot_every": 32, "*initial": None, "*name": None}
    assert not inspect.iscoroutinefunction(aionn.Compilation.recurrent)
    assert parameters_of(aionn.RecurrentStream.compute) == {"inputs": EMPTY, "*measure_timing": False, "*timeout_s": None}
    assert parameters_of(aionn.RecurrentStream.map) == parameters_of(aionn.Burst.map)
    assert parameters_of(aionn.RecurrentStream.reset) == {"*timeout_s": None}
    assert {"recovered", "statistics", "aclose"} <= set(dir(aionn.RecurrentStream))


def test_outputs_are_a_dict_that_tells_more() -> None:
    assert issubclass(aionn.Outputs, dict)
    assert {"timing", "device"} <= set(dir(aionn.Outputs)) | set(aionn.Outputs.__annotations__)


def test_a_model_comes_from_onnx() -> None:
    assert list(parameters_of(aionn.Model.from_onnx).values()) == [EMPTY, None]
    assert {"inputs", "outputs", "token"} <= set(hal.Model.__dataclass_fields__)
    assert issubclass(aionn.Model, hal.Model)


@pytest.mark.parametrize("name", sorted(ERROR_TREE))
def test_the_errors_are_one_tree(name: str) -> None:
    error = getattr(aionn, name)
    assert error is getattr(errors, name)
    assert issubclass(error, aionn.AionnError)
    parent = ERROR_TREE[name]
    assert issubclass(error, getattr(aionn, parent) if isinstance(parent, str) else parent)
    assert set(errors.__all__) >= set(ERROR_TREE)


def test_errors_carry_their_facts() -> None:
    compilation = errors.CompilationError("m", node="conv1", reason="r")
    assert (compilation.node, compilation.reason) == ("conv1", "r")
    insufficient = errors.OutputInsufficientSizeError("m", status=hal.ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes={"y": (3,)})
    assert (insufficient.status, insufficient.shapes) == (hal.ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, {"y": (3,)})
    died = errors.DriverDiedError("openvino", -9)
    assert (died.device, died.exit_code) == ("openvino", -9)
    assert errors.DriverHungError("openvino", 1.5).device == "openvino"
    assert errors.DeadlineError("m").transient is True
    assert errors.DeviceUnavailableError("tpu", "m").device == "tpu"
    busy = errors.DeviceBusyError("m", waited_s=0.5, queue=256)
    assert (busy.waited_s, busy.queue, busy.transient) == (0.5, 256, True)
    allocation = errors.MemoryAllocationError("m", needed_bytes=2, available_bytes=1)
    assert (allocation.needed_bytes, allocation.available_bytes) == (2, 1)
    rejected = errors.StageRejected("openvino", "slower")
    assert (rejected.stage, rejected.reason) == ("openvino", "slower")


def public_things(module: Any) -> list[tuple[str, Any]]:
    """Every name of the module's face, and every public method and property of its classes."""
    found: list[tuple[str, Any]] = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            found.append((name, value))
            found += [
                (f"{name}.{attribute}", member)
                for attribute, member in vars(value).items()
                if not attribute.startswith("_")
                # An attribute may be a property or not; either way the docstring of its class tells of it.
                and not (isinstance(member, property) and f"{attribute}:" in (value.__doc__ or ""))
                and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod))
            ]
        elif inspect.isfunction(value) or inspect.ismodule(value):
            found.append((name, value))
    return found


def test_every_public_name_of_the_face_says_what_it_does() -> None:
    bare = []
    for name, thing in public_things(aionn):
        text = inspect.getdoc(thing) or ""
        # What @dataclass writes of its own accord tells nothing.
        if not text or text.startswith(f"{name}("):
            bare.append(name)
    assert bare == []


@pytest.mark.parametrize("name", sorted(FACE))
def test_every_name_of_the_face_begins_with_a_plain_sentence(name: str) -> None:
    """`help(aionn.X)` opens with one sentence: a capital letter, a full stop, at most 25 words."""
    text = inspect.getdoc(getattr(aionn, name)) or ""
    first = re.split(r"(?<=[.])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
    assert first[:1].isupper(), first
    assert first.endswith("."), first
    assert 3 <= len(first.split()) <= 25, first


def test_every_public_class_of_the_hal_says_what_it_is() -> None:
    bare = [name for name, thing in public_things(hal) if "." not in name and (inspect.getdoc(thing) or f"{name}(").startswith(f"{name}(")]
    assert bare == []


VALUES: tuple[tuple[object, str], ...] = (
    (hal.DataLocation(1, 2, 3), "DataLocation(pool_index=1, offset=2, length=3)"),
    (hal.Operand(hal.OperandType.BOOL, (2,)), "Operand(type=<OperandType.BOOL: 'bool'>, dimensions=(2,), symbols=(), default=None)"),
    (hal.Timing(in_driver_us=7), f"Timing(on_device_us={hal.UNKNOWN_TIME_US}, in_driver_us=7)"),
    (hal.MQDescriptor((), 8, hal.MQFlavor.SYNCHRONIZED), "MQDescriptor(grantors=(), quantum=8, flavor=<MQFlavor.SYNCHRONIZED: 1>, fds=())"),
    (hal.Needs(["/etc"]), "Needs(reads=('/etc',), writes_by_path=False, makes_code=False, devices=())"),
    (aionn.Confinement("auto"), "Confinement(level='auto', holds=(), lacks=())"),
    (aionn.HealthPolicy(max_drop_rate=0.5), "HealthPolicy(max_drop_rate=0.5)"),
    (aionn.PlaneLayout(0, 2, 1), "PlaneLayout(offset=0, row_stride=2, pixel_stride=1)"),
)


@pytest.mark.parametrize(("value", "shown"), VALUES)
def test_a_value_is_equal_by_content_and_never_changes(value: object, shown: str) -> None:
    again = pickle.loads(pickle.dumps(value))
    assert repr(value) == repr(again) == shown
    assert (value, hash(value)) == (again, hash(again))
    assert value != tuple(getattr(value, name) for name in inspect.signature(type(value)).parameters)
    for name in inspect.signature(type(value)).parameters:
        with pytest.raises(AttributeError):
            setattr(value, name, None)


def test_the_descriptors_of_a_queue_do_not_decide_whether_descriptions_are_equal() -> None:
    here, there = (hal.MQDescriptor((hal.GrantorDescriptor(0, 0, 8),), 8, hal.MQFlavor.SYNCHRONIZED, fds) for fds in ((3,), (4,)))
    assert (here, hash(here)) == (there, hash(there))
    assert here != msgspec.structs.replace(here, quantum=16)


def test_types_are_shipped() -> None:
    assert (importlib.resources.files("aionn") / "py.typed").is_file()


def test_the_engines_are_found_through_their_entry_points() -> None:
    found = {point.name: point for point in importlib.metadata.entry_points(group="aionn.engines")}
    assert {"onnxruntime", "reference"} <= found.keys()
    for name in ("onnxruntime", "reference"):
        engine = found[name].load()()
        assert engine.name == name
        assert engine.version
        assert isinstance(engine.cache_files, hal.CacheFiles)


def test_importing_aionn_starts_nothing_and_loads_no_engine() -> None:
    code = (
        "import aionn, os, sys, threading\n"
        "print(sorted(m for m in ('onnxruntime', 'openvino', 'torch') if m in sys.modules))\n"
        "print(threading.active_count(), len(os.listdir('/proc/self/task')))"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    engines, threads = ran.stdout.splitlines()
    assert engines == "[]"
    assert threads.split()[0] == "1"
