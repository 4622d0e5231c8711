"""An engine that logs without end while it runs, or that raises in its listener's part of a burst."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aionn.hal import CompileOptions, ExecutionReport, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable, weights_of

LINES = 10_000


class LoggingEngine(FakeEngine):
    """Logs `LINES` lines in its first run, and a bug's traceback in each."""

    name = "logging"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        return LoggingExecutable(self, model.outputs, weights_of(model))


class LoggingExecutable(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        if inputs["input"].ravel()[0]:
            if os.environ.get("AIONN_TEST_LOGS") == "bug":
                raise KeyError("a bug")
            for number in range(LINES):
                logging.getLogger("aionn.driver").error("line %d", number)
        return super().run(inputs, outputs, timing)
