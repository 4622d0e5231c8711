"""An engine that loads the artifacts of another engine, for `check_engine`. A damaged artifact may end the process that loads it.

aionn verifies the bytes of an artifact before any engine sees them. So the artifact travels as a model of a format of this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from aionn.driver.registry import find_engine
from aionn.errors import CompilationError
from aionn.hal.engine import Artifact, CompileOptions, Executable, ExecutionReport
from aionn.hal.model import PooledModel, model_bytes
from aionn.hal.types import CacheFiles

LOADER = "aionn.testing.damaged:ArtifactLoader"
FORMAT = "aionn.testing.artifact"


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    engine: str
    model: tuple[bytes, ...]
    data: tuple[bytes, ...]


def packed(engine: str, artifact: Artifact) -> bytes:
    """Return an artifact and the name of its engine as bytes for a model of `FORMAT`."""
    return msgspec.msgpack.encode(_Packed(engine, tuple(map(bytes, artifact.model)), tuple(map(bytes, artifact.data))))


class ArtifactLoader:
    """Satisfies `hal.Engine`. It compiles by loading, and reports with the reason "refused" that the other engine raised."""

    name = "artifact-loader"
    version = "1"
    cache_files = CacheFiles()

    def supported_operations(self, model: PooledModel) -> Sequence[bool]:
        return [model.format == FORMAT] * len(model.operations)

    def compile(self, model: PooledModel, options: CompileOptions) -> Executable:
        stored = msgspec.msgpack.decode(model_bytes(model, FORMAT), type=_Packed)
        engine = find_engine(stored.engine)
        try:
            engine.load(Artifact(stored.model, stored.data), options)
        except Exception as error:
            raise CompilationError(f"the engine raised {type(error).__name__}", reason="refused") from error
        return _Nothing()

    def export(self, executable: Executable) -> Artifact | None:
        return None

    def load(self, artifact: Artifact, options: CompileOptions) -> Executable:
        raise CompilationError("this engine stores nothing, so there is nothing to load")


class _Nothing:
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        raise CompilationError("a loaded artifact is not run")
