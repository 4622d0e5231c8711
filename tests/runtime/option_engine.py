"""A fake engine with options and providers, whose outputs say which of them reached the executable that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from aionn.errors import DeviceUnavailableError
from aionn.hal import Artifact, CompileOptions, ExecutionReport, Model, OptionValue
from aionn.testing.fake_engine import FakeEngine, FakeExecutable, SecondFakeEngine

PROVIDERS = ("left", "right")


class OptionEngine(FakeEngine):
    """The first elements of an output are level, rate, fast, the size of the file, and the provider's place or -1."""

    name = "optional"
    options: Mapping[str, Any] = {"level": int, "rate": (float, int), "fast": bool, "file": Path}
    providers = PROVIDERS
    runs_on = "a fake"

    def __init__(self, provider: str = "") -> None:
        super().__init__()
        self.provider = PROVIDERS.index(provider) if provider else -1

    @classmethod
    def for_provider(cls, provider: str) -> OptionEngine:
        if provider.lower() not in PROVIDERS:
            raise DeviceUnavailableError(cls.name, f"there is no provider {provider!r}, only {PROVIDERS}")
        return cls(provider.lower())

    def supported_operations(self, model: Model, options: Mapping[str, OptionValue] = {}) -> Sequence[bool]:
        return [options.get("level") != -1] * len(model.operations)

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        return OptionExecutable(self, super().compile(model, options), options)

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        return OptionExecutable(self, super().load(artifact, options), options)


class SecondOptionEngine(OptionEngine):
    name = "optional2"
    variable = SecondFakeEngine.variable


class OptionExecutable(FakeExecutable):
    runs_on = "a fake's executable"

    def __init__(self, engine: OptionEngine, made: FakeExecutable, options: CompileOptions) -> None:
        super().__init__(engine, made.operands, made.weights)
        given = options.options
        size = Path(str(given["file"])).stat().st_size if "file" in given else 0
        self.asked = [given.get("level", 0), given.get("rate", 0), given.get("fast", False), size, engine.provider]

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        report = super().run(inputs, outputs, timing)
        for array in (*outputs.values(), *report.outputs.values()):
            array.reshape(-1)[: len(self.asked)] = self.asked
        return report


class UnaskedEngine(FakeEngine):
    """Has options, and judges models without them."""

    options: Mapping[str, Any] = {"level": int}


class WrongOptionsEngine(FakeEngine):
    """Says of its options what no engine may say."""

    options: Mapping[str, Any] = {"level": complex}
