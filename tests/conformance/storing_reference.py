"""The reference engine with a cache of its own: two model files and one data file, plain enough to read in a test.

Ask a driver for it as "tests.conformance.storing_reference:StoringReference" (the tests' root must be on PYTHONPATH).
"""

from __future__ import annotations

from typing import Any

import msgspec

from aionn.engines.reference import ReferenceEngine, ReferenceExecutable
from aionn.hal import Artifact, CacheFiles, CompileOptions, Executable, MemoryDescription, MemoryKind, Model, Operand
from aionn.hal.model import Constant, Operation

NAME = "tests.conformance.storing_reference:StoringReference"


class Plan(msgspec.Struct, frozen=True):
    """The first model file: all of a model but its graph and its constants' bytes."""

    inputs: tuple[tuple[str, Operand], ...]
    outputs: tuple[tuple[str, Operand], ...]
    operations: tuple[Operation, ...]
    constants: tuple[Constant, ...]
    token: bytes


class Bytes:
    """A pool over loaded bytes. Satisfies `IMemory` as far as an engine uses it."""

    def __init__(self, content: Any) -> None:
        self._content = memoryview(content)
        self.size_bytes = self._content.nbytes
        self.description = MemoryDescription(MemoryKind.ASHMEM, self.size_bytes, writable=False)

    def fileno(self) -> int:
        raise AssertionError("an engine sends its pools to nobody")

    def view(self) -> memoryview:
        return self._content


class StoringReference(ReferenceEngine):
    """Model files: the plan, the graph. Data file: the constants' bytes."""

    name = "storing-reference"
    cache_files = CacheFiles(model=2, data=1)

    def compile(self, model: Model, options: CompileOptions) -> ReferenceExecutable:
        executable = super().compile(model, options)
        executable.stored = self._stored(model)  # type: ignore[attr-defined]
        return executable

    @staticmethod
    def _stored(model: Model) -> Artifact:
        assert len(model.pools) <= 1
        plan = Plan(tuple(model.inputs.items()), tuple(model.outputs.items()), model.operations, model.constants, model.token)
        data = bytes(model.pools[0].view()) if model.pools else b"none"
        return Artifact((msgspec.msgpack.encode(plan), model.graph), (data,))

    def export(self, executable: Executable) -> Artifact | None:
        stored: Artifact = executable.stored  # type: ignore[attr-defined]
        return stored

    def load(self, artifact: Artifact, options: CompileOptions) -> ReferenceExecutable:
        plan = msgspec.msgpack.decode(artifact.model[0], type=Plan)
        model = Model(
            graph=bytes(artifact.model[1]),
            inputs=dict(plan.inputs),
            outputs=dict(plan.outputs),
            operations=plan.operations,
            constants=plan.constants,
            pools=(Bytes(artifact.data[0]),) if plan.constants else (),
            token=plan.token,
        )
        return self.compile(model, options)
