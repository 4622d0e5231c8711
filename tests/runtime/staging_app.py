"""An app for `test_stages_locks`: starts again and again on one cache, JIT or staged, and checks every answer. Until it is killed."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

import aionn
from aionn.testing import identity_model
from aionn.testing.fake_engine import FakeEngine, SecondFakeEngine

QUICK, BEST = (f"{engine.__module__}:{engine.__qualname__}" for engine in (FakeEngine, SecondFakeEngine))
MODEL = identity_model({"x": (1, 16)}, outputs=["y"])


async def main(mode: str, cache_dir: str) -> None:
    model = aionn.Model.from_onnx(MODEL)
    while True:
        async with aionn.Runtime() as runtime:
            runtime.stage_policy = dataclasses.replace(runtime.stage_policy, min_gain=None)
            if mode == "jit":
                compilation = await runtime.compile(model, devices=(BEST,), mode="jit", cache_dir=cache_dir, token=model.token)
            else:
                compilation = await runtime.compile(model, mode="staged", stages=(QUICK, BEST), cache_dir=cache_dir, token=model.token)
            for number in range(20):
                outputs = await compilation.compute({"x": np.full((1, 16), number, np.float32)})
                if not (outputs["y"] == number).all():
                    raise AssertionError(f"{mode}: {outputs['y']} is not {number}")
            if mode == "staged":
                await compilation.wait_for_stage(BEST)
        print("round", flush=True)


if __name__ == "__main__":
    aionn.run(main, *sys.argv[1:])
