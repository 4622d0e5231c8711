"""Execution providers of ONNX Runtime: which ones there are, whether one works here, and what a session really runs on.

ONNX Runtime lists the providers that it was built with. If the library of one cannot be loaded, it makes a session that runs on the CPU
and only logs why. So a provider makes a trial session first, and its name is looked for in that session and in every later one.

An accelerator's results depend on the versions of the GPU, of its driver, and of the libraries that this process has loaded. They are part
of an engine's version, so a new driver or library gives new cache entries. No tool is started for it.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aionn.cgroups import text_of
from aionn.engines.complaints import without_status
from aionn.errors import CompilationError, DeviceUnavailableError
from aionn.hal.types import DeviceType

CPU = "CPUExecutionProvider"

# An ONNX model of one Identity node, from float x[1] to y: too small a thing to import onnx for at each start.
_TRIAL = bytes.fromhex(
    "08083a370a100a017812017922084964656e746974791201745a0f0a0178120a0a08080112040a020801620f0a0179120a0a08080112040a02080142040a00100d"
)

_TYPES: Mapping[DeviceType, tuple[str, ...]] = {
    DeviceType.CPU: ("cpu", "dnnl", "xnnpack", "acl", "armnn"),
    DeviceType.GPU: ("cuda", "tensorrt", "nvtensorrtrtx", "rocm", "migraphx", "dml", "webgpu", "js"),
    DeviceType.ACCELERATOR: ("qnn", "vitisai", "cann", "coreml", "nnapi", "rknpu", "vsinpu"),
}


def short_names(available: Any) -> dict[str, str]:
    """Return the names of providers by their short names, as in {"cuda": "CUDAExecutionProvider"}."""
    return {name.removesuffix("ExecutionProvider").lower(): name for name in available}


class Provider:
    """One provider that works here.

    Attributes:
        device: the name of its device, as in "onnxruntime:cuda".
        name: as ONNX Runtime names it.
        type: of the hardware.
        version: of what it drives, as far as it can be read. An empty text for a CPU.
    """

    def __init__(self, ort: Any, engine: str, asked: str) -> None:
        """Find a provider by its short name, in any case, and try it.

        Raises:
            DeviceUnavailableError: ONNX Runtime has no such provider, or it does not load.
        """
        known = short_names(ort.get_available_providers())
        short = asked.lower()
        self.device = f"{engine}:{short}"
        if short not in known:
            there = ", ".join(f"{engine}:{name}" for name in known)
            found = f"device {self.device!r} is not there; the installed onnxruntime {ort.__version__} offers {there}"
            gpu = "; pip install 'aionn[onnxruntime-gpu]' in place of 'aionn[onnxruntime]' brings CUDA and TensorRT"
            raise DeviceUnavailableError(self.device, found + gpu * (short in ("cuda", "tensorrt")))
        self.name = known[short]
        self.type = next((kind for kind, names in _TYPES.items() if short in names), DeviceType.OTHER)
        if self.name != CPU:
            self._try(ort, short)
        self.version = nvidia_versions() if self.type is DeviceType.GPU else ""

    def _try(self, ort: Any, short: str) -> None:
        settings = ort.SessionOptions()
        settings.log_severity_level = 4
        settings.intra_op_num_threads = 1  # with more, ONNX Runtime pins threads to CPUs, which a confined driver must not
        try:
            session = ort.InferenceSession(_TRIAL, settings, providers=[self.name], enable_fallback=0)
        except Exception as error:  # ORT's exceptions have no common base but this
            why = without_status(str(error))
        else:
            if self.name in session.get_providers():
                return
            why = _why_not_loaded(ort, short)
        raise DeviceUnavailableError(
            self.device, f"device {self.device!r} cannot start, because {self.name} does not load here: {why}; install what it needs"
        )


def _why_not_loaded(ort: Any, short: str) -> str:
    """Return why the library of a provider does not load. ONNX Runtime has only logged it."""
    library = Path(ort.__file__).parent / "capi" / f"libonnxruntime_providers_{short}.so"
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error).replace(str(library), library.name)
    return "ONNX Runtime left it out without a reason"


def nodes_on(session: Any, provider: str) -> str:
    """Return what a session runs on, as in "CUDAExecutionProvider (12 nodes), CPUExecutionProvider (1 node)".

    Raises:
        CompilationError: the session does not run on that provider.
    """
    if provider not in session.get_providers():
        raise CompilationError(f"onnxruntime made a session without {provider}, although it was asked for it; see what its driver printed")
    assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if assignment is None:  # ONNX Runtime before 1.25
        return str(provider)
    counts = Counter[str]()
    for part in assignment():
        counts[part.ep_name] += len(part.get_nodes())
    if counts and not counts[provider]:
        others = ", ".join(sorted(counts))
        raise CompilationError(f"no operation of the model runs on {provider}, all would run on {others}; use another device")
    ordered = sorted(counts.items(), key=lambda item: (item[0] != provider, item[0]))
    return ", ".join(f"{name} ({count} node{'s' * (count != 1)})" for name, count in ordered) or str(provider)


def _by_pointer(name: str) -> Callable[[ctypes.CDLL], int]:
    def ask(library: ctypes.CDLL) -> int:
        found = ctypes.c_int()
        getattr(library, name)(ctypes.byref(found))
        return found.value

    return ask


def _by_result(name: str, result: type[ctypes.c_int] | type[ctypes.c_size_t]) -> Callable[[ctypes.CDLL], int]:
    def ask(library: ctypes.CDLL) -> int:
        function = getattr(library, name)
        function.restype = result
        return int(function())

    return ask


_LIBRARIES: dict[str, Callable[[ctypes.CDLL], int]] = {
    "cudart": _by_pointer("cudaRuntimeGetVersion"),
    "cudnn": _by_result("cudnnGetVersion", ctypes.c_size_t),
    "nvinfer": _by_result("getInferLibVersion", ctypes.c_int),
}


def nvidia_versions(driver: Path = Path("/proc/driver/nvidia"), maps: Path = Path("/proc/self/maps")) -> str:
    """Return GPUs, driver and loaded libraries, as in "gpu=NVIDIA A2;driver=550.54;cudart=12040". Returns "" without any."""
    found = []
    gpus = [
        name.group(1).strip()
        for file in sorted(driver.glob("gpus/*/information"))
        if (name := re.search(r"^Model:(.+)$", text_of(file), re.MULTILINE))
    ]
    if gpus:
        found.append(f"gpu={','.join(gpus)}")
    version = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text_of(driver / "version"))
    if version:
        found.append(f"driver={version.group()}")
    loaded = text_of(maps)
    for library, ask in _LIBRARIES.items():
        path = re.search(rf"(/\S*/lib{library}\.so\S*)$", loaded, re.MULTILINE)
        if path:
            found.append(f"{library}={_asked(path.group(1), ask)}")
    return ";".join(found)


def _asked(path: str, ask: Callable[[ctypes.CDLL], int]) -> str:
    """Return what a library says of its version, else what its file name says."""
    try:
        return str(ask(ctypes.CDLL(path)))  # it is loaded already
    except (OSError, AttributeError):
        return Path(path).name
