"""Devices of OpenVINO: which ones there are, their versions, and the properties that a compile sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aionn.engines.processor import run_threads
from aionn.errors import CallerError, DeviceUnavailableError
from aionn.hal.engine import CompileOptions
from aionn.hal.options import OptionValue
from aionn.hal.types import DeviceType

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
