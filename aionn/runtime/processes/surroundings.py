"""The environment of a driver process.

The app's environment holds secrets: tokens, addresses, names. A confined driver gets only variables that Python, its libraries and engines
are known to read, and what `Runtime(driver_env=)` adds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from aionn.errors import CallerError
from aionn.sandbox.report import VARIABLE, checked_level

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Makes the C library ask for huge pages for large blocks. Engines lay weights out in such blocks, and fresh small pages take them half of
that time: 390 instead of 510 ms for 500 MB (ONNX Runtime 1.31). Other C libraries ignore it."""

_POOL_SIZES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
"""Variables that bound the thread pools of libraries which an engine's settings do not reach, such as NumPy's BLAS."""

_KEPT = ("GLIBC_TUNABLES", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "TZ", "VIRTUAL_ENV")
_KEPT_FAMILIES = (
    "AIONN_",
    "ASAN_",
    "CUDA_",
    "GOMP_",
    "HIP_",
    "KMP_",
    "LC_",
    "LSAN_",
    "MALLOC_",
    "MKL_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "OPENVINO_",
    "ORT_",
    "OV_",
    "PYTHON",
    "RAYON_",
    "ROCR_",
    "TBB_",
    "TSAN_",
    "UBSAN_",
)
_NO_HOME = "/nonexistent"


def driver_environment(sandbox: str, threads: int, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a driver process: the app's without a sandbox, else the part of it that a driver may know.

    Args:
        sandbox: the level.
        threads: the most threads of the pools that libraries make. 0 sets no bound.
        more: variables that the app adds.
    """
    if sandbox == "off":
        environment = dict(os.environ)
    else:
        environment = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_FAMILIES)}
        environment["HOME"] = _NO_HOME
    if threads:
        environment.update(dict.fromkeys(_POOL_SIZES, str(threads)))
    tunables = [tunable for tunable in environment.get("GLIBC_TUNABLES", "").split(":") if tunable]
    if not any(tunable.startswith("glibc.malloc.hugetlb=") for tunable in tunables):
        environment["GLIBC_TUNABLES"] = ":".join([*tunables, _HUGE_PAGES])
    # Buffered prints of an engine would be lost when its driver is killed.
    environment["PYTHONUNBUFFERED"] = "1"
    return {**environment, **more}


def checked_driver_env(driver_env: object) -> dict[str, str]:
    """Return `Runtime(driver_env=)` as a dictionary, which is empty for None.

    Raises:
        CallerError: it is not a mapping from names to texts.
    """
    if driver_env is None:
        return {}
    if not isinstance(driver_env, Mapping):
        raise CallerError(f"driver_env={driver_env!r}: give a mapping from names of variables to texts, or None")
    for name, value in driver_env.items():
        fits = isinstance(name, str) and name and not set(name) & set("=\0")
        if not fits or not isinstance(value, str) or "\0" in value:
            raise CallerError(f"driver_env: {name!r}: {value!r} is not a variable; give the name and the value as texts")
    return dict(driver_env)


def checked_sandbox(sandbox: str | None) -> str:
    """Return the level for `Runtime(sandbox=)`.

    Raises:
        CallerError: there is no such level.
    """
    try:
        return checked_level(sandbox, os.environ.get(VARIABLE))
    except ValueError as error:
        raise CallerError(str(error)) from None
