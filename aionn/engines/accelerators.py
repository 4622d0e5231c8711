"""Versions of what an accelerator's results depend on: the GPU, its driver, and the libraries that this process has loaded.

They are part of an engine's version, so a new driver or library gives new cache entries. No tool is started for it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path


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
        if (name := re.search(r"^Model:(.+)$", _text(file), re.MULTILINE))
    ]
    if gpus:
        found.append(f"gpu={','.join(gpus)}")
    version = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", _text(driver / "version"))
    if version:
        found.append(f"driver={version.group()}")
    loaded = _text(maps)
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


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
