"""The machine that a benchmark runs on: what its figures depend on."""

from __future__ import annotations

import os
import platform
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("aionn", "numpy", "uvloop", "onnxruntime", "openvino")


def machine() -> dict[str, Any]:
    """Return what the machine is, as JSON values."""
    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **_versions()},
    }


def machine_line(found: dict[str, Any]) -> str:
    """Return what `machine` found in two lines for people."""
    governor = found["governor"] or "not known"
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return (
        f"{found['cpu']} ({found['architecture']}), {found['usable_cpus']} usable CPUs, governor {governor}, Linux {found['kernel']}, "
        f"load {found['load']:.1f}\n{versions}"
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "CPU not named"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU not named")


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""  # virtual machines often have no governor


class Others:
    """What share of the CPUs other processes use meanwhile. Where it is large, no figure can be trusted."""

    def __init__(self) -> None:
        self._began_s, self._foreign_s = time.monotonic(), _foreign_s()

    def share(self) -> float:
        """Return the share since the start, 0 to 1. Children count as ours once they have ended."""
        passed_s = max(1e-9, time.monotonic() - self._began_s)
        return min(1.0, max(0.0, _foreign_s() - self._foreign_s) / passed_s / (os.cpu_count() or 1))


def _foreign_s() -> float:
    """Return the CPU seconds of the machine without those of this process and its ended children."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9])
    busy_s = (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")
    ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy_s - sum(used.ru_utime + used.ru_stime for used in ours)
