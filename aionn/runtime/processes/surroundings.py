"""The environment of a driver process.

The app's environment holds secrets: tokens, addresses, names. A confined driver gets only variables that Python, its libraries and engines
are known to read, and what `Runtime(driver_env=)` adds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aionn.engines.installed import Homes
from aionn.errors import CallerError
from aionn.remote.orders import POOL_SIZES
from aionn.sandbox.report import VARIABLE, checked_level

if TYPE_CHECKING:
    from aionn.needs import Needs

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Makes the C library ask for huge pages for large blocks. Engines lay weights out in such blocks, and fresh small pages take them half of
that time: 390 instead of 510 ms for 500 MB (ONNX Runtime 1.31). Other C libraries ignore it."""

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

_SET_BY_AIONN = frozenset((APP_PID, "PYTHONUNBUFFERED", "UV_USE_IO_URING"))

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
        environment.update(_user_packages())
    if threads:
        environment.update(dict.fromkeys(POOL_SIZES, str(threads)))
    environment.update(more)
    tunables = [tunable for tunable in environment.get("GLIBC_TUNABLES", "").split(":") if tunable]
    if not any(tunable.startswith("glibc.malloc.hugetlb=") for tunable in tunables):
        environment["GLIBC_TUNABLES"] = ":".join([*tunables, _HUGE_PAGES])
    # Buffered prints of an engine would be lost when its driver is killed.
    return {**environment, "PYTHONUNBUFFERED": "1", APP_PID: str(os.getpid())}


def _user_packages() -> dict[str, str]:
    """Name the folder of `pip install --user` if this app imports from it. Python looks for it in HOME otherwise."""
    site = sys.modules.get("site")
    base = getattr(site, "USER_BASE", None) if getattr(site, "ENABLE_USER_SITE", False) else None
    return {"PYTHONUSERBASE": base} if base else {}


def checked_driver_env(driver_env: object) -> dict[str, str]:
    """Return `Runtime(driver_env=)` as a dictionary, which is empty for None.

    Raises:
        CallerError: it is not a mapping from names to texts.
    """
    if driver_env is None:
        return {}
    if not isinstance(driver_env, Mapping):
        found = type(driver_env).__name__
        raise CallerError(f"driver_env: expected a mapping from names of variables to texts, or None, got {found}")
    for name, value in driver_env.items():  # no sentence shows a value, which may be a secret
        if not isinstance(name, str) or not name or set(name) & set("=\0") or not _is_encodable(name):
            raise CallerError(f"driver_env: {name!r} cannot name a variable; give a text without '=' and without a zero byte")
        if not isinstance(value, str) or "\0" in value or not _is_encodable(value):
            found = "a text that cannot be a value" if isinstance(value, str) else type(value).__name__
            raise CallerError(f"driver_env: {name!r} is {found}; give a text without a zero byte")
        if name in _SET_BY_AIONN:
            raise CallerError(f"driver_env: aionn sets {name} for its drivers; leave it out")
    return dict(driver_env)


def checked_engine_needs(engine_needs: object) -> dict[str, Needs]:
    """Return `Runtime(engine_needs=)` by the names under which a runtime knows its devices. It is empty for None.

    Raises:
        CallerError: it is not a mapping from names of devices to `aionn.hal.Needs`, or a device is not installed.
    """
    if engine_needs is None:
        return {}
    from aionn.needs import Needs  # few apps give needs

    expected = "give a mapping from names of devices to aionn.hal.Needs"
    if not isinstance(engine_needs, Mapping):
        raise CallerError(f"engine_needs is {type(engine_needs).__name__}; {expected}")
    homes = Homes()
    for name, needs in engine_needs.items():
        if not isinstance(name, str) or not isinstance(needs, Needs):
            raise CallerError(f"engine_needs has {name!r}: {type(needs).__name__}; {expected}")
        if ":" not in name and not homes.home(name):
            raise CallerError(f"engine_needs names {name!r}, which is not installed; the installed devices are {', '.join(homes.engines)}")
    return {homes.key(name): needs for name, needs in engine_needs.items()}


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def checked_sandbox(sandbox: str | None) -> str:
    """Return the level for `Runtime(sandbox=)`.

    Raises:
        CallerError: there is no such level.
    """
    try:
        return checked_level(sandbox, os.environ.get(VARIABLE))
    except ValueError as error:
        raise CallerError(str(error)) from None
