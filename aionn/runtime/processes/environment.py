"""The environment of a driver process.

The app's environment holds secrets: tokens, addresses, names. A confined driver gets only variables that Python, its libraries and engines
are known to read, and what `Runtime(driver_env=)` adds.

A driver finds in its environment which process started it (`APP_PID`). So `aionn doctor` recognises one that has lost its app.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from aionn.remote.orders import POOL_SIZES

_LOCALE = "LANG LANGUAGE LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_MONETARY LC_NUMERIC LC_TIME LOCALE_ARCHIVE LOCPATH TZ TZDIR"
_SYSTEM = "GLIBC_TUNABLES LD_BIND_NOW LD_DEBUG LD_LIBRARY_PATH LD_PRELOAD NIX_LD NIX_LD_LIBRARY_PATH PATH"
_PYTHON = """
    CONDA_PREFIX EBPYTHONPREFIXES GUIX_PYTHONPATH NIX_PYTHONPATH PYTHONASYNCIODEBUG PYTHONCASEOK PYTHONCOERCECLOCALE PYTHONDEBUG
    PYTHONDEVMODE PYTHONDONTWRITEBYTECODE PYTHONFAULTHANDLER PYTHONHASHSEED PYTHONHOME PYTHONINTMAXSTRDIGITS PYTHONIOENCODING PYTHONMALLOC
    PYTHONMALLOCSTATS PYTHONNODEBUGRANGES PYTHONNOUSERSITE PYTHONOPTIMIZE PYTHONPATH PYTHONPERFSUPPORT PYTHONPLATLIBDIR
    PYTHONPROFILEIMPORTTIME PYTHONPYCACHEPREFIX PYTHONSAFEPATH PYTHONTRACEMALLOC PYTHONUSERBASE PYTHONUTF8 PYTHONVERBOSE
    PYTHONWARNDEFAULTENCODING PYTHONWARNINGS PYTHON_COLORS PYTHON_CPU_COUNT PYTHON_FROZEN_MODULES PYTHON_GIL PYTHON_JIT
    PYTHON_PERF_JIT_SUPPORT PYTHON_TLBC VIRTUAL_ENV
"""
_NUMPY = "BLIS_NUM_THREADS GOTO_NUM_THREADS NPY_DISABLE_CPU_FEATURES NPY_ENABLE_CPU_FEATURES NUMPY_MADVISE_HUGEPAGE RAYON_NUM_THREADS"
_ENGINES = """
    OPENVINO_LOG_LEVEL OPENVINO_TRACE_DEPTH OCL_ICD_FILENAMES OCL_ICD_VENDORS ZE_AFFINITY_MASK ZE_FLAT_DEVICE_HIERARCHY
    LITERT_DISABLE_OPENCL TF_CPP_MAX_VLOG_LEVEL TF_CPP_MIN_LOG_LEVEL
    NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE NVIDIA_VISIBLE_DEVICES AMD_LOG_LEVEL GPU_DEVICE_ORDINAL GPU_MAX_HW_QUEUES ROCM_PATH
"""
_SANITIZERS = "ASAN_OPTIONS HWASAN_OPTIONS LSAN_OPTIONS MSAN_OPTIONS TSAN_OPTIONS UBSAN_OPTIONS"
_OWN = "AIONN_LANES"
_KEPT = frozenset(" ".join((_LOCALE, _SYSTEM, _PYTHON, _NUMPY, _ENGINES, _SANITIZERS, _OWN)).split())
_KEPT_FAMILIES = (
    *(
        "AIONN_FAKE_DEVICE",
        "AIONN_TEST_",
        "CUDA_",
        "CUDNN_",
        "DNNL_",
        "GOMP_",
        "HIP_",
        "HSA_",
        "HWLOC_",
        "KMP_",
        "MALLOC_",
        "MIGRAPHX_",
        "MIOPEN_",
        "MKL_",
    ),
    *("MLAS_", "OMP_", "ONEDNN_", "OPENBLAS_", "ORT_", "OV_", "ROCR_", "TBB_"),
)
"""Beginnings of names that belong to one library. Other beginnings also name secrets: NVIDIA_API_KEY, PYTHON_KEYRING_BACKEND, and LC_
variables, which ssh passes on."""

_SECRETS = frozenset(
    ("APIKEY", "AUTH", "COOKIE", "CREDENTIAL", "CREDENTIALS", "KEY", "PASS", "PASSPHRASE", "PASSWD", "PASSWORD", "PROXY", "PWD", "SECRET")
) | {"TOKEN", "URL", "USERNAME"}
"""Words of a name that keep a variable of a family back. The OSS Review Toolkit has an ORT_HTTP_PASSWORD."""

APP_PID = "AIONN_APP_PID"
"""The variable in the environment of a driver with the number of its app, as the app itself knows it."""

SET_BY_AIONN = frozenset((APP_PID, "PYTHONUNBUFFERED", "UV_USE_IO_URING"))

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
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _KEPT or (name.startswith(_KEPT_FAMILIES) and not _SECRETS.intersection(name.upper().split("_")))
        }
        environment["HOME"] = _NO_HOME
        environment.update(user_packages())
    if threads:
        environment.update(dict.fromkeys(POOL_SIZES, str(threads)))
    environment.update(more)
    # Buffered prints of an engine would be lost when its driver is killed.
    return {**environment, "PYTHONUNBUFFERED": "1", APP_PID: str(os.getpid())}


def user_packages() -> dict[str, str]:
    """Name the folder of `pip install --user` if this app imports from it. Python looks for it in HOME otherwise."""
    site = sys.modules.get("site")
    base = getattr(site, "USER_BASE", None) if getattr(site, "ENABLE_USER_SITE", False) else None
    return {"PYTHONUSERBASE": base} if base else {}
