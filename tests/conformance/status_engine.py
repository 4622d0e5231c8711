"""An engine that fails by the status that its input names, so that every status can come on every execution path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import ExecutionError
from aionn.hal import Artifact, CacheFiles, CompileOptions, ErrorStatus, Executable, ExecutionReport, Model


class StatusEngine:
    """Satisfies `hal.Engine`. Input 0 holds a status. A run with NONE returns its input."""

    name = "status"
    version = "1"
    cache_files = CacheFiles(0, 0)

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return [True] * len(model.operations)

    def compile(self, model: Model, options: CompileOptions) -> StatusExecutable:
        return StatusExecutable()

    def export(self, executable: Executable) -> Artifact | None:
        return None

    def load(self, artifact: Artifact, options: CompileOptions) -> StatusExecutable:
        raise AssertionError("nothing is cached")


class StatusExecutable:
    """Satisfies `hal.Executable`."""

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        (given,) = inputs.values()
        status = ErrorStatus(int(given.flat[0]))
        if status is not ErrorStatus.NONE:
            raise ExecutionError(f"failed as asked, with {status.name}", status=status)
        made = {}
        for name, place in outputs.items():
            np.copyto(place, given)
            made[name] = place
        return ExecutionReport(made, None)
