"""An engine that tunes while it runs: after three runs it offers a better artifact. Its outputs say which artifact they come from.

Asked for as "tests.runtime.tuning_engine:TuningEngine". A compiled model adds 0 to its input, a tuned artifact adds 1, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.hal import Artifact, CacheFiles, CompileOptions, Executable, ExecutionReport, Model

RUNS = 3


class TuningEngine:
    """Satisfies `hal.Engine`."""

    name = "tuning"
    version = "1"
    cache_files = CacheFiles(1, 0)

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return [True] * len(model.operations)

    def compile(self, model: Model, options: CompileOptions) -> TuningExecutable:
        return TuningExecutable(0)

    def export(self, executable: Executable) -> Artifact:
        assert isinstance(executable, TuningExecutable)
        return executable.artifact()

    def load(self, artifact: Artifact, options: CompileOptions) -> TuningExecutable:
        return TuningExecutable(int(bytes(artifact.model[0])))


class TuningExecutable:
    def __init__(self, level: int) -> None:
        self.level = level
        self.runs = 0

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        self.runs += 1
        for source, target in zip(inputs.values(), outputs.values(), strict=True):
            np.add(source, self.level, out=target)
        return ExecutionReport()

    def artifact(self, level: int | None = None) -> Artifact:
        return Artifact((b"%d" % (self.level if level is None else level),), ())

    def export_again(self) -> Artifact | None:
        if self.runs < RUNS:
            return None
        self.runs = 0
        return self.artifact(self.level + 1)


class BrokenOffer(TuningEngine):
    """An engine whose offers fail."""

    name = "broken"

    def compile(self, model: Model, options: CompileOptions) -> TuningExecutable:
        return Broken(0)


class Broken(TuningExecutable):
    def export_again(self) -> Artifact | None:
        raise RuntimeError("a fault of the engine")
