"""An app for `test_interrupted_app`: streams without end, or compiles without end, until a test ends it.

    python -m tests.journeys.streaming_app MODEL {stream,compile} {uvloop,asyncio}

Prints one line when its driver is at work.
"""

from __future__ import annotations

import asyncio
import sys

import aionn
from tests.journeys.silero import still, windows


async def main(path: str, doing: str) -> None:
    inputs = {"input": next(windows(1)), "state": still()}
    model = aionn.Model.from_onnx(path)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        async with compilation.burst() as burst:
            await burst.compute(inputs)
            print("at work", flush=True)
            while True:
                if doing == "compile":
                    await runtime.compile(model, devices=("onnxruntime",))
                else:
                    await burst.compute(inputs)


if __name__ == "__main__":
    _, path, doing, loop = sys.argv
    if loop == "uvloop":
        aionn.run(main, path, doing)
    else:
        asyncio.run(main(path, doing))
