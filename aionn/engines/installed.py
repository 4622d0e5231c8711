"""Find the installed engines: the entry points of the group `aionn.engines`. Looking imports no engine."""

from __future__ import annotations

import errno
import os
import resource
from typing import TYPE_CHECKING

from aionn.errors import MemoryAllocationError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "aionn.engines"

BUILT_IN = {
    "onnxruntime": "aionn.engines.onnxruntime:OnnxRuntimeEngine",
    "openvino": "aionn.engines.openvino:OpenVINOEngine",
    "reference": "aionn.engines.reference:ReferenceEngine",
}
"""The engines of this package and their classes, best first. Another package may install an engine under the same name."""


def installed_engines() -> dict[str, EntryPoint]:
    """Return every installed engine's entry point by name; the first of a name wins.

    Raises:
        MemoryAllocationError: this process has no free file descriptor to look with.
    """
    found: dict[str, EntryPoint] = {}
    try:
        # Without a free descriptor, importlib.metadata skips folders in silence. So the shortage is found first.
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
        from importlib.metadata import entry_points  # 10 ms; a driver that gets its engine's place never looks

        for point in entry_points(group=GROUP):
            found.setdefault(point.name, point)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # The way out is the one for memory that needs a descriptor: the call is right, and works again when one is free.
        raise MemoryAllocationError(
            f"the look for engines found no free file descriptor (RLIMIT_NOFILE is {limit}); close files or raise it, then try again",
            needed_bytes=0,
            available_bytes=None,
        ) from error
    return found
