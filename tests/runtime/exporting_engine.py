"""Engines that write temporary files by path, as `exporting_engine.aionn-engine.toml` says. Their `runs_on` is what they find in TMPDIR.

Ask for one as "tests.runtime.exporting_engine:ExportingEngine" (the tests' root must be on PYTHONPATH).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from aionn.errors import CompilationError
from aionn.hal import Artifact, CompileOptions, Executable, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable


class ExportingEngine(FakeEngine):
    """Writes each artifact into a folder within its temporary directory, and reads it back from there."""

    name = "exporting"

    def __init__(self) -> None:
        super().__init__()
        self.runs_on = os.environ.get("TMPDIR", "")

    def export(self, executable: Executable) -> Artifact | None:
        artifact = super().export(executable)
        assert artifact is not None
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder, "artifact")).write_bytes(bytes(artifact.model[0]))
            moved = path.rename(Path(folder, "moved"))
            return Artifact((moved.read_bytes(), *artifact.model[1:]), artifact.data)


class LitteringEngine(ExportingEngine):
    """Leaves a file in its temporary directory."""

    name = "littering"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        tempfile.mkstemp()
        return super().compile(model, options)


class ReachingEngine(ExportingEngine):
    """Writes to a path beside its temporary directory, which it may not."""

    name = "reaching"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        try:
            Path(f"{self.runs_on}-beside").write_bytes(b"out")
        except OSError as error:
            raise CompilationError(f"beside: {error.strerror}") from error
        return super().compile(model, options)
