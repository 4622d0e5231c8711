"""An engine that computes nothing at all: what is left of a round trip is the way there and back.

Asked for as the device "tests.bench.empty_engine:EmptyEngine".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from aionn.hal import Artifact, CacheFiles, CompileOptions, Executable, ExecutionReport, Model

_NOTHING = ExecutionReport()


class EmptyExecutable:
    """Satisfies `hal.Executable`: leaves the outputs as they are."""

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        return _NOTHING


class EmptyEngine:
    """Satisfies `hal.Engine`."""

    name = "empty"
    version = "1"
    cache_files = CacheFiles(0, 0)

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return [True] * len(model.operations)

    def compile(self, model: Model, options: CompileOptions) -> EmptyExecutable:
        return EmptyExecutable()

    def export(self, executable: Executable) -> Artifact | None:
        return None

    def load(self, artifact: Artifact, options: CompileOptions) -> EmptyExecutable:
        return EmptyExecutable()
