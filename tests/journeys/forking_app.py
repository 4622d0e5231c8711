"""An app for `test_forking_app`: forks inside `async with Runtime()`, in mid-stream and in mid-compile.

    python -m tests.journeys.forking_app CHILD {uvloop,asyncio} {busy,quiet} CACHE_DIR

The child does what CHILD names. With "busy" a stream, a compile and a request are in flight. The parent waits for the child's end, and
goes on.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import warnings
from collections.abc import AsyncIterator

import anyio
import numpy as np
from numpy.typing import NDArray

import aionn
from aionn.testing import FakeDevice, identity_model
from aionn.testing.fake_engine import SecondFakeEngine

INPUTS = {"input": np.ones((1, 16), np.float32)}


async def in_child(what: str, runtime: aionn.Runtime, device: aionn.Device, compilation: aionn.Compilation, burst: aionn.Burst) -> None:
    """In the child. Without a running loop: asyncio has left the parent's behind."""
    if what == "sys.exit":
        sys.exit(7)
    elif what == "raise":
        raise ZeroDivisionError("the child's own")
    elif what == "close":
        await burst.aclose()
        await compilation.aclose()
        await runtime.aclose()
        os._exit(7)
    elif what == "use":
        for call in (
            compilation.compute(INPUTS),
            burst.compute(INPUTS),
            runtime.compile(compilation.model),
            burst.map([INPUTS]).__anext__(),
            device.restart(),
        ):
            try:
                await call
            except aionn.CallerError as error:
                assert "child" in str(error), error
            else:
                raise AssertionError("the child has used its parent's runtime")
        os._exit(7)
    elif what == "collect":
        del runtime, compilation, burst
        gc.collect()
        os._exit(7)
    elif what == "own":

        async def own() -> None:
            async with aionn.Runtime(start=()) as mine:
                compiled = await mine.compile(aionn.Model.from_onnx(identity_model()), devices=(FakeDevice(SecondFakeEngine).name,))
                assert list(await compiled.compute(INPUTS)) == ["input_out"]

        asyncio.run(own())
        os._exit(7)
    else:
        assert what == "return"


async def main(what: str, busy: bool, cache_dir: str) -> None:
    model = aionn.Model.from_onnx(identity_model())
    slow = aionn.Model.from_onnx(identity_model({"x": (1, 3)}))
    asked = asyncio.Event()

    async def camera() -> AsyncIterator[dict[str, NDArray[np.float32]]]:
        yield INPUTS
        await asked.wait()
        yield INPUTS

    with FakeDevice() as fake:
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
            async with compilation.burst() as burst, compilation.burst() as other:
                await burst.compute(INPUTS)
                device = next(device for device in runtime.devices if device.name == fake.name)
                driver = device.pid
                assert driver is not None
                if busy:
                    stream = other.map(camera())
                    await stream.__anext__()
                    fake.hang("compile")
                    compiling = asyncio.create_task(runtime.compile(slow, devices=(fake.name,), cache_dir=cache_dir, token=slow.token))
                    await fake.heard("compile")
                    asked.set()
                    answered = asyncio.ensure_future(stream.__anext__())
                    computed = asyncio.create_task(burst.compute(INPUTS))
                    await asyncio.sleep(0)  # its request is in flight
                if what == "multiprocessing":
                    process = multiprocessing.get_context("fork").Process(target=gc.collect)
                    process.start()
                    await asyncio.to_thread(process.join)
                    print("child", process.exitcode, flush=True)
                else:
                    with warnings.catch_warnings():
                        # Python 3.12 warns of every fork in a process with threads. This app is about what the child does then.
                        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                        child = os.fork()
                    if not child:
                        await in_child(what, runtime, device, compilation, burst)
                        return
                    if type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
                        # The child's end runs the loop. uvloop hands epoll calls over in an io_uring, whose memory a child shares, so
                        # libuv ends a process whose parent or child does so at the same moment.
                        _, status = os.waitpid(child, 0)  # noqa: ASYNC222
                    else:
                        _, status = await asyncio.to_thread(os.waitpid, child, 0)
                    print("child", os.waitstatus_to_exitcode(status), flush=True)
                with anyio.fail_after(20):
                    if busy:
                        assert list(await computed) == ["input_out"]
                        assert (await answered).seq == 1
                        fake.behave()
                        assert (await compiling).outcomes[0].save_failure is None
                    assert list(await burst.compute(INPUTS)) == ["input_out"]
                    assert list(await compilation.compute(INPUTS)) == ["input_out"]
                    again = await runtime.compile(
                        slow if busy else model, devices=(fake.name,), cache_dir=cache_dir, token=slow.token if busy else model.token
                    )
                    print(again.outcomes[0].kind.value, flush=True)
                assert driver == device.pid
        print("closed", flush=True)


if __name__ == "__main__":
    _, child, loop, load, directory = sys.argv
    if loop == "uvloop":
        aionn.run(main, child, load == "busy", directory)
    else:
        asyncio.run(main(child, load == "busy", directory))
