"""An engine with a bug in the act that AIONN_TEST_BUG names, such as "run KeyError". Its driver is a process like any other."""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from aionn.hal import Artifact, CompileOptions, ExecutionReport, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable

NAME = "tests.runtime.buggy_engine:BuggyEngine"


class Unprintable(KeyError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Stray(RuntimeError):
    """Its text has a byte that UTF-8 lacks, as that of an error about a file may have."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text} \udcff")


def act(name: str) -> None:
    wanted, _, kind = os.environ.get("AIONN_TEST_BUG", "").partition(" ")
    if wanted == name:
        error: type[Exception] = getattr(builtins, kind, None) or globals()[kind]
        raise error("the bug")


class BuggyExecutable(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        act("run")
        return super().run(inputs, outputs, timing)

    def run_values(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        act("run")
        return super().run_values(inputs)


class BuggyEngine(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        act("start")

    def supported_operations(self, model: Model) -> Sequence[bool]:
        act("supported")
        return super().supported_operations(model)

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        act("compile")
        made = super().compile(model, options)
        return BuggyExecutable(self, made.operands, made.weights)

    def export(self, executable: Any) -> Artifact | None:
        act("export")
        return super().export(executable)

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        act("load")
        made = super().load(artifact, options)
        return BuggyExecutable(self, made.operands, made.weights)
