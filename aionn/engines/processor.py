"""What this machine's CPU offers: usable cores, instruction set, flushing of denormals.

Denormal floats (below 1e-38) cost a CPU a hundred times a normal operation. PP-OCRv6's detector makes so many that it
runs 4 times slower (26 against 100 ms, 2 cores, 320 x 320). Flushing them to zero is a flag *of a thread*. ONNX Runtime sets it for
its own pool, and once per process for the thread that makes the first session. So the thread that runs a model may lack
it. `Flushing` sets it around one call and restores it, so the floats of other code stay as they are.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import struct
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import blake3

from aionn.cgroups import ROOT, Place, cpu_quota
from aionn.hal.engine import CompileOptions
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.types import ExecutionPreference

_FENV_BYTES = 64  # more than any libc's fenv_t
# Where fenv_t holds the control word, and the bits that flush denormals (glibc and musl agree).
_CONTROL = {
    "x86_64": (28, 0x8040),  # MXCSR: flush to zero, denormals are zero
    "aarch64": (0, 1 << 24),  # FPCR: FZ
}


def usable_cpus(root: Place = ROOT) -> int:
    """Return how many CPUs this process may use at once: its affinity, cut by the quotas of its cgroups."""
    cpus, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    return cpus if quota is None else min(cpus, math.ceil(quota.cpus))


def run_threads(options: CompileOptions | PrepareOptions) -> int:
    """Return how many threads a run may use: the app's number, else 1 for LOW_POWER, else an instance's share of the usable CPUs."""
    if options.threads and not options.at_most:
        return options.threads
    if options.preference is ExecutionPreference.LOW_POWER:
        return 1
    share = max(1, usable_cpus() // max(1, options.instances))
    return min(share, options.threads) if options.threads else share


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the architecture and a digest of its features. Artifacts that were compiled for one do not fit another."""
    features = ""
    with suppress(OSError):  # `platform.processor` would start a process, which a confined driver must not
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                features = " ".join(sorted(value.split()))
                break
    return f"{platform.machine()}-{blake3.blake3(features.encode()).hexdigest(8)}"


@functools.cache
def _libc() -> ctypes.PyDLL | None:
    # PyDLL keeps the GIL, because the two calls take a tenth of a microsecond each.
    for name in (None, "libm.so.6"):
        try:
            library = ctypes.PyDLL(name)
            if library.fegetenv and library.fesetenv:
                return library
        except (OSError, AttributeError):
            continue
    return None


def _nothing(_environment: Any) -> None:
    return None


class Flushing(AbstractContextManager["Flushing"]):
    """Compute with denormals as zero in this thread within the block, and as before afterwards. Reusable, by one thread at a time.

    Costs about 0.6 us. Does nothing on an unknown CPU or libc.
    """

    __slots__ = ("_before", "_during", "_get", "_set")

    def __init__(self, flush: bool = True) -> None:
        """`flush`: False only keeps the thread's floats as they are: what the block changes is put back."""
        self._get: Any = _nothing
        self._set: Any = _nothing
        self._before = self._during = ctypes.create_string_buffer(_FENV_BYTES)
        place, libc = _CONTROL.get(platform.machine()), _libc()
        if place is None or libc is None:
            return
        offset, bits = place
        libc.fegetenv(self._before)
        self._during = ctypes.create_string_buffer(self._before.raw, _FENV_BYTES)
        (word,) = struct.unpack_from("<I", self._during, offset)
        struct.pack_into("<I", self._during, offset, word | bits if flush else word & ~bits)
        self._get, self._set = libc.fegetenv, libc.fesetenv

    def __enter__(self) -> Flushing:
        self._get(self._before)
        self._set(self._during)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._set(self._before)
