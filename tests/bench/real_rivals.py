"""The lanes that `tests.bench.real` compares over one model, all open and warm at once.

direct      session.run in the app's own loop
shm         shared memory and two eventfds, with a worker process that blocks (`tests.bench.real_worker`)
to_thread   session.run in asyncio.to_thread
aionn       burst.compute of plain arrays
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aionn
from tests.bench.burst import pin_driver
from tests.bench.real_subjects import Inputs, Subject
from tests.bench.real_worker import session_of, views
from tests.bench.rivals import ROOT

ALIGNED = 64
READY_S = 30.0


@dataclass(frozen=True)
class Lane:
    """One way to run a model. `pid` is of the process that runs it, or None where that is the app itself."""

    name: str
    call: Callable[[Inputs], Awaitable[object]]
    pid: int | None
    busy_ns: Callable[[], int] | None = None
    """How long the other process has executed so far, where it says so."""


class SharedMemory:
    """The app's side of the simplest rival. It returns views of the shared memory, valid until the next call."""

    def __init__(self, subject: Subject, outputs: Mapping[str, NDArray[Any]]) -> None:
        self._descriptors: list[int] = []
        places: dict[str, list[tuple[str, str, list[int], int]]] = {"inputs": [], "outputs": []}
        end = 0
        for kind, arrays in (("inputs", subject.inputs[0]), ("outputs", outputs)):
            for name, array in arrays.items():
                places[kind].append((name, array.dtype.str, list(array.shape), end))
                end += -(-array.nbytes // ALIGNED) * ALIGNED
        fd = os.memfd_create("rival")
        os.ftruncate(fd, end)
        self._asked, self._answered = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
        self._descriptors = [fd, self._asked, self._answered]
        memory = mmap.mmap(fd, end)
        self._inputs, self._outputs = views(memory, places["inputs"]), views(memory, places["outputs"])
        given = {"model": str(subject.path), "threads": subject.threads, "size_bytes": end, **places}
        given |= {"memory": fd, "asked": self._asked, "answered": self._answered}
        command = [sys.executable, "-m", "tests.bench.real_worker", json.dumps(given)]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=self._descriptors)
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._waiting = self._loop.create_future()
        self._loop.add_reader(self._answered, self._settle)

    async def ready(self) -> None:
        await asyncio.wait_for(self._waiting, READY_S)

    def _settle(self) -> None:
        os.eventfd_read(self._answered)
        if not self._waiting.done():
            self._waiting.set_result(None)

    async def call(self, inputs: Inputs) -> Inputs:
        for name, array in inputs.items():
            self._inputs[name][...] = array
        self._waiting = self._loop.create_future()
        os.eventfd_write(self._asked, 1)
        await self._waiting
        return self._outputs

    def close(self) -> None:
        self._loop.remove_reader(self._answered)
        self._process.kill()
        self._process.wait()
        for fd in self._descriptors:
            os.close(fd)


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
        rival = SharedMemory(subject, outputs)
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
