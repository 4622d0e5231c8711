"""Which files a Python driver must read: Python, its packages, the system's libraries, facts about the machine."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator

from aionn.needs import Needs
from aionn.sandbox.landlock import DEVICE, READ, READ_AND_RUN, WRITE

_LIBRARIES = (
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64", "/etc/ld.so.cache"),
    *("/nix/store", "/gnu/store"),  # every package of NixOS and Guix; they are public
)
_TEXTS = (
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/os-release",
    "/usr/share/locale",
    "/usr/share/zoneinfo",
    "/proc/self",  # with mounts. Not for writing: a write to its `mem` passes by every protection of memory
    "/proc/cpuinfo",
    "/proc/driver/nvidia",
    "/proc/filesystems",
    "/proc/meminfo",
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
_LOADER_SETTINGS = "/etc/ld.so.conf.d/*.conf"
_OF_A_PREFIX = ("bin", "lib", "lib32", "lib64", "libexec", "share", "pyvenv.cfg")
_SHARED_PREFIXES = ("/usr", "/usr/local")
"""Prefixes that hold more than Python, such as /usr/src/app and /usr/local/etc of many containers."""
_OF_A_HOME = (".bash_history", ".bashrc", ".gnupg", ".netrc", ".ssh", ".zshrc")


def rules(needs: Needs, writable: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield path and rights for each place that a driver may open.

    Args:
        needs: of its engine.
        writable: folders in which it may make, write and remove files.
    """
    for path in (*_python(), *_LIBRARIES, *_loaders()):
        yield path, READ_AND_RUN
    if sys.pycache_prefix:
        yield sys.pycache_prefix, READ
    for path in (*_TEXTS, *needs.reads):
        yield from ((found, READ) for found in _matching(path))
    yield "/dev/null", WRITE
    for path in writable:
        yield path, WRITE
    for path in needs.devices:
        yield from ((found, DEVICE) for found in _matching(path))


def too_wide(needs: Needs) -> dict[str, str]:
    """Return places that a driver may read although they hold personal files (the root, home folders), and why it may."""
    asked = {found: "its engine asks for it" for path in needs.reads for found in _matching(path)}
    usual = dict.fromkeys((*_python(), *_loaders()), "Python or the system's loader looks for packages or libraries there")
    found: dict[str, str] = {}
    above = ""
    for path, why in sorted((usual | asked).items()):
        if not above or not path.startswith(above):  # else a path that was looked at covers this one
            above = path.rstrip("/") + "/"
            if holds_a_home(path):
                found[path] = why
    return found


def _matching(path: str) -> list[str]:
    return glob.glob(path) if "*" in path else [path]


def holds_a_home(path: str) -> bool:
    """Return whether a path is the root, the folder of home folders, or a home folder."""
    homes = _identity("/home")
    if _identity(path) in (_identity("/"), homes) or _identity(f"{path}/..") == homes:
        return os.path.isdir(path)
    return any(os.path.lexists(f"{path}/{name}") for name in _OF_A_HOME)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _python() -> set[str]:
    """Return where Python and everything that it may import lie."""
    found = {os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.__file__)}
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}:
        shared = prefix in _SHARED_PREFIXES or holds_a_home(prefix)
        found.update([f"{prefix}/{part}" for part in _OF_A_PREFIX] if shared else [prefix])
    on_path = {os.path.abspath(path) for path in sys.path if path}
    found.update(on_path)
    if os.path.islink(__file__):
        found.add(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
        found.update(place for path in on_path for place in _linked(path))
    for finder in sys.meta_path:
        found.update(_of_finder(finder))
    return found


def _linked(folder: str) -> Iterator[str]:
    """Yield where the packages in a folder lie if an installer has linked their files, as `uv --link-mode symlink` and Bazel do."""
    for metadata in glob.glob(f"{glob.escape(folder)}/*.dist-info/METADATA"):
        real = os.path.dirname(os.path.realpath(metadata))
        if real != os.path.dirname(metadata) and os.path.basename(real) == os.path.basename(os.path.dirname(metadata)):
            yield os.path.dirname(real)


def _of_finder(finder: object) -> Iterator[str]:
    """Yield the places that a finder of editable packages knows. These have no entry in `sys.path`."""
    if isinstance(finder, type):  # Python's own, and setuptools': its module has the places
        module = sys.modules.get(finder.__module__) if finder.__module__.startswith("__editable__") else None
        known: list[object] = [getattr(module, "MAPPING", None), getattr(module, "NAMESPACES", None)]
    else:  # those of scikit-build-core and meson-python keep them as attributes
        known = list(vars(finder).values()) if hasattr(finder, "__dict__") else []
    for value in known:
        entries = value.values() if isinstance(value, dict) else [value]
        for entry in entries:
            for path in entry if isinstance(entry, list | tuple | set | frozenset) else [entry]:
                if isinstance(path, str) and os.path.isabs(path):
                    # The path of a single module may lack its ending.
                    yield path if os.path.isdir(path) else os.path.dirname(path)


def _loaders() -> list[str]:
    """Return folders in which the system's loader looks for libraries, beyond `_LIBRARIES`."""
    found = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for settings in glob.glob(_LOADER_SETTINGS):
        try:
            with open(settings, encoding="utf-8", errors="surrogateescape") as lines:
                found.extend(line.strip() for line in lines)
        except OSError:
            continue
    return [path for path in found if path.startswith("/")]
