"""Which files a Python driver must read: Python, its packages, the system's libraries, facts about the machine."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from aionn.sandbox.facts import Facts
from aionn.sandbox.landlock import DEVICE, READ, READ_AND_RUN, WRITE

__all__ = ["rules"]

_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64", "/etc/ld.so.cache")
_TEXTS = (
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/os-release",
    "/usr/share/locale",
    "/usr/share/zoneinfo",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/driver/nvidia",
    "/proc/filesystems",
    "/proc/meminfo",
    "/proc/mounts",
    "/proc/stat",
    "/proc/sys/vm",
    "/proc/version",
    "/proc/version_signature",
    "/sys/bus/dax/devices",
    "/sys/bus/pci/devices",
    "/sys/class/dmi/id",
    "/sys/devices/pci*",
    "/sys/devices/system",
    "/sys/devices/virtual/dmi/id",
    "/sys/fs/cgroup",
    "/sys/kernel/mm",
    "/dev/random",
    "/dev/urandom",
    "/dev/zero",
)


def rules(facts: Facts, writable: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield path and rights for each place that a driver may open.

    Args:
        facts: of its engine.
        writable: folders in which it may make, write and remove files.
    """
    for path in _python():
        yield path, READ_AND_RUN
    for path in _LIBRARIES:
        yield path, READ_AND_RUN
    for path in (*_TEXTS, *facts.reads):
        yield from ((found, READ) for found in _matching(path))
    yield "/dev/null", WRITE
    for path in writable:
        yield path, WRITE
    for path in facts.devices:
        yield from ((found, DEVICE) for found in _matching(path))


def _matching(path: str) -> list[str]:
    return glob.glob(path) if "*" in path else [path]


def _python() -> set[str]:
    """Return where Python and everything that it may import lie. Several installs are known by a path alone (editable ones)."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, str(Path(__file__).parents[1])}
    found.update(path for path in sys.path if path)
    found.update(path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path)
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):  # setuptools: these packages are found without an entry of sys.path
            found.update(str(path) for path in getattr(module, "MAPPING", {}).values())
    return found
