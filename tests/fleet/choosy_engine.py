"""A fake engine whose artifacts load only with the option that they were compiled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aionn.errors import CompilationError
from aionn.hal import Artifact, CompileOptions, Model, OptionValue
from aionn.testing.fake_engine import FakeEngine, FakeExecutable

LEVEL = 3


class ChoosyEngine(FakeEngine):
    """Loads nothing without its level."""

    name = "choosy"
    options: Mapping[str, Any] = {"level": int, "rate": float, "fast": bool, "mode": str, "custom_ops": Path, "cache_dir": str}

    def supported_operations(self, model: Model, options: Mapping[str, OptionValue] = {}) -> Sequence[bool]:
        return super().supported_operations(model)

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        if options.options.get("level") != LEVEL:
            raise CompilationError("this artifact needs the option level=3", reason="this artifact needs the option level=3")
        return super().load(artifact, options)
