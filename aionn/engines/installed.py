"""Find the installed engines: the entry points of the group `aionn.engines`. Looking imports no engine."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

from aionn.errors import NO_DESCRIPTOR_LEFT, MemoryAllocationError

GROUP = "aionn.engines"

BUILT_IN = {
    "onnxruntime": "aionn.engines.onnxruntime:OnnxRuntimeEngine",
    "openvino": "aionn.engines.openvino:OpenVINOEngine",
    "reference": "aionn.engines.reference:ReferenceEngine",
    "litert": "aionn.engines.litert:LiteRTEngine",
}
"""The engines of this package and their classes, best first. Their names mean them, also where another package uses such a name."""

READERS = {"tflite": "litert"}
"""The engine of this package for each format that the others do not read. It is not asked for models of any other format."""


@contextmanager
def with_descriptors(what: str) -> Iterator[None]:
    """Raise one clear error where the body, which opens a file at a time, finds no free file descriptor.

    Args:
        what: what the body does, for the error's text.

    Raises:
        MemoryAllocationError: this process has no free file descriptor.
    """
    try:
        # Some code skips what it cannot open in silence. So the shortage is found first.
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
        yield
    except OSError as error:
        if error.errno not in NO_DESCRIPTOR_LEFT:
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # The way out is the one for memory that needs a descriptor: the call is right, and works again when one is free.
        raise MemoryAllocationError(
            f"{what} found no free file descriptor (RLIMIT_NOFILE is {limit}); close files or raise it, then try again",
            needed_bytes=0,
            available_bytes=None,
        ) from error


_PROVIDERS = {
    "cuda": ("onnxruntime:cuda", "onnxruntime-gpu"),
    "tensorrt": ("onnxruntime:tensorrt", "onnxruntime-gpu"),
    "gpu": ("openvino:GPU", "openvino"),
    "npu": ("openvino:NPU", "openvino"),
}
"""Words for hardware: the device that is meant, and the extra of aionn that it needs."""


def meant(name: str, installed: Iterable[str]) -> str:
    """Return a sentence with the device that `name` probably means, to stand behind another. It is empty if none is near."""
    word = name.lower()
    if word in _PROVIDERS:
        device, extra = _PROVIDERS[word]
        return f". {device!r} may be meant; it needs pip install 'aionn[{extra}]'"
    from difflib import get_close_matches  # only for errors

    close = get_close_matches(word, list(installed), 1, 0.5)
    return f". Did you mean {close[0]!r}?" if close else ""


def not_installed(name: str, installed: Iterable[str]) -> str:
    """Return the sentence for a device that is not installed, with the name or the extra that is probably meant."""
    known = list(installed)
    return f"device {name!r} is not installed; the installed devices are {', '.join(known) or 'none'}{meant(name, known)}"


def installed_engines() -> dict[str, str]:
    """Return "package.module:Class" of every installed engine by its name.

    Raises:
        MemoryAllocationError: this process has no free file descriptor to look with.
    """
    found: dict[str, str] = {}
    with with_descriptors("the look for engines"):
        if any(map(_may_have_engines, sys.path)):
            from importlib.metadata import entry_points  # that takes 40 ms where 200 packages are installed

            for point in entry_points(group=GROUP):
                found.setdefault(point.name, f"{point.module}:{point.attr}")
    return found | BUILT_IN


def _may_have_engines(folder: str) -> bool:
    """Return whether a package in a folder of `sys.path`, other than this one, may have engines. Looking takes 3 ms for 200 packages."""
    if not os.path.isdir(folder or "."):
        return os.path.exists(folder)  # a zip file, which the library reads
    names = os.listdir(folder or ".") if os.access(folder or ".", os.R_OK) else ()
    return any(
        GROUP in _text(os.path.join(folder, name, "entry_points.txt"))
        for name in names
        if name.endswith((".dist-info", ".egg-info", "EGG-INFO")) and not name.startswith(("aionn-", "aionn."))
    )


def _text(path: str) -> str:
    """Return the text of a file, or nothing if it cannot be read and a descriptor was free."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        if error.errno in NO_DESCRIPTOR_LEFT:
            raise
        return ""


class Homes:
    """Where the engines of devices are. A device's name is an engine's name, and may go on with a colon and a provider.

    The look for the engines of other packages is made once, when the first of them is asked for.
    """

    @cached_property
    def engines(self) -> dict[str, str]:
        """Return "package.module:Class" by the name of the engine.

        Raises:
            MemoryAllocationError: this process has no free file descriptor to look with.
        """
        return installed_engines()

    def home(self, name: str) -> str:
        """Return "package.module:Class" of a device's engine, or an empty text if the engine is not installed."""
        engine = name.partition(":")[0]
        return BUILT_IN.get(engine) or self.engines.get(name) or self.engines.get(engine, "")

    def key(self, name: str) -> str:
        """Return what all spellings of a device's name share: the case of a provider does not matter."""
        engine, colon, provider = name.partition(":")
        return f"{engine}:{provider.lower()}" if colon and self.home(engine) else name
