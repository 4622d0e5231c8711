"""ONNX Runtime in a driver that is killed when it has written its artifact's files and not yet gone on.

Ask for it as "tests.runtime.killed_engine:KilledWhileItCompiles" (the tests' root must be on PYTHONPATH).
"""

from __future__ import annotations

import os
import signal
from typing import Any

from aionn.engines.onnxruntime import OnnxRuntimeEngine


class KilledWhileItCompiles(OnnxRuntimeEngine):
    """Reports the bytes it has written in the file that AIONN_TEST_KILLED_ENGINE names, and dies."""

    def _session(self, graph: bytes, settings: Any, *rest: Any) -> Any:
        session = super()._session(graph, settings, *rest)
        written_bytes = os.stat(settings.optimized_model_filepath).st_size
        with open(os.environ["AIONN_TEST_KILLED_ENGINE"], "a", encoding="ascii") as report:
            report.write(f"{written_bytes}\n")
        os.kill(os.getpid(), signal.SIGKILL)
        return session
