"""The lanes that `tests.bench.real` compares over one model, all open and warm at once.

direct      session.run in the app's own loop
shm         shared memory and two eventfds, with a worker process that blocks (`tests.bench.real_worker`)
to_thread   session.run in asyncio.to_thread
aionn       burst.compute of plain arrays
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import numpy as np

import aionn
from tests.bench.burst import pin_driver
from tests.bench.real_subjects import Inputs, Subject
from tests.bench.real_worker import session_of
from tests.bench.versus_contenders import SharedMemory


@dataclass(frozen=True)
class Lane:
    """One way to run a model. `pid` is of the process that runs it, or None where that is the app itself."""

    name: str
    call: Callable[[Inputs], Awaitable[object]]
    pid: int | None
    busy_ns: Callable[[], int] | None = None
    """How long the other process has executed so far, where it says so."""


@contextmanager
def placed(runtime: aionn.Runtime, device: str, cpus: tuple[int, int] | None) -> Iterator[None]:
    """Keep the app's thread on the first CPU and the driver on the second, or leave both to the scheduler."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    pin_driver(runtime, device, cpus[1])
    os.sched_setaffinity(0, {cpus[0]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def lanes(subject: Subject, cpus: tuple[int, int] | None) -> AsyncIterator[list[Lane]]:
    """Open all lanes for a model, each with one answer behind it. With `cpus`, the app runs on the first and all others on the second."""
    session = session_of(str(subject.path), subject.threads)
    names = [output.name for output in session.get_outputs()]

    async def direct(inputs: Inputs) -> object:
        return session.run(names, inputs)

    async def to_thread(inputs: Inputs) -> object:
        return await asyncio.to_thread(session.run, names, inputs)

    outputs = dict(zip(names, session.run(names, subject.inputs[0]), strict=True))
    async with AsyncExitStack() as stack:
        specs = [{name: (array.dtype.str, array.shape) for name, array in arrays.items()} for arrays in (subject.inputs[0], outputs)]
        rival = SharedMemory(str(subject.path), subject.threads, *specs)
        stack.callback(rival.close)
        await rival.ready()
        runtime = await stack.enter_async_context(aionn.Runtime())
        compilation = await runtime.compile(aionn.Model.from_onnx(subject.path), devices=("onnxruntime",))
        burst = await stack.enter_async_context(compilation.burst())
        if cpus is not None:
            os.sched_setaffinity(rival.pid, {cpus[1]})
            pool = ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {cpus[1]}))
            asyncio.get_running_loop().set_default_executor(pool)
        stack.enter_context(placed(runtime, "onnxruntime", cpus))
        (device,) = [device for device in runtime.devices if device.name == "onnxruntime"]
        found = [
            Lane("direct", direct, None),
            Lane("shm", rival.call, rival.pid),
            Lane("to_thread", to_thread, None),
            Lane("aionn", burst.compute, device.pid, lambda: int(burst.statistics()["driver_busy_ns"])),
        ]
        for lane in found:
            for inputs in (*subject.inputs[1:3], subject.inputs[0]):
                answer = await lane.call(inputs)
            if isinstance(answer, Mapping):
                for name, array in outputs.items():
                    np.testing.assert_allclose(answer[name], array, rtol=1e-3, atol=1e-4)
        yield found
