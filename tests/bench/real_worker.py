"""The simplest rival's other process: it blocks in `eventfd_read`, runs ONNX Runtime over shared memory, and answers by an eventfd.

It is what an engineer writes in an hour: no asyncio, no queue, one request in flight. Its session has the settings that aionn's
engine gives the model, so the transport alone is different. The app's side is `tests.bench.real_rivals`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PR_SET_PDEATHSIG = 1


def session_of(path: str, threads: int, spinning: bool = False) -> Any:
    """Return a session with the settings of aionn's engine. See `aionn.engines.onnxruntime`."""
    import onnxruntime  # here, because an app's side of the rivals imports this module, too

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning and threads > 1 else "0")
    settings.add_session_config_entry("session.set_denormal_as_zero", "1")
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


Spec = tuple[str, Sequence[int]]
"""Type and shape of an array."""

Places = list[tuple[str, str, list[int], int]]
"""Name, type, shape and offset of arrays in shared memory."""

ALIGNED = 64


def laid_out(inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]) -> tuple[dict[str, Places], int]:
    """Return where the inputs and the outputs lie in shared memory, and how many bytes it needs."""
    places: dict[str, Places] = {"inputs": [], "outputs": []}
    end = 0
    for kind, specs in (("inputs", inputs), ("outputs", outputs)):
        for name, (dtype, shape) in specs.items():
            places[kind].append((name, dtype, list(shape), end))
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            end += -(-size // ALIGNED) * ALIGNED
    return places, end


def views(memory: Any, places: Places) -> dict[str, np.ndarray[Any, Any]]:
    """Return an array over the shared memory for each (name, dtype, shape, offset)."""
    found = {}
    for name, dtype, shape, offset in places:
        count = int(np.prod(shape, dtype=np.int64))
        found[name] = np.frombuffer(memory, dtype, count, offset).reshape(shape)
    return found


def serve(given: dict[str, Any]) -> None:
    memory = mmap.mmap(given["memory"], given["size_bytes"])
    inputs, outputs = views(memory, given["inputs"]), views(memory, given["outputs"])
    session = session_of(given["model"], given["threads"])
    names = list(outputs)
    asked, answered = given["asked"], given["answered"]
    os.eventfd_write(answered, 1)  # it is ready
    while True:
        os.eventfd_read(asked)
        for name, value in zip(names, session.run(names, inputs), strict=True):
            outputs[name][...] = value
        os.eventfd_write(answered, 1)


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when its parent has ended. The parent alone answers to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


if __name__ == "__main__":
    end_with_parent()
    serve(json.loads(sys.argv[1]))
