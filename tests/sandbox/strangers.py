"""Engines of a stranger that state no needs. Each needs something in a driver. The first word of `runs_on` is what it finds."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from aionn.hal import Artifact, CompileOptions, ExecutionReport, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable

FILE = "AIONN_TEST_FILE"
"""Names a file of the user."""


class ReadsWhenMade(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.runs_on = Path(os.environ[FILE]).read_text(encoding="ascii")


class ReadsToJudge(FakeEngine):
    def supported_operations(self, model: Model) -> list[bool]:
        Path(os.environ[FILE]).read_bytes()
        return [True] * len(model.operations)


class ReadsToCompile(FakeEngine):
    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        Path(os.environ[FILE]).read_bytes()
        return super().compile(model, options)


class ListsToCompile(FakeEngine):
    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        os.listdir(Path(os.environ[FILE]).parent)
        return super().compile(model, options)


class ReadsToLoad(FakeEngine):
    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        Path(os.environ[FILE]).read_bytes()
        return super().load(artifact, options)


class ReadsToExport(FakeEngine):
    def export(self, executable: Any) -> Artifact | None:
        Path(os.environ[FILE]).read_bytes()
        return super().export(executable)


class ReadsToRun(FakeEngine):
    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        made = super().compile(model, options)
        return ReadingExecutable(self, made.operands, made.weights)


class ReadingExecutable(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        Path(os.environ[FILE]).read_bytes()
        return super().run(inputs, outputs, timing)


class OpensADevice(FakeEngine):
    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        os.close(os.open("/dev/full", os.O_RDWR))
        return super().compile(model, options)


class MakesAFile(FakeEngine):
    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        Path(f"{os.environ[FILE]}.new").write_bytes(b"")
        return super().compile(model, options)


class MakesATemporaryFile(FakeEngine):
    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        with tempfile.TemporaryFile():
            return super().compile(model, options)


class MakesCode(FakeEngine):
    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
        return super().compile(model, options)


class ReadsWhatNobodyMay(FakeEngine):
    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        raise PermissionError(13, "Permission denied", "/nowhere at all/file")


class DeclaresInItsClass(ReadsToCompile):
    reads = ("/",)
    makes_code = True
