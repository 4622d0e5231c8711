"""What tests of `aionn.ray.MultiplexedHolder` share. Replicas import this module, too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

import aionn
import aionn.ray
from tests.scaled_model import scaled_model


def written_models(folder: Path, count: int, device: str = "onnxruntime") -> dict[str, aionn.ray.ModelSpec]:
    """Write models "m0", "m1", ... that multiply by 1, 2, ..., so that the answer of a wrong model is seen."""
    found = {}
    for number in range(count):
        path = folder / f"m{number}.onnx"
        path.write_bytes(scaled_model(np.full((1, 16), factor_of(f"m{number}"), np.float32)))
        found[f"m{number}"] = aionn.ray.ModelSpec(str(path), devices=(device,), cache_dir=str(folder / "cache"))
    return found


def factor_of(model_id: str) -> float:
    return float(model_id[1:]) + 1


class CompilationWatch:
    """Counts compilations of this process from outside of the table that limits them.

    Attributes:
        live: how many are being compiled, compiled, or being closed. most: the most that were at once. compiles: how many began.
        wrong: how often a compilation was used after its closing had begun, or closed while it was used.
    """

    def __init__(self) -> None:
        self.live = self.most = self.compiles = self.wrong = 0
        self._users: dict[aionn.Compilation, int] = {}

    def install(self, patch: Any = setattr) -> CompilationWatch:
        """Watch all compilations from now on. `patch`: `setattr`, or that of a monkeypatch."""
        patch(aionn.Runtime, "compile", self._watched_compile(aionn.Runtime.compile))
        patch(aionn.Compilation, "compute", self._watched_compute(aionn.Compilation.compute))
        patch(aionn.Compilation, "aclose", self._watched_aclose(aionn.Compilation.aclose))
        return self

    def _watched_compile(self, compile_model: Any) -> Any:
        @functools.wraps(compile_model)
        async def watched(*args: Any, **options: Any) -> aionn.Compilation:
            self.compiles += 1
            self.live += 1
            self.most = max(self.most, self.live)
            try:
                made: aionn.Compilation = await compile_model(*args, **options)
            except BaseException:
                self.live -= 1
                raise
            self._users[made] = 0
            return made

        return watched

    def _watched_compute(self, compute: Any) -> Any:
        @functools.wraps(compute)
        async def watched(compilation: aionn.Compilation, *args: Any, **options: Any) -> Any:
            if compilation not in self._users:
                self.wrong += 1
                return await compute(compilation, *args, **options)
            self._users[compilation] += 1
            try:
                return await compute(compilation, *args, **options)
            finally:
                if compilation in self._users:
                    self._users[compilation] -= 1

        return watched

    def _watched_aclose(self, aclose: Any) -> Any:
        @functools.wraps(aclose)
        async def watched(compilation: aionn.Compilation) -> None:
            self.wrong += bool(self._users.pop(compilation))
            try:
                await aclose(compilation)
            finally:
                self.live -= 1

        return watched
