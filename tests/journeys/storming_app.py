"""An app for `test_confined_storms`: compiles, streams and changes stages without end, each driver confined, until a test ends it.

    python -m tests.journeys.storming_app MODEL CACHE

Prints one line when its drivers are at work. A stage that is killed is compiled again.
"""

from __future__ import annotations

import sys

import aionn
from tests.journeys.silero import still, windows


async def main(path: str, cache: str) -> None:
    inputs = {"input": next(windows(1)), "state": still()}
    model = aionn.Model.from_onnx(path)
    async with aionn.Runtime(sandbox="require") as runtime:
        compilation = await runtime.compile(model, mode="staged", stages=("onnxruntime", "openvino"), cache_dir=cache, token=model.token)
        async with compilation.burst() as burst:
            await burst.compute(inputs)
            print("at work", flush=True)
            while True:
                await runtime.compile(model, devices=("onnxruntime",))
                await burst.compute(inputs)


if __name__ == "__main__":
    aionn.run(main, *sys.argv[1:])
