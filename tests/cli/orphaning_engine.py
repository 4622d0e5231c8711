"""An engine that keeps its driver alive after its app: it takes back the parent death signal, and its loop stands still."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aionn.hal import CompileOptions, ExecutionReport, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable

_PR_SET_PDEATHSIG = 1

_forgotten = threading.Event()


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)  # type: ignore[untyped-decorator]
def _forget_parent(_: int | None) -> int:
    """Runs in the main thread, to which the parent death signal belongs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    _forgotten.set()
    return 0


class _Standing(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        print("orphaning", flush=True)
        # With the GIL held, so that the loop never sees the end of its socket.
        ctypes.PyDLL(None).pause()
        time.sleep(600)
        return super().run(inputs, outputs, timing)


class OrphaningEngine(FakeEngine):
    name = "orphaning"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        ctypes.pythonapi.Py_AddPendingCall(_forget_parent, None)
        if not _forgotten.wait(30):
            raise RuntimeError("the main thread did not run the pending call")
        return _Standing(self, model.outputs, b"")
