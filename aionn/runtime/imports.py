"""Import what an open runtime needs, while a driver starts."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from aionn.engines.installed import with_descriptors

_NEEDED = ("aionn.runtime.open_runtime", "aionn.runtime.preparing.plan", "aionn.caching.store")
"""What `open` imports while a driver starts. It does so in the loop's thread, because two threads cannot import NumPy at once."""


def import_needed() -> None:
    """Import what an open runtime needs. What is imported stays, so looking for garbage in it meanwhile is a waste of time.

    Raises:
        MemoryAllocationError: this process has no free file descriptor to read modules with.
    """
    collects, is_first = gc.isenabled(), _NEEDED[-1] not in sys.modules
    gc.disable()
    try:
        with with_descriptors("the import of what a runtime needs"), _short_spins():
            for module in _NEEDED:
                import_module(module)
    finally:
        if is_first and not gc.get_freeze_count():  # what the app has frozen stays frozen
            gc.freeze()  # with `unfreeze`, all that exists counts as old, so the next collection does not look through it (8 ms)
            gc.unfreeze()
        if collects:
            gc.enable()


@contextmanager
def _short_spins() -> Iterator[None]:
    """Let NumPy's BLAS, if it is loaded in the body, spin for 2^20 cycles and not for 2^26 before its idle threads sleep.

    It spins once right after it is loaded, and would take a CPU for 30 ms from the driver that starts just then. Later it costs the app
    nothing that can be measured. An app that imports NumPy first, or sets the variable, keeps its own setting.
    """
    name = "OPENBLAS_THREAD_TIMEOUT"
    if "numpy" in sys.modules or name in os.environ:
        yield
        return
    os.environ[name] = "20"
    try:
        yield
    finally:
        os.environ.pop(name, None)
