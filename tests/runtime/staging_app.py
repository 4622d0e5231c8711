"""An app for `test_stages_locks`: starts again and again on one cache, JIT or staged, and checks every answer. Until it is killed.

Each writer of an artifact stores bytes that no other writer does, and each load checks that all files are of one writer. Lines on stdout:
"stored WRITER" and "loaded WRITER" by drivers, "refused REASON" for each cached artifact that was not taken, "round" by the app.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

import aionn
from aionn import trace
from aionn.hal import Artifact, CompileOptions, Executable
from aionn.testing import identity_model
from aionn.testing.fake_engine import FakeEngine, SecondFakeEngine

_WRITER_BYTES = 16


def tell(line: str) -> None:
    """One write, so that lines of several processes stay whole."""
    os.write(1, f"{line}\n".encode())


class _Marked(FakeEngine):
    """Marks each file of an artifact with a writer of its own."""

    def export(self, executable: Executable) -> Artifact | None:
        artifact = super().export(executable)
        if artifact is None:
            return None
        writer = os.urandom(_WRITER_BYTES)
        tell(f"stored {writer.hex()}")
        return Artifact(tuple(writer + file for file in artifact.model), tuple(writer + file for file in artifact.data))

    def load(self, artifact: Artifact, options: CompileOptions) -> Any:
        writers = {bytes(file[:_WRITER_BYTES]) for file in (*artifact.model, *artifact.data)}
        if len(writers) != 1:
            tell("mixed")
            raise AssertionError(f"the files of {len(writers)} writers were loaded as one artifact")
        tell(f"loaded {writers.pop().hex()}")
        model, data = (tuple(file[_WRITER_BYTES:] for file in files) for files in (artifact.model, artifact.data))
        return super().load(Artifact(model, data), options)


class QuickEngine(_Marked):
    name = "marked"


class BestEngine(_Marked, SecondFakeEngine):
    name = "marked2"


# By the module's name: this one is `__main__` where it is the app.
QUICK, BEST = (f"tests.runtime.staging_app:{engine.__qualname__}" for engine in (QuickEngine, BestEngine))
MODEL = identity_model({"x": (1, 16)}, outputs=["y"])


def tell_refusals(event: trace.Span | trace.Counter) -> None:
    if event.name == "cache.refused_hit":
        tell(f"refused {event.attributes['reason']}")


async def main(mode: str, cache_dir: str) -> None:
    model = aionn.Model.from_onnx(MODEL)
    while True:
        async with aionn.Runtime() as runtime:
            if mode == "jit":
                compilation = await runtime.compile(model, devices=(BEST,), mode="jit", cache_dir=cache_dir, token=model.token)
            else:
                compilation = await runtime.compile(
                    model,
                    mode="staged",
                    stages=(QUICK, BEST),
                    cache_dir=cache_dir,
                    token=model.token,
                    stage_policy=aionn.StagePolicy(min_gain=None),
                )
            for number in range(20):
                outputs = await compilation.compute({"x": np.full((1, 16), number, np.float32)})
                if not (outputs["y"] == number).all():
                    raise AssertionError(f"{mode}: {outputs['y']} is not {number}")
            if mode == "staged":
                await compilation.wait_for_stage(BEST)
        tell("round")


if __name__ == "__main__":
    with trace.listen(tell_refusals):
        aionn.run(main, *sys.argv[1:])
