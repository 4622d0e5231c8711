"""An app for `test_interrupted_app`: its driver hangs, so that closing the runtime takes a while.

    python -m tests.journeys.closing_app {uvloop,asyncio} {closing,interrupted}

With "interrupted" it has no driver. Two Ctrl-C strike it, the second in one of the runtime's own tasks, and it raises while
it ends. Else it prints a line when its driver hangs, and one when it closes its runtime.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import anyio
import numpy as np

import aionn
from aionn.testing import FakeDevice, identity_model


async def main() -> None:
    with FakeDevice() as fake:
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
            inputs = {"input": np.ones((1, 16), np.float32)}
            fake.hang(with_gil=True)
            running = [asyncio.ensure_future(compilation.compute(inputs)) for _ in range(3)]
            try:
                await fake.heard("run")
                print("at work", flush=True)
                await asyncio.gather(*running)
            finally:
                telling = asyncio.ensure_future(tell())
    await telling


async def tell() -> None:
    await anyio.wait_all_tasks_blocked()  # the runtime waits for its driver
    print("closing", flush=True)


async def interrupted() -> None:
    async def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    async with aionn.Runtime(start=()) as runtime:
        runtime._opened._tasks.start_soon(interrupt)
        try:
            await asyncio.sleep(3600)
        finally:
            print("closing", flush=True)
            raise ValueError("the app's own, while it ends")


if __name__ == "__main__":
    app = interrupted if sys.argv[2] == "interrupted" else main
    if sys.argv[1] == "uvloop":
        aionn.run(app)
    else:
        asyncio.run(app())
