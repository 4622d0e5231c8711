"""An engine that notes in a file when streams begin and end. Asked for as "tests.runtime.hinted_engine:HintedEngine"."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from aionn.engines.reference import ReferenceEngine
from aionn.hal import CompileOptions, Executable, ExecutionReport, Model

VARIABLE = "AIONN_TEST_HINTS"


class HintedEngine(ReferenceEngine):
    name = "hinted"

    def compile(self, model: Model, options: CompileOptions) -> Executable:  # type: ignore[override]
        return HintedExecutable(super().compile(model, options))


class HintedExecutable:
    def __init__(self, inner: Executable) -> None:
        self._inner = inner

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        return self._inner.run(inputs, outputs, timing)

    def stream_began(self) -> None:
        self._note("began")

    def stream_ended(self) -> None:
        self._note("ended")
        raise RuntimeError("a hint that fails costs nothing")

    def _note(self, what: str) -> None:
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write(f"{what}\n")
